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
