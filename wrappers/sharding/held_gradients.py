"""What FSDP2 keeps between forwards and backwards where ``zero_grad`` does not reach.

All that is read of torch's own state by names that it does not document is read here.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

logger = logging.getLogger(__name__)

_units: WeakSet[nn.Module] = WeakSet()


def watch_units(units: Iterable[nn.Module]) -> None:
    """Let ``drop_held_gradients`` find what ``fully_shard`` made of ``units``."""
    _units.update(units)


def drop_held_gradients(parameters: Iterable[Tensor]) -> None:
    """Drop gradients of ``parameters`` that were not given to them yet; not collective.

    FSDP2 keeps those of the forwards under ``no_sync``, and those of a backward that raised, in
    the whole parameters until the next reduction. Others than its parameters are left alone.
    """
    if not _units:
        return
    chosen = {id(one) for one in parameters}
    for unit in list(_units):
        for group in groups_of(unit):
            _drop(group, chosen)


def find_gathered(parameters: Iterable[Tensor]) -> Tensor | None:
    """Return the first of ``parameters`` that FSDP2 has put together for a forward; not collective.

    Those are freed after the backward, and their values come from the shards again.
    """
    if not _units:
        return None
    whole = {
        id(getattr(one, "_unsharded_param", None))
        for unit in list(_units)
        for group in groups_of(unit)
        for one in group.fsdp_params
    }
    return next((one for one in parameters if id(one) in whole), None)


def recover(root: Any) -> None:
    """Let the next forward of ``root`` begin anew, where one or a backward had raised.

    The gradients of the step that raised are dropped, and those of its window held so far.
    """
    if not is_interrupted(root):
        return
    reset = getattr(root, "reset_iter_state", None)
    if reset is None:
        _warn_once("this version of torch cannot go on after a forward or backward that raised")
        return
    reset()
    drop_held_gradients(root.parameters())


def take_down_dtypes(group: Any) -> None:
    """Let what is trained from now on be reduced in its dtype.

    FSDP2 takes it down at the first forward, and nothing where all of a group is frozen then.
    """
    if getattr(group, "_orig_dtype", None) is None and hasattr(group, "_init_mp_dtypes"):
        group._init_mp_dtypes()


def is_interrupted(root: Any) -> bool:
    """Whether a forward or a backward of ``root`` has begun and has not ended.

    To be asked outside of both: what has begun then has raised.
    """
    context = _context(root)
    if context is None or in_backward():
        return False
    return context.iter_forward_root is not None or bool(
        context.post_backward_final_callback_queued
    )


def is_running(root: Any) -> bool:
    """Whether a forward or a backward that uses the whole parameters of ``root`` is on its way."""
    context = _context(root)
    return in_backward() or (context is not None and context.iter_forward_root is not None)


def in_backward() -> bool:
    """Whether this thread is inside of a backward."""
    return torch._C._current_graph_task_id() != -1


def _drop(group: Any, chosen: set[int]) -> None:
    count = 0
    for one in group.fsdp_params:
        # There are no whole parameters before the first forward.
        whole = getattr(one, "_unsharded_param", None)
        if id(one.sharded_param) not in chosen and id(whole) not in chosen:
            continue
        count += 1
        one.unsharded_accumulated_grad = None
        if whole is not None:
            whole.grad = None
    if count == len(group.fsdp_params):
        # Of copies of shards: the sum over the shards, without the copies yet.
        group._partial_reduce_output = None


def groups_of(unit: Any) -> Iterator[Any]:
    """What torch keeps of the parameters of ``unit`` that are gathered together."""
    try:
        found = unit._get_fsdp_state()._fsdp_param_groups
    except AttributeError:
        _warn_once("gradients that this version of torch keeps under no_sync cannot be dropped")
        return
    yield from found


def _context(root: Any) -> Any:
    """What the units of ``root`` know together about the forward or backward they are in."""
    try:
        context = root._get_fsdp_state()._state_ctx
        _ = context.iter_forward_root, context.post_backward_final_callback_queued
    except AttributeError:
        _warn_once("whether a forward or backward raised cannot be seen in this version of torch")
        return None
    return context


@cache
def _warn_once(text: str) -> None:
    logger.warning("%s", text)
