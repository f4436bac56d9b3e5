"""Runs a function as the ranks of a group, one process each, and reports every rank.

Processes are forked from a server that has imported torch and the test, and has used neither: they
start in milliseconds. Every wait has a deadline; what is still alive at the end is killed and counts
as a failure.
"""

import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import tempfile
import time
import traceback
import unittest
from datetime import timedelta
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BUILD = Path(os.environ.get("CONVOY_BUILD", ROOT / "build" / "release"))
COMMAND = BUILD / "bin" / "convoy"
LIMIT = 120  # seconds, of everything that should take less than one

_context = multiprocessing.get_context("forkserver")
# torch imports _dynamo with the first module that is called, half a second in each rank.
_context.set_forkserver_preload(["__main__", "convoy", "torch._dynamo", "torch.distributed.fsdp",
                                 "torch.distributed.tensor"])


def folder():
    return tempfile.TemporaryDirectory(prefix="convoy-test.")


def rank():
    """Of the process that calls."""
    return int(os.environ["RANK"])


class Died:
    """Instead of a result: the rank ended without one."""

    def __init__(self, code):
        self.code = code

    def __repr__(self):
        return f"died with {signal.Signals(-self.code).name if self.code < 0 else self.code}"


class Failed:
    """Instead of a result: the function raised."""

    def __init__(self, error):
        self.text, self.trace = f"{type(error).__name__}: {error}", traceback.format_exc()

    def __repr__(self):
        return self.trace


def _rank_main(function, rank, size, backend, timeout, path, answer, arguments):
    try:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank),
                       "GLOO_SOCKET_IFNAME": "lo"}
        if backend:
            dist.init_process_group(backend, f"file://{path}/store", rank=rank, world_size=size,
                                    timeout=timedelta(seconds=timeout))
        result = function(*arguments)
        if dist.is_initialized():
            dist.destroy_process_group()
    except BaseException as error:
        result = Failed(error)
    answer.send(result)


def run_all(function, size, *arguments, backend="convoy", timeout=LIMIT / 2):
    """What `function(*arguments)` returned on each rank, or Failed or Died.

    `backend` and `timeout`: of the default group, which is made before and destroyed after it; None: no group.
    """
    with folder() as path:
        pipes, processes = [], []
        for rank in range(size):
            mine, theirs = _context.Pipe(duplex=False)
            process = _context.Process(target=_rank_main, args=(
                function, rank, size, backend, timeout, path, theirs, arguments))
            process.start()
            theirs.close()
            pipes.append(mine)
            processes.append(process)
        deadline = time.monotonic() + LIMIT
        results = [None] * size
        waiting = dict(zip(pipes, range(size)))
        try:
            while waiting:
                ready = multiprocessing.connection.wait(list(waiting), max(0, deadline - time.monotonic()))
                if not ready:
                    raise AssertionError(f"ranks {sorted(waiting.values())} did not end within {LIMIT} s")
                for pipe in ready:
                    rank = waiting.pop(pipe)
                    try:
                        results[rank] = pipe.recv()
                    except EOFError:
                        processes[rank].join(LIMIT)
                        results[rank] = Died(processes[rank].exitcode)
            for rank, process in enumerate(processes):
                process.join(max(0, deadline - time.monotonic()))
                if process.exitcode is None:
                    raise AssertionError(f"rank {rank} did not exit within {LIMIT} s")
                if process.exitcode and not isinstance(results[rank], Died):
                    results[rank] = Died(process.exitcode)
        finally:
            for process in processes:
                if process.exitcode is None:
                    process.kill()
                    process.join()
        return results


def run(function, size, *arguments, backend="convoy"):
    """The same, of ranks that must all succeed."""
    results = run_all(function, size, *arguments, backend=backend)
    bad = [f"rank {rank}: {r!r}" for rank, r in enumerate(results) if isinstance(r, (Died, Failed))]
    if bad:
        raise AssertionError("\n".join(bad))
    return results


def main():
    """unittest.main, and no file that Convoy makes for sharing must be left.

    They lie in /dev/shm by default, which other programs use too: here in a folder of this run.
    """
    with folder() as path:
        os.environ["CONVOY_SHARE_FOLDER"] = path
        program = unittest.main(exit=False)
        left = sorted(str(file.relative_to(path)) for file in Path(path).rglob("*"))
    if left:
        print(f"left in CONVOY_SHARE_FOLDER: {left}", file=sys.stderr)
    sys.exit(bool(left) or not program.result.wasSuccessful())
