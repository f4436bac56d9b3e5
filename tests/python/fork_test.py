"""A forked child of a rank, a worker of a DataLoader for example, takes no part in the rank's group."""

import atexit
import ctypes
import os
import signal
from datetime import timedelta
from unittest import TestCase, main

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset

import convoy
import ranks

SIZE = 2
SMALL, LARGE = 4, 300_000


def in_child(function):
    """What `function` returns in a forked child, as text; how the child ended if it did not return."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(30)  # whoever waits for a thread that is not there ends here
        try:
            text = function()
        except BaseException as error:
            text = f"raised {type(error).__name__}: {error}"
        os.write(writer, text.encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as answer:
        text = answer.read()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return text if status == 0 else f"{text}; ended with {status}"


def refusals(calls):
    """Which of the calls were not refused as they should be."""
    wrong = []
    for name, call in calls.items():
        try:
            call()
            wrong.append(f"{name}: accepted")
        except convoy.Error as error:
            if error.kind != "unsupported" or "forked child" not in str(error):
                wrong.append(f"{name}: {error.kind}: {error}")
        except Exception as error:
            wrong.append(f"{name}: {type(error).__name__}: {error}")
    return "\n".join(wrong)


def calls_of(n, pending, model, optimizer):
    rank = dist.get_rank()
    peer = 1 - rank
    x, two, twice = torch.ones(n), [torch.ones(n), torch.ones(n)], torch.ones(2 * n)
    other = [torch.ones(n), torch.ones(n)]
    at_root = two if rank == 0 else None
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    calls = {
        "all_reduce": lambda: dist.all_reduce(x),
        "all_reduce async": lambda: dist.all_reduce(x, async_op=True),
        "all_reduce_coalesced": lambda: dist.all_reduce_coalesced(two),
        "broadcast": lambda: dist.broadcast(x, 0),
        "reduce": lambda: dist.reduce(x, 0),
        "all_gather": lambda: dist.all_gather(two, x),
        "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(twice, x),
        "gather": lambda: dist.gather(x, at_root, 0),
        "scatter": lambda: dist.scatter(x, at_root, 0),
        "reduce_scatter": lambda: dist.reduce_scatter(x, two),
        "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(x, twice),
        "all_to_all": lambda: dist.all_to_all(two, other),
        "all_to_all_single": lambda: dist.all_to_all_single(twice, torch.ones(2 * n)),
        "barrier": lambda: dist.barrier(),
        "send": lambda: dist.send(x, peer),
        "recv": lambda: dist.recv(x, peer),
        "isend": lambda: dist.isend(x, peer),
        "irecv": lambda: dist.irecv(x, peer),
        "all_gather_object": lambda: dist.all_gather_object([None, None], "x" * n),
        "broadcast_object_list": lambda: dist.broadcast_object_list(["x" * n]),
        "shrink_group": lambda: convoy.shrink_group(timeout=timedelta(seconds=1)),
        "abort": lambda: backend.abort(),
        "wait": lambda: pending.wait(),
        "is_completed": lambda: pending.is_completed(),
        "DistributedDataParallel": lambda: model(torch.ones(2, 4)),
        "sync_gradients": lambda: model.sync_gradients(),
        "ShardedOptimizer": lambda: optimizer.step(),
    }
    return calls


def fork_and_go_on():
    rank = dist.get_rank()
    late = torch.zeros(1)
    pending = dist.irecv(late, 1 - rank, tag=9)
    dist.all_reduce(torch.ones(1), async_op=True).wait()
    model = convoy.DistributedDataParallel(nn.Linear(4, 4))
    sharded = convoy.DistributedDataParallel(nn.Linear(4, 4))  # whose gradients its steps reduce
    optimizer = convoy.ShardedOptimizer(sharded, torch.optim.SGD, lr=0.0)
    stock = nn.parallel.DistributedDataParallel(nn.Linear(4, 4))
    for module in (model, sharded, stock):
        module(torch.ones(2, 4)).sum().backward()
    optimizer.step()

    def child():
        wrong = [refusals(calls_of(n, pending, model, optimizer)) for n in (SMALL, LARGE)]
        # Last: torch does not close its block after an error.
        batch = [dist.P2POp(dist.isend, torch.ones(1), 1 - rank)]
        wrong.append(refusals({"batch": lambda: dist.batch_isend_irecv(batch)}))
        try:
            stock(torch.ones(2, 4)).sum().backward()
            wrong.append("torch's DistributedDataParallel: accepted")
        except RuntimeError:
            pass
        with torch.no_grad():
            assert model.eval()(torch.ones(2, 4)).shape == (2, 4)
        dist.destroy_process_group()  # neither throws nor tells anybody
        return "".join(wrong)

    told = in_child(child)
    dist.barrier()
    for n in (SMALL, LARGE):
        x = torch.full((n,), rank + 1.0)
        dist.all_reduce(x)
        assert (x == 3).all(), x
    dist.send(torch.full((1,), float(rank)), 1 - rank, tag=9)
    pending.wait()
    assert late == 1 - rank
    for module in (model, stock):
        module.zero_grad()
        module(torch.full((2, 4), rank + 1.0)).sum().backward()
        assert (module.module.weight.grad == 3).all(), module.module.weight.grad
    return told


class Worker(Dataset):
    """Whose items want a sum over the ranks, which a worker cannot have."""

    def __init__(self, n):
        self.n = n

    def __len__(self):
        return 8

    def __getitem__(self, index):
        x = torch.full((self.n,), 1000.0)
        try:
            dist.all_reduce(x)
        except convoy.Error as error:
            assert error.kind == "unsupported" and "DataLoader" in str(error), error
        else:
            raise AssertionError("a worker took part in the group")
        return x[:1]


def load_and_train(n):
    rank = dist.get_rank()
    dist.barrier()
    seen = 0
    # No limit on the workers: they end when the loader does, with the group still in them.
    for item in DataLoader(Worker(n), num_workers=2, multiprocessing_context="fork"):
        x = torch.full((n,), rank + 1.0)
        dist.all_reduce(x)
        assert (x == 3).all(), x
        assert (item == 1000).all()
        seen += 1
    return seen


def exit_in_child():
    """The whole way out: Python's exit handlers, ours among them, and C's."""
    child = os.fork()
    if child == 0:
        signal.alarm(30)
        atexit._run_exitfuncs()  # not sys.exit(): the harness would answer for the rank
        ctypes.CDLL(None).exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    x = torch.ones(3)
    dist.all_reduce(x)
    assert (x == 2).all()
    return status


class ForkTest(TestCase):
    def test_a_child_is_refused_everywhere_and_the_ranks_go_on(self):
        for told in ranks.run(fork_and_go_on, SIZE):
            self.assertEqual(told, "")

    def test_workers_of_a_data_loader(self):
        for n in (SMALL, LARGE):
            with self.subTest(n=n):
                self.assertEqual(ranks.run(load_and_train, SIZE, n), [8, 8])

    def test_a_child_that_exits_as_programs_do(self):
        self.assertEqual(ranks.run(exit_in_child, SIZE), [0, 0])


if __name__ == "__main__":
    main()
