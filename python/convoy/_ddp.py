"""DistributedDataParallel with torch's signature, on our own gradient reducer."""

import copy
import dataclasses
import os
import re
import warnings
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join as TorchsJoin, Joinable, _JoinConfig
from torch.nn.parameter import UninitializedParameter
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from convoy import _C
from convoy._error import ArgumentError, Error
from convoy._groups import DEFAULT_TIMEOUT, _factory, _store_of
from convoy._join import Join, ModelPart

CPU = torch.device("cpu")

# How many models this process has wrapped over a group: a store keeps the keys of the earlier ones.
_made: dict[str, int] = {}


@dataclasses.dataclass
class MixedPrecision:
    """Forward and backward compute with copies of the parameters in param_dtype, gradients travel in
    reduce_dtype (unset: in param_dtype), buffers become buffer_dtype for good. Parameters, optimizers
    and checkpoints stay in their own. Only floating-point tensors are cast: docs/reference/ddp.md."""

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True


class DistributedDataParallel(nn.Module, Joinable):
    """torch.nn.parallel.DistributedDataParallel for CPU modules, over any backend of torch.distributed.

        model = convoy.DistributedDataParallel(model)

    Arguments are torch's. What differs between ranks, or goes wrong on one of them, is an error with
    names on every rank. docs/reference/python.md tells what is not there. By default gradients live in the buckets
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
        Joinable.__init__(self)
        _refuse(device_ids or output_device is not None,
                f"device_ids and output_device are for GPUs, and modules are on the CPU here: got "
                f"device_ids {device_ids}, output_device {output_device}")
        _refuse(dim != 0, f"dim is {dim}, but inputs are not scattered")
        _refuse(param_to_hook_all_reduce is not None and delay_all_reduce_named_params is None,
                "param_to_hook_all_reduce is for delay_all_reduce_named_params, which is not given")
        if broadcast_buffers is not None:
            warnings.warn("broadcast_buffers is the old name of forward_sync_buffers, which counts if both "
                          "are given; the old one also leaves buffers alone at the start",
                          FutureWarning, stacklevel=2)
        if check_reduction:
            warnings.warn("check_reduction has no meaning: every backward is checked", FutureWarning,
                          stacklevel=2)
        self.process_group = _group_of(module, process_group, device_mesh)
        self.device_mesh = device_mesh
        self.module = module
        self.device, self.device_type, self.device_ids, self.output_device = CPU, "cpu", None, None
        self.dim, self.mixed_precision = dim, mixed_precision
        sync = forward_sync_buffers if forward_sync_buffers is not None else broadcast_buffers
        existing = {name for name, _ in (*module.named_parameters(remove_duplicate=False),
                                         *module.named_buffers(remove_duplicate=False))}
        ignored = set(getattr(module, "_ddp_params_and_buffers_to_ignore", []))
        self.parameters_to_ignore = ignored
        # Of torch; here a cap of -1 or None is ours: 25 MB, the first bucket 1 MB.
        caps = [float(cap) for cap in bucket_cap_mb_list or [bucket_cap_mb or 0] if cap and cap > 0]
        self.bucket_bytes_cap = int((max(caps) if caps else 25) * 2**20)
        self.bucket_bytes_cap_list = [int(cap * 2**20) for cap in bucket_cap_mb_list or []]
        # torch takes pairs of name and parameter, or here names.
        delayed = [each if isinstance(each, str) else each[0] for each in delay_all_reduce_named_params or []]
        self._arguments: dict[str, Any] = dict(
            bucket_cap_mb_list=caps, find_unused_parameters=bool(find_unused_parameters),
            static_graph=bool(static_graph or getattr(module, "_ddp_static_graph", False)),
            gradient_as_bucket_view=bool(gradient_as_bucket_view),
            skip_all_reduce_unused_params=bool(skip_all_reduce_unused_params),
            forward_sync_buffers=True if sync is None else bool(sync),
            ignore=sorted(ignored & existing), delayed=delayed, mixed_precision=_types(mixed_precision))
        self._begin_anew()
        # broadcast_buffers=False means so from the start.
        keeps_buffers = broadcast_buffers is False and forward_sync_buffers is None
        self._make_core(self.process_group, init_sync=bool(init_sync) and not keeps_buffers)
        if init_sync and keeps_buffers and self.process_group.size() > 1:
            self.reducer.broadcast([each.detach() for each in self.reducer.parameters()])

    def _begin_anew(self) -> None:
        self._core: _C.DdpCore | None = None
        self._lets_go = False  # of the module: there will be no core any more
        self._lowers = self._arguments["mixed_precision"] is not None
        self._input_type: torch.dtype | None = None
        if self._lowers:
            low, _, _, casts_inputs = self._arguments["mixed_precision"]
            self._input_type = low if casts_inputs else None
        self._part: ModelPart | None = None
        self._pause: Any = None  # of require_backward_grad_sync = False
        self._begun = False
        self._error = self._hook_name = ""

    def _make_core(self, group: dist.ProcessGroup, init_sync: bool = False) -> _C.DdpCore:
        """Collective."""
        self._core = _C.DdpCore(_Module(self.module), _backend(group), _store(group), init_sync=init_sync,
                                **self._arguments)
        return self._core

    def _need_core(self) -> _C.DdpCore:
        """A copy, or a model that comes out of a file, has none before it is trained: one rank alone may
        make it, and who only looks at it does not need one. Then it is collective."""
        if self._core is not None:
            return self._core
        if self._lets_go:
            raise Error("DistributedDataParallel: its hooks were removed; wrap the module again", "invalid argument")
        return self._make_core(self.process_group)

    @property
    def reducer(self) -> _C.Reducer:
        return self._need_core().reducer

    # --- a step ---

    def forward(self, *inputs, **kwargs):
        core = self._core
        if not torch.is_grad_enabled():
            if not self._lowers:
                return self.module(*inputs, **kwargs)
            if core is None:
                return self._forward_of_copy(inputs, kwargs)
        else:
            if core is None:
                core = self._need_core()
            if not self._begun:
                self._begin()
            if self._join_config.enable and self._part is not None:
                TorchsJoin.notify_join_context(self)
                self._part.step()
        if self._input_type is not None:
            inputs, kwargs = tree_map_only(torch.Tensor, self._cast, (inputs, kwargs))
        core.before_forward(self.training)
        try:
            output = self.module(*inputs, **kwargs)
            if type(output) is torch.Tensor:
                return core.after_forward([output])[0]
            return _with_tensors(output, core.after_forward)
        except BaseException as error:
            core.forward_failed(f"{type(error).__name__}: {error}")
            raise

    def _forward_of_copy(self, inputs: tuple, kwargs: dict[str, Any]):
        """With mixed precision, without gradients and without a core."""
        low = self._arguments["mixed_precision"][0]
        if self._input_type is not None:
            inputs, kwargs = tree_map_only(torch.Tensor, self._cast, (inputs, kwargs))
        lowered = {name: each.to(low) for name, each in self.module.named_parameters()
                   if low is not None and each.is_floating_point() and name not in self.parameters_to_ignore}
        return torch.func.functional_call(self.module, lowered, inputs, kwargs)

    def _cast(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self._input_type) if tensor.is_floating_point() else tensor

    def _begin(self) -> None:
        """Before the first forward."""
        self._begun = True
        self._take_optimizers_in_backward()

    @property
    def require_backward_grad_sync(self) -> bool:
        return self._core is None or not self._core.reducer.is_paused

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, value: bool) -> None:
        if value and self._pause is not None:
            self._pause.__exit__()
            self._pause = None
        elif not value and self._pause is None:
            self._pause = self.reducer.no_sync()
            self._pause.__enter__()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside of it, backward adds to this rank's gradients only."""
        with self.reducer.no_sync():
            yield

    def sync_gradients(self) -> None:
        """Reduces what was accumulated, without a backward. Collective."""
        self.reducer.sync_gradients()

    # --- other ranks, other groups ---

    def update_process_group(self, process_group: dist.ProcessGroup) -> None:
        """Goes on with another group: one without dead ranks, or with ranks that join.

        Collective in the new group; those who join wrap the same module in a group of their own
        first. Parameters, buffers and states of sharded optimizers become those of the rank that has
        made most backwards; hooks and optimizers stay, gradients are None.
        """
        self._leave_join()  # torch's Join does not tell us when an exception has ended it
        joins = self._core is None and not self._lets_go
        try:
            # A copy that was not trained joins those who were; its old group may be dead.
            core = self._make_core(_alone()) if joins else self._need_core()
            core.update_process_group(_backend(process_group), _store(process_group))
        except BaseException:
            if joins:
                self._core = None
            raise
        self.process_group = process_group

    def _update_process_group(self, new_process_group) -> None:
        """Also called by ranks that are not in the new group, for which nothing changes."""
        if not dist.distributed_c10d._rank_not_in_group(new_process_group):
            self.update_process_group(new_process_group)

    def join(self, divide_by_initial_world_size: bool = True, enable: bool = True,
             throw_on_early_termination: bool = False) -> Join:
        """`with model.join():` around a loop whose ranks have different numbers of inputs."""
        return Join([self], enable, throw_on_early_termination,
                    divide_by_initial_world_size=divide_by_initial_world_size)

    def _joinable(self) -> _C.DdpCore:
        return self._need_core()

    def join_hook(self, **kwargs) -> ModelPart:
        """For torch.distributed.algorithms.Join."""
        self._leave_join()
        self._need_core()  # now, on all ranks: later some have inputs, and others not
        self._part = ModelPart(self, kwargs.get("divide_by_initial_world_size", True))
        return self._part

    def _leave_join(self) -> None:
        if self._part is not None:
            self._part.drop()
        self._part = None
        self._join_config = _JoinConfig.construct_disabled_join_config()

    @property
    def join_device(self) -> torch.device:
        return CPU

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        return self.process_group

    # --- hooks ---

    def register_comm_hook(self, state: object, hook: Callable) -> None:
        """hook(state, bucket) gives a torch.futures.Future of the reduced buffer, or a tensor.

        One hook at a time: the next bucket's starts when this one's future is there. Callbacks may
        communicate, and do so in the same order on all ranks."""
        if not callable(hook):
            raise self._logged(TypeError("Communication hook must be callable."))
        self.reducer.register_comm_hook(state, hook, overlaps=_is_one_operation(hook))
        self._hook_name = getattr(hook, "__qualname__", type(hook).__qualname__)

    def _register_builtin_comm_hook(self, comm_hook_type) -> None:
        """dist.BuiltinCommHookType, or its name; also "BF16_COMPRESS"."""
        self.reducer.register_builtin_comm_hook(getattr(comm_hook_type, "name", comm_hook_type))
        self._hook_name = str(comm_hook_type)

    def _register_fused_optim(self, optim: type, *args, optim_params=None, **kwargs) -> None:
        """As torch's: a functional optimizer of torch.distributed.optim in a comm hook. Faster, and with
        clipping, accumulation and checkpoints: convoy.ShardedOptimizer(..., in_backward=True)."""
        from torch.distributed.algorithms._optimizer_overlap import _as_overlapped_optim

        try:
            _as_overlapped_optim(optim, optim_params, *args, **kwargs).register_ddp(self)
        except NotImplementedError as error:
            raise ValueError(f"{optim} has no overlapped form in torch") from error

    def _take_optimizers_in_backward(self) -> None:
        """Those of torch.distributed.optim._apply_optimizer_in_backward get reduced gradients."""
        takes = [hasattr(each, "_in_backward_optimizers") for each in self.reducer.parameters()]
        if not any(takes):
            return
        from torch.distributed.optim import apply_optimizer_in_backward as applied

        handles = getattr(applied, "param_to_optim_hook_handle_map", None)
        if handles is None:  # the module and its function have one name
            import sys

            handles = sys.modules["torch.distributed.optim.apply_optimizer_in_backward"].param_to_optim_hook_handle_map
        for each in self.reducer.parameters():
            for handle in handles.get(each, []):
                handle.remove()

        def step(buckets: list[_C.GradBucket], used: list[bool]) -> None:
            for bucket in buckets:
                for index, each, gradient in zip(bucket.indices(), bucket.parameters(), bucket.gradients()):
                    if not used[index] or not hasattr(each, "_in_backward_optimizers"):
                        continue
                    each.grad = gradient
                    for optimizer in each._in_backward_optimizers:
                        optimizer.step()
                    each.grad = None

        self.reducer.register_consumer(takes, step)

    def _register_buffer_comm_hook(self, state, hook: Callable, comm_hook_location=None) -> None:
        if not callable(hook):
            raise self._logged(TypeError("Buffer communication hook must be callable."))

        def run(buffers: dict[str, torch.Tensor]) -> None:
            futures = hook(state, buffers)
            if futures is not None:
                torch.futures.collect_all(futures).wait()

        after = getattr(comm_hook_location, "name", "POST_FORWARD") == "POST_FORWARD"
        self._need_core().set_buffer_hook(run, after)

    # --- buffers ---

    @property
    def forward_sync_buffers(self) -> bool:
        return self._arguments["forward_sync_buffers"]

    @property
    def broadcast_buffers(self) -> bool:
        return self.forward_sync_buffers

    @property
    def named_module_buffers(self) -> dict[str, torch.Tensor]:
        return {name: buffer for name, buffer in self.module.named_buffers()
                if name not in self.parameters_to_ignore}

    @property
    def modules_buffers(self) -> list[torch.Tensor]:
        return list(self.named_module_buffers.values())

    def will_sync_module_buffers(self) -> bool:
        return bool(self.forward_sync_buffers and self.require_backward_grad_sync
                    and self.process_group.size() > 1 and self.named_module_buffers)

    def _sync_buffers(self) -> None:
        """Buffers become rank 0's. Collective."""
        self._need_core().sync_buffers()

    def _default_broadcast_coalesced(self, bufs=None, bucket_size=None, authoritative_rank=0) -> None:
        """For buffer hooks: what happens without one. Collective."""
        self.reducer.broadcast(self.modules_buffers if bufs is None else bufs, authoritative_rank)

    # --- what torch's class has besides ---

    @classmethod
    def _get_active_ddp_module(cls) -> None:
        """For torch.compile, which would cut graphs where torch's buckets end."""
        return None

    @property
    def find_unused_parameters(self) -> bool:
        return self._arguments["find_unused_parameters"]

    @property
    def gradient_as_bucket_view(self) -> bool:
        return self._arguments["gradient_as_bucket_view"]

    @property
    def static_graph(self) -> bool:
        return self._arguments["static_graph"]

    def _set_static_graph(self) -> None:
        try:
            if self._core is not None:
                self._core.set_static_graph()
        except Error as error:
            raise self._logged(Error("_set_static_graph should be called before training loop starts: "
                                     f"{error}", error.kind)) from None
        self._arguments["static_graph"] = True

    def _set_sparse_metadata(self, global_unique_ids: dict[str, torch.Tensor]) -> None:
        """Rows that sparse gradients have on all ranks together, by name, for the next backward."""
        self.reducer.set_sparse_metadata(global_unique_ids)

    def _check_reducer_finalized(self) -> None:
        """Raises if the last backward still waits for gradients."""
        if self._core is not None:
            self._core.reducer.before_forward()

    def _remove_autograd_hooks(self) -> None:
        """Lets go of the module, which can be wrapped again; this one then only calls it."""
        self._leave_join()
        self.__dict__["forward"] = self.module
        self._core, self._lets_go = None, True

    def _set_ddp_sink_clone(self, val: bool) -> None:
        """Nothing to set: outputs may be modified in place, and are not copied for it."""

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

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        if sample_rate < 1:
            raise ValueError("DDP runtime logging sample rate should be equal or greater than 1")
        self._need_core().set_sample_rate(sample_rate)

    def _logged(self, error: Exception) -> Exception:
        self._error = str(error)
        return error

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        """What torch logs, by torch's names. Times are nanoseconds."""
        data: dict[str, Any] = {name: value if name in _TEXTS else int(value)
                                for name, value in self._need_core().stats().items()}
        data["comm_hook"] = self._hook_name or None
        data["dtypes"] = ", ".join(sorted(data["dtypes"].lower().split(", ")))
        # torch does not count frozen parameters.
        trained = [i for i, each in enumerate(self.reducer.parameters()) if each.requires_grad]
        for name in ("prev_iteration_grad_ready_order_indices", "rebuilt_per_bucket_param_indices"):
            data[name] = re.sub(r"\d+", lambda found: str(bisect_left(trained, int(found[0]))), data[name])
        if not data["bucket_sizes"]:
            data["bucket_sizes"] = self._planned_bucket_sizes()
        if self._error:
            data |= {"has_error": 1, "error": self._error}
        environment = ("MASTER_PORT", "MASTER_ADDR", "TORCH_DISTRIBUTED_DEBUG", "CUDA_VISIBLE_DEVICES")
        return data | {name.lower(): os.environ.get(name, "N/A") for name in environment}

    def _planned_bucket_sizes(self) -> str:
        """Before the first backward tells the order."""
        parameters = [each for each in self.reducer.parameters() if each.requires_grad]
        lists, _ = dist._compute_bucket_assignment_by_size(parameters, [self.bucket_bytes_cap])
        sizes = [sum(parameters[i].nbytes for i in indices) for indices in reversed(lists)]
        return ", ".join(map(str, sizes))

    # --- state ---

    def _restore_parameters(self) -> None:
        if self._core is not None:
            self._core.restore_parameters()

    def state_dict(self, *args, **kwargs):
        self._restore_parameters()
        return super().state_dict(*args, **kwargs)

    def load_state_dict(self, *args, **kwargs):
        self._restore_parameters()
        return super().load_state_dict(*args, **kwargs)

    def __getstate__(self):
        """As torch's: a copy, or a model that comes out of a file, makes a new reducer when it is trained."""
        self._restore_parameters()
        state = self.__dict__.copy()
        for name in ("process_group", "device_mesh", "forward", "_core", "_part", "_pause"):
            state.pop(name, None)
        return state | {"_join_config": _JoinConfig.construct_disabled_join_config()}

    def __reduce_ex__(self, protocol):
        if self.process_group is not dist.group.WORLD:
            raise ValueError("DistributedDataParallel: only a model of the default group can be pickled: "
                             "where it is loaded, nobody knows of others")
        return super().__reduce_ex__(protocol)

    def __setstate__(self, state, process_group=None) -> None:
        super().__setstate__(state)
        self.process_group = process_group or _world("load it into")
        self.device_mesh = None
        self._begin_anew()

    def __deepcopy__(self, memo):
        made = self.__class__.__new__(self.__class__)
        memo[id(self)] = made
        state = {name: copy.deepcopy(value, memo) for name, value in self.__getstate__().items()}
        made.__setstate__(state, self.process_group)
        return made


# So that isinstance() and what looks for a wrapped module know it.
nn.parallel.DistributedDataParallel.register(DistributedDataParallel)

# Of the logging data; the rest are numbers.
_TEXTS = {"module_name", "backend_name", "device_ids", "dtypes", "comm_hook", "bucket_sizes",
          "rebuilt_bucket_sizes", "rebuilt_per_bucket_param_indices",
          "prev_iteration_grad_ready_order_indices", "error"}


class _Module:
    """What the C++ class sees of a module. What is wrong is told to all ranks by it."""

    def __init__(self, module: nn.Module):
        self.name = type(module).__name__
        self._module = module
        self._look_at_buffers()

    def error(self) -> str:
        tensors = list(self._module.parameters())
        if any(isinstance(each, UninitializedParameter) for each in tensors):
            return "modules with uninitialized parameters cannot be wrapped: run a dummy forward pass first"
        if any(each.device != CPU for each in tensors):
            return "parameters must be on the CPU"
        if any(isinstance(each, nn.SyncBatchNorm) for each in self._module.modules()):
            return "torch's SyncBatchNorm works on GPUs only"
        return ""

    def parameters(self) -> list[tuple[str, torch.Tensor]]:
        return [] if self.error() else list(self._module.named_parameters(remove_duplicate=False))

    def places(self) -> list[tuple[dict, tuple]]:
        """Where parameters and modules are held, and what is there now."""
        return [(held, tuple(held.values())) for each in self._module.modules()
                for held in (each._parameters, each._modules)]

    def sparse(self) -> list[torch.Tensor]:
        return [each.weight for each in self._module.modules()
                if isinstance(each, (nn.Embedding, nn.EmbeddingBag)) and each.sparse]

    def _look_at_buffers(self) -> None:
        modules = list(self._module.modules())
        self._counts = [(each._buffers, len(each._buffers)) for each in modules]
        self._buffers = list(self._module.named_buffers())
        self._places = [(each._buffers, name, buffer) for each in modules
                        for name, buffer in each._buffers.items()]
        self._norms = [(each, [buffer for buffer in each.buffers(recurse=False)]) for each in modules
                       if isinstance(each, nn.modules.batchnorm._NormBase)]

    def buffers(self) -> list[tuple[str, torch.Tensor]]:
        """In each step: a walk over all modules takes a while, and finds what it found before."""
        if (any(len(held) != count for held, count in self._counts)
                or any(held.get(name) is not buffer for held, name, buffer in self._places)):
            self._look_at_buffers()
        return self._buffers

    def statistics(self) -> list[torch.Tensor]:
        return [buffer for norm, buffers in self._norms if norm.training for buffer in buffers]


def _refuse(given: object, text: str) -> None:
    if given:
        raise ArgumentError(f"DistributedDataParallel: {text}")


def _types(given) -> tuple | None:
    """Of torch's _MixedPrecision, FSDP's, or ours."""
    if given is None:
        return None
    _refuse(getattr(given, "keep_low_precision_grads", False),
            "mixed_precision.keep_low_precision_grads: gradients are of the parameters' own type")
    return (given.param_dtype, given.reduce_dtype, given.buffer_dtype,
            getattr(given, "cast_forward_inputs", True))


def _group_of(module: nn.Module, process_group, device_mesh) -> dist.ProcessGroup:
    if device_mesh is None:
        return process_group if process_group is not None else _world("wrap a module in")
    _refuse(process_group is not None, "Cannot specify both process_group and device_mesh arguments.")
    _refuse(device_mesh.ndim != 1, f"Only 1D device mesh is supported, but got {device_mesh}.")
    if device_mesh._get_root_mesh() != device_mesh:  # the other dimensions are tensor parallel
        from torch.distributed.tensor.parallel.ddp import _pre_dp_module_transform

        _pre_dp_module_transform(module)
    return device_mesh.get_group(mesh_dim=0)


def _world(purpose: str) -> dist.ProcessGroup:
    if dist.group.WORLD is None:
        raise Error(f"DistributedDataParallel: there is no group to {purpose}; call "
                    "init_process_group first", "invalid argument")
    return dist.group.WORLD


def _alone() -> dist.ProcessGroup:
    """A group of this rank, of which no other knows."""
    return _factory(dist.HashStore(), 0, 1, DEFAULT_TIMEOUT, CPU)


def _is_one_operation(hook: Callable) -> bool:
    """True for hooks that are known to communicate once, in the thread that calls them."""
    from torch.distributed.algorithms.ddp_comm_hooks import debugging_hooks, default_hooks

    known = (default_hooks.allreduce_hook, default_hooks.fp16_compress_hook, default_hooks.bf16_compress_hook,
             debugging_hooks.noop_hook)
    return any(hook is each for each in known)


def _backend(group: dist.ProcessGroup):
    return group._get_backend(CPU)


def _store(group: dist.ProcessGroup) -> dist.Store:
    """For groups of our own below this one."""
    # A rank that has joined has wrapped fewer.
    count = torch.tensor([_made.get(group.group_name, 0) + 1])
    group.allreduce([count], dist.ReduceOp.MAX).wait()
    _made[group.group_name] = int(count)
    return dist.PrefixStore(f"convoy/ddp/{int(count)}", _store_of(group))


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
