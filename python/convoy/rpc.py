"""Calls of functions in other processes: torch.distributed.rpc on convoy.

    import convoy, torch.distributed.rpc as rpc
    rpc.init_rpc("worker0", backend=rpc.BackendType.CONVOY, rank=0, world_size=4)

docs/reference/python_rpc.md is the guide.
"""

from _convoy.torch_rpc import ConvoyRpcBackendOptions

__all__ = ["ConvoyRpcBackendOptions"]
