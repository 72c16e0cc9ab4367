"""What a world is given: which rank this process is, and settings that cannot be."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable

import torch.distributed as dist

# What torch's RPC takes.
_NAME = re.compile(r"[A-Za-z0-9_:-]{1,127}")


def own_place(rank: int, world_size: int) -> tuple[int, int]:
    """Return rank and world size, where not given those of the launcher.

    Raises:
        ValueError: neither is given, or they do not fit.
    """
    rank, world_size = whole_number("rank", rank), whole_number("world_size", world_size)
    if dist.is_initialized():
        there = dist.get_rank(), dist.get_world_size()
    else:
        there = _of_environment("RANK"), _of_environment("WORLD_SIZE")
    rank = there[0] if rank == -1 else rank
    world_size = there[1] if world_size == -1 else world_size
    if rank == -1 or world_size == -1:
        raise ValueError(
            "rank and world_size must be given where no launcher has set RANK and WORLD_SIZE, got "
            f"rank={rank}, world_size={world_size}"
        )
    if dist.is_initialized() and (rank, world_size) != there:
        raise ValueError(
            f"this process is rank {there[0]} of {there[1]} in its process group, got "
            f"rank={rank}, world_size={world_size}"
        )
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1, got {world_size}")
    if not 0 <= rank < world_size:
        raise ValueError(f"rank must be in 0..{world_size - 1}, got {rank}")
    return rank, world_size


def whole_number(setting: str, value: object) -> int:
    """Return what a setting of the caller (a number) or the environment (its digits) says.

    Raises:
        ValueError: it is none.
    """
    if isinstance(value, str) and setting.isupper():
        try:
            return int(value)
        except ValueError:
            pass
    elif isinstance(value, int) and not isinstance(value, bool):
        return value
    raise ValueError(f"{setting} must be a whole number, got {value!r}")


def _of_environment(setting: str) -> int:
    return whole_number(setting, os.environ.get(setting) or "-1")


def check_times(dist_timeout: float, rpc_timeout: float) -> None:
    """Check times in seconds.

    Raises:
        ValueError: no number, or one that cannot be.
    """
    for setting, value in (("dist_timeout", dist_timeout), ("rpc_timeout", rpc_timeout)):
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"{setting} must be a number of seconds, got {value!r}")
    if not 0 < dist_timeout < float("inf"):
        raise ValueError(f"dist_timeout must be more than 0 seconds, got {dist_timeout}")
    if not 0 <= rpc_timeout < float("inf"):
        raise ValueError(f"rpc_timeout must be at least 0 seconds, got {rpc_timeout}")


def fault_of_name(name: object) -> str | None:
    """Return why a process cannot have this name; None where it can."""
    if isinstance(name, str) and _NAME.fullmatch(name):
        return None
    shown = repr(name) if len(repr(name)) < 80 else f"{repr(name)[:60]}... ({len(str(name))} long)"
    return (
        "a name must be 1 to 127 of the letters a-z and A-Z, digits, underscores, colons and "
        f"dashes, got {shown}"
    )


def check_members(names: tuple[str, ...], members: tuple[str, ...]) -> None:
    """Check that all names are members'.

    Raises:
        ValueError: one is not; the nearest is told.
    """
    for name in names:
        if name not in members:
            known = ", ".join(map(repr, members))
            hint = did_you_mean(name, members)
            raise ValueError(f"{name!r} is no member of the world: {known}{hint}")


def did_you_mean(name: object, known: Iterable[object]) -> str:
    """Return "; did you mean 'x'?" with the nearest of those known, or "" where none is near."""
    if not isinstance(name, str):
        return ""
    names = [one for one in known if isinstance(one, str)]
    near = difflib.get_close_matches(name, names, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""
