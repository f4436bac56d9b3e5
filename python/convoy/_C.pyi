from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

from torch import Tensor
from torch.distributed import Backend, Store
from torch.futures import Future

__version__: str

class Options(Backend.Options):
    """Options of a group: init_process_group(..., pg_options=convoy.Options(threads=2))."""

    threads: int
    """that work on one large operation of this rank"""
    read_private: bool
    """large private tensors may be read out of the other process"""
    def __init__(self, *, threads: int = 1, read_private: bool = True) -> None: ...
    def __copy__(self) -> Options: ...

class ConvoyBackend(Backend):
    """Collective: returns when all ranks have called it. The store's keys must be fresh."""

    def __init__(self, store: Store, rank: int, size: int, options: Options = ...) -> None: ...
    @property
    def options(self) -> Options: ...  # a copy

class GradBucket:
    """What a comm hook gets: gradients that travel together, not divided."""

    def index(self) -> int: ...
    def is_last(self) -> bool: ...
    def buffer(self) -> Tensor: ...
    def set_buffer(self, buffer: Tensor) -> None: ...
    def gradients(self) -> list[Tensor]: ...
    def parameters(self) -> list[Tensor]: ...
    def indices(self) -> list[int]:
        """Numbers of the parameters: state kept by them survives a change of layout."""

class Reducer:
    """Averages gradients over ranks while backward computes them: under DistributedDataParallel."""

    def __init__(self, parameters: Sequence[Tensor], backend: Backend, store: Store | None = None, *,
                 bucket_cap_mb_list: Sequence[float] = ..., find_unused_parameters: bool = False,
                 static_graph: bool = False, gradient_as_bucket_view: bool = True,
                 skip_all_reduce_unused_params: bool = False, names: Sequence[str] = ...,
                 sparse: Sequence[int] = ..., delayed: Sequence[int] = ...,
                 must_agree: Sequence[str] = ..., error: str = "") -> None: ...
    def before_forward(self) -> None: ...
    def prepare_for_backward(self, outputs: Sequence[Tensor], in_step: bool = True) -> list[Tensor]: ...
    def no_sync(self) -> AbstractContextManager[None]: ...
    @property
    def is_paused(self) -> bool: ...
    def sync_gradients(self) -> None: ...
    def register_comm_hook(
        self, state: object, hook: Callable[[object, GradBucket], Future[Tensor] | Tensor]) -> None: ...
    def broadcast(self, tensors: Sequence[Tensor], root: int = 0) -> None: ...
    def buckets(self) -> list[list[int]]: ...
    def used(self) -> list[bool]: ...
    def stats(self) -> dict[str, float]: ...

def launcher_store() -> Store | None:
    """The store that `convoy run` serves to this rank; None in a process that it did not start."""

def install_allocator() -> None:
    """Memory of CPU tensors comes from pools that keep what is freed, from now on."""

def install_allocator_if_asked() -> None:
    """install_allocator() if CONVOY_ALLOCATOR is 1, as under `convoy run --allocator`."""

def uninstall_allocator() -> None:
    """Back to the allocator before it. Tensors of the pools live on."""

def is_allocator_installed() -> bool: ...
def allocator_stats() -> dict[str, int]:
    """used_bytes, cached_bytes, peak_bytes, allocations, refills."""

def trim_allocator() -> int:
    """Gives what is free back to the system; returns the bytes."""

def shutdown_all() -> None:
    """Ends all backends of the process: what is pending fails, their threads are joined."""
