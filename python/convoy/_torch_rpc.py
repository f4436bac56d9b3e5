"""torch.distributed.rpc on convoy's sessions."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.autograd as dist_autograd
from torch._C._distributed_rpc import PyRRef
from torch.distributed.rpc import api, constants
from torch.distributed.rpc.internal import RPCExecMode

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
    _wait_in_sync_calls()
    agent = _C.TorchRpcAgent(store, name, rank, world_size, options.rpc_timeout, threads)
    try:
        api._init_rpc_states(agent)
        # Nobody goes on before everybody serves.
        api._all_gather(None, timeout=options.rpc_timeout)
    except RuntimeError:
        api.shutdown(graceful=False)
        raise
    return agent


_torchs: dict[str, Any] = {}  # what was replaced


def _wait_in_sync_calls() -> None:
    """Calls of rpc_sync take their answer on the thread that waits for it, with no other thread in between.

    torch tells its agents nothing of who waits; the function that all calls go through knows it.
    """
    if "invoke" not in _torchs:
        _torchs["invoke"] = api._invoke_rpc
        setattr(api, "_invoke_rpc", _invoke_rpc)


def _invoke_rpc(to: Any, func: Any, rpc_type: RPCExecMode, *arguments: Any, **named: Any) -> Any:
    if rpc_type is not RPCExecMode.SYNC:
        return _torchs["invoke"](to, func, rpc_type, *arguments, **named)
    _C.torch_rpc_waits(True)
    try:
        return _torchs["invoke"](to, func, rpc_type, *arguments, **named)
    finally:
        _C.torch_rpc_waits(False)


# --- SMART backward ---------------------------------------------------------------------------------------------------

_smart_timeout = 0.0  # of passes, in seconds; 0: never


def use_smart_backward(*, timeout: float = 1800) -> None:
    """torch.distributed.autograd.backward, and backward() of torch's RRefs, become SMART in this process.

    Only what the roots depend on takes part: a call whose result was not used no longer makes backward() hang. A
    worker that fails or dies is an error with its name, on all workers. `timeout`: of a whole pass, in seconds; 0:
    never. For groups of BackendType.CONVOY; call it on each worker that calls backward(), before others copy the name
    (`from torch.distributed.autograd import backward`). TorchScript keeps torch's own.
    """
    global _smart_timeout
    if not timeout >= 0:
        raise ArgumentError(f"use_smart_backward: timeout must be >= 0 s, got {timeout}")
    _smart_timeout = timeout
    if "backward" in _torchs:
        return
    _torchs.update(backward=dist_autograd.backward, info=dist_autograd._get_debug_info)
    _torchs["rref"] = getattr(PyRRef, "backward")  # torch's stub does not have it
    setattr(dist_autograd, "backward", _backward)
    setattr(dist_autograd, "_get_debug_info", _get_debug_info)
    setattr(PyRRef, "backward", _rref_backward)
    torch.jit._builtins._register_builtin(_backward, "aten::dist_backward")


def _run_backward(context_id: int, roots: Sequence[torch.Tensor], retain_graph: bool, timeout: float) -> None:
    agent = api._get_current_rpc_agent()
    if not isinstance(agent, _C.TorchRpcAgent):
        raise Error("convoy.rpc.use_smart_backward: torch.distributed.rpc runs on another backend than CONVOY",
                    "unsupported")
    agent.backward(context_id, roots, retain_graph, timeout)


def _backward(context_id: int, roots: Sequence[torch.Tensor], retain_graph: bool = False) -> None:
    """torch.distributed.autograd.backward: SMART."""
    _run_backward(context_id, roots, retain_graph, _smart_timeout)


def _rref_backward(self: Any, dist_autograd_ctx_id: int = -1, retain_graph: bool = False) -> None:
    if dist_autograd_ctx_id == -1:
        _torchs["rref"](self, dist_autograd_ctx_id, retain_graph)
    elif self.is_owner():
        _backward_of_value(self, dist_autograd_ctx_id, retain_graph, _smart_timeout)
    else:
        api.rpc_sync(self.owner(), _backward_of_value, args=(self, dist_autograd_ctx_id, retain_graph, _smart_timeout),
                     timeout=_smart_timeout)


def _backward_of_value(reference: Any, context_id: int, retain_graph: bool, timeout: float) -> None:
    """At the owner."""
    value = reference.local_value()
    if not isinstance(value, torch.Tensor):
        raise Error("RRef should contain a tensor for .backward()", "invalid argument")
    _run_backward(context_id, [value], retain_graph, timeout)


def _get_debug_info() -> dict[str, str]:
    info = dict(_torchs["info"]())
    agent = api._get_current_rpc_agent() if api._is_current_rpc_agent_set() else None
    if isinstance(agent, _C.TorchRpcAgent):
        passes = int(info["num_current_backward_passes"]) + agent.backward_passes()
        info["num_current_backward_passes"] = str(passes)
    return info
