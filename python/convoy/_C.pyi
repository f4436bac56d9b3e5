from torch.distributed import Backend, Store

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
