"""Tensors between processes: channels, and reductions for torch.multiprocessing."""

import functools
import io
import os
import pickle
from multiprocessing import reduction
from typing import Any

import torch
from torch.multiprocessing import reductions as _torch
from torch.nn.parameter import Parameter

from convoy import _C
from convoy._error import Error

DEFAULT_TIMEOUT = 300.0
_INT64 = range(-(2**63), 2**63)


# What a tensor is besides its memory: whether it is a Parameter. Of a Parameter that has no gradient
# requires_grad says so, also of one of integers.
def _plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.data.requires_grad_(tensor.requires_grad) if isinstance(tensor, Parameter) else tensor


def _as_sent(kind: type, tensor: torch.Tensor) -> torch.Tensor:
    return Parameter(tensor.detach(), tensor.requires_grad) if kind is Parameter else tensor


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage)


# Queues and events: values of their own, by the name of their kind.
_shared_kinds: dict[Any, str] = {}


def _of_shared(value):
    if isinstance(value, _C.Shared):
        return next((kind._of(value) for kind, name in _shared_kinds.items() if name == value.kind), value)
    return value


# Types that in our messages are reduced as they say themselves, not as multiprocessing was told to.
_message_kinds: set[type] = set()


class _Pickler(pickle.Pickler):
    """Tensors become values of the message beside the pickle."""

    def __init__(self, file, tensors):
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.tensors = tensors
        table = reduction.ForkingPickler(io.BytesIO()).dispatch_table
        self.dispatch_table = {kind: reduce for kind, reduce in table.items() if kind not in _message_kinds}

    def persistent_id(self, value):
        if type(value) in _shared_kinds:
            self.tensors.append(value._shared)
            return len(self.tensors) - 1, None
        if type(value) is torch.UntypedStorage and value.device.type == "cpu" and value.nbytes() > 0:
            # One with the storages of the message's tensors.
            self.tensors.append(_bytes_of(value))
            return len(self.tensors) - 1, torch.UntypedStorage
        if type(value) not in (torch.Tensor, Parameter):
            return None
        self.tensors.append(_plain(value))
        return len(self.tensors) - 1, type(value)


class _Unpickler(pickle.Unpickler):
    def __init__(self, file, tensors):
        super().__init__(file)
        self.tensors = tensors

    def persistent_load(self, name):
        index, kind = name
        if kind is torch.UntypedStorage:
            return self.tensors[index].untyped_storage()
        return _of_shared(self.tensors[index]) if kind is None else _as_sent(kind, self.tensors[index])


def _is_plain(value) -> bool:
    if type(value) is int:
        return value in _INT64
    return value is None or type(value) in (bool, float, str, bytes, torch.Tensor) or type(value) in _shared_kinds


def _to_value(value):
    return value._shared if type(value) in _shared_kinds else value


def _to_values(value) -> list:
    if _is_plain(value):
        return [_to_value(value)]
    if type(value) is tuple and len(value) != 1 and all(_is_plain(v) for v in value):
        return [_to_value(v) for v in value]
    tensors: list[torch.Tensor] = []
    file = io.BytesIO()
    _Pickler(file, tensors).dump(value)
    return [_C.PythonObject(file.getvalue()), *tensors]


def _from_values(values: list):
    if values and isinstance(values[0], _C.PythonObject):
        return _Unpickler(io.BytesIO(values[0].pickle), values[1:]).load()
    return _of_shared(values[0]) if len(values) == 1 else tuple(_of_shared(value) for value in values)


class Channel:
    """One end of a connection between two processes; C++ has the same as convoy::share::Channel.

    Objects arrive in order; tensors are not copied but shared. None, bool, int, float, str, bytes,
    tensors and tuples of these are values for C++ too; everything else is pickled, with its tensors
    shared, and should go only between processes that trust each other. Calls raise convoy.Error:
    "timeout", "peer lost" when the other side is closed or its process has ended. Thread-safe.

    An end that was not used yet can be an argument of a process that multiprocessing starts; close
    it here afterwards.
    """

    def __init__(self, end: _C.Channel) -> None:
        self._end = end
        self._given = -1

    def send(self, value: object, timeout: float = DEFAULT_TIMEOUT) -> None:
        """Blocks only while much that was sent before waits to be received."""
        self._end.send(_to_values(value), timeout)

    def receive(self, timeout: float = DEFAULT_TIMEOUT) -> object:
        return _from_values(self._end.receive(timeout))

    def poll(self) -> tuple[bool, object]:
        """(True, what came) or (False, None); does not wait."""
        values = self._end.try_receive()
        return (False, None) if values is None else (True, _from_values(values))

    def close(self) -> None:
        if self._given >= 0:
            os.close(self._given)
            self._given = -1
        else:
            self._end.close()

    def __enter__(self) -> "Channel":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_given", -1) >= 0:
            os.close(self._given)

    def __reduce__(self):
        if self._given < 0:
            self._given = self._end.release()
        return _adopt, (reduction.DupFd(self._given),)


def _adopt(descriptor) -> Channel:
    return Channel(_C.Channel.adopt(descriptor.detach()))


class Listener:
    """Waits at a path for processes of this user that connect(). See listen()."""

    def __init__(self, listener: _C.ChannelListener) -> None:
        self._listener = listener

    @property
    def path(self) -> str:
        return self._listener.path

    def accept(self, timeout: float = DEFAULT_TIMEOUT) -> Channel:
        return Channel(self._listener.accept(timeout))


def channel() -> tuple[Channel, Channel]:
    """Two ends: for threads, or for processes of which one gets an end as an argument."""
    first, second = _C.channel()
    return Channel(first), Channel(second)


def listen(path: str) -> Listener:
    """A socket of mode 0600 in a folder of mode 0700, which is made if it is missing."""
    return Listener(_C.listen(path))


def connect(path: str, timeout: float = DEFAULT_TIMEOUT) -> Channel:
    return Channel(_C.connect(path, timeout))


def _rebuild_tensor(kind: type, handle: bytes) -> torch.Tensor:
    return _as_sent(kind, _C.tensor_from_bytes(handle))


def _rebuild_storage(handle: bytes) -> torch.UntypedStorage:
    return _C.tensor_from_bytes(handle).untyped_storage()


# Whether all tensors of multiprocessing's messages go our way, or only those in our memory, which
# torch would move: processes that have it from us would be alone with it.
_all_tensors = False


def _is_ours(tensor: torch.Tensor) -> bool:
    """Not on another device, of a kind that only torch can pass, or shared by torch already: memory
    that is shared is not moved again."""
    if tensor.device.type != "cpu" or tensor.is_quantized or type(tensor) not in (torch.Tensor, Parameter):
        return False
    if tensor.layout is torch._mkldnn:  # type: ignore[attr-defined]
        return False
    if _C.is_shared(tensor):
        return True
    if not _all_tensors:
        return False
    return tensor.layout is not torch.strided or tensor.is_nested or not _torch_is_shared(tensor.untyped_storage())


def _reduce_tensor(tensor: torch.Tensor):
    if not _is_ours(tensor) or (tensor.requires_grad and not tensor.is_leaf):
        return _torch.reduce_tensor(tensor)  # the latter for torch's own text
    return _rebuild_tensor, (type(tensor), _C.tensor_to_bytes(_plain(tensor)))


def _reduce_storage(storage: torch.UntypedStorage):
    if storage.device.type != "cpu" or storage.nbytes() == 0:
        return _torch.reduce_storage(storage)
    whole = _bytes_of(storage)
    if not _is_ours(whole):
        return _torch.reduce_storage(storage)
    return _rebuild_storage, (_C.tensor_to_bytes(whole),)


def install_reductions() -> None:
    """Passes tensors of torch.multiprocessing's queues and pipes, and of DataLoader's workers, our way.

    For this process and those that it forks; in others call it too, before they send. A receiver only
    needs to be able to import convoy. Memory that torch has shared already goes torch's way.
    """
    global _all_tensors
    _all_tensors = True
    _register()
    # DataLoader's workers collate into memory that is shared from the beginning.
    torch.UntypedStorage._new_shared = classmethod(_new_shared)  # type: ignore


def _new_shared(cls, size: int, *, device="cpu") -> torch.UntypedStorage:
    if torch.device(device).type != "cpu" or size == 0:
        return _torch_new_shared(size, device=device)
    return _C.empty_shared(size).untyped_storage()


def _register() -> None:
    for kind in (torch.Tensor, Parameter):
        reduction.ForkingPickler.register(kind, _reduce_tensor)
    reduction.ForkingPickler.register(torch.UntypedStorage, _reduce_storage)


def _storage_is_ours(storage: torch.UntypedStorage) -> bool:
    return storage.device.type == "cpu" and storage.nbytes() > 0 and _C.is_shared(_bytes_of(storage))


def _share_memory_(self, *args, **kwargs):
    return self if _storage_is_ours(self) else _torch_share_memory_(self, *args, **kwargs)


def _is_shared(self) -> bool:
    return _torch_is_shared(self) or _storage_is_ours(self)


def _refuse_ours(name: str):
    stock = getattr(torch.UntypedStorage, name)

    @functools.wraps(stock)
    def share(self, *args, **kwargs):
        if _storage_is_ours(self):
            raise Error(f"{name}: this memory is shared by convoy, and torch would move it: processes that have it "
                        "would be alone with it. Send the tensor or storage itself, or a clone()", "unsupported")
        return stock(self, *args, **kwargs)

    return share


_torch_new_shared = torch.UntypedStorage._new_shared
_torch_share_memory_ = torch.UntypedStorage.share_memory_
_torch_is_shared = torch.UntypedStorage.is_shared

# From the first import on: what convoy shares is shared for torch too, and torch does not move it.
torch.UntypedStorage.share_memory_ = _share_memory_  # type: ignore
torch.UntypedStorage.is_shared = _is_shared  # type: ignore
for _name in ("_share_fd_cpu_", "_share_filename_cpu_"):
    setattr(torch.UntypedStorage, _name, _refuse_ours(_name))
_register()
