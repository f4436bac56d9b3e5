"""The cases of bench_autograd.cpp with torch.distributed.autograd, two processes: a line of JSON.

    peer_autograd.py [quick]
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from statistics import median

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc


def my_add(a, b):
    return a + b


def half(inputs, outputs):
    return torch.nn.Sequential(torch.nn.Linear(inputs, 64), torch.nn.ReLU(), torch.nn.Linear(64, outputs))


UPPER = half(64, 10)


def forward_upper(x):
    return UPPER(x)


def repeat(seconds, once):
    times, start = [], time.perf_counter()
    while len(times) < 5 or time.perf_counter() - start < seconds:
        begin = time.perf_counter()
        once()
        times.append(1e6 * (time.perf_counter() - begin))
    return round(median(times), 3)


def measure(quick):
    seconds = 0.3 if quick else 1.0
    t1, t2, t4 = (torch.rand(3, 3, requires_grad=True) for _ in range(3))
    lower, x = half(32, 64), torch.rand(1, 32)

    def example():
        with dist_autograd.context() as context:
            t3 = rpc.rpc_sync("worker1", my_add, (t1, t2))
            dist_autograd.backward(context, [(t3 * t4).sum()])
            assert len(dist_autograd.get_gradients(context)) == 3

    def mlp():
        with dist_autograd.context() as context:
            dist_autograd.backward(context, [rpc.rpc_sync("worker1", forward_upper, (lower(x),)).sum()])

    def mlp_local():
        forward_upper(lower(x)).sum().backward()

    print(json.dumps({name: repeat(seconds, once) for name, once in
                      (("example", example), ("mlp", mlp), ("mlp_local", mlp_local))}))


def main():
    folder = os.environ.get("BENCH_AUTOGRAD_FOLDER")
    rank = 1 if folder else 0
    made = None if folder else tempfile.TemporaryDirectory(prefix="convoy-bench.")
    folder = folder or made.name
    os.environ["TP_SOCKET_IFNAME"] = os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    child = None
    if rank == 0:
        child = subprocess.Popen([sys.executable, *sys.argv], env=os.environ | {"BENCH_AUTOGRAD_FOLDER": folder})
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{folder}/store", rpc_timeout=300)
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    if rank == 0:
        measure("quick" in sys.argv)
    rpc.shutdown()
    if child:
        child.wait(60)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
    sys.stdout.flush()
    os._exit(0)
