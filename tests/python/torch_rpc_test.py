"""torch.distributed.rpc on the backend CONVOY: what PyTorch's own suite (tests/pytorch/rpc_suite.py) does not ask."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from unittest import TestCase

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc

import convoy
import ranks
from fork_test import in_child


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


def error_of(call):
    try:
        call()
    except Exception as error:
        return str(error)
    return "it returned"


def twice(x):
    return 2 * x


def call_from_threads(path):
    """Synchronous calls of operators, functions and references, of many threads, and inside of each other."""
    init(path, 2, num_worker_threads=2)
    other = f"worker{1 - ranks.rank()}"
    made = rpc.remote(other, torch.add, args=(torch.ones(2), 1))
    wrong = []

    def call(number):
        for i in range(30):
            x = torch.full((2,), float(100 * number + i))
            if not (torch.equal(rpc.rpc_sync(other, torch.add, args=(x, 1)), x + 1)
                    and torch.equal(rpc.rpc_sync(other, twice, args=(x,)), 2 * x)
                    and torch.equal(made.to_here(), torch.full((2,), 2.0))
                    and rpc.rpc_sync(other, bounce, args=(3,)) == 3):
                wrong.append((number, i))

    threads = [threading.Thread(target=call, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(ranks.LIMIT)
    alive = sum(thread.is_alive() for thread in threads)
    del made
    rpc.shutdown()
    return wrong, alive


def call_operators(path):
    """Those that are answered where they arrive, and those that are not."""
    init(path, 2)
    try:
        if ranks.rank() == 0:
            check_operators()
    finally:
        rpc.shutdown()  # the other one waits for it
    return True


def check_operators():
    x, big = torch.arange(6.0).reshape(2, 3), torch.arange(5000.0)
    for function, arguments in ((torch.add, (x, 1)), (torch.add, (x, x)), (torch.mm, (x, x.t())), (torch.sum, (x,)),
                                (torch.zeros, ((2, 3),)), (torch.sum, (x, (0,))), (torch.add, (big, big)),
                                (torch.mul, (x, 10**6)), (torch.split, (x, 1))):
        found, wanted = rpc.rpc_sync("worker1", function, args=arguments), function(*arguments)
        if isinstance(wanted, torch.Tensor):
            found, wanted = (found,), (wanted,)
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True)), (function, found)
    assert "mat1 and mat2" in error_of(lambda: rpc.rpc_sync("worker1", torch.mm, args=(x, x)))
    # What changes its argument changes the copy.
    assert torch.equal(rpc.rpc_sync("worker1", torch.relu_, args=(x - 1,)), torch.relu(x - 1))
    with torch.no_grad():
        assert rpc.rpc_sync("worker1", torch.add, args=(x, 1)).sum() == 21
    # Operators that are not ATen's own.
    with dist_autograd.context() as context:
        y = torch.ones(2, requires_grad=True)
        assert torch.equal(rpc.rpc_sync("worker1", torch.add, args=(y, 1)).detach(), torch.full((2,), 2.0))
        assert rpc.rpc_sync("worker1", dist_autograd.get_gradients, args=(context,)) == {}


def wait_in_callbacks(path):
    """Callbacks that wait for each other, and for calls; others go on."""
    init(path, 2)
    other = f"worker{1 - ranks.rank()}"
    events = [threading.Event() for _ in range(9)]

    def wait_for_next(number):
        def callback(future):
            fine = events[number + 1].wait(ranks.LIMIT)
            events[number].set()
            return fine and torch.equal(rpc.rpc_sync(other, twice, args=(future.value(),)), torch.full((1,), 4.0))
        return callback

    waiting = [rpc.rpc_async(other, torch.add, args=(torch.ones(1), 1)).then(wait_for_next(i)) for i in range(8)]
    for _ in range(50):
        rpc.rpc_async(other, torch.add, args=(torch.ones(1), 1)).wait()
    events[8].set()
    fine = torch.futures.wait_all(waiting)
    rpc.shutdown()
    return fine


def shut_down_beside_calls(path):
    """Whoever waits in a call hears of it."""
    init(path, 2, rpc_timeout=0)
    texts = []
    if ranks.rank() == 0:
        begun = threading.Barrier(3)

        def call(function):
            begun.wait()
            texts.append(error_of(function))

        threads = [threading.Thread(target=call, args=(function,)) for function in (
            lambda: rpc.rpc_sync("worker1", sleep_long), lambda: rpc.rpc_async("worker1", sleep_long).wait())]
        for thread in threads:
            thread.start()
        begun.wait()
        while int(rpc.api._get_current_rpc_agent().get_metrics()["agent.client_active_calls"]) < 2:
            os.sched_yield()
        rpc.shutdown(graceful=False)
        for thread in threads:
            thread.join(ranks.LIMIT)
        os._exit(0 if len(texts) == 2 and "it returned" not in texts else 1)
    # Until the other worker has left. Nobody waits for what sleeps here then.
    while error_of(lambda: rpc.rpc_sync("worker0", torch.add, args=(torch.ones(1), 1))) == "it returned":
        os.sched_yield()
    os._exit(0)


def send_nonsense(path):
    """Bytes that are no pickle are an error of the call; the worker goes on."""
    init(path, 2)
    try:
        return texts_of_nonsense() if ranks.rank() == 0 else None
    finally:
        rpc.shutdown()  # the other one waits for it


def texts_of_nonsense():
    import pickle

    from torch._C._distributed_rpc import _invoke_rpc_python_udf
    from torch.distributed.rpc.internal import PythonUDF, serialize

    good, tensors = serialize(PythonUDF(twice, (torch.ones(2),), {}))
    other = rpc.get_worker_info("worker1")

    def send(payload, sent):
        return _invoke_rpc_python_udf(other, payload, sent, 60.0, False).wait()

    bad = [b"", b"\x00", b"nonsense" * 1000, good[:len(good) // 2], good[:-1], pickle.dumps(None),
           pickle.dumps([1, 2]), pickle.dumps(PythonUDF(twice, (), {}))]
    texts = [error_of(lambda: send(payload, tensors)) for payload in bad]
    texts.append(error_of(lambda: send(good, [])))  # a tensor is missing
    assert torch.equal(send(good, tensors), torch.full((2,), 2.0))
    return texts


def fork_and_go_on(path):
    """A forked child takes no part, and ends as programs do."""
    import atexit

    init(path, 2)
    other = f"worker{1 - ranks.rank()}"
    rpc.rpc_async(other, torch.add, args=(torch.ones(1), 1)).wait()  # there are threads of all kinds
    rpc.rpc_sync(other, twice, args=(torch.ones(1),))

    def child():
        texts = [error_of(lambda: rpc.rpc_sync(other, torch.add, args=(torch.ones(1), 1))),
                 error_of(lambda: rpc.rpc_async(other, twice, args=(torch.ones(1),)).wait()),
                 error_of(lambda: rpc.remote(other, twice, args=(torch.ones(1),))),
                 error_of(lambda: rpc.rpc_sync(f"worker{ranks.rank()}", twice, args=(torch.ones(1),)))]
        wrong = [text for text in texts if "forked child" not in text]
        rpc.shutdown(graceful=False)
        atexit._run_exitfuncs()
        return repr(wrong)

    told = in_child(child)
    fine = torch.equal(rpc.rpc_sync(other, twice, args=(torch.ones(1),)), torch.full((1,), 2.0))
    rpc.shutdown()
    return told, fine


# --- SMART backward ---------------------------------------------------------------------------------------------------


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return x.clone()

    @staticmethod
    def backward(context, gradient):
        raise ValueError("no gradient here")


class Dies(Fails):
    @staticmethod
    def backward(context, gradient):
        die()


def multiply(a, b):
    return a * b


def pass_on(x, to):
    """A call inside of a call."""
    return rpc.rpc_sync(to, multiply, args=(x, x)) * 2


def fail_backward(x):
    return Fails.apply(x)


def die_backward(x):
    return Dies.apply(x)


def checkpointed(x):
    from torch.utils.checkpoint import checkpoint

    return checkpoint(lambda y: (y * y).sin(), x, use_reentrant=False)


def passes_here():
    return int(dist_autograd._get_debug_info()["num_current_backward_passes"])


def use_smart(path):
    convoy.rpc.use_smart_backward(timeout=ranks.LIMIT)
    convoy.rpc.use_smart_backward(timeout=ranks.LIMIT)  # the same again
    init(path, 3, rpc_timeout=ranks.LIMIT)
    try:
        if ranks.rank() == 0:
            check_gradients()
            check_failures()
    finally:
        rpc.shutdown()  # the others wait for it
    return True


def check_gradients():
    x, y = torch.full((3,), 2.0, requires_grad=True), torch.full((3,), 5.0, requires_grad=True)
    with dist_autograd.context() as context:
        # Results that nobody uses: PyTorch's own backward() waits for their gradients without end.
        rpc.rpc_sync("worker1", multiply, args=(x, y))
        rpc.rpc_sync("worker2", pass_on, args=(y, "worker1"))
        a = rpc.rpc_sync("worker1", pass_on, args=(x, "worker2"))  # 2 x^2
        b = rpc.rpc_sync("worker2", pass_on, args=(a, "worker0"))  # 8 x^4, and back to here
        dist_autograd.backward(context, [b.sum()], retain_graph=True)
        gradients = dist_autograd.get_gradients(context)
        assert torch.equal(gradients[x], torch.full((3,), 256.0)), gradients
        assert y not in gradients and x.grad is None
        dist_autograd.backward(context, [b.sum()])  # adds to them
        assert torch.equal(dist_autograd.get_gradients(context)[x], torch.full((3,), 512.0))
    # References as roots, here and there.
    with dist_autograd.context() as context:
        used = rpc.remote("worker1", multiply, args=(x, x))
        rpc.rpc_sync("worker2", multiply, args=(x, y))
        total = rpc.remote("worker2", torch.sum, args=(used.to_here(),))
        total.backward(context, retain_graph=True)
        rpc.RRef(used.to_here().sum()).backward(context)
        assert torch.equal(dist_autograd.get_gradients(context)[x], torch.full((3,), 8.0))
        del used, total
    # What is checkpointed is computed again, in the backward pass of another worker.
    with dist_autograd.context() as context:
        z = rpc.rpc_sync("worker1", checkpointed, args=(x,))
        dist_autograd.backward(context, [z.sum()])
        wanted, = torch.autograd.grad((x * x).sin().sum(), x)
        assert torch.allclose(dist_autograd.get_gradients(context)[x], wanted)


def check_failures():
    x = torch.ones(2, requires_grad=True)
    for _ in range(3):
        with dist_autograd.context() as context:
            y = rpc.rpc_sync("worker2", pass_on, args=(rpc.rpc_sync("worker1", fail_backward, args=(x,)), "worker1"))
            try:
                dist_autograd.backward(context, [y.sum()])
                raise AssertionError("it returned")
            except convoy.rpc.RemoteError as error:
                assert (error.worker, error.remote_type) == ("worker1", "ValueError"), error
                assert "Error on Node 1: no gradient here" in str(error), error
    assert passes_here() == 0
    for worker in ("worker1", "worker2"):
        assert rpc.rpc_sync(worker, passes_here) == 0


def backward_with_the_dying(path):
    """A worker that dies in the middle of a pass is an error with its name at the root; others go on."""
    convoy.rpc.use_smart_backward(timeout=ranks.LIMIT)
    init(path, 3, rpc_timeout=ranks.LIMIT)
    if ranks.rank() == 0:
        text, x = "", torch.ones(2, requires_grad=True)
        with dist_autograd.context() as context:
            a = rpc.rpc_sync("worker1", multiply, args=(x, x))
            y = rpc.rpc_sync("worker1", pass_on, args=(rpc.rpc_sync("worker2", die_backward, args=(a,)), "worker1"))
            try:
                dist_autograd.backward(context, [y.sum()])
            except convoy.Error as error:
                text = f"{error.kind}: {error}"
        with dist_autograd.context() as context:
            dist_autograd.backward(context, [rpc.rpc_sync("worker1", multiply, args=(x, x)).sum()])
            assert torch.equal(dist_autograd.get_gradients(context)[x], torch.full((2,), 2.0))
        left = rpc.rpc_sync("worker1", passes_here)
        try:
            rpc.rpc_sync("worker1", set_ended)
        except RuntimeError:
            pass
        rpc.shutdown(graceful=False)
        return text, left
    wait_ended()
    rpc.shutdown(graceful=False)
    return None


def smart_elsewhere(path):
    convoy.rpc.use_smart_backward()
    rpc.init_rpc("only", rank=0, world_size=1, rpc_backend_options=rpc.TensorPipeRpcBackendOptions(
        init_method=f"file://{path}/rpc"))
    text = ""
    with dist_autograd.context() as context:
        try:
            dist_autograd.backward(context, [torch.ones(2, requires_grad=True).sum()])
        except convoy.Error as error:
            text = str(error)
    rpc.shutdown()
    return text


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

    def test_synchronous_calls_of_threads(self):
        with ranks.folder() as path:
            self.assertEqual(ranks.run(call_from_threads, 2, path, backend=None), [([], 0)] * 2)

    def test_operators(self):
        with ranks.folder() as path:
            self.assertEqual(ranks.run(call_operators, 2, path, backend=None), [True, True])

    def test_callbacks_that_wait(self):
        with ranks.folder() as path:
            self.assertEqual(ranks.run(wait_in_callbacks, 2, path, backend=None), [[True] * 8] * 2)

    def test_shutdown_ends_calls_that_are_waited_for(self):
        with ranks.folder() as path:
            results = ranks.run_all(shut_down_beside_calls, 2, path, backend=None)
        self.assertEqual([result.code for result in results], [0, 0], results)

    def test_bytes_that_are_no_call(self):
        with ranks.folder() as path:
            texts, _ = ranks.run(send_nonsense, 2, path, backend=None)
        self.assertEqual(len(texts), 9)
        self.assertNotIn("it returned", texts)

    def test_a_forked_child_is_refused_and_the_workers_go_on(self):
        with ranks.folder() as path:
            self.assertEqual(ranks.run(fork_and_go_on, 2, path, backend=None), [("[]", True)] * 2)

    def test_options(self):
        with ranks.folder() as path:
            [texts] = ranks.run(refuse_options, 1, path, backend=None)
        self.assertIn("world_size", texts[0])
        self.assertIn("device_maps", texts[1])
        self.assertEqual(texts[2], "7")

    def test_smart_backward(self):
        with ranks.folder() as path:
            self.assertEqual(ranks.run(use_smart, 3, path, backend=None), [True] * 3)

    def test_smart_backward_with_a_killed_worker(self):
        with ranks.folder() as path:
            results = ranks.run_all(backward_with_the_dying, 3, path, backend=None)
        self.assertNotIsInstance(results[0], ranks.Failed, results[0])
        text, left = results[0]
        self.assertIn("peer lost", text)
        self.assertIn("worker2", text)
        self.assertEqual(left, 0)
        self.assertIsInstance(results[2], ranks.Died)

    def test_smart_backward_on_another_backend(self):
        with ranks.folder() as path:
            [text] = ranks.run(smart_elsewhere, 1, path, backend=None)
        self.assertIn("another backend than CONVOY", text)

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
