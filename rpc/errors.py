"""What goes wrong between processes of a world."""


class RpcError(RuntimeError):
    """A call, a group or a world could not finish: the text names the peers concerned."""


class RpcException(RpcError):
    """A remote function raised what cannot be rebuilt here: the text has its type and traceback."""
