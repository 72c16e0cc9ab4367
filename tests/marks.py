"""Marks for single cases of parametrized tests."""

from typing import Any

import pytest


def slow(*cases: Any) -> list[Any]:
    """Return cases of `parametrize` that `make test` does not run.

    A tuple gives the values of several arguments:

        @pytest.mark.parametrize("wrapper", ["ddp", *slow("fsdp", "separate")])
        @pytest.mark.parametrize(("size", "kind"), [(2, "fsdp"), *slow((4, "fsdp"), (4, "hsdp"))])
    """
    return _marked(pytest.mark.slow, cases)


def nightly(*cases: Any) -> list[Any]:
    """Return cases of `parametrize` that only `make test-nightly` runs, as `slow` does."""
    return _marked(pytest.mark.nightly, cases)


def _marked(mark: pytest.MarkDecorator, cases: tuple[Any, ...]) -> list[Any]:
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=mark) for case in cases
    ]


def selected(request: pytest.FixtureRequest, argument: str) -> set[Any]:
    """Return the values of an argument in the selected tests that use a module's fixture."""
    return {
        test_item.callspec.params[argument]
        for test_item in request.session.items
        if request.fixturename in getattr(test_item, "fixturenames", ())
        and argument in getattr(getattr(test_item, "callspec", None), "params", ())
    }
