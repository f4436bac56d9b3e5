"""torch.distributed.rpc's backend CONVOY: what must be there before convoy itself is loaded."""

import torch.distributed.rpc as rpc
from torch.distributed.rpc import backend_registry, constants


class ConvoyRpcBackendOptions(rpc.RpcBackendOptions):
    """Options of init_rpc(..., backend=BackendType.CONVOY).

    `num_worker_threads` handlers run at once; those that wait for calls of their own do not count.
    """

    def __init__(self, *, num_worker_threads: int = constants.DEFAULT_NUM_WORKER_THREADS,
                 rpc_timeout: float = constants.DEFAULT_RPC_TIMEOUT_SEC,
                 init_method: str = constants.DEFAULT_INIT_METHOD) -> None:
        super().__init__()
        if num_worker_threads < 1:
            raise ValueError(f"num_worker_threads must be >= 1, got {num_worker_threads}")
        if rpc_timeout < 0:
            raise ValueError(f"rpc_timeout must be >= 0 seconds, got {rpc_timeout}")
        self.num_worker_threads = num_worker_threads
        self.rpc_timeout = rpc_timeout
        self.init_method = init_method


def register() -> None:
    """BackendType.CONVOY; does nothing the second time."""
    if backend_registry.backend_registered("CONVOY"):
        return
    backend_registry.register_backend("CONVOY", _make_options, _init)
    # torch makes a new enum, and leaves the old one here.
    setattr(rpc, "BackendType", backend_registry.BackendType)


def _make_options(rpc_timeout, init_method, **arguments):
    return ConvoyRpcBackendOptions(rpc_timeout=rpc_timeout, init_method=init_method, **arguments)


def _init(store, name, rank, world_size, rpc_backend_options):
    from convoy import _torch_rpc

    return _torch_rpc.init(store, name, rank, world_size, rpc_backend_options)
