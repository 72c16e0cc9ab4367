"""A plain function as the training step of any wrapper."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias, TypeVar

from torch import Tensor

from .step import Steps

StepFunction: TypeAlias = Callable[[Any, Any, Any], Mapping[str, Any]]
W = TypeVar("W", bound=Steps)


def with_train_step(wrapper: type[W], function: StepFunction) -> type[W]:
    """Return a subclass of ``wrapper`` whose training step is ``function``.

    The function does what an overridden ``train_step`` does: the forward by ``wrapper(...)``,
    the update by ``optim_wrapper``. The method of another wrapper is such a function, too::

        def clipped(wrapper, data, optim_wrapper):
            with optim_wrapper.optim_context(wrapper):
                losses = wrapper(*data, mode="loss")
            optim_wrapper.update_params(losses["loss"].clamp(max=5))
            return {"loss": losses["loss"]}

        model = with_train_step(StepDistributedDataParallel, clipped)(net)

    Args:
        wrapper: a model wrapper's class.
        function: called as ``function(wrapper, data, optim_wrapper)``; returns what to log.

    Raises:
        TypeError: no wrapper's class, or no function of three arguments. By a step: it returns no
            dict, or something in it that is no number.
    """
    if not (isinstance(wrapper, type) and issubclass(wrapper, Steps)):
        raise TypeError(f"with_train_step needs the class of a model wrapper, got {wrapper!r}")
    name = _name_of(function)
    check_step_function(function)

    def train_step(self: Any, data: Any, optim_wrapper: Any) -> dict[str, Any]:
        logs = function(self, data, optim_wrapper)
        if not isinstance(logs, Mapping):
            raise TypeError(
                f"the training step {name} must return a dict of what to log, got "
                f"{type(logs).__name__}"
            )
        return {key: _loggable(name, key, value) for key, value in logs.items()}

    members = {
        "train_step": train_step,
        "__module__": getattr(function, "__module__", __name__),
        "__doc__": f"``{wrapper.__name__}`` with the training step ``{name}``.",
    }
    return type(f"{wrapper.__name__}_with_{name}", (wrapper,), members)


def check_step_function(function: Any) -> None:
    """Raise TypeError where ``function`` cannot be called as a training step."""
    if isinstance(function, type) or not callable(function):
        raise TypeError(
            "a training step is a function(wrapper, data, optim_wrapper) that returns what to log, "
            f"got {function!r}"
        )
    try:
        inspect.signature(function).bind(None, None, None)
    except ValueError:
        return
    except TypeError as error:
        raise TypeError(
            f"the training step {_name_of(function)} must take (wrapper, data, optim_wrapper): "
            f"{error}"
        ) from error


def _loggable(name: str, key: str, value: Any) -> Any:
    if isinstance(value, Tensor):
        # With a graph it would keep that until it is logged.
        return value.detach()
    if hasattr(value, "__float__"):
        return value
    raise TypeError(f"the training step {name} must return numbers or tensors, got {key}={value!r}")


def _name_of(function: Any) -> str:
    inner = getattr(function, "func", function)
    return str(getattr(inner, "__qualname__", type(inner).__name__)).rpartition(".")[2]
