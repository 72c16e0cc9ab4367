"""Calls of a group now and later, and tensors of each rank in several layouts."""

from collections.abc import Callable, Iterator, Sequence

import torch

from stepwrap.collectives import CollectiveGroup, CollectiveHandle

Call = Callable[[bool], CollectiveHandle[None] | None]


def now_and_later(call: Call) -> Iterator[None]:
    """Make the call with and without `async_op`; yields when its outcome must be there."""
    assert call(False) is None
    yield
    handle = call(True)
    assert handle is not None
    assert handle.wait() is None
    assert handle.is_completed()
    yield
    # Waiting again changes nothing, also after the tensors have been used for something else.
    assert handle.wait() is None


def members_of(ranks: Sequence[int] | None) -> tuple[CollectiveGroup, bool]:
    """Return a new group and whether this rank is one of it."""
    group = CollectiveGroup.create(ranks)
    return group, group.current_rank is not None


def assert_same(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """Compare dtype and every bit."""
    assert ours.dtype == theirs.dtype
    assert torch.equal(ours, theirs), (ours, theirs)
