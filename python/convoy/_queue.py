"""Queues, events, barriers and locks between processes."""

import collections
import os
import queue as _queue
from multiprocessing import reduction

from convoy import _C
from convoy._share import DEFAULT_TIMEOUT, _from_values, _shared_kinds, _to_values

_UNBOUNDED = 8192  # messages


class _SharedObject:
    """What they have in common: how other processes get them."""

    _kind: type

    def __init__(self, shared) -> None:
        self._shared = shared

    @classmethod
    def _of(cls, shared: _C.Shared):
        made = cls.__new__(cls)
        made._begin(cls._kind(shared))
        return made

    def _begin(self, shared) -> None:
        _SharedObject.__init__(self, shared)

    @classmethod
    def open(cls, name: str, timeout: float = DEFAULT_TIMEOUT):
        """What a process of this user offers by that name; waits until one does."""
        return cls._of(_C.open_shared(name, timeout))

    def offer(self, name: str) -> None:
        """Other processes of this user can open() it by that name as long as this one has it."""
        _C.offer(self._shared, name)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _SharedObject) and self._shared == other._shared

    __hash__ = object.__hash__

    def __reduce__(self):
        return _adopt, (type(self), [reduction.DupFd(fd) for fd in self._shared.descriptors()])


def _adopt(kind: type[_SharedObject], descriptors: list) -> _SharedObject:
    return kind._of(_C.Shared.adopt([descriptor.detach() for descriptor in descriptors]))


class Queue(_SharedObject):
    """As torch.multiprocessing.Queue, which it can stand in for; C++ has it as convoy::share::Queue.

    Any number of processes put and get. Tensors are not copied but shared, and stay valid when the
    process that put them has ended. There is no feeder thread: what cannot be sent raises in put().
    Without a maxsize, 8192 messages have room.

    An argument of a process that multiprocessing or convoy.spawn starts, an object for a Channel, or
    known by a name: offer() and open().

    copy_below: private tensors of at most so many bytes are copied in and out, not shared.
    item_bytes: of a message in the queue itself, without its tensors; a larger one goes through shared
    memory. By default enough for `copy_below`.
    """

    _kind = _C.Queue

    def __init__(self, maxsize: int = 0, *, item_bytes: int | None = None, copy_below: int = 0, ctx=None) -> None:
        del ctx  # as multiprocessing's
        if item_bytes is None:
            item_bytes = max(1024, copy_below + 512)
        self._begin(_C.Queue(maxsize if maxsize > 0 else _UNBOUNDED, item_bytes, copy_below))

    def _begin(self, shared) -> None:
        super()._begin(shared)
        self._closed = False
        # Messages that get_many() took and has not given out: the next call's.
        self._taken: collections.deque[list] = collections.deque()
        self._taker = 0  # its process: a forked child has a copy, and must not deliver it again

    def put(self, obj: object, block: bool = True, timeout: float | None = None) -> None:
        """Raises queue.Full; convoy.Error "peer lost" after shutdown()."""
        self._check_open()
        if not self._shared.put(_to_values(obj), _seconds(block, timeout)):
            raise _queue.Full

    def get(self, block: bool = True, timeout: float | None = None) -> object:
        """Raises queue.Empty; convoy.Error "peer lost" after shutdown(), when nothing is left.

        What a message raises while it is rebuilt (an unpickling error) is raised here; it is then gone.
        """
        found = self.get_many(1, _seconds(block, timeout))
        if not found:
            raise _queue.Empty
        return found[0]

    def _check_open(self) -> None:
        if self._closed:
            raise ValueError(f"Queue {self!r} is closed")

    def put_nowait(self, obj: object) -> None:
        self.put(obj, False)

    def get_nowait(self) -> object:
        return self.get(False)

    def put_many(self, objects, timeout: float | None = None) -> int:
        """In order; how many were put in time, or before one that cannot be.

        The error of that one is raised if it is the first: call again with the rest. What cannot be
        pickled raises before anything is put.
        """
        self._check_open()
        return self._shared.put_many([_to_values(obj) for obj in objects], timeout)

    def get_many(self, most: int, timeout: float | None = None) -> list:
        """All that are there, waiting for one; an empty list if none came in time.

        Ends before one that cannot be rebuilt, whose error the next call raises; those after it are still to come.
        """
        taken: list = []
        objects: list[object] = []
        try:
            self._take(taken, most, timeout)
            for values in taken:
                objects.append(_from_values(values))
        except Exception:
            if not objects:
                self._keep(taken[1:])
                raise
            self._keep(taken[len(objects):])
        except BaseException:  # such as KeyboardInterrupt, of which no message is guilty: nobody has got one
            self._keep(taken)
            raise
        return objects

    def _keep(self, taken: list) -> None:
        if taken:
            self._kept()
            self._taken.extendleft(reversed(taken))
            self._taker = os.getpid()

    def _take(self, taken: list, most: int, timeout: float | None) -> None:
        while len(taken) < most and self._kept():
            try:
                taken.append(self._taken.popleft())
            except IndexError:  # of another thread
                break
        if not taken:
            taken += self._shared.get_many(most, timeout)

    def _kept(self) -> int:
        if self._taken and self._taker != os.getpid():
            self._taken.clear()
        return len(self._taken)

    def qsize(self) -> int:
        return self._shared.size() + self._kept()

    def empty(self) -> bool:
        return self.qsize() == 0

    def full(self) -> bool:
        return self._shared.size() >= self._shared.capacity()

    def lost(self) -> tuple[int, str]:
        """How many messages went with processes that ended in put() or get(), and the latest one."""
        return self._shared.lost()

    def shutdown(self) -> None:
        """For all processes: nothing can be put any more; what is there can still be taken."""
        self._shared.close()

    def close(self) -> None:
        """This object puts no more; other processes still can."""
        self._closed = True

    def join_thread(self) -> None:
        """There is no thread."""

    def cancel_join_thread(self) -> None:
        """There is no thread."""


class Event(_SharedObject):
    """As multiprocessing.Event; C++ has it as convoy::share::Event."""

    _kind = _C.Event

    def __init__(self, *, ctx=None) -> None:
        del ctx
        super().__init__(_C.Event())

    def is_set(self) -> bool:
        return self._shared.is_set()

    def set(self) -> None:
        self._shared.set()

    def clear(self) -> None:
        self._shared.clear()

    def wait(self, timeout: float | None = None) -> bool:
        return self._shared.wait(timeout)


class Barrier(_SharedObject):
    """So many processes or threads wait for each other, again and again; C++ has it as convoy::share::Barrier.

    As multiprocessing.Barrier. A process that has it and dies breaks it: who waits, or comes later, gets
    convoy.Error "peer lost" with its pid, until reset().
    """

    _kind = _C.Barrier

    def __init__(self, parties: int, *, ctx=None) -> None:
        del ctx
        super().__init__(_C.Barrier(parties))

    @property
    def parties(self) -> int:
        return self._shared.parties()

    @property
    def n_waiting(self) -> int:
        return self._shared.waiting()

    def wait(self, timeout: float = DEFAULT_TIMEOUT) -> int:
        """0 for the last that came. Raises convoy.Error "timeout": this one waits no more, the others do."""
        return self._shared.wait(timeout)

    def reset(self) -> None:
        """Fails current waiters, and repairs a broken barrier."""
        self._shared.reset()


class Lock(_SharedObject):
    """A mutex between processes; C++ has it as convoy::share::Lock.

    As multiprocessing.Lock, but it belongs to the thread that took it, and if that dies with it, the next
    one gets it: `recovered` is then true, and what it guards may be half changed.
    """

    _kind = _C.Lock

    def __init__(self, *, ctx=None) -> None:
        del ctx
        self._begin(_C.Lock())

    def _begin(self, shared) -> None:
        super()._begin(shared)
        self.recovered = False  # of the latest acquire()

    def acquire(self, block: bool = True, timeout: float | None = None) -> bool:
        taken = self._shared.lock(_seconds(block, timeout))
        if taken:
            self.recovered = taken == 2
        return taken != 0

    def release(self) -> None:
        self._shared.unlock()

    def __enter__(self) -> "Lock":
        self.acquire()
        return self

    def __exit__(self, *_) -> None:
        self.release()


def _seconds(block: bool, timeout: float | None) -> float | None:
    return timeout if block else 0.0


_shared_kinds.update({Queue: "queue", Event: "event", Barrier: "barrier", Lock: "lock"})
