"""Synchronous and asynchronous calls of a group, and checks of their results."""

from collections.abc import Callable, Iterator, Sequence

import torch

from stepwrap.collectives import CollectiveGroup, CollectiveHandle

Call = Callable[[bool], CollectiveHandle[None] | None]


def now_and_later(call: Call) -> Iterator[None]:
    """Make the call with and without `async_op`; yield when its result must be available."""
    assert call(False) is None
    yield
    handle = call(True)
    assert handle is not None
    assert handle.wait() is None
    assert handle.is_completed()
    yield
    # A second wait must not change tensors that have been reused.
    assert handle.wait() is None


def get_members(ranks: Sequence[int] | None) -> tuple[CollectiveGroup, bool]:
    """Return a new group and whether this rank is a member."""
    group = CollectiveGroup.create(ranks)
    return group, group.current_rank is not None


def assert_same(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert ours.dtype == theirs.dtype
    assert torch.equal(ours, theirs), (ours, theirs)
