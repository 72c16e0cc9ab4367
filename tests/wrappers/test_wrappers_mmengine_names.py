"""mmengine's documented names exist with their arguments; docs/migrate.md lists the others."""

import inspect
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from stepwrap import wrappers

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    reason = "mmengine, the extra of that name, cannot be imported"
    theirs_model = pytest.importorskip("mmengine.model", reason=reason, exc_type=ImportError)
    theirs_optim = pytest.importorskip("mmengine.optim", reason=reason, exc_type=ImportError)

PAGE = (Path(__file__).parents[2] / "docs/migrate.md").read_text()
# mmengine's classes and ours; MMFullyShardedDataParallel wraps torch's older class.
CLASSES = {
    "OptimWrapper": "OptimWrapper",
    "AmpOptimWrapper": "AmpOptimWrapper",
    "OptimWrapperDict": "OptimWrapperDict",
    "BaseModule": "BaseModule",
    "BaseModel": "BaseModel",
    "BaseDataPreprocessor": "DataPreprocessor",
    "MMDistributedDataParallel": "StepDistributedDataParallel",
    "MMSeparateDistributedDataParallel": "SeparateDistributedDataParallel",
    "MMFullyShardedDataParallel": "StepFullyShardedDataParallel",
}
# Names without a counterpart; the members of an OptimWrapperDict have its missing ones.
ABSENT = {
    "AmpOptimWrapper.valid_dtypes",
    "OptimWrapperDict.defaults",
    "OptimWrapperDict.scale_loss",
    "OptimWrapperDict.should_sync",
    *(
        f"{name}.{to}"
        for name in ("BaseModel", "BaseDataPreprocessor")
        for to in ("mlu", "musa", "npu")
    ),
}
OTHER_ARGUMENTS = {
    "AmpOptimWrapper.__init__",  # accepts both orders, see test_wrappers_amp.py
    "BaseDataPreprocessor.__init__",  # non_blocking only as keyword
    "MMFullyShardedDataParallel.__init__",  # only keywords
    "OptimWrapperDict.initialize_count_status",  # same as in OptimWrapper
}
FUNCTIONS = {
    "convert_sync_batchnorm",
    "detect_anomalous_params",
    "initialize",
    "is_model_wrapper",
    "revert_sync_batchnorm",
}


def arguments(function: Callable[..., Any]) -> list[str]:
    """Return the names of the arguments that may be given by position and by name."""
    parameters = inspect.signature(function).parameters.values()
    named = [
        parameter.name
        for parameter in parameters
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    ]
    return [name for name in named if name != "self"]


def documented(cls: type) -> dict[str, Any]:
    """Yield the public names that a class of mmengine defines, and its constructor."""
    names = {
        name
        for base in cls.__mro__
        if base.__module__.startswith("mmengine")
        for name in vars(base)
    }
    return {
        name: getattr(cls, name) for name in names if name == "__init__" or not name.startswith("_")
    }


def differences(name: str) -> Iterator[str]:
    """Return members of a class that are missing here or take other arguments."""
    ours: Any = getattr(wrappers, CLASSES[name])
    # An instance of ours also has instance attributes.
    instance = wrappers.BaseModule() if name.startswith("Base") else object
    theirs = getattr(theirs_model, name, None) or getattr(theirs_optim, name)
    for member, value in documented(theirs).items():
        full = f"{name}.{member}"
        present = hasattr(ours, member) or member in vars(instance)
        if present == (full in ABSENT):
            yield f"{full} is there: {present}"
        if not present or not inspect.isfunction(value) or full in OTHER_ARGUMENTS:
            continue
        our_member = getattr(ours, member)
        expected, actual = arguments(value), arguments(our_member)
        passes = any(
            p.kind is p.VAR_POSITIONAL for p in inspect.signature(our_member).parameters.values()
        )
        if actual[: len(expected)] != expected and not passes:
            yield f"{full} takes {actual}, not {expected}"


def test_classes_have_the_documented_members() -> None:
    assert not [line for name in CLASSES for line in differences(name)]


def test_functions_have_the_documented_arguments() -> None:
    for name in FUNCTIONS:
        expected, actual = (
            arguments(getattr(theirs_model, name)),
            arguments(getattr(wrappers, name)),
        )
        assert actual[: len(expected)] == expected, name


def test_missing_names_are_documented() -> None:
    section = PAGE.partition("\n## From mmengine\n")[2].partition("\n## ")[0]
    for name in (*CLASSES, *FUNCTIONS):
        assert name in section
    public = {name for name in theirs_model.__all__ if not hasattr(wrappers, name)} - set(CLASSES)
    assert {name for name in public if name not in section} == set()
