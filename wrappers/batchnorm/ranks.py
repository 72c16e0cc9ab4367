"""What the ranks tell each other in the forward of a synchronised layer."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, distributed

from ...collectives import CollectiveError, all_gather_object, calling, comm_device
from .statistics import Moments, merge

# A rank's flags: its output is part of a graph, the gradient of its input is wanted, it gave up.
IN_GRAPH, MOVES_INPUT, FAILED = 1, 2, 4
_HEADER = 3
# Sums over many ranks stay exact, also in fp32.
_NUMBERS = 64
# How many layers have agreed, by group.
_layers: weakref.WeakKeyDictionary[distributed.ProcessGroup, int] = weakref.WeakKeyDictionary()


def is_shared(group: distributed.ProcessGroup | None) -> bool:
    """Whether there are several ranks in the group (None: the default group).

    Raises:
        ValueError: this rank is no member.
    """
    if not (distributed.is_available() and distributed.is_initialized()):
        return False
    size = distributed.get_world_size(group)
    if size < 0:
        raise ValueError(
            f"rank {distributed.get_rank()} is no member of the layer's process_group; give each "
            "rank a group that it is in"
        )
    return size > 1


@dataclass
class Agreed:
    """What a layer knows once all ranks have agreed on it.

    Attributes:
        layer: its number in the group, the same on all ranks.
        calls: how often it was called since.
    """

    group: weakref.ref[distributed.ProcessGroup]
    layer: int
    calls: int = 0

    def next_call(self) -> int:
        """The number of this call of this layer, below 64."""
        self.calls += 1
        return (7 * self.layer + self.calls) % _NUMBERS


@dataclass(frozen=True)
class Ranks:
    """The ranks that hold parts of one batch.

    Attributes:
        layer: name of the layer's class, for errors.
    """

    layer: str
    channels: int
    group: distributed.ProcessGroup | None

    def agree(self) -> Agreed:
        """Make sure that messages will be equally long, since others would abort the processes.

        Every rank must call this. Layers are numbered in the order of their first calls.

        Raises:
            ValueError: on every rank, when the numbers of channels differ.
        """
        channels = all_gather_object(self.channels, group=self.group)
        if len(set(channels)) > 1:
            listed = zip(self._members(), channels, strict=True)
            raise ValueError(
                f"{self.layer} must have the same num_features on all ranks, but it has "
                + ", ".join(f"{number} on rank {rank}" for rank, number in listed)
            )
        group = self.group or distributed.group.WORLD
        assert group is not None
        _layers[group] = _layers.get(group, 0) + 1
        return Agreed(weakref.ref(group), _layers[group])

    def merge(
        self, moments: Moments, flags: int, number: int, problem: Exception | None = None
    ) -> tuple[tuple[int, Tensor, Tensor], bool]:
        """Count, mean and M2 of all ranks, and whether any input's gradient is wanted.

        Every rank must call this, also one that has no values or a problem.

        Args:
            number: of this call, the same on all ranks.

        Raises:
            CollectiveError: on every rank, when one has a problem, some but not all will be in
                the backward, or the ranks are in different layers.
        """
        device = moments.mean.device
        rows = self._gather(moments, flags, number)
        header = rows[:, :_HEADER].tolist()
        all_flags = [int(of_rank) for _, of_rank, _ in header]
        self._compare(all_flags, problem)
        self._compare_calls([int(of_rank) for _, _, of_rank in header])
        means, m2s = rows[:, _HEADER:].to(device).tensor_split(2, dim=1)
        moves_input = any(one & MOVES_INPUT for one in all_flags)
        return merge([int(count) for count, _, _ in header], means, m2s), moves_input

    def _gather(self, moments: Moments, flags: int, number: int) -> Tensor:
        """Return one row of count, flags, number, mean and M2 for every rank."""
        values = torch.cat([moments.mean, moments.m2])
        message = values.new_empty(
            _HEADER + values.numel(), device=comm_device(self.group, prefer=values.device)
        )
        # Fills, since numbers copied to a GPU would wait for it.
        message[0].fill_(moments.count)
        message[1].fill_(flags)
        message[2].fill_(number)
        message[_HEADER:].copy_(values)
        rows = message.new_empty(distributed.get_world_size(self.group), message.numel())
        with calling(f"{self.layer}.forward", self.group, lambda: f"{self.channels} channels"):
            distributed.all_gather(list(rows.unbind()), message, self.group)
        return rows

    def _compare(self, flags: Sequence[int], problem: Exception | None) -> None:
        if any(one & FAILED for one in flags):
            text = f"{type(problem).__name__}: {problem}" if problem else ""
            texts = zip(self._members(), all_gather_object(text, group=self.group), strict=True)
            listed = "; ".join(f"rank {rank}: {one}" for rank, one in texts if one)
            raise CollectiveError(f"{self.layer} cannot go on: {listed}") from problem
        outside = [
            rank for rank, one in zip(self._members(), flags, strict=True) if not one & IN_GRAPH
        ]
        if outside and any(one & MOVES_INPUT for one in flags):
            raise CollectiveError(
                f"{self.layer} is called without gradients on ranks {outside} (under no_grad, or "
                "nothing requires them) but with gradients on the others, whose backward would "
                "wait for these ranks for ever"
            )

    def _compare_calls(self, numbers: Sequence[int]) -> None:
        if len(set(numbers)) > 1:
            ranks: dict[int, list[int]] = {}
            for rank, number in zip(self._members(), numbers, strict=True):
                ranks.setdefault(number, []).append(rank)
            listed = " and ".join(map(str, ranks.values()))
            raise CollectiveError(
                f"the ranks {listed} are in different calls of {self.layer}: in training all ranks "
                "must call the same layers, in the same order and equally often"
            )

    def _members(self) -> list[int]:
        return distributed.get_process_group_ranks(self.group)
