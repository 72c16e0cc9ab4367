"""Who belongs to a world: names and numbers, agreed on before anything else begins."""

from __future__ import annotations

import difflib
import json
import os
import time
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from .errors import RpcError

# How long rank 0 keeps the store of a world that could not begin, so that all can read why.
_LINGER_S = 3.0


def own_place(rank: int, world_size: int) -> tuple[int, int]:
    """Return rank and world size, where not given those of the launcher.

    Raises:
        ValueError: neither is given, or they do not fit.
    """
    if dist.is_initialized():
        there = dist.get_rank(), dist.get_world_size()
    else:
        there = int(os.environ.get("RANK") or -1), int(os.environ.get("WORLD_SIZE") or -1)
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
    if not 0 <= rank < world_size:
        raise ValueError(f"rank must be in 0..{world_size - 1}, got {rank}")
    return rank, world_size


def check_members(names: tuple[str, ...], members: tuple[str, ...]) -> None:
    """Check that all names are members'.

    Raises:
        ValueError: one is not; the nearest is told.
    """
    for name in names:
        if name not in members:
            near = difflib.get_close_matches(name, members, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(
                f"{name!r} is no member of the world: {', '.join(map(repr, members))}{hint}"
            )


def agree_on_members(
    store: Store, *, name: str, rank: int, world_size: int, timeout_s: float
) -> dict[int, str]:
    """Return the names of all members by rank; every member must call this.

    Raises:
        ValueError: a rank or a name given twice, or different world sizes.
        RpcError: members have not come in time; their ranks are named.
    """
    own = json.dumps({"name": name, "world_size": world_size})
    # A rank claims its place once; a second one finds what the first one has written.
    claim = f"member_{rank}"
    if store.add(f"claims_{rank}", 1) > 1:
        other = json.loads(_read(store, claim, timeout_s) or own)
        raise ValueError(f"rank {rank} of the world is {other['name']!r}, so {name!r} cannot be it")
    store.set(claim, own)
    try:
        return _read_members(store, world_size, timeout_s)
    finally:
        _linger(store, "seen_members", rank, world_size)


def _read_members(store: Store, world_size: int, timeout_s: float) -> dict[int, str]:
    deadline = time.monotonic() + timeout_s
    names: dict[int, str] = {}
    for rank in range(world_size):
        text = _read(store, f"member_{rank}", max(0.01, deadline - time.monotonic()))
        if text is None:
            _raise_missing(store, names, world_size, timeout_s)
        other = json.loads(text or "{}")
        if other["world_size"] != world_size:
            raise ValueError(
                f"world_size must be the same everywhere: it is {other['world_size']} in rank "
                f"{rank} ({other['name']!r}), {world_size} here"
            )
        if other["name"] in names.values():
            first = next(one for one, known in names.items() if known == other["name"])
            raise ValueError(
                f"names must differ: ranks {first} and {rank} are both called {other['name']!r}"
            )
        names[rank] = other["name"]
    return names


def _raise_missing(store: Store, names: dict[int, str], world_size: int, timeout_s: float) -> None:
    missing = [rank for rank in range(world_size) if not store.check([f"member_{rank}"])]
    here = ", ".join(f"{rank} ({name!r})" for rank, name in names.items()) or "none before it"
    ranks = ", ".join(map(str, missing)) or "some"
    raise RpcError(
        f"the world is not complete: rank {ranks} of {world_size} has not come within "
        f"{timeout_s:g} s; here: {here}"
    )


def _read(store: Store, key: str, timeout_s: float) -> str | None:
    try:
        store.wait([key], timedelta(seconds=timeout_s))
    except dist.DistStoreError:
        return None
    return str(store.get(key).decode())


def _linger(store: Store, key: str, rank: int, world_size: int) -> None:
    """Have rank 0, with whom the store goes, wait until the others have read it."""
    try:
        store.add(key, 1)
        deadline = time.monotonic() + _LINGER_S
        while rank == 0 and store.add(key, 0) < world_size and time.monotonic() < deadline:
            time.sleep(0.01)
    except RuntimeError:
        # Rank 0 has gone already; what is to be said of that has been read.
        return


def leave_together(store: Store, rank: int, names: dict[int, str], timeout_s: float) -> None:
    """Wait until every member has come to the end of the world.

    Raises:
        RpcError: members have not come in time; they are named.
    """
    store.set(f"left_{rank}", "1")
    keys = {f"left_{one}": name for one, name in names.items()}
    try:
        store.wait(list(keys), timedelta(seconds=timeout_s))
    except dist.DistStoreError as error:
        missing = ", ".join(repr(name) for key, name in keys.items() if not store.check([key]))
        raise RpcError(f"end of the world: {missing} not come within {timeout_s:g} s") from error
    finally:
        _linger(store, "seen_end", rank, len(names))
