"""Ways in and out: with and without the import, under launchers; the interpreter's lock; its exit."""

import os
import subprocess
import sys
import textwrap
import threading
from datetime import timedelta
from unittest import TestCase

import torch
import torch.distributed as dist

import convoy
import ranks

PENDING = """
    import os, torch, torch.distributed as dist  # and no import of convoy
    dist.init_process_group("convoy", INIT)
    rank = dist.get_rank()
    x = torch.ones(3)
    dist.all_reduce(x)
    assert x.tolist() == [2.0] * 3
    PORTS
    # Both leave with work that nobody else takes part in, and with callbacks on it.
    works = [dist.all_reduce(torch.ones(10), async_op=True) for _ in range(3 * (1 + rank))]
    works.append(dist.irecv(torch.empty(3), 1 - rank, tag=77))
    kept = [work.get_future().then(lambda future: [i for i in range(1000)]) for work in works]
    print("leaving")
"""
NO_PORTS = """
    mine = {os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")
            if os.path.exists(f"/proc/self/fd/{fd}")}
    for name in ("tcp", "tcp6"):
        for line in open(f"/proc/self/net/{name}").readlines()[1:]:
            assert f"socket:[{line.split()[9]}]" not in mine, line
"""


def script(text, **parts):
    for name, part in parts.items():
        text = text.replace(name, part.strip() if "\n" in part else part)
    return textwrap.dedent(text)


def finish(command):
    return subprocess.run(command, capture_output=True, text=True, timeout=ranks.LIMIT)


def spin():
    return sum(i * i for i in range(2000))


def drop_groups_with_callbacks(path):
    """The end of a group waits for its thread, which runs Python: not while holding the lock."""
    store, rank = dist.FileStore(path, 2), ranks.rank()
    for turn in range(6):
        group = convoy.new_group(store=store, rank=rank, world_size=2, timeout=timedelta(seconds=20))
        if turn % 2:  # torch itself lets go of the lock at the end of a ProcessGroup, not of a Backend
            group = group._get_backend(torch.device("cpu"))
        ran, futures = [], []
        for _ in range(20):
            work = group.allreduce([torch.ones(1000)])
            futures.append(work.get_future().then(lambda future: ran.append(spin())))
        if turn % 3 == 2:
            group.shutdown()
        del group, work
        for future in futures:
            try:
                future.wait()
            except Exception:  # what the end of the group overtook
                pass


def wait_while_python_runs():
    """A rank that waits lets its other threads run: one of them lets the other rank come."""
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 0:
        waiting = threading.Thread(target=dist.barrier)
        waiting.start()
        spin()
        store.set("go", "1")
        waiting.join(20)
        assert not waiting.is_alive()
        thread = threading.Thread(target=lambda: store.set("go on", "1"))
        thread.start()
    else:
        store.wait(["go"], timedelta(seconds=20))
        dist.barrier()
        store.wait(["go on"], timedelta(seconds=20))
    dist.all_reduce(torch.ones(1))


def end_with_pending_work():
    """destroy_process_group with work under way: it fails, its waiters hear of it."""
    if dist.get_rank() == 0:
        work = dist.all_reduce(torch.ones(5), async_op=True)
        dist.destroy_process_group()
        try:
            work.wait()
        except convoy.Error:
            return "error"
    else:
        dist.destroy_process_group()


class ExitTest(TestCase):
    def ended_well(self, done):
        self.assertEqual(done.returncode, 0, done.stderr + done.stdout)
        self.assertEqual(done.stdout.count("leaving"), 2)
        for word in ("terminate", "Traceback", "Fatal", "Aborted", "core dumped"):
            self.assertNotIn(word, done.stderr)

    def test_exit_with_pending_work_under_convoy_run(self):
        text = script(PENDING, INIT='"convoy://"', PORTS=NO_PORTS)
        self.ended_well(finish([ranks.COMMAND, "run", "-n", "2", sys.executable, "-c", text]))

    def test_exit_with_pending_work_under_torchrun(self):
        with ranks.folder() as path:
            with open(f"{path}/train.py", "w") as file:
                file.write(script(PENDING, INIT="None", PORTS="pass"))
            self.ended_well(finish([sys.executable, "-m", "torch.distributed.run", "--standalone",
                                    "--nproc-per-node", "2", f"{path}/train.py"]))

    def test_a_group_that_is_dropped_with_callbacks(self):
        with ranks.folder() as path:
            ranks.run(drop_groups_with_callbacks, 2, f"{path}/store", backend=None)

    def test_a_waiting_rank_lets_python_run(self):
        ranks.run(wait_while_python_runs, 2)

    def test_the_end_of_a_group_with_pending_work(self):
        self.assertEqual(ranks.run(end_with_pending_work, 2), ["error", None])

    def test_alone_without_a_launcher(self):
        def use():
            dist.init_process_group("convoy", "convoy://")
            dist.all_reduce(torch.ones(2))
            dist.destroy_process_group()

        for _ in range(2):
            use()

    def test_ranks_without_a_launcher_are_told(self):
        with self.assertRaisesRegex(convoy.Error, "rank 1 of 2 was not started by `convoy run`"):
            dist.init_process_group("convoy", "convoy://", rank=1, world_size=2)

    def test_wrong_options_are_told(self):
        with self.assertRaisesRegex(TypeError, "convoy.Options"):
            dist.init_process_group("convoy", "convoy://", pg_options=dist.ProcessGroupGloo._Options())
        dist.destroy_process_group() if dist.is_initialized() else None

    def test_the_entry_point_never_raises(self):
        from _convoy import autoload

        real, plugins = dist.Backend.register_backend, dist.Backend._plugins
        dist.Backend.register_backend, dist.Backend._plugins = None, {}
        try:
            with self.assertLogs("convoy", "WARNING"):
                autoload.register()
        finally:
            dist.Backend.register_backend, dist.Backend._plugins = real, plugins

    def test_another_torch_is_refused(self):
        # Before the libraries are loaded, which would end in a missing symbol. torch knows the
        # backend all the same, and says so when it is used.
        done = finish([sys.executable, "-c", script("""
            import torch, torch.distributed as dist
            torch.__version__ = "2.12.1"
            try:
                dist.init_process_group("convoy", "convoy://")
            except ImportError as error:
                print(error)
        """)])
        self.assertRegex(done.stdout, r"built for torch 2\.13, and this is torch 2\.12\.1", done.stderr)

    def test_an_error_keeps_its_kind_in_a_pickle(self):
        import pickle

        error = pickle.loads(pickle.dumps(convoy.Error("text", "timeout")))
        self.assertEqual((str(error), error.kind), ("text", "timeout"))
        self.assertIsInstance(error, dist.DistBackendError)


if __name__ == "__main__":
    ranks.main()
