"""Objects as bytes: plain data, functions and classes of any origin, modules."""

from __future__ import annotations

import io
import os
import pickle
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import run, run_script

from stepwrap.parallel import Pickler, dumps, loads, mark_static_module
from stepwrap.transport import wire as _wire

_SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
)
NESTED = st.recursive(
    _SCALARS,
    lambda inner: (
        st.lists(inner)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text() | st.integers(), inner)
        | st.frozensets(st.integers())
    ),
    max_leaves=30,
)
FACTOR = 3


def _send_over_wire(value: Any) -> Any:
    return _wire.unpack(*_wire.pack(value, copy_tensor=True))


@settings(max_examples=200, deadline=None)
@given(value=NESTED, recurse=st.booleans(), copy_tensor=st.booleans())
def test_nested_data(value: Any, recurse: bool, copy_tensor: bool) -> None:
    assert loads(dumps(value, recurse, copy_tensor)) == value
    packed = _wire.pack(value, copy_tensor=copy_tensor, recurse=recurse)
    assert len(packed.data) <= _wire.INLINE_BYTES
    assert _wire.unpack(*packed) == value


@settings(max_examples=40, deadline=None)
@given(count=st.integers(30_000, 36_000), kind=st.sampled_from(["bytes", "array", "both"]))
def test_around_the_size_that_goes_inline(count: int, kind: str) -> None:
    array = np.arange(count, dtype=np.uint8)
    value = {"bytes": [bytes(count)], "array": [array], "both": [bytes(count), array, array[5:]]}
    packed = _wire.pack(value[kind], copy_tensor=True)
    assert len(packed.data) <= _wire.INLINE_BYTES
    arrived = _wire.unpack(*packed)
    assert list(map(bytes, arrived)) == list(map(bytes, value[kind]))
    if kind == "array":
        arrived[0][:] = 1
        assert array[0] == 0


def test_read_only_arrays_stay_so() -> None:
    array = np.zeros(50_000)
    array.flags.writeable = False
    arrived = _send_over_wire([array, np.asfortranarray(np.ones((300, 200)))])
    assert not arrived[0].flags.writeable
    assert arrived[1].flags.f_contiguous
    assert arrived[1].sum() == 60_000


def test_small_data_is_a_plain_pickle() -> None:
    assert pickle.loads(dumps((1, [2]))) == (1, [2])
    assert _wire.pack((1, [2]), copy_tensor=True).fds == ()


@pytest.mark.parametrize("recurse", [False, True])
def test_functions_of_any_kind(recurse: bool) -> None:
    offset = 10

    def local(value: int) -> int:
        return value * FACTOR + offset

    class Local:
        def __init__(self) -> None:
            self.value = local(1)

    assert loads(dumps(lambda: local(2), recurse))() == 16
    assert loads(dumps(Local, recurse))().value == 13
    assert loads(dumps(os.path.join, recurse)) is os.path.join
    # An importable function is pickled by name.
    assert loads(dumps(test_small_data_is_a_plain_pickle)) is test_small_data_is_a_plain_pickle


def test_only_the_globals_that_are_used_travel() -> None:
    names: dict[str, Any] = {"used": 5, "unused": bytes(10**6), "__name__": "made_here"}
    exec("def function():\n    return used", names)
    data = dumps(names["function"])
    assert len(data) < 2000
    assert loads(data)() == 5


def test_pickler_writes_messages_that_stand_alone() -> None:
    file = io.BytesIO()
    pickler = Pickler(file)
    shared = ["once"]
    for value in (shared, [shared, 1]):
        pickler.dump(value)
    file.seek(0)
    assert [pickle.load(file), pickle.load(file)] == [["once"], [["once"], 1]]
    with pytest.raises(TypeError):
        pickler.dump([io.StringIO, (n for n in "a")])
    position = file.seek(0, os.SEEK_END)
    pickler.dump(2)
    assert loads(file.getvalue()[position:]) == 2


def test_pickling_within_pickling() -> None:
    class Outer:
        def __reduce__(self) -> Any:
            return loads, (dumps({"inner": [1]}),)

    assert loads(dumps([Outer(), Outer()])) == [{"inner": [1]}] * 2


def test_a_function_defined_twice_takes_its_own_globals() -> None:
    # Picklers are reused and must not keep anything of an earlier message.
    for number in range(50):
        names: dict[str, Any] = {"__name__": f"made_{number}"}
        exec("def function():\n    return 1", names)
        assert loads(dumps(names["function"])).__globals__["__name__"] == f"made_{number}"
        names.clear()
        del names


@pytest.fixture
def made_module() -> Iterator[types.ModuleType]:
    module = types.ModuleType("made_for_a_test")
    exec("def answer():\n    return 42\nclass Answer:\n    pass", module.__dict__)
    yield module
    sys.modules.pop(module.__name__, None)


def test_static_modules_go_by_name(made_module: Any) -> None:
    made_module.lock = sys.stdout
    sys.modules[made_module.__name__] = made_module
    before = dict(vars(made_module))
    for _ in range(2):
        mark_static_module(made_module)
    assert vars(made_module) == before
    assert loads(dumps(made_module)) is made_module
    assert loads(dumps(made_module.answer)) is made_module.answer
    assert type(loads(dumps(made_module.Answer()))) is made_module.Answer
    assert loads(dumps(lambda: made_module.answer()))() == 42
    mark_static_module(os.path)
    assert loads(dumps(os.path)) is os.path
    with pytest.raises(TypeError, match="takes a module, got str"):
        mark_static_module("os")  # type: ignore[arg-type]


_SCRIPT = """
import multiprocessing
import sys
from dataclasses import dataclass

from stepwrap.parallel import SimpleQueue, dumps, loads

LARGE = bytes(10**6)


@dataclass
class Point:
    x: int


def work(point):
    assert len(LARGE) == 10**6
    return Point(point.x + 1)


def with_late(x):
    return x + LATE


def dumped_here(recurse):
    return dumps((work, Point(1)), recurse=recurse)


def serve(given, back):
    while (task := given.get()) is not None:
        function, argument = task
        try:
            back.put(function(argument))
        except NameError as error:
            back.put(str(error))


if __name__ == "__main__":
    LATE = 5

    @dataclass
    class Guarded:
        x: int

    def guarded(value):
        return Guarded(value.x + LATE)

    given, back = SimpleQueue(), SimpleQueue()
    context = multiprocessing.get_context(sys.argv[1])
    process = context.Process(target=serve, args=(given, back), daemon=True)
    process.start()
    given.put((work, Point(1)))
    answer = back.get(60)
    assert isinstance(answer, Point), type(answer)
    assert answer == Point(2)
    assert len(dumps(work)) < 300, "only the name"
    given.put((with_late, 1))
    if sys.argv[1] == "spawn":
        assert "LATE" in back.get(60)
    else:
        assert back.get(60) == 6
    given.put((loads, dumps(with_late, recurse=True)))
    assert back.get(60)(1) == 6
    for recurse in (False, sys.argv[1] == "spawn"):
        given.put((dumped_here, recurse))
        assert loads(back.get(60)) == (work, Point(1))
    given.put((guarded, Guarded(1)))
    answer = back.get(60)
    assert answer == Guarded(6), answer
    given.put(None)
    process.join(30)
    assert process.exitcode == 0
    print("done")
"""


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_objects_of_the_script(method: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(_SCRIPT)
    assert run("script.py", method, cwd=tmp_path) == "done\n"


def test_objects_of_another_script_are_named(tmp_path: Path) -> None:
    code = (
        "from stepwrap.parallel import dumps\ndef work():\n    return 1\n"
        "for recurse in (False, True):\n    print(dumps(work, recurse=recurse).hex())\n"
    )
    by_name, by_value = map(bytes.fromhex, run_script(code, tmp_path).split())
    with pytest.raises(AttributeError, match=r"work .*script\.py .*not .*this process"):
        loads(by_name)
    assert loads(by_value)() == 1
