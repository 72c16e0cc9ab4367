"""The messages that the ranks of a synchronised BatchNorm exchange, and their checks.

Each forward gathers the moments of all ranks with a header, each backward sums their gradients. The
headers show whether a rank failed, and whether all ranks are in the same call.

Reading a header on the host would make it wait for a GPU in each forward and backward. Therefore
only the first call of a layer with the same flags is checked before its statistics are used. In
later calls the device compares the header and makes the statistics NaN if it is not the expected
one. The header is copied to the host, and one of the next calls raises the error.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed

from ...collectives import CollectiveError, all_gather_object, calling, comm_device
from .statistics import Moments, check_count, merge

# Flags that a rank sends: its output is part of a graph, its input requires a gradient, it failed.
IN_GRAPH, INPUT_NEEDS_GRAD, FAILED = 1, 2, 4
# The first entries of a message; the moments follow. The second one is _CALL times the number of
# the call, plus the flags.
_COUNT, _NUMBER_AND_FLAGS, _LEFT_OUT, _HEADER = range(4)
_CALL = 8
# Call numbers are taken modulo this, so that sums of their squares over many ranks are exact in
# fp32.
_NUMBERS = 64
# For each group, the number of layers whose channels have been compared between the ranks.
_num_layers: weakref.WeakKeyDictionary[distributed.ProcessGroup, int] = weakref.WeakKeyDictionary()
# For each group, the messages of earlier calls that the host has not checked yet.
_unchecked: weakref.WeakKeyDictionary[distributed.ProcessGroup, deque[_LateCheck]] = (
    weakref.WeakKeyDictionary()
)


class _LateCheck(NamedTuple):
    """The check of a copy that has arrived on the host when the event ``is_ready``."""

    is_ready: torch.cuda.Event
    check: Callable[[distributed.ProcessGroup], None]


@dataclass
class CallCounter:
    """Count the calls of a layer.

    Attributes:
        layer: the number of the layer in the group, equal on all ranks.
        needs_grad: for each value of this rank's flags, whether the input of any rank required a
            gradient in the last call whose header was read at once.
    """

    group: weakref.ref[distributed.ProcessGroup]
    layer: int
    calls: int = 0
    needs_grad: dict[int, bool] = field(default_factory=dict)

    def next_call(self) -> int:
        """Return a number for the next call, below ``_NUMBERS``."""
        self.calls += 1
        return (7 * self.layer + self.calls) % _NUMBERS


class LayerCall(NamedTuple):
    """One call of a layer, which all ranks of the group make.

    Attributes:
        layer: the name of the layer's class, for messages.
        number: the number of the call.
        leaves_out: whether the samples of this rank do not count.
    """

    layer: str
    group: distributed.ProcessGroup
    counter: CallCounter
    number: int
    leaves_out: bool


class _Header(NamedTuple):
    """The first entries of all ranks' messages."""

    counts: list[int]
    flags: Sequence[int]
    numbers: Sequence[int]
    left_out: Sequence[int]

    def needs_grad(self) -> bool:
        """Return whether the input of any rank requires a gradient."""
        return any(flags & INPUT_NEEDS_GRAD for flags in self.flags)


class Merged(NamedTuple):
    """The moments of the ranks whose samples count.

    Attributes:
        input_needs_grad: whether the input of any rank requires a gradient.
        counts: whether the samples of any rank count. If not, all samples are used, so that the
            outputs are finite. A tensor if only the device knows it.
    """

    moments: Moments
    input_needs_grad: bool
    counts: bool | Tensor


def number_layer(name: str, num_features: int, group: distributed.ProcessGroup) -> CallCounter:
    """Number a layer in the order of first calls; every rank of the group must call this.

    Raises:
        ValueError: the ranks have different numbers of channels. Without this check gloo would
            abort the processes, because their messages have different lengths.
    """
    channels = all_gather_object(num_features, group=group)
    if len(set(channels)) > 1:
        listed = zip(distributed.get_process_group_ranks(group), channels, strict=True)
        raise ValueError(
            f"{name} must have the same num_features on all ranks, but it has "
            + ", ".join(f"{number} on rank {rank}" for rank, number in listed)
        )
    _num_layers[group] = _num_layers.get(group, 0) + 1
    return CallCounter(weakref.ref(group), _num_layers[group])


def merge_ranks(call: LayerCall, local_moments: Moments, flags: int) -> Merged:
    """Merge the moments of all ranks; every rank must call this, even if it has no values.

    Args:
        call: this call.
        local_moments: the moments of this rank.
        flags: the flags of this rank.
    """
    _raise_late_errors(call.group)
    rows = _gather(call, local_moments, flags)
    needs_grad = call.counter.needs_grad
    if rows.is_cuda and flags in needs_grad:
        return _merge_unread(call, rows, needs_grad[flags])
    header = _read_header(rows)
    if not rows.is_cuda:
        _raise_failures(call, header, None)
    _check_header(call.layer, call.group, header)
    needs_grad[flags] = header.needs_grad()
    counts, left_out = header.counts, header.left_out
    for rank, is_left_out in enumerate(left_out):
        if is_left_out and not all(left_out):
            # The moments as well, because 0 * NaN is NaN.
            counts[rank] = 0
            rows[rank, _HEADER:].zero_()
    means, m2s = rows[:, _HEADER:].to(local_moments.mean.device).tensor_split(2, dim=1)
    return Merged(merge(counts, means, m2s), needs_grad[flags], not all(left_out))


def report_failure(call: LayerCall, no_moments: Moments, problem: Exception) -> None:
    """Tell the other ranks that the forward of this rank failed, because they wait for it."""
    rows = _gather(call, no_moments, FAILED)
    if not rows.is_cuda:
        _raise_failures(call, _read_header(rows), problem)


def sum_ranks(call: LayerCall, counts: bool | Tensor, total: Tensor) -> Tensor:
    """Return the gradient sums of all ranks; every rank's backward must call this.

    If this rank's samples do not count, but others' do, it adds nothing and gets zeros, because the
    statistics do not depend on its samples.

    The call numbers of the ranks and their squares are summed as well. Both sums have the expected
    values only if the numbers of all ranks are equal.
    """
    group, number = call.group, call.number
    _raise_late_errors(group)
    if call.leaves_out:
        total = torch.where(torch.as_tensor(counts, device=total.device), 0.0, total)
    numbers = _number_tensor([[number], [number**2]], total.device)
    message = torch.cat([total, numbers], dim=1).to(comm_device(group, prefer=total.device))
    with calling(f"{call.layer}.backward", group, lambda: f"{total.size(1)} channels"):
        distributed.all_reduce(message, group=group)
    summed, sums = message[:, :-1].to(total.device), message[:, -1]
    world_size = distributed.get_world_size(group)
    expected = [world_size * number, world_size * number**2]
    if message.is_cuda:
        is_expected = (sums[0] == expected[0]) & (sums[1] == expected[1])
        summed = torch.where(is_expected, summed, torch.nan)
        _check_later(group, sums, partial(_check_sums, call.layer, expected))
    else:
        _check_sums(call.layer, expected, sums, group)
    if call.leaves_out:
        summed = torch.where(torch.as_tensor(counts, device=total.device), total, summed)
    return summed


def _gather(call: LayerCall, local_moments: Moments, flags: int) -> Tensor:
    """Return the messages of all ranks, ``(ranks, _HEADER + 2 * channels)``."""
    group = call.group
    header = _number_tensor(
        [local_moments.num_values, _CALL * call.number + flags, call.leaves_out],
        local_moments.mean.device,
    )
    message = torch.cat([header, local_moments.mean, local_moments.m2])
    message = message.to(comm_device(group, prefer=message.device))
    rows = message.new_empty(distributed.get_world_size(group), message.numel())
    channels = local_moments.mean.numel()
    with calling(f"{call.layer}.forward", group, lambda: f"{channels} channels"):
        distributed.all_gather(list(rows.unbind()), message, group)
    return rows


def _number_tensor(numbers: Sequence[Any], device: torch.device) -> Tensor:
    """Return numbers in fp64 on a device, without waiting for a GPU."""
    tensor = torch.tensor(numbers, dtype=torch.float64, pin_memory=device.type == "cuda")
    return tensor.to(device, non_blocking=True)


def _read_header(rows: Tensor) -> _Header:
    counts, calls, left_out = rows[:, :_HEADER].long().t().tolist()
    numbers, flags = zip(*(divmod(call, _CALL) for call in calls), strict=True)
    return _Header(counts, flags, numbers, left_out)


def _merge_unread(call: LayerCall, rows: Tensor, needs_grad: bool) -> Merged:
    """Merge the moments on the device; the host checks the header later."""
    header, num_features = rows[:, :_HEADER], (rows.size(1) - _HEADER) // 2
    check = partial(_check_copy, call.layer, num_features, needs_grad)
    _check_later(call.group, header, check)
    lowest, highest = header[:, _NUMBER_AND_FLAGS].aminmax()
    base = _CALL * call.number
    if needs_grad:
        is_expected = (lowest >= base + IN_GRAPH) & (highest == base + IN_GRAPH + INPUT_NEEDS_GRAD)
    else:
        is_expected = (lowest >= base) & (highest <= base + IN_GRAPH)
    left_out = header[:, _LEFT_OUT] > 0
    any_counts = ~left_out.all()
    # The moments as well, because 0 * NaN is NaN.
    counted = rows.masked_fill((left_out & any_counts).unsqueeze(1), 0)
    means, m2s = counted[:, _HEADER:].tensor_split(2, dim=1)
    moments = merge(counted[:, _COUNT], means, m2s)
    mean = torch.where(is_expected, moments.mean, torch.nan)
    return Merged(moments._replace(mean=mean), needs_grad, any_counts)


def _check_later(
    group: distributed.ProcessGroup,
    message: Tensor,
    check: Callable[[Tensor, distributed.ProcessGroup], None],
) -> None:
    """Copy a message to the host without waiting; ``_raise_late_errors`` checks the copy."""
    copy = torch.empty(message.shape, dtype=message.dtype, pin_memory=True)
    copy.copy_(message, non_blocking=True)
    is_ready = torch.cuda.current_stream(message.device).record_event()
    _unchecked.setdefault(group, deque()).append(_LateCheck(is_ready, partial(check, copy)))


def _raise_late_errors(group: distributed.ProcessGroup) -> None:
    """Check the messages of earlier calls that have arrived on the host."""
    unchecked = _unchecked.get(group)
    while unchecked and unchecked[0].is_ready.query():  # type: ignore[no-untyped-call]
        unchecked.popleft().check(group)


def _check_copy(
    layer: str,
    num_features: int,
    needs_grad: bool,
    copy: Tensor,
    group: distributed.ProcessGroup,
) -> None:
    header = _read_header(copy)
    _check_header(layer, group, header)
    if header.needs_grad() != needs_grad:
        raise CollectiveError(
            f"other ranks changed whether the input of {layer} requires a gradient, but this rank "
            "did not: change it on all ranks in the same step"
        )
    pairs = zip(header.counts, header.left_out, strict=True)
    counted = [count for count, is_left_out in pairs if not is_left_out] or header.counts
    check_count(sum(counted), num_features)


def _check_header(layer: str, group: distributed.ProcessGroup, header: _Header) -> None:
    """Raise CollectiveError if a rank failed or the ranks are in different calls."""
    members = distributed.get_process_group_ranks(group)
    failed = [rank for rank, flags in zip(members, header.flags, strict=True) if flags & FAILED]
    if failed:
        raise CollectiveError(
            f"{layer} cannot continue: its forward failed on ranks {failed}, whose errors say why"
        )
    outside = [
        rank for rank, flags in zip(members, header.flags, strict=True) if not flags & IN_GRAPH
    ]
    if outside and header.needs_grad():
        raise CollectiveError(
            f"{layer} must run with gradients on all ranks or on none, but ranks {outside} run it "
            "without (under no_grad, or because no tensor requires a gradient), and the backward "
            "of the other ranks would wait for them forever"
        )
    if len(set(header.numbers)) > 1:
        ranks: dict[int, list[int]] = {}
        for rank, number in zip(members, header.numbers, strict=True):
            ranks.setdefault(number, []).append(rank)
        listed = " and ".join(map(str, ranks.values()))
        raise CollectiveError(
            f"the ranks {listed} are in different calls of {layer}: in training all ranks must "
            "call the same layers, in the same order and the same number of times"
        )


def _raise_failures(call: LayerCall, header: _Header, problem: Exception | None) -> None:
    """Raise CollectiveError with the errors of all ranks if a rank failed."""
    if any(flags & FAILED for flags in header.flags):
        text = f"{type(problem).__name__}: {problem}" if problem else ""
        texts = all_gather_object(text, group=call.group)
        members = distributed.get_process_group_ranks(call.group)
        listed = [f"rank {rank}: {text}" for rank, text in zip(members, texts, strict=True) if text]
        raise CollectiveError(f"{call.layer} cannot continue: {'; '.join(listed)}") from problem


def _check_sums(
    layer: str, expected: list[int], sums: Tensor, group: distributed.ProcessGroup
) -> None:
    if sums.tolist() != expected:
        members = distributed.get_process_group_ranks(group)
        raise CollectiveError(
            f"the ranks {members} are in the backward of different calls of {layer}: all ranks "
            "must run the backward of the same outputs, in the same order"
        )
