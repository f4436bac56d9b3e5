from torch import Tensor
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

def shutdown_all() -> None:
    """Ends all backends of the process: what is pending fails, their threads are joined."""

class PythonObject:
    """A pickle, as a value of a message."""

    def __init__(self, pickle: bytes) -> None: ...
    @property
    def pickle(self) -> bytes: ...

class Channel:
    """What convoy.Channel is made of: lists of plain values."""

    def send(self, values: list[object], seconds: float) -> None: ...
    def receive(self, seconds: float) -> list[object]: ...
    def try_receive(self) -> list[object] | None: ...
    def close(self) -> None: ...
    def release(self) -> int: ...
    @staticmethod
    def adopt(descriptor: int) -> Channel: ...

class ChannelListener:
    @property
    def path(self) -> str: ...
    def accept(self, seconds: float) -> Channel: ...

def channel() -> tuple[Channel, Channel]: ...
def listen(path: str) -> ChannelListener: ...
def connect(path: str, seconds: float) -> Channel: ...
def share_memory_(tensor: Tensor) -> Tensor:
    """Moves a tensor into convoy's shared memory, in place: every view of it follows."""

def is_shared(tensor: Tensor) -> bool:
    """All of its memory is shared memory of convoy's (torch's own does not count)."""

def empty_shared(bytes: int) -> Tensor: ...
def tensor_to_bytes(tensor: Tensor) -> bytes: ...
def tensor_from_bytes(handle: bytes) -> Tensor: ...
def get_sharing_strategy() -> str: ...
def set_sharing_strategy(name: str) -> None:
    """ "descriptor" or "file": where tensors that are shared from now on are put."""

def share_usage() -> dict[str, int]: ...
def trim() -> int:
    """Gives shared memory that is not in use back to the system; the bytes."""
