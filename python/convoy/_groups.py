"""Groups of ranks: what torch.distributed calls, and dist2's functions."""

import copy
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qsl, urlparse
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _current_process_group
from torch.distributed import PrefixStore, ProcessGroup, Store, _dist2

from convoy import _C
from convoy._error import Error

DEFAULT_TIMEOUT = timedelta(minutes=30)

# How often this process has made a group of this name and these ranks: a store keeps the keys of the
# earlier ones.
_made: dict[tuple, int] = {}

# How often a group was shrunk, or tried to.
_shrinks: WeakKeyDictionary[ProcessGroup, int] = WeakKeyDictionary()


def _fresh(store: Store, *identity) -> Store:
    count = _made[identity] = _made.get(identity, 0) + 1
    return store if count == 1 else PrefixStore(f"again-{count}", store)


def _numbered(store: Store, rank: int, name: str) -> Store:
    """Keys of their own for what all ranks do for the n-th time.

    Ranks count in the store: a script may run one program after another on the launcher's.
    """
    count = store.add(f"convoy/{name}/{rank}", 1)
    return store if count == 1 else PrefixStore(f"convoy/{name}-{count}", store)


def create_for_torch(asked, options) -> _C.ConvoyBackend:
    """The creator that torch.distributed calls, with its own options and those of the user."""
    if options is None:
        options = _C.Options()
    elif not isinstance(options, _C.Options):
        raise TypeError(f"pg_options of the backend convoy are convoy.Options, not {type(options)}")
    options = copy.copy(options)
    options._timeout = asked.timeout
    options.group_name = asked.group_id
    # Of the default group torch says none: it has all ranks.
    options.global_ranks_in_group = asked.global_ranks_in_group or list(range(asked.group_size))
    store = _fresh(asked.store, asked.group_id, *asked.global_ranks_in_group)
    return _C.ConvoyBackend(store, asked.group_rank, asked.group_size, options)


def meet(url: str, timeout: timedelta = DEFAULT_TIMEOUT, **_) -> Iterator[tuple[Store, int, int]]:
    """convoy://, and env:// under `convoy run`: ranks meet through its store; a process alone needs none."""
    asked = dict(parse_qsl(urlparse(url).query))

    def number(name: str, variable: str, otherwise: int) -> int:
        value = int(asked.get(name, -1))  # torch says -1 for "not given"
        return value if value >= 0 else int(os.environ.get(variable, otherwise))

    rank, size = number("rank", "RANK", 0), number("world_size", "WORLD_SIZE", 1)
    store = _C.launcher_store()
    if store is None:
        if size != 1:
            raise Error(f"convoy://: rank {rank} of {size} was not started by `convoy run`; start "
                        "the program with it, or use another init_method such as env://",
                        "invalid argument")
        store = dist.HashStore()
    store.set_timeout(timeout)
    store = _numbered(store, rank, "meetings")
    store.set_timeout(timeout)
    yield store, rank, size
    raise RuntimeError("convoy:// cannot meet again")


def dist2_factory(store: Store, rank: int, world_size: int, timeout: timedelta, device: torch.device,
                  **kwargs: Any) -> ProcessGroup:
    """What torch's dist2 calls, with the same store each time."""
    made = PrefixStore("dist2", _numbered(store, rank, "dist2"))
    made.set_timeout(timeout)
    return _factory(made, rank, world_size, timeout, device, **kwargs)


def _factory(store: Store, rank: int, world_size: int, timeout: timedelta, device: torch.device,
             **kwargs: Any) -> ProcessGroup:
    if device.type != "cpu":
        raise Error(f"the backend convoy has no groups for {device}, only for cpu", "unsupported")
    options = _C.Options(**kwargs)
    options._timeout = timeout
    return _group_over(_C.ConvoyBackend(store, rank, world_size, options), store)


def _group_over(backend: _C.ConvoyBackend, store: Store) -> ProcessGroup:
    group = ProcessGroup(store, backend.rank(), backend.size())
    group._set_default_backend(ProcessGroup.BackendType.CUSTOM)
    group._register_backend(torch.device("cpu"), ProcessGroup.BackendType.CUSTOM, backend)
    return group


def new_group(backend: str = "convoy", timeout: timedelta = DEFAULT_TIMEOUT,
              device: str | torch.device = "cpu", *, store: Store | None = None,
              rank: int | None = None, world_size: int | None = None, name: str = "",
              **options: object) -> ProcessGroup:
    """A group of its own: not known to torch.distributed's functions, but a ProcessGroup like others.

    Collective: blocks until all ranks have called it, `timeout` at most, which also is the limit of
    each operation. Without a store the ranks of the launcher (`convoy run`, torchrun) meet. Groups of
    one store that several threads make at the same time need names; without, ranks pair them by
    their order. `options` are those of the backend: of "convoy", those of convoy.Options.

    Raises ValueError for an unknown backend, TypeError for an unknown option, and convoy.Error.
    """
    if backend not in _dist2._BACKENDS:
        raise ValueError(f"unknown backend {backend!r}; known: {', '.join(sorted(_dist2._BACKENDS))}")
    if store is None:
        # `convoy run` leaves its store to its ranks; elsewhere torch knows where to meet.
        method = "env://" if _C.launcher_store() is None and "WORLD_SIZE" in os.environ else "convoy://"
        store, found_rank, found_size = next(iter(dist.rendezvous(method, timeout=timeout)))
        rank = found_rank if rank is None else rank
        world_size = found_size if world_size is None else world_size
    if rank is None or world_size is None:
        raise ValueError("new_group: a store needs rank and world_size")
    store = _fresh(PrefixStore(f"group/{name}", store), "new_group", name)
    store.set_timeout(timeout)
    make = _factory if backend == "convoy" else _dist2._BACKENDS[backend]
    return make(store, rank, world_size, timeout, torch.device(device), **options)


def shrink_group(group: ProcessGroup | None = None,
                 timeout: timedelta = timedelta(minutes=1)) -> ProcessGroup:
    """After deaths: a group of those who live, in the order of their ranks.

    Collective among them: every one calls it, and they agree on who is left, also if more die
    meanwhile. The old group, by default torch's default one, ends; the new one is like those of
    new_group(): a model takes it by update_process_group(). `timeout` is for them to meet, and then
    of each operation. It needs the backend convoy, and a store that lives on: that of `convoy run`,
    a file, or a TCPStore whose process lives.

    Raises convoy.Error: "unsupported" for other backends, "timeout" if one who lives did not come.
    """
    if group is None:
        group = current_group()
    # Another attempt needs other keys.
    count = _shrinks[group] = _shrinks.get(group, 0) + 1
    store = PrefixStore(f"shrink/{count}", _store_of(group))
    return _group_over(_C.shrink(group._get_backend(torch.device("cpu")), store, timeout), store)


def _store_of(group: ProcessGroup) -> Store:
    entry = dist.distributed_c10d._world.pg_map.get(group)
    return entry[1] if entry else group.get_group_store()


def current_group() -> ProcessGroup:
    """The group of the innermost process_group() of this thread; outside of all, torch's default one.

    Raises convoy.Error if there is neither.
    """
    group = _current_process_group()
    if group is None and dist.is_initialized():
        group = dist.group.WORLD
    if group is None:
        raise Error("current_group: there is none: use process_group() or init_process_group()",
                    "invalid argument")
    return group


@contextmanager
def process_group(group: ProcessGroup) -> Iterator[ProcessGroup]:
    """Makes a group this thread's current one until the block ends, however it ends. Nests."""
    with _dist2.process_group(group):
        yield group


def allocate(*sizes: int, dtype: torch.dtype | None = None, group: ProcessGroup | None = None) -> torch.Tensor:
    """A tensor, not cleared, in memory that the ranks of the host share: of such ones windows are made.

    Collectives work on it in place, without a copy. It needs the backend convoy.
    """
    shape = torch.Size(sizes)
    backend = _backend_of(group, "allocate")
    return backend.allocate_tensor(shape.numel(), dtype=dtype or torch.get_default_dtype(),
                                   device=torch.device("cpu")).view(shape)


def window(tensor: torch.Tensor, group: ProcessGroup | None = None) -> _C.Window:
    """A window on every rank's tensor, which must be of allocate() and contiguous; sizes and types may differ.

    Collective. docs/reference/groups.md tells what windows are. Raises convoy.Error on all ranks if one has none.
    """
    return _C.window(_backend_of(group, "window"), tensor)


def _backend_of(group: ProcessGroup | None, function: str) -> _C.ConvoyBackend:
    backend = (group or current_group())._get_backend(torch.device("cpu"))
    if not isinstance(backend, _C.ConvoyBackend):
        raise Error(f"{function}: the group's backend is {backend.name()}, whose ranks do not share memory; "
                    "it needs the backend convoy", "unsupported")
    return backend


def flight_record() -> dict[str, Any] | None:
    """What this process's groups did last, in the form of PyTorch's flight recorder; None if none is written.

    write_flight_record() writes files for torchfrtrace. docs/reference/debugging.md tells more.
    """
    text = _C.flight_record()
    return json.loads(text) if text else None
