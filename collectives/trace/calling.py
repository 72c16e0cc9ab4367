"""Turn errors of the transport into CollectiveErrors that name ranks, calls and lines.

The *transport* is the library that moves the data, gloo or NCCL, and torch's store.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import NamedTuple, TypeAlias

import torch
import torch.distributed as dist

from ..errors import Call, CollectiveError, Group, Place, describe_places, user_site
from ..process.ranks import live_world_size, members
from . import tracing as trace

# If ranks wait for each other, all of them time out within this many seconds after the first one.
_PATIENCE_S = 1.0
# Seconds to wait for a rank whose process is known to run: it may be slow on an overloaded host.
_BUSY_S = 20.0
_POLL_S = 0.02
_SILENT = "does not answer: it has died, is stuck, has been stopped or has not begun"
_thread = threading.local()


# Errors in a collective that do not come from the transport.
_OF_THIS_RANK = (CollectiveError, torch.OutOfMemoryError)


class calling(Call):
    """Surround the communication of a collective: ``with calling("all_reduce", group): ...``.

    An error of the transport in this context is raised as a CollectiveError that names ranks, calls
    and lines. While tracing, the ranks first check that all of them are in this call. If calls in
    one group are nested, only the outermost has an effect, because it is the one that the user
    made.
    """

    def __enter__(self) -> Call:
        outer: calling | None = getattr(_thread, "call", None)
        self._outer = outer
        self._record: trace.CollectiveRecord | None = None
        self._is_inner = outer is not None and outer.group is self.group
        if outer is not None and self._is_inner:
            return outer
        _thread.call = self
        if trace.is_tracing():
            try:
                self._record = trace.start(self)
                trace.compare(self, self._record)
            except BaseException as error:
                self.__exit__(type(error), error, None)
                raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._is_inner:
            return
        _thread.call = self._outer
        if self._record:
            self._record.state = "finished" if error is None else "failed"
        if error is None:
            _withdraw_failure(self.group)
        elif isinstance(error, RuntimeError) and not isinstance(error, _OF_THIS_RANK):
            raise _failure(self.here(), self.group, error) from error


class Progress(NamedTuple):
    """The activity of a loop, such as "training", and its position."""

    what: str
    where: str

    def __str__(self) -> str:
        return f"{self.what} ({self.where})"


@contextlib.contextmanager
def in_progress(progress: Callable[[], Progress]) -> Iterator[None]:
    """Raise an error that names missing ranks if the transport fails in this context.

    Every rank must enter it. Use it for code that communicates without ``calling``, such as torch's
    backward passes. Meanwhile a thread reports this rank's position to other ranks that ask. With
    one process nothing is done.

    Args:
        progress: function that returns the current activity; it is also called from another thread.

    Raises:
        CollectiveError: the transport failed; its error is the cause.
    """
    if live_world_size() == 1:
        yield
        return
    with trace.answering(lambda: str(progress())):
        try:
            yield
        except RuntimeError as error:
            if _is_of_the_transport(error):
                position = Place(dist.get_rank(), *progress())
                raise _failure(position, None, error, is_call=False) from error
            raise


def explain_transport(error: BaseException, name: str) -> None:
    """Raise a CollectiveError that names ranks if the error comes from the transport.

    Does nothing inside ``in_progress``, which raises such an error itself.

    Args:
        error: the error that was caught.
        name: the function in which it was raised.
    """
    if trace.is_in_progress() or not _is_of_the_transport(error) or live_world_size() == 1:
        return
    raise _failure(Place(dist.get_rank(), name, user_site()), None, error) from error


def _is_of_the_transport(error: BaseException) -> bool:
    """Return whether NCCL, a store or gloo raised the error; gloo is recognised by the text."""
    if isinstance(error, CollectiveError) or not isinstance(error, RuntimeError):
        return False
    return isinstance(error, dist.DistError) or "/gloo/" in str(error)


class _FailureHistory(NamedTuple):
    """The keys of this rank's reports in the store, and the keys of ranks that did not answer."""

    posted: set[str]
    silent: set[str]


_histories = weakref.WeakKeyDictionary[dist.ProcessGroup, _FailureHistory]()
_Answers: TypeAlias = "tuple[list[Place], dict[int, str]]"


def _failure(
    position: Place, group: Group, error: BaseException, *, is_call: bool = True
) -> CollectiveError:
    """Return the error to raise, after asking where the other ranks are."""
    ranks = members(group)
    positions, elsewhere = _ask_in_time(position, ranks, group)
    transport_text = f"The transport ({dist.get_backend_config(group)}) says: {error}"
    title, needs = (
        (f"{position.call}()", "must be reached by") if is_call else (position.call, "needs")
    )
    if (
        not elsewhere
        and len({(rank_position.call, rank_position.detail) for rank_position in positions}) == 1
    ):
        return CollectiveError(
            f"{title} failed on all ranks: {describe_places(positions)}. {transport_text}"
        )
    return CollectiveError(
        f"{title} {needs} all {len(ranks)} ranks, but did not finish on rank {position.rank}: "
        f"{describe_places(positions, elsewhere)}. {transport_text}"
    )


def _withdraw_failure(group: Group) -> None:
    """Delete this rank's report of an earlier failure, after a successful call."""
    history = _histories.get(_world()) if _histories else None
    if history and history.posted:
        history.silent.clear()
        key = _key(group, dist.get_rank())
        if key in history.posted:
            history.posted.discard(key)
            _world().get_group_store().delete_key(key)


def _ask_in_time(position: Place, ranks: list[int], group: Group) -> _Answers:
    """Return the result of ``_ask``, or only this rank's place if the store does not respond."""
    answers_in_time: list[_Answers] = []
    has_store = threading.Event()
    patience = _PATIENCE_S + (trace.ANSWER_S if trace.is_answering() else 0.0)

    def ask() -> None:
        with contextlib.suppress(RuntimeError):
            answers_in_time.append(_ask(position, ranks, group, patience, has_store))

    asking = threading.Thread(target=ask, name="stepwrap-report", daemon=True)
    asking.start()
    asking.join(patience + _PATIENCE_S)
    if has_store.is_set():
        asking.join(_BUSY_S)
    if answers_in_time:
        return answers_in_time[0]
    unreachable = {rank: "cannot be asked" for rank in ranks if rank != position.rank}
    if _is_served_by_rank_0() and 0 in unreachable:
        unreachable[0] = (
            "does not answer, nor does the store that it serves: it is stuck or stopped"
        )
    return [position], unreachable


def _ask(
    position: Place, ranks: list[int], group: Group, patience: float, has_store: threading.Event
) -> _Answers:
    """Return the places of ranks that failed too, and a text for each of the others."""
    store = _world().get_group_store()
    history = _histories.setdefault(_world(), _FailureHistory(set(), set()))
    keys = {rank: _key(group, rank) for rank in ranks}
    store.set(keys[position.rank], position.encode().decode())
    history.posted.add(keys.pop(position.rank))
    has_store.set()
    question = trace.ask(store) if trace.is_answering() else None
    positions, answers, started = {position.rank: position}, dict[int, str](), time.monotonic()
    while True:
        for rank, key in keys.items():
            if rank not in positions and store.check([key]):
                positions[rank] = Place.decode(store.get(key))
        if question:
            answers |= trace.answers(store, question, [r for r in keys if r not in answers])
        missing = {key: r for r, key in keys.items() if r not in positions and r not in answers}
        waited_s = time.monotonic() - started
        # Ranks that were silent before will not report a failure: wait only for their answers.
        was_silent = missing.keys() <= history.silent
        if waited_s > (bool(question) * _PATIENCE_S if was_silent else patience):
            will_answer = (trace.will_answer(store, rank) for rank in missing.values())
            if not question or waited_s > _BUSY_S or not any(will_answer):
                break
        # A rank in a collective may be about to fail like this one.
        may_fail = any(
            r not in positions and text.startswith(trace.IN) for r, text in answers.items()
        )
        if not missing and (waited_s > patience or not may_fail):
            break
        time.sleep(_POLL_S)
    history.silent.update(missing)
    answers |= dict.fromkeys(missing.values(), _SILENT if question else "has not arrived")
    # Ranks that failed long ago no longer wait, so their places are outdated.
    gone = {
        rank: (
            f"gave up in {rank_position.call} ({rank_position.site}) "
            f"{position.when - rank_position.when:.0f} s ago"
        )
        for rank, rank_position in positions.items()
        if position.when - rank_position.when > _PATIENCE_S
    }
    waiting = [rank_position for rank, rank_position in positions.items() if rank not in gone]
    return waiting, {r: text for r, text in answers.items() if r not in positions} | gone


def _world() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def _is_served_by_rank_0() -> bool:
    """Return whether rank 0's process serves the store, rather than torchrun's agent."""
    store = _world().get_group_store()
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    has_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return isinstance(store, dist.TCPStore) and not has_agent


def _key(group: Group, rank: int) -> str:
    return f"stepwrap/failed/{(group or _world()).group_name}/{rank}"
