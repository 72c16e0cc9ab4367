"""Tests whose body runs on every rank, and checks that exchange values between ranks."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import Tensor

T = TypeVar("T")


def on_ranks(ranks: int | str, **options: Any) -> Callable[[Callable[..., None]], Any]:
    """Run the decorated test on every rank of a new gloo group.

    The arguments of the test, such as parameters and ``tmp_path``, are pickled.

    Args:
        ranks: number of ranks, or the name of the test's argument that holds it.
        options: further arguments of ``run_ranks``.
    """

    def decorate(test: Callable[..., None]) -> Any:
        @functools.wraps(test)
        def run(**arguments: Any) -> None:
            size = arguments[ranks] if isinstance(ranks, str) else ranks
            run_ranks(_call, size, test.__module__, test.__name__, arguments, **options)

        return run

    return decorate


def _call(module: str, name: str, arguments: dict[str, Any]) -> None:
    getattr(importlib.import_module(module), name).__wrapped__(**arguments)


def gathered(value: T) -> list[T]:
    """Return the values of all ranks in the order of the ranks; every rank must call this."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def same_on_ranks(tensor: Tensor) -> bool:
    """Return whether a tensor has the same bits on all ranks; every rank must call this."""
    head, *tail = gathered(tensor.detach())
    return all(torch.equal(head, other) for other in tail)


def assert_near(actual: Any, expected: Any, bound: float) -> None:
    """Compare tensors, or dicts of tensors, by their largest absolute difference."""
    torch.testing.assert_close(actual, expected, rtol=0, atol=bound)


@contextmanager
def raises_with(error: Any, *texts: str) -> Iterator[None]:
    """Expect an error whose message contains each of the texts, which are not patterns."""
    with pytest.raises(error) as caught:
        yield
    for text in texts:
        assert text in str(caught.value), f"{text!r} is not in {str(caught.value)!r}"
