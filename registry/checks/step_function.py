"""A function named in a config as the training step."""

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from ..imports import import_path


def find_train_step(setting: Any) -> Callable[..., Any] | None:
    """Return the function that `train_step` of a config means; None where it is not set.

    Args:
        setting: an import path, or a mapping with it as `type`; the other keys are arguments
            beside (wrapper, data, optim_wrapper).

    Raises:
        ImportError: there is no such function.
        TypeError: it is not a function of these arguments.
    """
    if setting is None:
        return None
    given = setting if isinstance(setting, Mapping) else {"type": setting}
    options = {key: value for key, value in given.items() if key != "type"}
    path = given.get("type")
    if not isinstance(path, str):
        raise TypeError("must be the import path of a function, such as my_steps.step")
    found = import_path(path)
    if isinstance(found, type) or not callable(found):
        raise TypeError(
            f"{path} is no function; a class with a train_step of its own is named as the wrapper"
        )
    try:
        inspect.signature(found).bind(None, None, None, **options)
    except TypeError as error:
        raise TypeError(
            f"{path} is called with (wrapper, data, optim_wrapper) and the options beside: {error}"
        ) from error
    return partial(found, **options) if options else found
