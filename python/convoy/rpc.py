"""Calls of functions in other processes, without pickle; and torch.distributed.rpc on the same transport.

    import convoy.rpc

    @convoy.rpc.function
    def scale(x: torch.Tensor, by: float) -> torch.Tensor:
        return x * by

    with convoy.rpc.Session("trainer0") as rpc:
        y = rpc.rpc_sync("worker1", "my_add", a, b)    # a function of C++, or a registered one of Python
        ref = rpc.remote("worker1", "make_model", 7)
        z = await rpc.rpc_async("worker2", scale, x, 2.0)

docs/reference/python_rpc.md is the guide.
"""

import asyncio
import atexit
import dataclasses
import inspect
import os
import threading
import types
import typing
from collections.abc import Callable, Coroutine, Generator, Sequence
from typing import Annotated, Any, NamedTuple, TypeVar, Union

import torch
from torch import Tensor

from _convoy.torch_rpc import ConvoyRpcBackendOptions
from convoy import _C
from convoy._C import RpcFuture as Future, RpcReference as RRef
from convoy._error import ArgumentError, RemoteError
from convoy._torch_rpc import use_smart_backward

__all__ = ["Context", "ConvoyRpcBackendOptions", "DistributedOptimizer", "Future", "RRef", "RemoteError", "Session",
           "WorkerInfo", "caller", "current_session", "float32", "function", "int16", "int32", "int8", "struct",
           "uint16", "uint32", "uint64", "uint8", "use_smart_backward"]

Any_ = TypeVar("Any_")


class WorkerInfo(NamedTuple):
    name: str
    rank: int


# --- Types ------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Cpp:
    """What a number is in C++."""

    name: str


# int is C++'s long, float is double. These are for functions of other types.
int8 = Annotated[int, _Cpp("signed char")]
int16 = Annotated[int, _Cpp("short")]
int32 = Annotated[int, _Cpp("int")]
uint8 = Annotated[int, _Cpp("unsigned char")]
uint16 = Annotated[int, _Cpp("unsigned short")]
uint32 = Annotated[int, _Cpp("unsigned int")]
uint64 = Annotated[int, _Cpp("unsigned long")]
float32 = Annotated[float, _Cpp("float")]

_PLAIN = {bool: "bool", int: "long", float: "double", str: "std::string", Tensor: "at::Tensor",
          torch.nn.Parameter: "at::Tensor", type(None): "std::monostate", None: "std::monostate",
          bytes: "std::vector<std::byte, std::allocator<std::byte> >"}
_names: dict[type, str] = {}  # of dataclasses


def struct(name: str) -> Callable[[type[Any_]], type[Any_]]:
    """A dataclass is the struct of that name in C++: CONVOY_FIELDS and the dataclass have the same fields in order."""
    def declare(made: type[Any_]) -> type[Any_]:
        if not dataclasses.is_dataclass(made):
            raise ArgumentError(f"convoy.rpc.struct: {made.__name__} is not a dataclass")
        _names[made] = name
        _C.rpc_struct(name, made)
        return made
    return declare


def _list_of(item: str, is_number: bool) -> str:
    return f"std::vector<{item}, std::allocator<{item}> >" if is_number else f"std::vector<{item}>"


def _is_number(hint: Any) -> bool:
    return hint in (int, float) or typing.get_origin(hint) is Annotated


def _describe(hint: Any) -> str:
    """The type that stands for a hint in signatures."""
    if isinstance(hint, type) and hint in _PLAIN or hint is None:
        return _PLAIN[hint]
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        found = [each.name for each in arguments[1:] if isinstance(each, _Cpp)]
        return found[0] if found else _describe(arguments[0])
    if origin in (list, Sequence) or origin is tuple and len(arguments) == 2 and arguments[1] is Ellipsis:
        return _list_of(_describe(arguments[0]), _is_number(arguments[0]))
    if origin is tuple:
        return "(" + ", ".join(map(_describe, arguments)) + ")"
    if origin is dict:
        return f"std::map<{_describe(arguments[0])}, {_describe(arguments[1])}>"
    if origin is RRef:
        return f"convoy::RRef<{_describe(arguments[0])}>"
    if origin in (Union, types.UnionType):
        others = [each for each in arguments if each is not type(None)]
        text = _describe(others[0]) if len(others) == 1 else f"std::variant<{', '.join(map(_describe, others))}>"
        return text if len(others) == len(arguments) else f"std::optional<{text}>"
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        if hint not in _names:
            struct(hint.__name__)(hint)
        hints = typing.get_type_hints(hint, include_extras=True)
        return _names[hint] + "{" + ", ".join(_describe(hints[each.name]) for each in dataclasses.fields(hint)) + "}"
    if isinstance(hint, type) and hint not in (list, tuple, dict, object):
        return f"object {hint.__name__}"  # stays where it is made
    raise ArgumentError(f"convoy.rpc: values of {hint!r} cannot be passed; there are bool, int, float, str, bytes, "
                        "torch.Tensor, list[...], dict[..., ...], tuple[...], Optional, Union, RRef[...], dataclasses")


def _signature(function: Callable[..., Any], owner: str | None) -> str:
    hints = typing.get_type_hints(function, include_extras=True)
    parameters = []
    for index, each in enumerate(inspect.signature(function).parameters.values()):
        if each.kind not in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD):
            raise ArgumentError(f"convoy.rpc.function: {function.__name__}: parameter {each.name} must be positional")
        if owner and index == 0:
            parameters.append(f"object {owner}")
        elif each.name not in hints:
            raise ArgumentError(f"convoy.rpc.function: {function.__name__}: parameter {each.name} needs a type hint")
        else:
            parameters.append(_describe(hints[each.name]))
    if "return" not in hints:
        raise ArgumentError(f"convoy.rpc.function: {function.__name__} needs a type hint for what it returns")
    result = "void" if hints["return"] in (None, type(None)) else _describe(hints["return"])
    return f"{result} ({', '.join(parameters)})"


# --- What others may call ---------------------------------------------------------------------------------------------

_F = TypeVar("_F", bound=Callable[..., Any])


@typing.overload
def function(target: _F) -> _F: ...
@typing.overload
def function(target: None = None, *, name: str | None = None) -> Callable[[_F], _F]: ...
def function(target: Any = None, *, name: str | None = None) -> Any:
    """Lets workers of sessions that are made from now on call it: by its name, and "Class::method" for methods.

    All parameters have type hints, and so has the result. What a method is called on is made by remote(), of a
    function whose result is of that class. A coroutine function runs on an event loop of its own thread.
    """
    def register(made: _F) -> _F:
        where = made.__qualname__.split("<locals>.")[-1].split(".")
        owner = where[-2] if len(where) > 1 else None
        called = name or "::".join(where)
        _C.rpc_serve(called, _signature(made, owner), made)
        setattr(made, "__rpc_name__", called)
        return made
    return register if target is None else register(target)


def current_session() -> _C.RpcSession:
    """That of the call whose function runs on this thread."""
    return _C.rpc_current_session()


def caller() -> WorkerInfo:
    """Who called the function that runs on this thread."""
    return WorkerInfo(*_C.rpc_caller())


_loop: asyncio.AbstractEventLoop | None = None
_loop_thread: threading.Thread | None = None
_loop_lock = threading.Lock()


def _run_coroutine(coroutine: Coroutine[Any, Any, Any], end: Callable[[Callable[[], Any]], None]) -> None:
    """Runs it on the event loop of functions that are called; end(get) when it has ended."""
    global _loop, _loop_thread
    with _loop_lock:
        if _loop is None:
            _loop = asyncio.new_event_loop()
            _loop_thread = threading.Thread(target=_loop.run_forever, name="convoy-rpc-loop", daemon=True)
            _loop_thread.start()
    asyncio.run_coroutine_threadsafe(coroutine, _loop).add_done_callback(lambda future: end(future.result))


def _forget_loop() -> None:
    """In a forked child, which does not have the thread."""
    global _loop, _loop_thread, _loop_lock
    _loop, _loop_thread, _loop_lock = None, None, threading.Lock()


def _end() -> None:
    """At the end of the interpreter: calls that are under way end while it can still hear of it."""
    _C.end_rpc()
    if _loop is not None and _loop_thread is not None:
        _loop.call_soon_threadsafe(_loop.stop)
        _loop_thread.join(10)


# --- Sessions ---------------------------------------------------------------------------------------------------------


def _name_of(called: str | Callable[..., Any]) -> str:
    if isinstance(called, str):
        return called
    name = getattr(called, "__rpc_name__", None)
    if name is None:
        raise ArgumentError(f"convoy.rpc: {called!r} has no @convoy.rpc.function; of a function of C++ give the name")
    return name


class Session(_C.RpcSession):
    """A worker among others, of Python or C++; all of them make theirs. Thread-safe.

    Functions are called by name, with positional arguments, which are checked against the signature that the callee
    has. Errors are convoy.Error (RemoteError: of the other side, with `worker` and `remote_type`). As a context
    manager it ends by shutdown(), or abruptly after an exception.
    """

    def __init__(self, name: str = "", *, method: str = "env://", rank: int | None = None, size: int | None = None,
                 timeout: float = 60, start_timeout: float = 300, threads: int = 16, operators: Sequence[str] = (),
                 come_and_go: bool = False) -> None:
        super().__init__(name, method, rank, size, timeout, start_timeout, threads, list(operators), come_and_go)

    def rpc_sync(self, to: str | int, function: str | Callable[..., Any], *arguments: Any,
                 timeout: float | None = None) -> Any:
        """Runs the function there and waits for its result; `timeout` in seconds, 0: never, None: the session's."""
        return super().rpc_sync(to, _name_of(function), *arguments, timeout=timeout)

    def rpc_async(self, to: str | int, function: str | Callable[..., Any], *arguments: Any,
                  timeout: float | None = None) -> Future:
        """Does not wait: a Future, which can be awaited."""
        return super().rpc_async(to, _name_of(function), *arguments, timeout=timeout)

    def remote(self, to: str | int, function: str | Callable[..., Any], *arguments: Any,
               timeout: float | None = None) -> RRef:
        """Does not wait, and the result stays where it is made: a reference to it."""
        return super().remote(to, _name_of(function), *arguments, timeout=timeout)

    def local_rref(self, value: Any, hint: Any = None) -> RRef:
        """A reference to a value here, to be passed on. `hint` is its type; without it, that of a tensor or object."""
        return super().rref(_describe(type(value) if hint is None else hint), value)

    def worker(self, which: str | int | None = None) -> WorkerInfo:
        """This one, or another one by name or rank."""
        return WorkerInfo(*(self.worker_info() if which is None else self.find_worker(which)))

    def context(self) -> "Context":
        """Records calls of this thread for a backward pass: with rpc.context() as context: ..."""
        return Context(self)

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.shutdown(graceful=kind is None)


class Context:
    """A context of distributed autograd: calls of this thread are recorded until it ends, on the same thread."""

    def __init__(self, session: _C.RpcSession) -> None:
        self._session = session
        self._context: _C.RpcContext | None = None

    def __enter__(self) -> "Context":
        self._context = _C.RpcContext(self._session)
        return self

    def __exit__(self, *_: object) -> None:
        if self._context is not None:
            self._context.close()
            self._context = None

    def _get(self) -> _C.RpcContext:
        if self._context is None:
            raise ArgumentError("convoy.rpc: a context is used inside of its with block")
        return self._context

    @property
    def id(self) -> int:
        return self._get().id()

    def backward(self, roots: Sequence[Tensor] | Tensor, gradients: Sequence[Tensor] = (), *, retain_graph: bool = False,
                 fast: bool = False, timeout: float | None = None) -> None:
        """Computes the gradients of the roots on all workers; `.grad` is untouched. See docs/reference/autograd.md."""
        self._get().backward([roots] if isinstance(roots, Tensor) else list(roots), list(gradients), retain_graph, fast,
                             timeout)

    def gradients(self) -> dict[Tensor, Tensor]:
        """Those of this worker's leaves."""
        return dict(self._get().gradients())

    def dump(self) -> str:
        return self._get().dump()


class DistributedOptimizer:
    """Steps of parameters that live on several workers, of Python and C++, with the gradients of a context.

        optimizer = convoy.rpc.DistributedOptimizer(rpc, references, torch.optim.SGD, lr=0.05)
        with rpc.context() as context:
            ...
            context.backward(loss)
            optimizer.step(context)

    `parameters` are references to tensors. The class is one of torch.optim's: SGD, Adam, AdamW, Adagrad, RMSprop,
    Adadelta, Adamax, Rprop. `.grad` is neither read nor written. See docs/reference/optim.md.
    """

    def __init__(self, session: _C.RpcSession, parameters: Sequence[RRef],
                 optimizer_class: type[torch.optim.Optimizer], **defaults: Any) -> None:
        # Its own defaults, and its own checks of what was given.
        full = optimizer_class([torch.zeros(1, requires_grad=True)], **defaults).defaults
        kind = optimizer_class.__name__
        if kind == "Adam" and full.get("decoupled_weight_decay"):
            kind = "AdamW"
        self._optimizer = _C.RpcOptimizer(session, list(parameters), kind, full)

    def step(self, context: Context) -> None:
        """Blocks until all owners have stepped. RemoteError names one that has not."""
        self._optimizer.step(context._get())

    def set_lr(self, lr: float) -> None:
        """From the next step on."""
        self._optimizer.set_lr(lr)


# --- What is added to classes of the extension ------------------------------------------------------------------------


def _await(self: Future) -> Generator[Any, None, Any]:
    loop = asyncio.get_running_loop()
    waiter = loop.create_future()

    def wake(_: Future) -> None:
        try:
            loop.call_soon_threadsafe(lambda: None if waiter.done() else waiter.set_result(None))
        except RuntimeError:
            pass  # the loop has ended

    self.add_done_callback(wake)
    try:
        yield from waiter.__await__()
    except asyncio.CancelledError:
        self.cancel()
        raise
    return self.result()


setattr(Future, "__await__", _await)
# So that hints can say RRef[torch.Tensor].
setattr(RRef, "__class_getitem__", classmethod(types.GenericAlias))
atexit.register(_end)
os.register_at_fork(after_in_child=_forget_loop)
