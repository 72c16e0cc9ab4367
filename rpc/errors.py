"""Errors between the processes of a world."""


class RpcError(RuntimeError):
    """A call, a group or a world failed; the text names the processes concerned."""


class RpcException(RpcError):
    """A remote error that cannot be rebuilt here; the text has its type and traceback."""
