"""Programs for torch.distributed under `convoy run`: they meet through its store, without a TCP port."""

import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from unittest import TestCase

import torch
import torch.distributed as dist
from torch.distributed import _dist2

import ranks

TIMEOUT = timedelta(seconds=60)


def listening_inodes():
    """Of all TCP sockets of this network namespace that listen."""
    lines = [line.split() for name in ("tcp", "tcp6") if (path := Path("/proc/net", name)).exists()
             for line in path.read_text().splitlines()[1:]]
    return {f"socket:[{words[9]}]" for words in lines if words[3] == "0A"}


def parent_of(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def listeners():
    """Those of this rank, its launcher and the launcher's monitor that listen on a TCP port."""
    inodes, found = listening_inodes(), []
    monitor = parent_of(os.getpid())
    for pid in (os.getpid(), monitor, parent_of(monitor)):
        fds = [os.readlink(fd) for fd in Path(f"/proc/{pid}/fd").iterdir() if fd.is_symlink()]
        if inodes & set(fds):
            found.append(pid)
    return found


def total(group=None):
    x = torch.ones(4)
    dist.all_reduce(x, group=group)
    assert torch.equal(x, torch.full((4,), 2.0)), x


def no_port():
    """The default, env://, of a program that does not even import convoy."""
    dist.init_process_group("convoy", timeout=TIMEOUT)
    total()
    total(dist.new_group([0, 1]))
    dist.barrier()
    assert listeners() == [], listeners()
    dist.destroy_process_group()


def gloo():
    dist.init_process_group("gloo", timeout=TIMEOUT)
    total()
    dist.destroy_process_group()


def objects():
    """dist2's own function, which gives each group the same store."""
    import convoy  # it registers the backend

    for backend in ("convoy", "convoy", "gloo", "gloo"):
        group = _dist2.new_group(backend, TIMEOUT, "cpu")
        x = torch.ones(4)
        group.allreduce(x).wait()
        assert torch.equal(x, torch.full((4,), 2.0)), (backend, x)
    for backend in ("gloo", "convoy"):
        x = torch.ones(4)
        group = convoy.new_group(backend, TIMEOUT)
        group.allreduce(x).wait()
        assert torch.equal(x, torch.full((4,), 2.0)), (backend, x)


def elsewhere():
    """A program that names another place to meet gets torch's store there: rank 0 listens."""
    store = dist.FileStore(os.environ["TEST_FILE"], 2)
    if ranks.rank() == 0:
        store.set("port", str(free_port()))
    os.environ["MASTER_PORT"] = store.get("port").decode()
    dist.init_process_group("convoy", timeout=TIMEOUT)
    total()
    assert listeners() == ([os.getpid()] if ranks.rank() == 0 else []), listeners()
    dist.barrier()
    dist.destroy_process_group()


def free_port():
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def child():
    """A program that a rank starts has its variables, but not its connection."""
    subprocess.run([sys.executable, __file__, "gloo"], check=True, timeout=ranks.LIMIT)


class LauncherTest(TestCase):
    def run_ranks(self, *command):
        with ranks.folder() as path:
            return subprocess.run([ranks.COMMAND, "run", "-n", "2", *command], capture_output=True, text=True,
                                  timeout=ranks.LIMIT, env=os.environ | {"TEST_FILE": f"{path}/store"})

    def expect_good(self, done):
        self.assertEqual(done.returncode, 0, done.stderr + done.stdout)

    def test_env_meets_through_the_launcher_and_opens_no_port(self):
        self.expect_good(self.run_ranks(sys.executable, __file__, "no_port", "gloo", "objects", "elsewhere"))

    def test_programs_one_after_another_in_one_rank_and_below_it(self):
        # The second one's ranks must not find what the first one's have left in the store.
        program = f"'{sys.executable}' '{__file__}'"
        done = self.run_ranks("sh", "-c", f"{program} no_port && {program} no_port child")
        self.expect_good(done)
        self.assertIn("env:// meets through torch's TCPStore", done.stderr)


if __name__ == "__main__":
    parts = {part.__name__: part for part in (no_port, gloo, objects, elsewhere, child)}
    if sys.argv[1:] and sys.argv[1] in parts:
        for name in sys.argv[1:]:
            parts[name]()
    else:
        ranks.main()
