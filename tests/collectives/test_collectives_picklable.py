"""Closures that are sent to other processes."""

import copy
import multiprocessing
import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from stepwrap.collectives import PicklableWrapper


class _Holder:
    """Has attributes and methods that a wrapper could hide."""

    def __init__(self) -> None:
        self.name = "held"
        self.function = lambda x: x

    def __len__(self) -> int:
        return 3


def _adder(k: int) -> Callable[[int], int]:
    return lambda x: x + k


def _call_in_child(fn: Any, results: Any) -> None:
    results.put((fn(1), type(fn).__name__))


def test_a_closure_runs_in_a_spawned_child() -> None:
    spawn = multiprocessing.get_context("spawn")
    results = spawn.SimpleQueue()
    child = spawn.Process(target=_call_in_child, args=(PicklableWrapper(_adder(4)), results))
    child.start()
    child.join(60)
    assert child.exitcode == 0
    assert results.get() == (5, "function")
    results.close()
    child.close()


def test_the_pickle_needs_nothing_of_the_sender() -> None:
    data = pickle.dumps(PicklableWrapper(_adder(4)))
    code = "import pickle, sys; print(pickle.load(sys.stdin.buffer)(1), 'torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], input=data, capture_output=True, timeout=60, check=True
    )
    assert done.stdout.split() == [b"5", b"False"]


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_the_bare_object_comes_out(protocol: int) -> None:
    wrapped = PicklableWrapper(_Holder())
    for out in (pickle.loads(pickle.dumps(wrapped, protocol)), copy.copy(wrapped)):
        assert type(out).__name__ == "_Holder"
        assert (out.name, out.function(2)) == ("held", 2)
    assert type(copy.deepcopy(PicklableWrapper(_adder(1)))(1)) is int


def test_it_stands_for_the_object() -> None:
    holder = _Holder()
    wrapped = PicklableWrapper(holder)
    assert PicklableWrapper(wrapped)._obj is holder
    assert PicklableWrapper(PicklableWrapper(wrapped))._obj is holder
    assert (wrapped.name, wrapped.__len__()) == ("held", 3)
    assert PicklableWrapper(lambda x, *, y: (x, y))(1, y=2) == (1, 2)
    wrapped.name = "outside"
    assert (wrapped.name, holder.name) == ("outside", "held")
    with pytest.raises(AttributeError, match="'_Holder' .*'missing'"):
        _ = wrapped.missing


def test_an_instance_without_init_has_no_attributes() -> None:
    bare = PicklableWrapper.__new__(PicklableWrapper)
    for name in ("x", "_obj", "__len__", "__setstate__", "__deepcopy__"):
        assert not hasattr(bare, name) or name in dir(object)
    with pytest.raises(AttributeError, match="not initialised"):
        pickle.dumps(bare)
