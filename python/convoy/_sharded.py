"""An optimizer of which each rank keeps and does its part, on convoy.DistributedDataParallel."""

import weakref
from collections import defaultdict
from typing import Any

import torch
from torch.distributed.algorithms.join import Joinable

from convoy import _C
from convoy._ddp import DistributedDataParallel
from convoy._error import Error
from convoy._join import OptimizerPart

# What torch calls the states that ours keeps by number.
_STATES = {
    torch.optim.SGD: ["momentum_buffer"],
    torch.optim.Adam: ["exp_avg", "exp_avg_sq", "max_exp_avg_sq"],
    torch.optim.AdamW: ["exp_avg", "exp_avg_sq", "max_exp_avg_sq"],
    torch.optim.Adagrad: ["sum"],
    torch.optim.RMSprop: ["square_avg", "momentum_buffer", "grad_avg"],
    torch.optim.Adadelta: ["square_avg", "acc_delta"],
    torch.optim.Adamax: ["exp_avg", "exp_inf"],
    torch.optim.Rprop: ["step_size", "prev"],
}
_REFUSED = ["capturable", "differentiable"]


class _Elsewhere(defaultdict):
    """`Optimizer.state`, which is empty between calls. torch.distributed.checkpoint makes a step if it
    finds none, which would count."""

    def __bool__(self) -> bool:
        return True


class ShardedOptimizer(torch.optim.Optimizer, Joinable):
    """One of torch.optim's SGD, Adam, AdamW, Adagrad, RMSprop, Adadelta, Adamax and Rprop, divided among the
    ranks (ZeRO, stage 1).

        model = convoy.DistributedDataParallel(model)
        optimizer = convoy.ShardedOptimizer(model, torch.optim.AdamW, lr=3e-4)

    step() is collective: it averages what `.grad` holds and updates this rank's part of the
    parameters in all ranks' memory; gradients are None afterwards. Arguments of the optimizer follow
    its class; `params` are all parameters of the model, or groups of them. With in_backward,
    backward() is the whole step. max_norm scales the gradients of all groups together down to that
    norm. state_dict() is collective, too, and is that of the plain optimizer: it loads into one, and
    with any number of ranks. docs/reference/sharded_optimizer.md tells the rest.
    """

    def __init__(self, model: DistributedDataParallel, optimizer_class: type[torch.optim.Optimizer], *,
                 params=None, in_backward: bool = False, max_norm: float = 0, norm_type: float = 2,
                 skip_nonfinite: bool = False, **defaults: Any) -> None:
        if optimizer_class not in _STATES:
            raise Error(f"ShardedOptimizer: {optimizer_class.__name__} is none of "
                        f"{', '.join(each.__name__ for each in _STATES)}", "unsupported")
        # Its own defaults, and its own checks of what was given.
        full = optimizer_class([torch.zeros(1, requires_grad=True)], **defaults).defaults
        every = model.reducer.parameters()
        super().__init__(every if params is None else params, dict(full))
        Joinable.__init__(self)
        self.state = _Elsewhere(dict)
        self._model, self._in_backward = weakref.ref(model), in_backward
        self._names = _STATES[optimizer_class]
        self._index = {id(each): i for i, each in enumerate(every)}
        self._check_groups()
        kind = optimizer_class.__name__
        if kind == "Adam" and full.get("decoupled_weight_decay"):
            kind = "AdamW"
        self._shards = _C.ShardedOptimizer(
            model.reducer, kind, self.param_groups, in_backward=in_backward, max_norm=max_norm,
            norm_type=norm_type, skip_nonfinite=skip_nonfinite)
        if in_backward:  # what schedulers have changed counts for the next backward
            self._opt_called = True  # they warn if step() was not
            model.register_forward_pre_hook(_BeforeForward(self))

    def _check_groups(self) -> None:
        for group in self.param_groups:
            for name in _REFUSED:
                if group.get(name):
                    raise Error(f"ShardedOptimizer: {name} is not there", "unsupported")

    @torch.no_grad()
    def step(self, closure=None):
        """Averages gradients and updates. Collective."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._step()
        return loss

    def _step(self) -> None:
        try:
            _hand_over(self)
        except Exception as error:
            try:
                self._shards.refuse_step(f"{type(error).__name__}: {error}")  # the others wait for this rank
            except Error as told:
                if told.kind != "invalid argument":
                    raise
            raise
        self._shards.step()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Only while it is made: parameters are divided among the ranks once."""
        if hasattr(self, "_shards"):
            raise Error("ShardedOptimizer: groups cannot be added later", "unsupported")
        super().add_param_group(param_group)

    # --- in a Join, after the model ---

    def _joinable(self) -> _C.ShardedOptimizer:
        return self._shards

    def join_hook(self, **kwargs) -> OptimizerPart:
        """For torch.distributed.algorithms.Join."""
        return OptimizerPart(self)

    @property
    def join_device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def join_process_group(self):
        model = self._model()
        if model is None:
            raise Error("ShardedOptimizer: its model is gone", "invalid argument")
        return model.process_group

    def _step_without_input(self) -> None:
        if not self._in_backward:
            self._step()

    def stats(self) -> dict[str, float]:
        """steps, skipped, norm (of the last gradients, if it was needed), numbers, state_bytes."""
        return self._shards.stats()

    def state_dict(self) -> dict[str, Any]:
        """The whole state, as the plain optimizer has it. Collective."""
        parameters = {self._index[id(each)]: each for group in self.param_groups for each in group["params"]}
        for index, (steps, tensors) in self._shards.states().items():
            if steps == 0:
                continue
            state = {name: each for name, each in zip(self._names, tensors) if each is not None}
            if self._names != _STATES[torch.optim.SGD]:
                state["step"] = torch.tensor(float(steps))
            self.state[parameters[index]] = state
        try:
            return super().state_dict()
        finally:
            self.state.clear()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """On all ranks, the same one."""
        super().load_state_dict(state_dict)
        try:
            states = {}
            for group in self.param_groups:
                for each in group["params"]:
                    state = self.state.get(each, {})
                    steps = int(state.get("step", 1 if state else 0))
                    states[self._index[id(each)]] = (steps, [state.get(name) for name in self._names])
            _hand_over(self)
            self._shards.load_states(states)
        finally:
            self.state = _Elsewhere(dict)


def _hand_over(optimizer: ShardedOptimizer) -> None:
    """Options as they are now."""
    optimizer._check_groups()
    optimizer._shards.set_options(optimizer.param_groups)


class _BeforeForward:
    """A hook of the model's. Its copies have no such optimizer."""

    def __init__(self, optimizer: ShardedOptimizer | None = None) -> None:
        self._optimizer = None if optimizer is None else weakref.ref(optimizer)

    def __call__(self, *_: object) -> None:
        optimizer = None if self._optimizer is None else self._optimizer()
        if optimizer is not None:
            _hand_over(optimizer)

    def __reduce__(self):
        return _BeforeForward, ()
