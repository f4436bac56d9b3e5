"""convoy.rpc: sessions of Python workers, and of Python and C++ workers."""

import asyncio
import dataclasses
import os
import signal
import subprocess
import sys
import textwrap
import threading
from unittest import TestCase

import torch

import convoy
import convoy.rpc
import ranks
from fork_test import in_child

WORKER = ranks.BUILD / "bin" / "python_rpc_worker"


@dataclasses.dataclass
class Job:
    seed: convoy.rpc.int32
    name: str
    tensors: list[torch.Tensor]


@convoy.rpc.function
def scale(x: torch.Tensor, by: float) -> torch.Tensor:
    return x * by


@convoy.rpc.function
def echo(flag: bool, number: int, text: str, data: bytes, numbers: list[float], names: dict[str, list[int]],
         pair: tuple[int, torch.Tensor], maybe: str | None, either: int | str, job: Job) -> tuple[
             bool, int, str, bytes, list[float], dict[str, list[int]], tuple[int, torch.Tensor], str | None,
             int | str, Job]:
    return flag, number, text, data, numbers, names, pair, maybe, either, job


@convoy.rpc.function
def fail_with(text: str) -> None:
    raise KeyError(text)


@convoy.rpc.function
def bounce(left: int) -> int:
    session, other = convoy.rpc.current_session(), convoy.rpc.caller().name
    return 0 if left == 0 else 1 + session.rpc_sync(other, "bounce", left - 1)


@convoy.rpc.function
async def bounce_later(left: int, to: str) -> int:
    if left == 0:
        return 0
    me = session_here.worker().name
    return 1 + await session_here.rpc_async(to, "bounce_later", left - 1, me)


@convoy.rpc.function
def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Model:
    def __init__(self, size: int) -> None:
        self.weight = torch.ones(size, requires_grad=True)

    @convoy.rpc.function
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x

    @convoy.rpc.function
    def weight_of(self) -> torch.Tensor:
        return self.weight


@convoy.rpc.function
def make_model(size: int) -> Model:
    return Model(size)


@convoy.rpc.function
def checkpointed(x: torch.Tensor) -> torch.Tensor:
    from torch.utils.checkpoint import checkpoint

    return checkpoint(lambda y: (y * y).sin(), x, use_reentrant=False)


@convoy.rpc.function
def read_plus_one(reference: convoy.rpc.RRef[torch.Tensor]) -> torch.Tensor:
    return reference.to_here() + 1


session_here: convoy.rpc.Session


def session(path, size, name=None, **options):
    global session_here
    session_here = convoy.rpc.Session(name or f"worker{ranks.rank()}", method=f"file://{path}/rpc", rank=ranks.rank(),
                                      size=size, **options)
    return session_here


def text_of(kind, call):
    try:
        call()
    except convoy.Error as error:
        assert error.kind == kind, (error.kind, str(error))
        return str(error)
    raise AssertionError("no error")


def call_python(path):
    with session(path, 2, threads=2) as rpc:
        other = f"worker{1 - ranks.rank()}"
        assert rpc.worker() == (f"worker{ranks.rank()}", ranks.rank())
        assert rpc.worker(other).rank == 1 - ranks.rank()
        assert torch.equal(rpc.rpc_sync(other, scale, torch.ones(3), 2), torch.full((3,), 2.0))
        values = (True, -2**40, "täxt", b"\x00\xff", [1.5, 2], {"a": [1, 2], "": []}, (7, torch.arange(3)), None, "x",
                  Job(3, "job", [torch.ones(2)]))
        back = rpc.rpc_sync(other, "echo", *values)
        assert back[:6] == values[:6] and back[7:9] == values[7:9], back
        assert back[6][0] == 7 and torch.equal(back[6][1], torch.arange(3))
        assert isinstance(back[9], Job) and back[9].seed == 3 and torch.equal(back[9].tensors[0], torch.ones(2))
        # What does not fit is said before anything is sent.
        assert "argument 2: expected double, got str" in text_of("invalid argument",
                                                                 lambda: rpc.rpc_sync(other, scale, torch.ones(1), "x"))
        assert "takes 2 arguments" in text_of("invalid argument", lambda: rpc.rpc_sync(other, scale, torch.ones(1)))
        assert "has no function" in text_of("invalid argument", lambda: rpc.rpc_sync(other, "nonsense"))
        try:
            rpc.rpc_sync(other, fail_with, "the text")
        except convoy.rpc.RemoteError as error:
            assert (error.worker, error.remote_type) == (other, "KeyError") and "the text" in str(error), error
        # More handlers that wait than there are threads, in both directions.
        futures = [rpc.rpc_async(other, bounce, 5) for _ in range(10)]
        assert [future.wait() for future in futures] == [5] * 10
        assert all(future.done() for future in futures)
        called = threading.Event()
        futures[0].add_done_callback(lambda future: called.set() if future.result() == 5 else None)
        assert called.wait(ranks.LIMIT)

        async def together():
            return await asyncio.gather(*[rpc.rpc_async(other, bounce_later, 4, rpc.worker().name) for _ in range(10)])

        assert asyncio.run(together()) == [4] * 10
        assert rpc.rref_info()["num_owner_rrefs"] >= 0
        rpc.barrier()
    return True


def call_references(path):
    with session(path, 3) as rpc:
        if ranks.rank() == 0:
            model = rpc.remote("worker1", make_model, 3)
            assert model.owner() == ("worker1", 1) and not model.is_owner()
            assert torch.equal(model.rpc_sync("Model::forward", torch.full((3,), 5.0)), torch.full((3,), 5.0))
            assert "cannot be passed" in text_of("unsupported", model.to_here)
            mine = rpc.local_rref(torch.zeros(2))
            assert torch.equal(rpc.rpc_sync("worker2", read_plus_one, mine), torch.ones(2))
            assert torch.equal(mine.local_value(), torch.zeros(2)) and torch.equal(mine.to_here(), torch.zeros(2))
            broken = rpc.remote("worker1", fail_with, "made badly")
            assert "made badly" in text_of("remote error", broken.to_here)
            # Gradients through both.
            with rpc.context() as context:
                x = torch.full((3,), 4.0, requires_grad=True)
                y = model.rpc_sync("Model::forward", x)
                loss = rpc.rpc_sync("worker2", scale, y, 3.0).sum()
                context.backward(loss)
                assert torch.equal(context.gradients()[x], torch.full((3,), 3.0))
                assert x.grad is None
                # What is checkpointed is computed again, in the backward pass of another worker.
                z = torch.full((3,), 0.5, requires_grad=True)
                context.backward(rpc.rpc_sync("worker1", checkpointed, z).sum())
                wanted, = torch.autograd.grad((z * z).sin().sum(), z)
                assert torch.allclose(context.gradients()[z], wanted)
                weight = model.remote("Model::weight_of")
                assert weight.type() == "at::Tensor"
                optimizer = convoy.rpc.DistributedOptimizer(rpc, [weight], torch.optim.SGD, lr=0.5)
                optimizer.step(context)  # the gradient is 12
                assert torch.equal(weight.to_here().detach(), torch.full((3,), -5.0)), weight.to_here()
                del weight, optimizer
            del model, broken, mine
    return True


def call_cpp(path):
    with session(path, 2, name="python") as rpc:
        a = torch.ones(2, 2)
        assert torch.equal(rpc.rpc_sync("cpp", "my_add", a, a), a + a)
        assert ("my_add", "at::Tensor (at::Tensor, at::Tensor)") in rpc.functions("cpp")
        values = {"one": (False, 5, 2**63, 0.25, "text", [0.5])}
        back = rpc.rpc_sync("cpp", "turn", values, "two")
        assert back == values | {"two": (True, -1, 2**64 - 1, 0.5, "also", [1.0, 2.0])}, back
        assert "is not a signed char" in text_of("invalid argument", lambda: rpc.rpc_sync(
            "cpp", "turn", {"one": (False, 500, 0, 0.0, "", [])}, None))
        job = rpc.rpc_sync("cpp", "next_job", Job(1, "job", [a]))
        assert isinstance(job, Job) and (job.seed, job.name) == (2, "job+") and torch.equal(job.tensors[0], a * 2)
        text = text_of("remote error", lambda: rpc.rpc_sync("cpp", "complain", "for Python"))
        assert "for Python" in text and "cpp" in text, text
        counter = rpc.remote("cpp", "make_counter", 10)
        assert [counter.rpc_sync("Counter::add", i) for i in (1, 2)] == [11, 13]
        # C++ calls Python back.
        assert torch.equal(rpc.rpc_sync("cpp", "scale_there", a, 3.0), a * 3 + 1)
        weight = rpc.remote("cpp", "weights")
        with rpc.context() as context:
            x = torch.ones(3, requires_grad=True)
            context.backward([rpc.rpc_sync("cpp", "forward", weight, x).sum()])
            assert torch.equal(context.gradients()[x], torch.full((3,), 2.0))
            # From here to C++, back to Python, and the same way again.
            y = torch.ones(3, requires_grad=True)
            context.backward(rpc.rpc_sync("cpp", "scale_there", y, 5.0).sum())
            assert torch.equal(context.gradients()[y], torch.full((3,), 5.0))
        # References of both go to the other one.
        mine = rpc.local_rref(torch.full((3,), 7.0))
        assert torch.equal(rpc.rpc_sync("cpp", "fetch_plus_one", mine), torch.full((3,), 8.0))
        assert torch.equal(rpc.rpc_sync("cpp", "read_there", weight).detach(), torch.full((3,), 3.0))
        del counter, weight, mine
    return True


def call_the_dying(path):
    rpc = session(path, 2, timeout=0)
    if ranks.rank() == 1:
        wait_for_end(rpc)
    model = rpc.remote("worker1", make_model, 2)
    weight = model.remote("Model::weight_of")
    weight.to_here()
    pending = rpc.rpc_async("worker1", "wait_without_end")

    async def wait_for_it():
        return await rpc.rpc_async("worker1", "wait_without_end")

    awaited = threading.Thread(target=lambda: texts.append(text_of("peer lost", lambda: asyncio.run(wait_for_it()))))
    texts = []
    awaited.start()
    texts += [text_of("peer lost", call) for call in (
        lambda: rpc.rpc_sync("worker1", die), pending.wait, weight.to_here,
        lambda: model.rpc_sync("Model::forward", torch.ones(2)), lambda: rpc.rpc_async("worker1", bounce, 0).wait())]
    awaited.join(ranks.LIMIT)
    rpc.shutdown(graceful=False)
    return texts


@convoy.rpc.function
def wait_without_end() -> None:
    threading.Event().wait(ranks.LIMIT)


def fork_and_go_on(path):
    """A forked child takes no part in the session, may have its own, and ends as programs do."""
    import atexit

    with session(path, 2) as rpc:
        other = f"worker{1 - ranks.rank()}"
        called = threading.Event()
        rpc.rpc_async(other, bounce, 0).add_done_callback(lambda _: called.set())
        assert called.wait(ranks.LIMIT)
        assert rpc.rpc_sync(other, bounce_later, 2, rpc.worker().name) == 2

        def child():
            wrong = [text for text in (text_of("unsupported", lambda: rpc.rpc_sync(other, scale, torch.ones(1), 1.0)),
                                       text_of("unsupported", lambda: rpc.rpc_async(other, scale, torch.ones(1), 1.0)),
                                       text_of("unsupported", lambda: rpc.remote(other, make_model, 1)))
                     if "forked child" not in text]
            atexit._run_exitfuncs()
            return repr(wrong)

        told = in_child(child)
        assert torch.equal(rpc.rpc_sync(other, scale, torch.ones(2), 2.0), torch.full((2,), 2.0))
    return told


def wait_for_end(rpc):
    threading.Event().wait(ranks.LIMIT)


def torch_message(path):
    """What torch.distributed.rpc sends is refused by other sessions: nothing is unpickled."""
    with session(path, 1, name="only") as rpc:
        name = "convoy::python::torch_rpc_message"
        names = [found for found, _ in rpc.functions("only") if found == name]
        import pickle

        payload = [byte - 256 if byte > 127 else byte for byte in pickle.dumps(os.getpid)]
        return names, text_of("remote error", lambda: rpc.rpc_sync("only", name, 0x102, 1, payload, []))


LEAVING = """
    import asyncio, sys, time
    import convoy.rpc
    @convoy.rpc.function
    def rest(seconds: float) -> float:
        time.sleep(seconds)
        return seconds
    @convoy.rpc.function
    async def rest_later(seconds: float) -> float:
        await asyncio.sleep(seconds)
        return seconds
    rank = int(sys.argv[1])
    rpc = convoy.rpc.Session(method="file://" + sys.argv[2], rank=rank, size=2)
    rpc.functions(f"worker{1 - rank}")
    rpc.barrier()
    try:
        kept = [rpc.rpc_async(f"worker{1 - rank}", rest, 0.2) for _ in range(20)]
        kept += [rpc.rpc_async(f"worker{1 - rank}", rest_later, 0.001 * i) for i in range(100)]
        for future in kept:
            future.add_done_callback(lambda future: [i for i in range(1000)])
    except convoy.Error:
        pass  # the other one was quicker
    print("leaving")
"""


class RpcTest(TestCase):
    def test_python_workers(self):
        with ranks.folder() as path:
            self.assertEqual(ranks.run(call_python, 2, path, backend=None), [True] * 2)

    def test_references_and_gradients(self):
        with ranks.folder() as path:
            self.assertEqual(ranks.run(call_references, 3, path, backend=None), [True] * 3)

    def test_cpp_worker(self):
        with ranks.folder() as path:
            worker = subprocess.Popen([WORKER, f"{path}/rpc", "1", "2"])
            try:
                self.assertEqual(ranks.run(call_cpp, 1, path, backend=None), [True])
                self.assertEqual(worker.wait(ranks.LIMIT), 0)
            finally:
                if worker.poll() is None:
                    worker.kill()
                    worker.wait()

    def test_killed_worker_is_an_error_by_name(self):
        with ranks.folder() as path:
            results = ranks.run_all(call_the_dying, 2, path, backend=None)
        self.assertEqual(len(results[0]), 6, results[0])
        for text in results[0]:
            self.assertIn("worker1", text)
        self.assertIsInstance(results[1], ranks.Died)

    def test_a_forked_child_is_refused_and_the_workers_go_on(self):
        with ranks.folder() as path:
            self.assertEqual(ranks.run(fork_and_go_on, 2, path, backend=None), ["[]"] * 2)

    def test_messages_of_torch_are_refused(self):
        with ranks.folder() as path:
            [(names, text)] = ranks.run(torch_message, 1, path, backend=None)
        self.assertEqual(len(names), 1)
        self.assertIn("does not serve torch.distributed.rpc", text)

    def test_registration(self):
        with self.assertRaisesRegex(convoy.Error, "parameter x needs a type hint"):
            @convoy.rpc.function
            def no_hint(x) -> None:
                del x

        with self.assertRaisesRegex(convoy.Error, "cannot be passed"):
            @convoy.rpc.function
            def bad_hint(x: object) -> None:
                del x

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
