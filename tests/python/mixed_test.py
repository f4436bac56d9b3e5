"""C++ and Python ranks in one group: values, errors, shutdown."""

import os
import subprocess
import sys
from unittest import TestCase

import torch
import torch.distributed as dist

import convoy
import ranks

HELPER = ranks.BUILD / "bin" / "python_mixed_rank"


def python_rank():
    """What mixed_rank.cpp does, from the other side; it is the last rank."""
    rank, size = dist.get_rank(), dist.get_world_size()
    x = torch.full((1000,), rank + 1.0)
    dist.all_reduce(x)
    assert torch.equal(x, torch.full((1000,), size * (size + 1) / 2)), x
    x = torch.empty(3, dtype=torch.int64)
    dist.broadcast(x, size - 1)
    assert x.tolist() == [7, 8, 9], x
    x = torch.empty(size)
    dist.all_gather_single(x, torch.tensor([float(rank)]))
    assert torch.equal(x, torch.arange(float(size))), x
    if rank == 0:
        x = torch.empty(5)
        dist.recv(x, size - 1, tag=3)
        assert torch.equal(x, torch.full((5,), 0.5)), x
    try:
        dist.all_reduce(torch.ones(4))
    except convoy.Error as error:
        assert f"rank {size - 1} called all_reduce(5 x f32, sum)" in str(error), error
        assert error.kind == "invalid argument"
    else:
        raise AssertionError("no error")
    dist.barrier()
    try:
        dist.all_reduce(torch.ones(4))
    except convoy.Error as error:
        assert error.kind == "peer lost" and f"rank {size - 1} " in str(error), error
    else:
        raise AssertionError("the C++ rank has left")
    dist.destroy_process_group()


def either(path):
    rank, size = ranks.rank(), int(os.environ["WORLD_SIZE"])
    if rank == size - 1:
        subprocess.run([HELPER, path, str(rank), str(size)], check=True, timeout=ranks.LIMIT)
        return
    dist.init_process_group("convoy", f"file://{path}", rank=rank, world_size=size)
    python_rank()


class MixedTest(TestCase):
    def test_through_a_file(self):
        with ranks.folder() as path:
            ranks.run(either, 3, f"{path}/store", backend=None)

    def test_under_convoy_run(self):
        done = subprocess.run([ranks.COMMAND, "run", "-n", "2", sys.executable, __file__, "rank"],
                              capture_output=True, text=True, timeout=ranks.LIMIT)
        self.assertEqual(done.returncode, 0, done.stderr + done.stdout)


if __name__ == "__main__":
    if sys.argv[1:] == ["rank"]:
        if ranks.rank() == 1:  # the same rank, another program
            os.execv(HELPER, [HELPER, "convoy", "1", "2"])
        dist.init_process_group("convoy", "convoy://")
        python_rank()
    else:
        ranks.main()
