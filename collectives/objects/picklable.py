"""Functions that plain pickle refuses, made fit for spawned processes."""

import pickle
from typing import Any

import cloudpickle


class PicklableWrapper:
    """Makes a closure, a lambda or an object that holds one picklable, by cloudpickle.

    Calls and reading attributes go to the wrapped object; attributes that are set stay on the
    wrapper. A wrapper of a wrapper holds the innermost object. What unpickles, or comes out of
    copy.copy, is the bare object, without a wrapper around it.

    cloudpickle must be installed on the receiving side too.
    """

    # Any, here and below: the wrapper stands for an object of whatever type.
    def __init__(self, obj: Any) -> None:
        self._obj: Any = obj._obj if isinstance(obj, PicklableWrapper) else obj

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._obj(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        # An instance made by __new__ alone holds nothing: to ask it for _obj would lead here again.
        if "_obj" not in self.__dict__:
            raise AttributeError(f"this {type(self).__name__} is not initialised, no {name!r} yet")
        return getattr(self._obj, name)

    def __reduce__(self) -> tuple[Any, tuple[bytes]]:
        return pickle.loads, (cloudpickle.dumps(self._obj),)
