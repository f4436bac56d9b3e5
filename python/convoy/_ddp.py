"""DistributedDataParallel with torch's signature, on our own gradient reducer."""

import copy
import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parameter import UninitializedParameter
from torch.utils._pytree import tree_flatten, tree_unflatten

from convoy import _C
from convoy._error import Error

CPU = torch.device("cpu")

# How many models this process has wrapped over a group: a store keeps the keys of the earlier ones.
_made: dict[str, int] = {}


class DistributedDataParallel(nn.Module):
    """torch.nn.parallel.DistributedDataParallel for CPU modules, over any backend of torch.distributed.

        model = convoy.DistributedDataParallel(model)

    Arguments are torch's. What differs between ranks, or goes wrong on one of them, is an error with
    names on every rank. docs/python.md tells what is not there. By default gradients live in the buckets
    (gradient_as_bucket_view), because nothing stops them from it here.
    """

    def __init__(self, module: nn.Module, device_ids=None, output_device=None, dim=0,
                 broadcast_buffers=None, init_sync=True, process_group=None, bucket_cap_mb=None,
                 find_unused_parameters=False, check_reduction=False, gradient_as_bucket_view=True,
                 static_graph=False, delay_all_reduce_named_params=None,
                 param_to_hook_all_reduce=None, mixed_precision=None, device_mesh=None,
                 skip_all_reduce_unused_params=False, bucket_cap_mb_list=None,
                 batched_grad_copy=False, forward_sync_buffers=None):
        super().__init__()
        _refuse(device_ids or output_device is not None, "device_ids and output_device: modules are on the CPU")
        _refuse(dim != 0, "dim: inputs are not scattered")
        _refuse(mixed_precision is not None, "mixed_precision: use the C++ class, or autocast")
        _refuse(device_mesh is not None and process_group is not None,
                "device_mesh and process_group: give one of them")
        if broadcast_buffers is not None and forward_sync_buffers is not None:
            raise Error("broadcast_buffers is the old name of forward_sync_buffers: give one of them",
                        "invalid argument")
        self.module = module
        given = device_mesh.get_group() if device_mesh is not None else process_group
        self.process_group = given or _world("wrap a module in")
        sync = forward_sync_buffers if forward_sync_buffers is not None else broadcast_buffers
        self.forward_sync_buffers = True if sync is None else sync
        self.parameters_to_ignore = set(getattr(module, "_ddp_params_and_buffers_to_ignore", []))
        # Of torch; here a cap of -1 or None is ours: 25 MB, the first bucket 1 MB.
        caps = [float(cap) for cap in bucket_cap_mb_list or [bucket_cap_mb or 0] if cap and cap > 0]
        self._arguments: dict[str, Any] = dict(
            bucket_cap_mb_list=caps, find_unused_parameters=bool(find_unused_parameters),
            static_graph=bool(static_graph or getattr(module, "_ddp_static_graph", False)),
            gradient_as_bucket_view=bool(gradient_as_bucket_view),
            skip_all_reduce_unused_params=bool(skip_all_reduce_unused_params))
        # What came by name: (name, parameter). torch takes pairs, or names.
        delayed = [each if isinstance(each, str) else each[0] for each in delay_all_reduce_named_params or []]
        self._delayed = delayed
        self._buffer_hook: tuple[Any, Callable[..., Any]] | None = None
        self._hook_after_forward = False
        self._make_reducer(init_sync)

    def _make_reducer(self, init_sync: bool) -> None:
        found = _Parameters(self.module, self.parameters_to_ignore, self._delayed)
        self._names = found.names
        self.reducer = _C.Reducer(
            found.tensors, _backend(self.process_group), _store(self.process_group),
            names=found.names, sparse=found.sparse, delayed=found.delayed, error=found.error,
            must_agree=found.buffers, **self._arguments)
        if init_sync and self.process_group.size() > 1:
            self.reducer.broadcast([tensor.detach() for tensor in found.tensors]
                                   + [buffer for _, buffer in self._named_buffers()])

    # --- a step ---

    def forward(self, *inputs, **kwargs):
        if not torch.is_grad_enabled():
            return self.module(*inputs, **kwargs)
        self.reducer.before_forward()
        if not self._hook_after_forward:
            self._sync_buffers_in_training()
        output = self.module(*inputs, **kwargs)
        if self._hook_after_forward:
            self._sync_buffers_in_training()
        return _with_tensors(output, lambda tensors: self.reducer.prepare_for_backward(
            tensors, in_step=self.training))

    @property
    def require_backward_grad_sync(self) -> bool:
        return not self.reducer.is_paused

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside of it, backward adds to this rank's gradients only."""
        with self.reducer.no_sync():
            yield

    def sync_gradients(self) -> None:
        """Reduces what was accumulated, without a backward. Collective."""
        self.reducer.sync_gradients()

    # --- hooks ---

    def register_comm_hook(self, state: object, hook: Callable) -> None:
        """hook(state, bucket) gives a torch.futures.Future of the reduced buffer, or a tensor."""
        if not callable(hook):
            raise TypeError("Communication hook must be callable.")
        self.reducer.register_comm_hook(state, hook)

    def _register_buffer_comm_hook(self, state, hook: Callable, comm_hook_location=None) -> None:
        if not callable(hook):
            raise TypeError("Buffer communication hook must be callable.")
        self._buffer_hook = state, hook
        self._hook_after_forward = getattr(comm_hook_location, "name", "POST_FORWARD") == "POST_FORWARD"

    # --- buffers ---

    def _named_buffers(self) -> list[tuple[str, torch.Tensor]]:
        return [(name, buffer) for name, buffer in self.module.named_buffers()
                if name not in self.parameters_to_ignore]

    def will_sync_module_buffers(self) -> bool:
        return bool(self.forward_sync_buffers and self.require_backward_grad_sync
                    and self.process_group.size() > 1 and self._named_buffers())

    def _sync_buffers_in_training(self) -> None:
        if self.training and self.will_sync_module_buffers():
            self._sync_buffers()

    def _sync_buffers(self) -> None:
        """Buffers become rank 0's. Collective."""
        buffers = self._named_buffers()
        if self._buffer_hook:
            state, hook = self._buffer_hook
            futures = hook(state, dict(buffers))
            if futures is not None:
                torch.futures.collect_all(futures).wait()
            return
        # Running statistics are not part of any graph: their change must not be noticed by one.
        statistics = {id(each) for module in self.module.modules()
                      if isinstance(module, nn.modules.batchnorm._NormBase)
                      for each in module.buffers(recurse=False)}
        self.reducer.broadcast([each.data if id(each) in statistics else each for _, each in buffers])

    # --- what torch's class has besides ---

    def _set_static_graph(self) -> None:
        if self._arguments["static_graph"]:
            return
        if self.reducer.stats()["backwards"]:
            raise Error("_set_static_graph() comes before the first backward", "invalid argument")
        self._arguments["static_graph"] = True
        self._make_reducer(init_sync=False)

    @classmethod
    def _set_params_and_buffers_to_ignore_for_model(cls, module, params_and_buffers_to_ignore) -> None:
        module._ddp_params_and_buffers_to_ignore = list(params_and_buffers_to_ignore)

    @staticmethod
    def _get_data_parallel_params(module, named_params=False) -> Iterator:
        ignored = set(getattr(module, "_ddp_params_and_buffers_to_ignore", []))
        inner = module.module if isinstance(module, DistributedDataParallel) else module
        for name, parameter in inner.named_parameters():
            if name not in ignored and f"module.{name}" not in ignored:
                yield (name, parameter) if named_params else parameter

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        return self.reducer.stats() | {"world_size": self.process_group.size(),
                                       "rank": self.process_group.rank(), **self._arguments}

    def __getstate__(self):
        """As torch's: a copy, or a model that comes out of a file, makes a new reducer."""
        state = self.__dict__.copy()
        for name in ("reducer", "process_group"):
            del state[name]
        return state

    def __setstate__(self, state) -> None:
        super().__setstate__(state)
        self.process_group = _world("load it into")
        self._make_reducer(init_sync=False)

    def __deepcopy__(self, memo):
        made = self.__class__.__new__(self.__class__)
        memo[id(self)] = made
        state = {name: copy.deepcopy(value, memo) for name, value in self.__getstate__().items()}
        made.__setstate__(state)
        return made


class _Parameters:
    """What the reducer is told of a module. What is wrong is told to all ranks by it: `error`."""

    def __init__(self, module: nn.Module, ignored: set[str], delayed: list[str]):
        named = [(name, tensor) for name, tensor in module.named_parameters() if name not in ignored]
        self.names = [name for name, _ in named]
        self.tensors = [tensor for _, tensor in named]
        sparse = {id(each.weight) for each in module.modules()
                  if isinstance(each, (nn.Embedding, nn.EmbeddingBag)) and each.sparse}
        self.sparse = [i for i, tensor in enumerate(self.tensors) if id(tensor) in sparse]
        self.delayed = [self.names.index(name) for name in delayed if name in self.names]
        self.buffers = [f"buffer {name}: {buffer.dtype} of sizes {list(buffer.shape)}"
                        for name, buffer in module.named_buffers() if name not in ignored]
        existing = {name for name, _ in (*module.named_parameters(), *module.named_buffers())}
        unknown = sorted(name for name in {*delayed} if name not in existing)
        self.error = f"there is no parameter {', '.join(unknown)}" if unknown else ""
        if any(isinstance(each, UninitializedParameter) for each in self.tensors):
            self.tensors, self.names, self.sparse, self.delayed = [], [], [], []
            self.error = ("modules with uninitialized parameters cannot be wrapped: run a dummy "
                          "forward pass first")
        elif any(each.device != CPU for each in self.tensors):
            self.error = "parameters must be on the CPU"


def _refuse(given: object, text: str) -> None:
    if given:
        raise Error(f"DistributedDataParallel: {text}", "unsupported")


def _world(purpose: str) -> dist.ProcessGroup:
    if dist.group.WORLD is None:
        raise Error(f"DistributedDataParallel: there is no group to {purpose}; call "
                    "init_process_group first", "invalid argument")
    return dist.group.WORLD


def _backend(group: dist.ProcessGroup):
    return group._get_backend(CPU)


def _store(group: dist.ProcessGroup):
    """For groups of our own below this one; None where torch does not tell."""
    entry = dist.distributed_c10d._world.pg_map.get(group)
    if entry is None:
        return None
    count = _made[group.group_name] = _made.get(group.group_name, 0) + 1
    return dist.PrefixStore(f"convoy/ddp/{count}", entry[1])


def _with_tensors(output, change: Callable):
    """`output` with its tensors replaced by change(list of them)."""
    if dataclasses.is_dataclass(output) and not isinstance(output, type):
        fields = {field.name: getattr(output, field.name) for field in dataclasses.fields(output)}
        fields = _with_tensors(fields, change)
        made = copy.copy(output)
        for name, value in fields.items():
            object.__setattr__(made, name, value)
        return made
    leaves, form = tree_flatten(output)
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    for i, tensor in zip(places, change([leaves[i] for i in places])):
        leaves[i] = tensor
    return tree_unflatten(leaves, form)
