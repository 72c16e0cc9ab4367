"""Suggest names that a user may have meant."""

import difflib
from collections.abc import Iterable, Sequence


def nearest(
    name: str, candidates: Iterable[str], limit: int = 3, *, cutoff: float = 0.6
) -> list[str]:
    """Return the candidates that a user who wrote ``name`` may have meant, best first.

    Args:
        cutoff: the minimum similarity, from 0 to 1 (equal).
    """
    by_lower: dict[str, str] = {}
    # Keys of a config may be numbers.
    for candidate in map(str, candidates):
        by_lower.setdefault(candidate.lower(), candidate)
    lower_name = str(name).lower()
    close = difflib.get_close_matches(lower_name, by_lower, n=limit, cutoff=cutoff)
    if len(lower_name) >= 3:
        # A candidate that contains the name, but does not start with it, must not be much longer.
        longest = len(lower_name) / (cutoff - 0.2)
        matches = (
            low
            for low in by_lower
            if low.startswith(lower_name) or (lower_name in low and len(low) <= longest)
        )
        containing = sorted(matches, key=len)
        close += [low for low in containing if low not in close]
    return [by_lower[low] for low in close[:limit]]


def meant_by(names: Iterable[str], candidates: Sequence[str]) -> set[str]:
    """Return the candidates that a user who wrote the unknown ``names`` may have meant."""
    return {near for name in names for near in nearest(name, candidates)}


def did_you_mean(
    name: str,
    candidates: Iterable[str],
    *,
    limit: int = 3,
    cutoff: float = 0.6,
    quoted: bool = False,
) -> str:
    """Return "; did you mean A or B?", or "" if no candidate is similar.

    Args:
        limit: the maximum number of suggestions.
        cutoff: the minimum similarity, from 0 to 1 (equal).
        quoted: put the suggestions in quotes.
    """
    close = nearest(name, candidates, limit, cutoff=cutoff)
    return f"; did you mean {join_choices(map(repr, close) if quoted else close)}?" if close else ""


def join_choices(names: Iterable[str]) -> str:
    """Join names as "A, B or C"."""
    *head, tail = map(str, [*names] or [""])
    return f"{', '.join(head)} or {tail}" if head else tail
