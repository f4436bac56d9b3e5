"""Processes, and what they work on together: spawn, Published, Slots."""

import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing import reduction
from multiprocessing import spawn as _multiprocessing
from typing import Any

import torch
from torch.multiprocessing import ProcessExitedException, ProcessRaisedException

from convoy import _C
from convoy._share import DEFAULT_TIMEOUT, Channel, _from_values, _message_kinds, _to_values

_PIECE = 0.5  # seconds


class Processes:
    """Processes of spawn(); what torch.multiprocessing.spawn(join=False) returns, and more."""

    def __init__(self, processes: _C.Processes) -> None:
        self._processes = processes

    def pids(self) -> list[int]:
        return self._processes.pids()

    def join(self, timeout: float | None = None, grace_period: float | None = None) -> bool:
        """True when all have ended; False after `timeout` seconds, and then it may be called again.

        If one fails, the others are ended, and torch's ProcessRaisedException (with its traceback)
        or ProcessExitedException is raised.
        """
        del grace_period  # that of spawn()
        end = None if timeout is None else time.monotonic() + timeout
        # In pieces: so that signals of Python's are handled.
        while not self._processes.join(_PIECE if end is None else min(_PIECE, max(0, end - time.monotonic()))):
            if end is not None and time.monotonic() >= end:
                return False
        failure = self._processes.first_failure()
        if failure is None:
            return True
        index, pid, code, number, exception = failure
        if exception:
            raise ProcessRaisedException(
                f"\n\n-- Process {index} terminated with the following error:\n{exception}", index, pid)
        if number:
            name = signal.Signals(number).name
            raise ProcessExitedException(f"process {index} terminated with signal {name}",
                                         error_index=index, error_pid=pid, exit_code=-number,
                                         signal_name=name)
        raise ProcessExitedException(f"process {index} terminated with exit code {code}",
                                     error_index=index, error_pid=pid, exit_code=code)

    def terminate(self, grace: float = 5.0) -> None:
        """SIGTERM, and SIGKILL to what still runs after `grace` seconds."""
        self._processes.terminate(grace)

    def restart_failed(self) -> list[str]:
        """Starts those again that have failed; what became of them."""
        return self._processes.restart_failed()

    def channel(self, index: int) -> Channel:
        """To and from one of them; there it is convoy.parent_channel()."""
        return Channel(self._processes.channel(index))


_parent: Channel | None = None


def parent_channel() -> Channel:
    """In a spawned process: the other end of Processes.channel()."""
    if _parent is None:
        raise RuntimeError("this process was not spawned by convoy")
    return _parent


def spawn(fn: Callable[..., object], args: tuple[Any, ...] = (), nprocs: int = 1, join: bool = True,
          daemon: bool = False, start_method: str = "spawn", grace_period: float = 5.0,
          environment: Mapping[str, str] | None = None) -> Processes | None:
    """Runs fn(index, *args) in processes of their own; as torch.multiprocessing.spawn.

    Tensors among the arguments are shared, not copied. The processes end when this one does, however
    it ends, and so do theirs. In the program's main file calls belong below
    `if __name__ == "__main__":`, because each process imports it.
    """
    del daemon
    if start_method != "spawn":
        raise ValueError(f"start_method {start_method}: convoy executes Python anew, which is \"spawn\"")
    preparation = _multiprocessing.get_preparation_data("convoy")
    preparation.pop("authkey", None)  # bytes that refuse to be pickled; for multiprocessing's own sockets
    # The function is pickled by itself: it can be found only after the preparation.
    call = _to_values([fn, args])
    code = f"import sys; sys.path[:] = {sys.path!r}; from convoy._processes import _main; _main()"
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]  # multiprocessing's own way
    program = [sys.executable, *flags, "-c", code]
    processes = Processes(_C.start_processes(
        program, nprocs, grace_period, [f"{k}={v}" for k, v in (environment or {}).items()],
        [*_to_values([preparation]), *call]))
    if not join:
        return processes
    processes.join()
    return None


def start() -> tuple[int, Any] | None:
    """In a program that convoy::start_processes of C++ has started: its index and its arguments."""
    if not sys.argv or not sys.argv[-1].startswith("--convoy-spawned="):
        return None
    index, values = _adopt()
    return index, _from_values(values)


def _adopt() -> tuple[int, list[object]]:
    global _parent
    index, _, values, parent = _C.adopt_ticket(sys.argv.pop())
    _parent = Channel(parent)
    return index, values


def _main() -> None:
    try:
        index, values = _adopt()
        (preparation,) = _from_values(values[:1])
        _multiprocessing.prepare(preparation)
        fn, args = _from_values(values[1:])
        del values
        fn(index, *args)
    except Exception:
        _C.report_exception(traceback.format_exc())
        sys.exit(1)


# --- Published ------------------------------------------------------------------------------------

Source = torch.nn.Module | Mapping[str, torch.Tensor] | Sequence[torch.Tensor]


def _pairs(source: Source) -> list[tuple[str, torch.Tensor]]:
    if isinstance(source, torch.nn.Module):
        return [*source.named_parameters(), *source.named_buffers()]
    if isinstance(source, Mapping):
        return list(source.items())
    return [(str(i), tensor) for i, tensor in enumerate(source)]


class Snapshot(Mapping[str, torch.Tensor]):
    """One whole version of published tensors, by name. They are the shared memory itself: do not write
    to them, and drop them when you are done."""

    def __init__(self, snapshot: _C.Snapshot) -> None:
        self._snapshot = snapshot
        self._names = snapshot.names()

    @property
    def version(self) -> int:
        return self._snapshot.version

    @property
    def age(self) -> float:
        """Seconds since it was published."""
        return self._snapshot.age

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self._names:
            raise KeyError(name)
        return self._snapshot.tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class _Handled:
    """What travels as a tensor that stands for it."""

    _object: Any

    @classmethod
    def _open(cls, handle: torch.Tensor):
        raise NotImplementedError

    # In messages of convoy's.
    def __reduce__(self):
        return self._open, (self._object.handle(),)


def _open_by_bytes(cls: type[_Handled], handle: bytes):
    return cls._open(_C.tensor_from_bytes(handle))


# To multiprocessing's queues and processes.
def _reduce_by_bytes(value: _Handled):
    return _open_by_bytes, (type(value), _C.tensor_to_bytes(value._object.handle()))


class Published(_Handled):
    """Tensors of which one process publishes versions and others read the newest whole one; C++ has the
    same as convoy::share::Published.

    Of a module (its parameters and buffers), a dict or a list of tensors. It can be an argument of
    spawn(), of multiprocessing's processes, and part of what goes over a channel or a queue.
    """

    def __init__(self, source: Source, buffers: int = 4, patience: float = 1.0) -> None:
        self._object = _C.PublishedTensors(_pairs(source), buffers, patience)

    @classmethod
    def _open(cls, handle: torch.Tensor) -> "Published":
        made = cls.__new__(cls)
        made._object = _C.PublishedTensors.open(handle)
        return made

    def publish(self, source: Source) -> int:
        """Copies them, and makes them the newest version, whose number it returns."""
        return self._object.publish(_pairs(source))

    def read(self) -> Snapshot:
        """The newest version. Never waits."""
        return Snapshot(self._object.read())

    def read_newer(self, version: int, timeout: float = DEFAULT_TIMEOUT) -> Snapshot:
        """Waits for one that is newer than this."""
        return Snapshot(self._object.read_newer(version, timeout))

    def load_into(self, target: Source) -> int:
        """Copies the newest version into a module or tensors; its number."""
        return self._object.load_into(_pairs(target))

    @property
    def version(self) -> int:
        return self._object.version()

    def behind(self, snapshot: Snapshot) -> int:
        """How many versions newer than this one there are."""
        return self.version - snapshot.version

    def handle(self) -> torch.Tensor:
        """A tensor that stands for it in a message to C++: convoy::share::Published<T>::open()."""
        return self._object.handle()

    @classmethod
    def open(cls, handle: torch.Tensor) -> "Published":
        """From handle(), of C++'s or another process's."""
        return cls._open(handle)


# --- Slots ----------------------------------------------------------------------------------------


class Slots(_Handled):
    """Slots of tensors in shared memory which actors fill and a learner reads; C++ has the same as
    convoy::share::Slots.

        slots = convoy.Slots(16, {"states": ((64, 4), torch.float32)})
        while slot := slots.fill():              # an actor; None once they are closed
            slot["states"].copy_(states)
            slot.commit()
        while slot := slots.next(): ...          # the learner
    """

    def __init__(self, count: int, tensors: Mapping[str, tuple[Sequence[int], torch.dtype]]) -> None:
        self._object = _C.Slots(count, [(name, list(sizes), dtype)
                                        for name, (sizes, dtype) in tensors.items()])

    @classmethod
    def _open(cls, handle: torch.Tensor) -> "Slots":
        made = cls.__new__(cls)
        made._object = _C.Slots.open(handle)
        return made

    def fill(self, timeout: float = DEFAULT_TIMEOUT) -> "Slot | None":
        return _slot(self._object.fill(timeout))

    def next(self, timeout: float = DEFAULT_TIMEOUT) -> "Slot | None":
        return _slot(self._object.next(timeout))

    def close(self) -> None:
        self._object.close()

    def counts(self) -> dict[str, int]:
        return self._object.counts()

    def __len__(self) -> int:
        return len(self._object)

    def __bool__(self) -> bool:
        return True

    def handle(self) -> torch.Tensor:
        return self._object.handle()

    @classmethod
    def open(cls, handle: torch.Tensor) -> "Slots":
        return cls._open(handle)


class Slot:
    """A slot that is being filled or read; given back when it and its tensors are gone, or by release()."""

    def __init__(self, slot: _C.Slot) -> None:
        self._slot = slot

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._slot.tensor(name)

    @property
    def number(self) -> int:
        return self._slot.number

    def commit(self) -> None:
        """It is filled; its tensors must not be used any more."""
        self._slot.commit()

    def release(self) -> None:
        self._slot.release()


def _slot(slot: _C.Slot) -> Slot | None:
    return Slot(slot) if slot else None


for _kind in (Published, Slots):
    reduction.ForkingPickler.register(_kind, _reduce_by_bytes)
    _message_kinds.add(_kind)
