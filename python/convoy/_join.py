"""Ranks that have different numbers of inputs."""

from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING

from torch.distributed.algorithms.join import JoinHook

from convoy import _C

if TYPE_CHECKING:
    from convoy._ddp import DistributedDataParallel
    from convoy._sharded import ShardedOptimizer


class Join:
    """A rank that has come to the end of its inputs takes part in the steps of the others, without adding
    anything, until all have; then all get the model of one that was in the last step.

        with convoy.Join([model, optimizer]):      # or model.join()
            for data, target in loader:
                ...

    `joinables` are convoy's, in the order in which a step uses them. An exception of one rank's loop is
    an error on all ranks. Entering it is collective.
    """

    def __init__(self, joinables: Sequence["DistributedDataParallel | ShardedOptimizer"],
                 enable: bool = True, throw_on_early_termination: bool = False, *,
                 divide_by_initial_world_size: bool = True) -> None:
        if not joinables:
            raise ValueError("Join: there is nothing to join")
        for each in joinables:
            if not hasattr(each, "_joinable"):
                raise ValueError(f"Join: {type(each).__name__} is not convoy's; torch.distributed."
                                 "algorithms.Join takes others, and convoy's too")
        self._joinables = list(joinables)
        self._enable = enable
        self._options = dict(divide_by_initial_world_size=divide_by_initial_world_size,
                             throw_on_early_termination=throw_on_early_termination)
        self._join: _C.Join | None = None

    def __enter__(self) -> None:
        if self._enable:
            self._join = _C.Join([each._joinable() for each in self._joinables], **self._options)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        join, self._join = self._join, None
        if join is None:
            return
        if kind is not None:
            join.abandon(f"{kind.__name__}: {error}")
        else:
            join.finish()


class ModelPart(JoinHook):
    """Of a model, in torch.distributed.algorithms.Join. It begins with the first step: only then it is
    known whether that Join is enabled."""

    def __init__(self, model: "DistributedDataParallel", divide_by_initial_world_size: bool) -> None:
        self._model = model
        self._divide = divide_by_initial_world_size
        self._part: _C.JoinPart | None = None

    def _begun(self) -> _C.JoinPart:
        if self._part is None:
            self._part = _C.JoinPart(self._model._joinable(),
                                     divide_by_initial_world_size=self._divide)
        return self._part

    def step(self) -> None:
        """Before forward, by a rank that has an input."""
        self._begun().step()

    def main_hook(self) -> None:
        self._begun().shadow()

    def post_hook(self, is_last_joiner: bool) -> None:
        self._begun().finish(is_last_joiner)
        self._model._leave_join()

    def drop(self) -> None:
        self._part = None


class OptimizerPart(JoinHook):
    """Of a sharded optimizer: a rank without inputs goes on to update its shard."""

    def __init__(self, optimizer: "ShardedOptimizer") -> None:
        self._optimizer = optimizer

    def main_hook(self) -> None:
        self._optimizer._step_without_input()
