"""What torch says when a message does not arrive, as errors that name the peer."""

import re
from collections.abc import Callable
from typing import Any

from .errors import RpcError

# torch's text for a time-out; the rest it takes from the connection that broke.
_TIME_OUT = re.compile(r"RPCErr:1:.*?\((\d+) ms\)", re.DOTALL)
_BROKEN = ("eof", "connection", "pipe", "broken", "error originated at tensorpipe", "not running")


def transport_error(error: RuntimeError, to: str, func: Callable[..., Any] | str) -> RpcError:
    """Return the error for a message to `to` that torch could not deliver or get answered."""
    name = func if isinstance(func, str) else getattr(func, "__qualname__", repr(func))
    text = str(error)
    late = _TIME_OUT.search(text)
    if late:
        return RpcError(f"{to!r} has not answered {name}() within {int(late[1]) / 1000:g} s")
    if any(word in text.lower() for word in _BROKEN):
        return RpcError(f"{to!r} is gone or cannot be reached, so {name}() has no answer: {text}")
    return RpcError(f"{name}() could not be called on {to!r}: {text}")
