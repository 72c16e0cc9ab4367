"""CollectiveError, and functions that describe where each rank is and how ranks differ."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, TypeAlias, TypeVar

import torch.distributed as dist

T = TypeVar("T")


class CollectiveError(RuntimeError):
    """Raised if a collective fails on a rank, or a rank dies, leaves or does not arrive in time."""


_FOLDER = os.path.dirname(os.path.abspath(__file__)) + os.sep
_ROOT = Path(__file__).absolute().parents[1]
_OURS = tuple(
    f"{marker.parent}{os.sep}"
    for marker in _ROOT.glob("*/py.typed")
    if marker.parent.name != "configs"
)
# Frames of `contextlib` lie between a `with` statement and this package's context manager.
_NOT_CALLERS = _FOLDER, contextlib.__file__
# The maximum number of keys or differences in an error text.
_SHOWN = 5
_STANDARD_LIBRARY = os.path.dirname(os.__file__) + os.sep

# None is the default group.
Group: TypeAlias = dist.ProcessGroup | None
Describe: TypeAlias = "Callable[[], str | Iterable[object]]"


@dataclass
class Call:
    """One call of a collective on this rank.

    Attributes:
        name: the function, without parentheses.
        group: the ranks that must make the call.
        describe: function that returns a description of this rank's arguments: a text, or the keys
            of a dict. Tracing requires the same description on all ranks unless ``has_headers``.
        detail: a text such as "from rank 0", which must be the same on all ranks.
        has_headers: if True, tracing adds no header exchange: the call exchanges headers itself or
            must not exchange any (barriers, messages, ``wait`` of async calls).
    """

    name: str
    group: Group = None
    describe: Describe | None = None
    detail: str = ""
    has_headers: bool = False

    def structure(self) -> str | list[str]:
        """Describe this rank's arguments; never raise, because other ranks are waiting."""
        try:
            described = self.describe() if self.describe else ""
            return described if isinstance(described, str) else [str(key) for key in described]
        # The call itself will report the error.
        except Exception as error:
            return f"arguments that cannot be described ({type(error).__name__})"

    def here(self, problem: str = "") -> Place:
        return Place(
            dist.get_rank(), self.name, call_site(), self.detail, self.structure(), problem
        )


@dataclass(frozen=True)
class Place:
    """The call that one rank is in, with its line, its arguments and its error.

    Attributes:
        rank: the global rank.
        call: the name of the function.
        site: "file:line" of the caller.
        detail: see ``Call``.
        structure: the description of the arguments: a text, or the keys of a dict.
        problem: the failure of this rank as a verb phrase, such as "cannot pickle its object: ...";
            "" if it did not fail.
        when: the time in seconds since the epoch.
    """

    rank: int
    call: str
    site: str
    detail: str = ""
    structure: str | list[str] = ""
    problem: str = ""
    when: float = field(default_factory=time.time)

    def encode(self) -> bytes:
        """Return the place as JSON, so that reading it after a failure needs no pickle."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, data: bytes) -> Place:
        return cls(**json.loads(data))


def call_site() -> str:
    """Return "file:line" of the nearest caller outside this folder."""
    frame = sys._getframe(1)
    while frame.f_back and frame.f_code.co_filename.startswith(_NOT_CALLERS):
        frame = frame.f_back
    return _location(frame)


def user_site(innermost: FrameType | None = None) -> str:
    """Return "file:line in function" of the user's innermost frame on a stack.

    If no frame is the user's, return the innermost one outside the standard library. The default
    stack is the caller's.
    """
    frames = [frame for frame, _ in traceback.walk_stack(innermost or sys._getframe(1))]
    for is_wanted in (_is_the_users, lambda path: not path.startswith((_STANDARD_LIBRARY, "<"))):
        for frame in frames:
            if is_wanted(frame.f_code.co_filename):
                return f"{_location(frame)} in {frame.f_code.co_name}"
    return "?"


def describe_places(
    positions: Iterable[Place], elsewhere: Mapping[int, str] | None = None, *, compare: bool = True
) -> str:
    """Return one sentence that says where each rank is and how the ranks' arguments differ."""
    positions = sorted(positions, key=lambda position: position.rank)
    has_details = len({p.call for p in positions}) == 1 and len({p.detail for p in positions}) > 1
    by_call: dict[tuple[str, str], list[Place]] = {}
    for position in positions:
        name = f"{position.call} {position.detail}" if has_details else position.call
        by_call.setdefault((name, position.site), []).append(position)
    # Smallest group first: it most likely has the mistake.
    groups = sorted(by_call.items(), key=lambda call_group: len(call_group[1]))
    phrases = []
    for index, ((call, site), group) in enumerate(groups):
        singular, plural = ("waits", "wait") if index == len(groups) - 1 else ("is", "are")
        verb = singular if len(group) == 1 else plural
        phrases.append(f"{name_ranks(p.rank for p in group)} {verb} in {call} ({site})")
    for text, ranks in ranks_by_text(elsewhere or {}).items():
        phrases.append(f"{name_ranks(ranks)} {text}")
    sentence = ", ".join(phrases)
    difference = _difference(positions) if compare else ""
    return f"{sentence}; {difference}" if difference else sentence


def attempt(action: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """Run ``action``; return (result, None) if it succeeds, otherwise (None, error)."""
    try:
        return action(), None
    except Exception as error:
        return None, error


def get_text(error: BaseException) -> str:
    """Return type and text of an error, even if its ``__str__`` fails."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return f"{type(error).__name__} (without a text: its __str__ fails)"


def name_ranks(ranks: Iterable[int]) -> str:
    """Return "rank 2" or "ranks 0, 1, 3"."""
    listed = sorted(ranks)
    return f"rank{'s' if len(listed) > 1 else ''} {', '.join(map(str, listed))}"


def ranks_by_text(texts: Mapping[int, str]) -> dict[str, list[int]]:
    ranks: dict[str, list[int]] = {}
    for rank, text in texts.items():
        ranks.setdefault(text, []).append(rank)
    return ranks


def differences(entries: Mapping[int, Mapping[Any, str]]) -> str:
    """Describe the keys whose texts differ between ranks, and the keys that some ranks lack."""
    phrases: list[str] = []
    missing: dict[str, list[str]] = {}
    for key in dict.fromkeys(key for rank_entries in entries.values() for key in rank_entries):
        lacking = [rank for rank, rank_entries in entries.items() if key not in rank_entries]
        if lacking:
            missing.setdefault(name_ranks(lacking), []).append(str(key))
        by_text = ranks_by_text(
            {
                rank: rank_entries[key]
                for rank, rank_entries in entries.items()
                if key in rank_entries
            }
        )
        if len(by_text) > 1:
            where = (f"{text} on {name_ranks(ranks)}" for text, ranks in by_text.items())
            phrases.append(f"{key!r} is {' and '.join(where)}")
    phrases += [f"keys missing on {where}: {shorten(keys)}" for where, keys in missing.items()]
    return shorten(phrases, "; ")


def shorten(texts: Sequence[str], separator: str = ", ") -> str:
    """Join the first texts, and add the number of the others."""
    more = len(texts) - _SHOWN
    return separator.join([*texts[:_SHOWN], *([f"and {more} more"] if more > 0 else [])])


def _difference(positions: Sequence[Place]) -> str:
    keys = {
        p.rank: dict.fromkeys(p.structure, "") for p in positions if isinstance(p.structure, list)
    }
    phrases = [differences(keys)]
    texts = {p.rank: p.structure for p in positions if p.structure and isinstance(p.structure, str)}
    by_text = ranks_by_text(texts)
    if len(by_text) > 1:
        phrases += [f"{name_ranks(ranks)}: {text}" for text, ranks in by_text.items()]
    return "; ".join(filter(None, phrases))


def _is_the_users(path: str) -> bool:
    installed = "site-packages" in path or "dist-packages" in path
    return not installed and not path.startswith((*_OURS, _STANDARD_LIBRARY, "<"))


def _location(frame: FrameType) -> str:
    path = frame.f_code.co_filename
    # The current directory may have been removed.
    with contextlib.suppress(OSError):
        path = path.removeprefix(os.getcwd() + os.sep)
    return f"{path}:{frame.f_lineno}"
