"""torch.distributed.rpc on the backend CONVOY: what PyTorch's own suite (tests/pytorch/rpc_suite.py) does not ask."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from unittest import TestCase

import torch
import torch.distributed.rpc as rpc

import convoy
import ranks


def init(path, size, **options):
    rpc.init_rpc(f"worker{ranks.rank()}", backend=rpc.BackendType.CONVOY, rank=ranks.rank(), world_size=size,
                 rpc_backend_options=convoy.rpc.ConvoyRpcBackendOptions(init_method=f"file://{path}/rpc", **options))


def bounce(left):
    """Back and forth between two workers, each call inside of the other."""
    if left == 0:
        return 0
    other = 1 - rpc.get_worker_info().id
    return 1 + rpc.rpc_sync(f"worker{other}", bounce, args=(left - 1,))


def call_deep(path):
    """More handlers wait for each other than there are threads, in both directions."""
    init(path, 2, num_worker_threads=2)
    other = f"worker{1 - ranks.rank()}"
    futures = [rpc.rpc_async(other, bounce, args=(5,)) for _ in range(12)]
    depths = torch.futures.wait_all(futures)
    info = rpc.api._get_current_rpc_agent().get_metrics()
    rpc.shutdown()
    return depths, info["agent.thread_pool_size"]


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def sleep_long():
    time.sleep(ranks.LIMIT)


def call_the_dying(path):
    init(path, 3, rpc_timeout=ranks.LIMIT)
    if ranks.rank() == 0:
        # One that is under way, the one that kills, and one that is made later.
        waiting = rpc.rpc_async("worker2", sleep_long)
        texts = []
        for call in (lambda: rpc.rpc_sync("worker2", die), waiting.wait,
                     lambda: rpc.rpc_sync("worker2", torch.add, args=(torch.ones(1), 1))):
            try:
                call()
                texts.append("it returned")
            except RuntimeError as error:
                texts.append(str(error))
        fine = rpc.rpc_sync("worker1", torch.add, args=(torch.ones(1), 1)).item()
        try:
            rpc.rpc_sync("worker1", set_ended)
        except RuntimeError:
            pass  # it may have left before it answered
        rpc.shutdown(graceful=False)
        return texts, fine
    wait_ended()
    rpc.shutdown(graceful=False)
    return None


ended = []


def set_ended():
    ended.append(True)


def wait_ended():
    deadline = time.monotonic() + ranks.LIMIT
    while not ended and time.monotonic() < deadline:
        os.sched_yield()


def call_large(path):
    """Tensors of all sizes and forms go and come back."""
    init(path, 2)
    same = True
    if ranks.rank() == 0:
        tensors = [torch.arange(n, dtype=torch.float32) for n in (0, 1, 3, 1009, 300_001)]
        tensors += [torch.rand(5, 7).t(), torch.ones(4, 4).to_sparse(), torch.tensor(3), torch.rand(3) > 0.5,
                    torch.rand(2, 3, dtype=torch.complex64).conj(), torch.rand(4, requires_grad=True)]
        for tensor in tensors:
            back = rpc.rpc_sync("worker1", torch.clone, args=(tensor,))
            same = same and torch.equal(back.to_dense(), tensor.to_dense()) and back.dtype == tensor.dtype
        many = rpc.rpc_sync("worker1", list, args=([torch.full((1000,), float(i)) for i in range(400)],))
        same = same and all(bool((tensor == i).all()) for i, tensor in enumerate(many))
    rpc.shutdown()
    return same


def refuse_options(path):
    texts = []
    for size, arguments in ((None, {}), (2, {"device_maps": {"worker1": {"cuda:0": "cuda:0"}}})):
        options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{path}/{size}", **arguments)
        try:
            rpc.init_rpc("worker0", backend=rpc.BackendType.CONVOY, rank=0, world_size=size,
                         rpc_backend_options=options)
            texts.append("it returned")
        except RuntimeError as error:
            texts.append(str(error))
    # Those of TensorPipe are taken where they have a meaning.
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{path}/fine", num_worker_threads=7)
    rpc.init_rpc("only", backend=rpc.BackendType.CONVOY, rank=0, world_size=1, rpc_backend_options=options)
    texts.append(rpc.api._get_current_rpc_agent().get_metrics()["agent.thread_pool_size"])
    rpc.shutdown()
    return texts


LEAVING = """
    import sys, time, torch, torch.distributed.rpc as rpc
    import convoy
    rank = int(sys.argv[1])
    rpc.init_rpc(f"worker{rank}", backend=rpc.BackendType.CONVOY, rank=rank, world_size=2,
                 rpc_backend_options=convoy.rpc.ConvoyRpcBackendOptions(init_method="file://" + sys.argv[2]))
    def callback(future):
        return [i for i in range(1000)]
    # Both leave with calls under way, in both directions, and with callbacks on them.
    kept = [rpc.rpc_async(f"worker{1 - rank}", time.sleep, args=(0.2,)).then(callback) for _ in range(20)]
    kept += [rpc.remote(f"worker{1 - rank}", torch.add, args=(torch.ones(2), 1))]
    print("leaving")
"""


class TorchRpcTest(TestCase):
    def test_handlers_that_wait_for_each_other(self):
        with ranks.folder() as path:
            self.assertEqual(ranks.run(call_deep, 2, path, backend=None), [([5] * 12, "2")] * 2)

    def test_killed_worker_is_an_error_by_name(self):
        with ranks.folder() as path:
            begin = time.monotonic()
            results = ranks.run_all(call_the_dying, 3, path, backend=None)
        self.assertLess(time.monotonic() - begin, ranks.LIMIT)
        self.assertNotIsInstance(results[0], ranks.Failed, results[0])
        texts, fine = results[0]
        for text in texts:
            self.assertIn("worker2", text)
        self.assertEqual(fine, 2)
        self.assertIsInstance(results[2], ranks.Died)

    def test_tensors(self):
        with ranks.folder() as path:
            self.assertEqual(ranks.run(call_large, 2, path, backend=None), [True, True])

    def test_options(self):
        with ranks.folder() as path:
            [texts] = ranks.run(refuse_options, 1, path, backend=None)
        self.assertIn("world_size", texts[0])
        self.assertIn("device_maps", texts[1])
        self.assertEqual(texts[2], "7")

    def test_interpreter_exit_with_calls_under_way(self):
        with ranks.folder() as path:
            workers = [subprocess.Popen([sys.executable, "-c", textwrap.dedent(LEAVING), str(rank), f"{path}/rpc"],
                                        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
                       for rank in range(2)]
            for worker in workers:
                said, _ = worker.communicate(timeout=ranks.LIMIT)
                self.assertEqual(worker.returncode, 0, said)
                self.assertIn("leaving", said)


if __name__ == "__main__":
    ranks.main()
