"""Unpickled exceptions can be raised and have a traceback."""

import pickle
import re
import sys
import threading
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from process_work import TwoArguments

from stepwrap.parallel import ExceptionWithTraceback, RemoteError, RemoteTraceback


class _WrongMessage(Exception):
    def __init__(self, code: int) -> None:
        super().__init__(f"code {code}")


class _File(OSError):
    def __init__(self, name: str) -> None:
        super().__init__(2, "gone", name)
        self.name = name


class _Coded(SystemExit):
    def __init__(self, code: int, *, reason: str) -> None:
        super().__init__(code)
        self.reason = reason


class _BecomesAnother(Exception):
    def __reduce__(self) -> tuple[type, tuple[str]]:
        return ValueError, ("own",)


class _DropsState(Exception):
    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return _DropsState, self.args


class _BecomesNone(Exception):
    def __reduce__(self) -> str:
        return "_NONE"


_NONE = None


class _RaisesInPickle(Exception):
    def __reduce__(self) -> tuple[type, tuple[str]]:
        raise KeyboardInterrupt


class _Endless(Exception):
    def __reduce__(self) -> tuple[type, tuple[object]]:
        return _Endless, (_Endless(),)


class _NoText(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


class _NotHere(Exception):
    """An error that can only be created while `refuses` is False."""

    refuses = False

    def __init__(self, text: str) -> None:
        if self.refuses:
            raise SystemExit(1)
        super().__init__(text)


class _WithLock(Exception):
    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.lock = threading.Lock()


def through(error: BaseException) -> BaseException:
    """Raise the exception with a cause, catch it, pickle and unpickle it."""
    try:
        try:
            raise KeyError("the cause")
        except KeyError as cause:
            raise error from cause
    except BaseException as caught:
        carried = pickle.loads(pickle.dumps(ExceptionWithTraceback(caught)))
    assert isinstance(carried, BaseException)
    assert isinstance(carried.__cause__, RemoteTraceback)
    assert "KeyError: 'the cause'" in str(carried.__cause__)
    assert "raise error from cause" in str(carried.__cause__)
    return carried


def _local() -> Exception:
    class Local(Exception):
        def __init__(self, *, key: int) -> None:
            super().__init__("local")

    return Local(key=1)


@pytest.mark.parametrize(
    "make",
    [
        lambda: ValueError("wrong", 3),
        lambda: TwoArguments("size", 3),
        lambda: _WrongMessage(3),
        lambda: _File("name"),
        lambda: _Coded(3, reason="why"),
        lambda: _BecomesAnother("own"),
        lambda: _BecomesNone("own"),
        lambda: _RaisesInPickle("own"),
        lambda: _Endless("own"),
        lambda: KeyboardInterrupt(),
        lambda: SystemExit(3),
        lambda: ImportError("no module", name="name", path="path"),
        lambda: UnicodeDecodeError("utf-8", b"abc", 0, 1, "wrong"),
        _local,
    ],
)
def test_type_message_and_attributes_survive(make: Callable[[], BaseException]) -> None:
    error = make()
    carried = through(error)
    assert type(carried) is type(error)
    assert (str(carried), carried.args) == (str(error), error.args)
    assert vars(carried) == vars(error)
    for name in ("code", "filename", "errno", "path", "name", "object"):
        assert getattr(carried, name, None) == getattr(error, name, None)


def test_the_text_stands_in_triple_quotes_and_may_have_another_traceback() -> None:
    try:
        raise ValueError("with traceback")
    except ValueError as error:
        wrapped, tb = ExceptionWithTraceback(error), error.__traceback__
    assert isinstance(wrapped.exc, ValueError)
    assert wrapped.tb.startswith('\n"""\nTraceback')
    assert wrapped.tb.endswith('ValueError: with traceback\n"""')
    bare = ExceptionWithTraceback(ValueError("bare"), tb)
    assert "in test_the_text" in bare.tb
    assert str(pickle.loads(pickle.dumps(bare)).__cause__) == bare.tb


def test_exceptions_that_cannot_be_pickled_become_remote_errors() -> None:
    carried = through(_WithLock("locked"))
    assert isinstance(carried, RemoteError)
    assert carried.type_name == f"{__name__}._WithLock"
    assert carried.message == "locked"
    assert "cannot pickle '_thread.lock' object" in carried.traceback
    again = pickle.loads(pickle.dumps(carried))
    assert (str(again), again.traceback) == (str(carried), carried.traceback)


def test_an_exception_without_a_text_is_carried() -> None:
    assert type(through(_NoText())) is _NoText


def test_exceptions_that_cannot_be_unpickled_become_remote_errors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data = pickle.dumps(ExceptionWithTraceback(_NotHere("not here")))
    assert type(pickle.loads(data)) is _NotHere
    monkeypatch.setattr(_NotHere, "refuses", True)
    carried = pickle.loads(data)
    assert isinstance(carried, RemoteError)
    assert carried.message == "not here"
    assert "not recreate it: SystemExit" in str(carried.__cause__)


def test_large_exceptions_become_texts_of_bounded_length() -> None:
    carried = through(ValueError("head", b"x" * (17 << 20), "tail"))
    assert isinstance(carried, RemoteError)
    assert "longer" not in carried.message
    data = pickle.dumps(ExceptionWithTraceback(ValueError("y" * (20 << 20))))
    assert len(data) < 1 << 18
    text = str(pickle.loads(data).__cause__)
    assert len(text) < 66_000
    assert re.search(r"\[cut here.* 209", text)


def test_tensors_go_along_by_copy() -> None:
    import torch

    tensor = torch.arange(3.0)
    carried = through(ValueError("not finite", tensor))
    assert type(carried) is ValueError
    assert torch.equal(carried.args[1], tensor)
    assert not tensor.is_shared()
    assert not carried.args[1].is_shared()


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exception groups and notes are missing")
def test_groups_keep_their_members_and_notes() -> None:
    group = ExceptionGroup("many", [ValueError("one"), TwoArguments("size", 3)])  # noqa: F821
    group.add_note("of the group")
    carried = through(group)
    assert type(carried) is type(group)
    assert carried.__notes__ == ["of the group"]
    assert [type(member) for member in carried.exceptions] == [ValueError, TwoArguments]

    group = ExceptionGroup("many", [ValueError("one"), _WithLock("locked")])  # noqa: F821
    carried = through(group)
    assert type(carried) is type(group)
    assert [type(member) for member in carried.exceptions] == [ValueError, RemoteError]

    error = _DropsState("own")
    error.add_note("of the error")
    assert through(error).__notes__ == ["of the error"]


@given(st.lists(st.text(st.characters(codec=None)) | st.integers() | st.none()))
def test_all_plain_arguments_survive(args: list[object]) -> None:
    carried = pickle.loads(pickle.dumps(ExceptionWithTraceback(RuntimeError(*args))))
    assert type(carried) is RuntimeError
    assert carried.args == tuple(args)
