"""The exception of convoy."""

import torch.distributed as dist


class Error(dist.DistBackendError):
    """What goes wrong in a group; the text says who, what and what to do.

    `kind` is one of "invalid argument" (fix the call), "unsupported" (choose another way),
    "timeout", "peer lost" (rebuild the group), "resource" (free some or raise the limit), "remote"
    and "internal" (a bug of convoy).
    """

    def __init__(self, text: str, kind: str = "internal") -> None:
        super().__init__(text)
        self.kind = kind

    def __reduce__(self):
        return type(self), (str(self), self.kind)


class ArgumentError(Error, ValueError):
    """An argument that cannot be. torch raises the one or the other for these."""

    def __init__(self, text: str, kind: str = "invalid argument") -> None:
        super().__init__(text, kind)


class RemoteError(Error):
    """How a call of convoy.rpc went wrong because of the worker that was called, or on it.

    `remote_type` is the type of what the function raised, empty if it was not the function.
    """

    def __init__(self, text: str, kind: str = "remote error", worker: str = "", remote_type: str = "") -> None:
        super().__init__(text, kind)
        self.worker, self.remote_type = worker, remote_type

    def __reduce__(self):
        return type(self), (str(self), self.kind, self.worker, self.remote_type)
