"""Find the causes that limit the speed of training: loading data, a hook, or a slow rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ...collectives import all_gather_object
from ..state import LoopState

# A cause counts if it takes at least this share of the time.
_NOTICEABLE = 0.1
# Short intervals are combined until they are at least this long.
_WINDOW_S = 1.0


@dataclass
class RankTimes:
    """Seconds of one rank in an interval without evaluations, as its CPU process measures them.

    Attributes:
        elapsed_s: the length of the interval.
        loading_s: waiting for the next batch.
        forward_s: from the start of each step to the end of its forward.
        hooks: in hooks, by class.
    """

    elapsed_s: float = 0.0
    loading_s: float = 0.0
    forward_s: float = 0.0
    hooks: dict[str, float] = field(default_factory=dict)

    def clear(self) -> None:
        self.elapsed_s = self.loading_s = self.forward_s = 0.0
        self.hooks.clear()

    def add(self, other: RankTimes) -> None:
        self.elapsed_s += other.elapsed_s
        self.loading_s += other.loading_s
        self.forward_s += other.forward_s
        for name, seconds in other.hooks.items():
            self.hooks[name] = self.hooks.get(name, 0.0) + seconds


class SpeedLimits:
    """Find what limits the speed, from the times of all ranks.

    The first interval does not count, because the first steps of a training are not typical.
    """

    def __init__(self) -> None:
        self._window: list[RankTimes] | None = None

    def update(self, state: LoopState, rank_times: RankTimes) -> dict[str, float]:
        """Set ``state.limits``; return shares for the log record; every rank must call this."""
        times = all_gather_object(rank_times)
        shares = {"hooks_share": sum(rank_times.hooks.values()) / rank_times.elapsed_s}
        if len(times) > 1:
            rank, share = slowest_rank(times)
            shares |= {"slowest_rank": float(rank), "rank_wait_share": share}
        if self._window is None:
            self._window = [RankTimes() for _ in times]
            return shares
        for total, latest in zip(self._window, times, strict=True):
            total.add(latest)
        if self._window[0].elapsed_s >= _WINDOW_S:
            state.limits = find_limits(self._window)
            self._window = [RankTimes() for _ in times]
        return shares


def slowest_rank(times: Sequence[RankTimes]) -> tuple[int, float]:
    """Return the slowest rank, and the share of the time that the others wait for it on average.

    Only the time of a step before the ranks first wait for each other is compared, so the share is
    a lower bound. Usually they first wait in the backward. With FSDP or SyncBatchNorm they already
    wait in the forward, and its time would hide differences. So the forward is included only if
    this increases the share.
    """
    before = [rank_times.loading_s + sum(rank_times.hooks.values()) for rank_times in times]
    with_forward = [s + rank_times.forward_s for s, rank_times in zip(before, times, strict=True)]
    slowest = (0, 0.0)
    for seconds in (before, with_forward):
        rank = max(range(len(times)), key=seconds.__getitem__)
        others_s = (sum(seconds) - seconds[rank]) / (len(times) - 1)
        share = (seconds[rank] - others_s) / times[rank].elapsed_s
        slowest = (rank, share) if share > slowest[1] else slowest
    return slowest


def find_limits(times: Sequence[RankTimes]) -> dict[str, float]:
    """Return the entries of ``LoopState.limits``, the slow rank first, then by share."""
    rank, waiting = slowest_rank(times) if len(times) > 1 else (0, 0.0)
    rank_times = times[rank]
    seconds = {"loading data": rank_times.loading_s} | {
        f"hook {n}": s for n, s in rank_times.hooks.items()
    }
    shares = {name: spent_s / rank_times.elapsed_s for name, spent_s in seconds.items()}
    noticeable = {name: share for name, share in shares.items() if share >= _NOTICEABLE}
    slow = {f"rank {rank}": waiting} if waiting >= _NOTICEABLE else {}
    return slow | dict(sorted(noticeable.items(), key=lambda entry: -entry[1]))


def limit_texts(limits: Mapping[str, float]) -> dict[str, str]:
    """Return a sentence for each entry of ``LoopState.limits``.

    If a rank is slow, the other entries describe the time of that rank.
    """
    texts: dict[str, str] = {}
    rank = next((name for name in limits if name.startswith("rank ")), None)
    for name, share in limits.items():
        if name == rank:
            texts[name] = f"{name} limits the speed: the others wait for it {share:.0%} of the time"
        elif rank is not None:
            texts[name] = f"on {rank}, {name} takes {share:.0%} of the time"
        else:
            texts[name] = f"{name} limits the speed: {share:.0%} of the time"
    return texts
