"""torch.distributed.rpc on convoy's sessions."""

from typing import Any

import torch.distributed as dist
from torch.distributed.rpc import api, constants

from convoy import _C
from convoy._error import ArgumentError, Error


def init(store: dist.Store, name: str, rank: int, world_size: int | None, options: Any) -> _C.TorchRpcAgent:
    """What init_rpc calls for the backend CONVOY; options may be those of TensorPipe."""
    if not world_size:
        raise Error("init_rpc: backend CONVOY needs a world_size; groups without one, whose workers come and go, are "
                    "convoy.rpc's", "unsupported")
    if getattr(options, "device_maps", None) or getattr(options, "devices", None):
        raise Error("init_rpc: backend CONVOY carries CPU tensors: device_maps and devices must be empty",
                    "unsupported")
    threads = getattr(options, "num_worker_threads", constants.DEFAULT_NUM_WORKER_THREADS)
    if threads < 1:
        raise ArgumentError(f"init_rpc: num_worker_threads must be >= 1, got {threads}")
    agent = _C.TorchRpcAgent(store, name, rank, world_size, options.rpc_timeout, threads)
    try:
        api._init_rpc_states(agent)
        # Nobody goes on before everybody serves.
        api._all_gather(None, timeout=options.rpc_timeout)
    except RuntimeError:
        api.shutdown(graceful=False)
        raise
    return agent
