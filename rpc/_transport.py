"""What torch says when a message does not arrive, as errors that name the peer; and its times."""

import math
import re
from collections.abc import Callable
from numbers import Real
from typing import Any

from .errors import RpcError

# torch's text for a time-out; the rest it takes from the connection that broke.
_TIME_OUT = re.compile(r"RPCErr:1:.*?\((\d+) ms\)", re.DOTALL)
_BROKEN = ("eof", "connection", "pipe", "broken", "error originated at tensorpipe", "not running")
_NO_WORLD = ("has not been initialized", "RPC not initialized")
_DEVICES = ("set_device_map", "device mapping", "device map")

# In seconds: what torch can count, in milliseconds of 32 bits.
_SHORTEST, _LONGEST = 0.001, 2e6


def checked_timeout(timeout: float) -> float:
    """Return a timeout as torch takes it: -1, 0, or at least what it can count.

    Raises:
        TypeError: it is no number.
        ValueError: it is negative, other than -1, or not finite.
    """
    if timeout == -1:
        return -1
    if not isinstance(timeout, Real) or isinstance(timeout, bool):
        raise TypeError(f"timeout must be a number of seconds, got {timeout!r}")
    if not math.isfinite(timeout) or timeout < 0:
        raise ValueError(
            f"timeout must be seconds, 0 for no limit or -1 for the world's, got {timeout!r}"
        )
    return min(max(float(timeout), _SHORTEST), _LONGEST) if timeout else 0


def is_late(error: RuntimeError) -> bool:
    """Whether torch tells of a time-out: the message may have arrived, or may arrive yet."""
    return _TIME_OUT.search(str(error)) is not None


def transport_error(error: RuntimeError, to: str, func: Callable[..., Any] | str) -> RpcError:
    """Return the error for a message to `to` that torch could not deliver or get answered.

    Args:
        func: what was called; a text is told as it is.
    """
    what = func if isinstance(func, str) else f"{getattr(func, '__qualname__', repr(func))}()"
    text = str(error)
    late = _TIME_OUT.search(text)
    if late:
        return RpcError(f"{to!r} has not answered {what} within {int(late[1]) / 1000:g} s")
    if any(phrase in text for phrase in _NO_WORLD):
        return RpcError(f"{what} cannot be called on {to!r}: the world has been stopped")
    if any(phrase in text for phrase in _DEVICES):
        return RpcError(
            f"{what} on {to!r}: a tensor that is not on the CPU was to be sent, and "
            f"World(device_maps=...) does not say to which device: {text}"
        )
    if any(word in text.lower() for word in _BROKEN):
        return RpcError(f"{to!r} is gone or cannot be reached, so {what} has no answer: {text}")
    return RpcError(f"{what} could not be called on {to!r}: {text}")
