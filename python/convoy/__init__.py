"""Collectives of one host's processes over shared memory, as a backend of torch.distributed.

    import convoy, torch.distributed as dist
    dist.init_process_group("convoy")

docs/reference/python.md tells the rest.
"""

import atexit

import torch

from convoy._build import TORCH, VERSION as __version__

if torch.__version__.split("+")[0].split(".")[:2] != TORCH.split("."):
    raise ImportError(f"convoy {__version__} was built for torch {TORCH}, and this is torch "
                      f"{torch.__version__}: libtorch's C++ interface differs between minor versions. "
                      f"Install torch {TORCH}, or build convoy again with this one.")

import torch.distributed as _dist

if not _dist.is_available():
    raise ImportError("convoy needs a torch that was built with torch.distributed")

from torch.distributed import _dist2

from convoy import _C, _groups, rpc
from convoy._C import (ConvoyBackend, GradBucket, Options, Window, allocator_stats, install_allocator,
                       is_allocator_installed, launcher_store, trim_allocator, uninstall_allocator,
                       write_flight_record)
from convoy._ddp import DistributedDataParallel, MixedPrecision
from convoy._error import Error
from convoy._groups import (allocate, current_group, flight_record, new_group, process_group,
                            shrink_group, window)
from convoy._join import Join
from convoy._C import (get_sharing_strategy, is_shared, set_sharing_strategy, share_memory_,
                       share_usage, trim)
from convoy._sharded import ShardedOptimizer
from convoy._share import Channel, Listener, channel, connect, install_reductions, listen
from convoy._queue import Barrier, Event, Lock, Queue
from convoy._processes import (Processes, Published, Slot, Slots, Snapshot, parent_channel, spawn,
                               start)
from _convoy import autoload as _autoload

__all__ = ["Barrier", "Channel", "ConvoyBackend", "DistributedDataParallel", "Error", "Event",
           "GradBucket", "Join", "Listener", "Lock", "MixedPrecision", "Options", "Processes",
           "Published", "Queue", "ShardedOptimizer", "Slot", "Slots", "Snapshot", "Window",
           "allocate", "allocator_stats", "channel", "connect", "current_group", "flight_record",
           "get_sharing_strategy", "install_allocator", "install_reductions",
           "is_allocator_installed", "is_shared", "launcher_store", "listen", "new_group",
           "parent_channel", "process_group", "rpc", "set_sharing_strategy", "share_memory_",
           "share_usage", "shrink_group", "spawn", "start", "trim", "trim_allocator",
           "uninstall_allocator", "window", "write_flight_record"]

_C.install_allocator_if_asked()
_autoload._register()
if "convoy" not in _dist2._BACKENDS:
    _dist2.register_backend("convoy", _groups.dist2_factory)
# Operations that are still pending fail while their callbacks can still run.
atexit.register(_C.shutdown_all)
atexit.register(_C.end_torch_rpc)
