"""The cases of calls.h from Python: a line of JSON.

    peer_rpc.py torch [quick]     torch.distributed.rpc over TensorPipe, two processes
    peer_rpc.py torch_convoy [quick]  the same over our transport
    peer_rpc.py convoy [quick]    convoy.rpc
    peer_rpc.py torch_rref [quick]  references of it, three processes: the cases of bench_rref.cpp
    peer_rpc.py ray [quick]       a call of an actor of Ray
    peer_rpc.py monarch [quick]   a call of an endpoint of an actor of torchmonarch

Only what is alike is measured: Ray gives large results as read-only memory of its object store.
"""

import collections
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from statistics import median

import torch

ECHO_BYTES = [10**6, 16 * 10**6, 100 * 10**6]
TRANSFER_BYTES = 10**9
OUTSTANDING = 64


def add(a, b):
    return a + b


def echo(tensor):
    return tensor


def numel(tensor):
    return tensor.numel()


def repeat(seconds, most, once):
    times, start = [], time.perf_counter()
    while len(times) < most and (len(times) < 5 or time.perf_counter() - start < seconds):
        times.append(once())
    return round(median(times), 3)


def timed(function, times=1):
    start = time.perf_counter()
    for _ in range(times):
        function()
    return 1e6 * (time.perf_counter() - start) / times


def threads_16(call, each=100):
    """Time per call of 16 threads that make 100 each."""
    threads = [threading.Thread(target=lambda: [call() for _ in range(each)]) for _ in range(16)]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return 1e6 * (time.perf_counter() - start) / (16 * each)


def measure(begin, end, quick, sync=None):
    """`begin(name, *args)` starts a call, `end(started)` waits for its result; sync(a, b) is the quickest of both."""
    seconds = 0.2 if quick else 0.5
    a, b = torch.ones(2), torch.ones(2)

    def call():
        return end(begin("add", a, b))

    def asleep():
        time.sleep(0.003)
        return timed(call)

    def outstanding(in_a_row=1000):
        start = time.perf_counter()
        started = collections.deque(begin("add", a, b) for _ in range(OUTSTANDING))
        for _ in range(in_a_row - OUTSTANDING):
            end(started.popleft())
            started.append(begin("add", a, b))
        for each in started:
            end(each)
        return 1e6 * (time.perf_counter() - start) / in_a_row

    for _ in range(100):
        call()
    found = {"call": repeat(seconds, 1000, lambda: timed(call, 10)), "call_asleep": repeat(seconds, 150, asleep),
             "outstanding_64": repeat(seconds, 20, outstanding)}
    if sync:
        found |= {"sync_add": repeat(seconds, 1000, lambda: timed(lambda: sync(a, b), 10)),
                  "threads_16": repeat(seconds, 10, lambda: threads_16(lambda: sync(a, b)))}
    for size in ECHO_BYTES:
        large = torch.ones(size, dtype=torch.uint8)
        for _ in range(2):
            end(begin("echo", large))
        found[f"echo_{size // 10**6}mb"] = repeat(seconds, 100, lambda: timed(lambda: end(begin("echo", large))))
    if not quick:
        found |= beside_transfer(begin, end, call)
    print(json.dumps(found), flush=True)


def beside_transfer(begin, end, call):
    large = torch.ones(TRANSFER_BYTES, dtype=torch.uint8)
    end(begin("numel", large))
    alone, beside = [timed(call) for _ in range(1000)], []
    for _ in range(2):
        other = threading.Thread(target=lambda: end(begin("numel", large)))
        other.start()
        while other.is_alive():
            beside.append(timed(call))
    return {"call_single": round(median(alone), 3), "call_beside_1gb": round(median(beside), 3)}


def touch(reference):
    pass


def number(n):
    return n


def measure_rrefs(quick):
    import torch.distributed.rpc as rpc

    seconds = 0.5 if quick else 2

    def live_and_die(count=1000):
        references = [rpc.remote("worker1", number, (1.0,)) for _ in range(count)]
        for each in [rpc.rpc_async("worker2", touch, (reference,)) for reference in references]:
            each.wait()
        del references

    live_and_die(100)
    value = rpc.remote("worker1", number, (1.0,))
    print(json.dumps({
        "number": repeat(seconds, 1000, lambda: timed(lambda: rpc.rpc_sync("worker1", number, (1.0,)), 10)),
        "to_here": repeat(seconds, 1000, lambda: timed(value.to_here, 10)),
        "rref_life": repeat(seconds, 20, lambda: timed(live_and_die) / 1000)}), flush=True)


def run_torch_rref(quick):
    import torch.distributed.rpc as rpc

    rank = int(os.environ.get("BENCH_RPC_RANK", 0))
    made = None if rank else tempfile.TemporaryDirectory(prefix="convoy-bench.")
    folder = os.environ.setdefault("BENCH_RPC_FOLDER", made.name if made else "")
    os.environ["TP_SOCKET_IFNAME"] = os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    children = [subprocess.Popen([sys.executable, *sys.argv], env=os.environ | {"BENCH_RPC_RANK": str(other)})
                for other in (1, 2) if rank == 0]
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{folder}/store", rpc_timeout=300)
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=3, rpc_backend_options=options)
    if rank == 0:
        measure_rrefs(quick)
    rpc.shutdown()
    for child in children:
        child.wait(60)


def run_torch_convoy(quick):
    run_torch(quick, backend="CONVOY")


def run_convoy(quick):
    import convoy.rpc

    for function in (add, echo, numel):
        many = function is add
        function.__annotations__ = {name: torch.Tensor for name in (("a", "b") if many else ("tensor",))}
        function.__annotations__["return"] = int if function is numel else torch.Tensor
        convoy.rpc.function(function)
    folder = os.environ.get("BENCH_RPC_FOLDER")
    rank = 1 if folder else 0
    made = None if folder else tempfile.TemporaryDirectory(prefix="convoy-bench.")
    folder = folder or made.name
    child = None
    if rank == 0:
        child = subprocess.Popen([sys.executable, *sys.argv], env=os.environ | {"BENCH_RPC_FOLDER": folder})
    with convoy.rpc.Session(method=f"file://{folder}/store", rank=rank, size=2, timeout=300) as rpc:
        if rank == 0:
            measure(lambda name, *args: rpc.rpc_async("worker1", name, *args), lambda started: started.wait(), quick,
                    lambda a, b: rpc.rpc_sync("worker1", "add", a, b))
    if child:
        child.wait(60)


def run_torch(quick, backend="TENSORPIPE"):
    import torch.distributed.rpc as rpc

    if backend == "CONVOY":
        import convoy  # noqa: F401

    folder = os.environ.get("BENCH_RPC_FOLDER")
    rank = 1 if folder else 0
    made = None if folder else tempfile.TemporaryDirectory(prefix="convoy-bench.")
    folder = folder or made.name
    os.environ["TP_SOCKET_IFNAME"] = os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    child = None
    if rank == 0:
        child = subprocess.Popen([sys.executable, *sys.argv], env=os.environ | {"BENCH_RPC_FOLDER": folder})
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{folder}/store", rpc_timeout=300)
    rpc.init_rpc(f"worker{rank}", backend=rpc.BackendType[backend], rank=rank, world_size=2,
                 rpc_backend_options=options)
    if rank == 0:
        functions = {"add": add, "echo": echo, "numel": numel}
        measure(lambda name, *args: rpc.rpc_async("worker1", functions[name], args), lambda started: started.wait(),
                quick, lambda a, b: rpc.rpc_sync("worker1", torch.add, (a, b)))
    rpc.shutdown()
    if child:
        child.wait(60)


def run_ray(quick):
    import ray

    ray.init(num_cpus=2, _node_ip_address="127.0.0.1", include_dashboard=False, log_to_driver=False, configure_logging=False,
             object_store_memory=6 * 10**9)

    @ray.remote(max_concurrency=2)
    class Worker:
        def add(self, a, b):
            return add(a, b)

        def echo(self, tensor):
            return tensor

        def numel(self, tensor):
            return tensor.numel()

    worker = Worker.remote()
    measure(lambda name, *args: getattr(worker, name).remote(*args), ray.get, quick)
    ray.shutdown()


def run_monarch(quick):
    from monarch.actor import Actor, endpoint, this_host

    class Worker(Actor):
        @endpoint
        def add(self, a, b):
            return add(a, b)

        @endpoint
        def echo(self, tensor):
            return tensor

        @endpoint
        def numel(self, tensor):
            return tensor.numel()

    worker = this_host().spawn_procs(per_host={"procs": 1}).spawn("worker", Worker)
    measure(lambda name, *args: getattr(worker, name).call_one(*args), lambda started: started.get(), quick)


if __name__ == "__main__":
    torch.set_num_threads(1)
    runs = {"torch": run_torch, "torch_convoy": run_torch_convoy, "convoy": run_convoy,
            "torch_rref": run_torch_rref, "ray": run_ray, "monarch": run_monarch}
    runs[sys.argv[1]]("quick" in sys.argv)
    sys.stdout.flush()
    os._exit(0)
