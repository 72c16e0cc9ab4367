"""BatchNorm layers that compute statistics over all replicas of a module or all ranks."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor, distributed, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ...collectives import CollectiveError, all_gather_object, calling, comm_device
from ...registry import MODELS
from ..replicas.replicate import CallbackContext
from ..replicas.session import ReplicationSession
from ..torch_functions import uncompiled
from .statistics import (
    BackwardOptions,
    Chunk,
    EpsMode,
    Moments,
    Precision,
    Statistics,
    connect,
    merge,
    moments,
    no_moments,
    normalise,
    statistics,
)

_WITHOUT_GRAPHS = (
    "SynchronizedBatchNorm waits for other replicas or ranks in its forward, which cannot be part "
    "of a compiled graph; compile the parts of the model between these layers"
)
_default_eps_mode: list[EpsMode] = ["plus"]
_DTYPES = {"fp32": torch.float32, "fp64": torch.float64}
# Flags that a rank sends: its output is part of a graph, its input requires a gradient, it failed,
# its samples do not count.
_IN_GRAPH, _INPUT_NEEDS_GRAD, _FAILED, _LEFT_OUT = 1, 2, 4, 8
# The first entries of a rank's message: count, flags, number of the call. The moments follow.
_HEADER = 3
# Call numbers are taken modulo this, so that sums of their squares over many ranks are exact in
# fp32.
_NUMBERS = 64
# For each group, the number of layers whose channels have been compared between the ranks.
_num_layers: weakref.WeakKeyDictionary[distributed.ProcessGroup, int] = weakref.WeakKeyDictionary()

logger = logging.getLogger(__name__)


def set_sbn_eps_mode(mode: EpsMode) -> None:
    """Set the ``eps_mode`` of all layers that were created without one.

    Args:
        mode: "plus" or "clamp", see ``SynchronizedBatchNorm2d``.

    Raises:
        AssertionError: ``mode`` is neither of the two.
    """
    if mode not in get_args(EpsMode):
        # Earlier implementations document an AssertionError.
        raise AssertionError(f"the eps mode must be 'clamp' or 'plus', got {mode!r}")
    _default_eps_mode[0] = mode


def check_precision(precision: str) -> None:
    """Raise ValueError unless ``precision`` is "fp32" or "fp64"."""
    if precision not in _DTYPES:
        raise ValueError(f"precision must be 'fp32' or 'fp64', got {precision!r}")


class _Place(NamedTuple):
    """The session of the current replication, and which copy of which layer this is."""

    session: Callable[[], ReplicationSession | None]
    layer: str
    copy_id: int


@dataclass
class _CallCounter:
    """Count the calls of a layer; ``layer`` is its number in the group, equal on all ranks."""

    group: weakref.ref[distributed.ProcessGroup]
    layer: int
    calls: int = 0

    def next_call(self) -> int:
        """Return a number for the next call, below ``_NUMBERS``."""
        self.calls += 1
        return (7 * self.layer + self.calls) % _NUMBERS


class SynchronizedBatchNorm(_BatchNorm):
    """Normalise like ``SynchronizedBatchNorm2d``, for inputs with any number of dimensions."""

    process_group: distributed.ProcessGroup | None = None
    eps_mode: EpsMode | None = None
    precision: Precision = "fp32"
    _place: _Place | None = None
    _call_counter: _CallCounter | None = None
    # Whether the samples of this rank do not count; `uncounted_batch` sets it.
    leaves_out = False
    _check_input_dim: Any = nn.SyncBatchNorm._check_input_dim

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        *,
        process_group: distributed.ProcessGroup | None = None,
        eps_mode: EpsMode | None = None,
        precision: Precision = "fp32",
        **factory: Any,
    ) -> None:
        if eps_mode is not None and eps_mode not in get_args(EpsMode):
            raise ValueError(f"eps_mode must be 'plus' or 'clamp', got {eps_mode!r}")
        check_precision(precision)
        super().__init__(num_features, eps, momentum, affine, track_running_stats, **factory)
        self.process_group = process_group
        self.eps_mode = eps_mode
        self.precision = precision

    def forward(self, input: Tensor) -> Tensor:
        """Normalise ``input``, with statistics of all replicas or ranks in training.

        In training, every replica or every rank of the group must call this.
        """
        if self.training and (self._place is not None or _is_shared(self.process_group)):
            synchronised: Tensor = self._synchronised(input)
            return synchronised
        return super().forward(input)

    @property
    def shares_statistics(self) -> bool:
        """Whether the layer trains with the statistics of several ranks."""
        return self._place is None and _is_shared(self.process_group)

    def __data_parallel_replicate__(self, ctx: CallbackContext, copy_id: int) -> None:
        """Remember the session of the replication; called for every copy."""
        session: Any = ctx.session
        # The original layer outlives the replication and must not keep the session alive.
        owned = copy_id or getattr(self, "_is_replica", False)
        find = (lambda: session) if owned else weakref.ref(session)
        self._place = _Place(find, ctx.layer, copy_id) if ctx.num_copies > 1 else None

    @uncompiled(_WITHOUT_GRAPHS)
    def _synchronised(self, x: Tensor) -> Tensor:
        if x.is_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(_WITHOUT_GRAPHS.replace("a compiled graph", "a CUDA graph"))
        session = self._place.session() if self._place else None
        if self._place is not None and session is not None:
            return self._over_replicas(x, self._place, session)
        return self._over_ranks(x) if _is_shared(self.process_group) else super().forward(x)

    def _over_replicas(self, x: Tensor, replica: _Place, session: ReplicationSession) -> Tensor:
        self._check_input(x)
        message = moments(x.detach(), _DTYPES[self.precision]), self._chunk(x)
        stats, output = session.rendezvous(replica.layer, replica.copy_id, message, self._combine)
        if replica.copy_id == 0:
            self._update_running_stats(stats)
        return self._fill(output, x, stats)

    def _combine(self, messages: Sequence[tuple[Moments, Chunk]]) -> list[tuple[Any, Tensor]]:
        """Merge the replicas' moments, and create their outputs in one autograd node."""
        replica_moments, chunks = zip(*messages, strict=True)
        device = replica_moments[0].mean.device
        means = torch.stack([copy_moments.mean.to(device) for copy_moments in replica_moments])
        m2s = torch.stack([copy_moments.m2.to(device) for copy_moments in replica_moments])
        stats = self._statistics(
            merge([copy_moments.num_values for copy_moments in replica_moments], means, m2s)
        )
        input_needs_grad = any(chunk.x.requires_grad for chunk in chunks)
        outputs = connect(BackwardOptions(stats, input_needs_grad), chunks)
        return [(stats.to(output.device), output) for output in outputs]

    def _over_ranks(self, x: Tensor) -> Tensor:
        world = self.process_group or distributed.group.WORLD
        assert world is not None
        if self._call_counter is None or self._call_counter.group() is not world:
            self._call_counter = _number_layer(self, world)
        number = self._call_counter.next_call()
        try:
            self._check_input(x)
            local_moments, chunk = moments(x.detach(), _DTYPES[self.precision]), self._chunk(x)
        except Exception as error:
            # The other ranks wait for this rank, so it sends them a message with a flag.
            _merge_ranks(self, no_moments(self.num_features, x.device), _FAILED, number, error)
            raise
        flags = chunk.is_in_graph * _IN_GRAPH + chunk.x.requires_grad * _INPUT_NEEDS_GRAD
        flags += self.leaves_out * _LEFT_OUT
        merged = _merge_ranks(self, local_moments, flags, number)
        stats = self._statistics(merged.moments)
        if merged.counts:
            self._update_running_stats(stats)
        is_apart = self.leaves_out and merged.counts
        sum_ranks = partial(_sum_ranks, type(self).__name__, self.process_group, number, is_apart)
        (output,) = connect(BackwardOptions(stats, merged.input_needs_grad, sum_ranks), [chunk])
        return self._fill(output, x, stats)

    def _statistics(self, merged: Moments) -> Statistics:
        mode = self.eps_mode or _default_eps_mode[0]
        return statistics(merged, self.eps, mode)._replace(precision=_DTYPES[self.precision])

    def _chunk(self, x: Tensor) -> Chunk:
        params: list[Tensor | None] = [self.weight, self.bias]
        if not torch.is_grad_enabled():
            x = x.detach()
            params = [param if param is None else param.detach() for param in params]
        return Chunk(x, torch.empty_like(x), *params)

    @torch.no_grad()
    def _fill(self, output: Tensor, x: Tensor, stats: Statistics) -> Tensor:
        # Written through a detached alias, because the output is already part of the graph.
        weight, bias = self.weight, self.bias
        normalise(x.detach(), output.detach(), stats=stats, weight=weight, bias=bias)
        return output

    @torch.no_grad()
    def _update_running_stats(self, stats: Statistics) -> None:
        """Update the running statistics in place; other objects may refer to their tensors."""
        if not self.track_running_stats or self.running_mean is None:
            return
        factor = self.momentum
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if factor is None:
                factor = 1.0 / float(self.num_batches_tracked)
        factor = factor or 0.0
        unbiased_var = stats.var * (stats.num_values / (stats.num_values - 1))
        new_values = (stats.mean, unbiased_var)
        for buffer, value in zip((self.running_mean, self.running_var), new_values, strict=True):
            assert buffer is not None
            buffer.lerp_(value.to(buffer.dtype), factor)

    def _check_input(self, x: Tensor) -> None:
        self._check_input_dim(x)
        if x.size(1) != self.num_features:
            raise AssertionError(
                f"Channel size mismatch: the input must have {self.num_features} channels, got "
                f"shape {tuple(x.shape)}"
            )
        if not x.is_floating_point():
            raise TypeError(f"the input must be floating point, got {x.dtype}")

    def __getstate__(self) -> dict[str, Any]:
        state = {**self.__dict__, "_place": None, "_call_counter": None}
        if state.get("process_group") is not None:
            state["process_group"] = None
            logger.warning(
                "a %s is pickled without its process_group, which belongs to this process; the "
                "loaded layer will synchronise over all ranks unless you set process_group again",
                type(self).__name__,
            )
        return state

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        state = {**self.__dict__, "_place": None, "_call_counter": None, "process_group": None}
        copied.__setstate__(deepcopy(state, memo))  # type: ignore[no-untyped-call]
        # The copy shares the group, which cannot be copied.
        copied.process_group = self.process_group
        if self._call_counter is not None:
            # Keeps the counter: without it, a rank that uses the copy would compare the channels
            # again, and wait for ranks that use the original.
            copied._call_counter = replace(self._call_counter)
        return copied


def _is_shared(group: distributed.ProcessGroup | None) -> bool:
    """Return whether ``group`` (None: the default group) has several ranks."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return False
    size = distributed.get_world_size(group)
    if size < 0:
        raise ValueError(
            f"rank {distributed.get_rank()} is not a member of the layer's process_group; give "
            "each rank a group that it belongs to"
        )
    return size > 1


def _number_layer(layer: SynchronizedBatchNorm, group: distributed.ProcessGroup) -> _CallCounter:
    """Number a layer in the order of first calls; every rank of the group must call this.

    Raises:
        ValueError: the ranks have different numbers of channels. Without this check gloo would
            abort the processes, because their messages have different lengths.
    """
    channels = all_gather_object(layer.num_features, group=layer.process_group)
    if len(set(channels)) > 1:
        listed = zip(distributed.get_process_group_ranks(group), channels, strict=True)
        raise ValueError(
            f"{type(layer).__name__} must have the same num_features on all ranks, but it has "
            + ", ".join(f"{number} on rank {rank}" for rank, number in listed)
        )
    _num_layers[group] = _num_layers.get(group, 0) + 1
    return _CallCounter(weakref.ref(group), _num_layers[group])


class _Merged(NamedTuple):
    """The moments of the ranks whose samples count.

    Attributes:
        input_needs_grad: whether the input of any rank requires a gradient.
        counts: whether the samples of any rank count. If not, all samples are used, so that the
            outputs are finite.
    """

    moments: Moments
    input_needs_grad: bool
    counts: bool


def _merge_ranks(
    layer: SynchronizedBatchNorm,
    local_moments: Moments,
    flags: int,
    number: int,
    problem: Exception | None = None,
) -> _Merged:
    """Merge the moments of all ranks.

    Every rank must call this, even if it has no values or its forward failed.

    Args:
        local_moments: the moments of this rank.
        flags: the flags of this rank.
        number: the number of this call, which must be the same on all ranks.
        problem: the error of this rank's forward, if it failed.
    """
    group, device = layer.process_group, local_moments.mean.device
    values = torch.cat([local_moments.mean, local_moments.m2])
    message = values.new_empty(
        _HEADER + values.numel(), device=comm_device(group, prefer=values.device)
    )
    # Filled one by one, because copying a list to the GPU would wait for it.
    for index, value in enumerate((local_moments.num_values, flags, number)):
        message[index].fill_(value)
    message[_HEADER:].copy_(values)
    rows = message.new_empty(distributed.get_world_size(group), message.numel())
    with calling(
        f"{type(layer).__name__}.forward", group, lambda: f"{layer.num_features} channels"
    ):
        distributed.all_gather(list(rows.unbind()), message, group)
    counts, all_flags, numbers = rows[:, :_HEADER].long().t().tolist()
    _check_ranks(layer, all_flags, numbers, problem)
    left_out = [rank for rank, rank_flags in enumerate(all_flags) if rank_flags & _LEFT_OUT]
    any_counts = len(left_out) < len(counts)
    for rank in left_out if any_counts else ():
        # The moments as well, because 0 * NaN is NaN.
        counts[rank] = 0
        rows[rank, _HEADER:].zero_()
    means, m2s = rows[:, _HEADER:].to(device).tensor_split(2, dim=1)
    needs_grad = any(rank_flags & _INPUT_NEEDS_GRAD for rank_flags in all_flags)
    return _Merged(merge(counts, means, m2s), needs_grad, any_counts)


def _check_ranks(
    layer: SynchronizedBatchNorm,
    flags: Sequence[int],
    numbers: Sequence[int],
    problem: Exception | None,
) -> None:
    """Raise CollectiveError on every rank if a rank failed or the ranks are in different calls."""
    name, group = type(layer).__name__, layer.process_group
    members = distributed.get_process_group_ranks(group)
    if any(rank_flags & _FAILED for rank_flags in flags):
        text = f"{type(problem).__name__}: {problem}" if problem else ""
        texts = zip(members, all_gather_object(text, group=group), strict=True)
        listed = "; ".join(f"rank {rank}: {text}" for rank, text in texts if text)
        raise CollectiveError(f"{name} cannot continue: {listed}") from problem
    outside = [
        rank for rank, rank_flags in zip(members, flags, strict=True) if not rank_flags & _IN_GRAPH
    ]
    if outside and any(rank_flags & _INPUT_NEEDS_GRAD for rank_flags in flags):
        raise CollectiveError(
            f"{name} must run with gradients on all ranks or on none, but ranks {outside} run it "
            "without (under no_grad, or because no tensor requires a gradient), and the backward "
            "of the other ranks would wait for them forever"
        )
    if len(set(numbers)) > 1:
        ranks: dict[int, list[int]] = {}
        for rank, number in zip(members, numbers, strict=True):
            ranks.setdefault(number, []).append(rank)
        listed = " and ".join(map(str, ranks.values()))
        raise CollectiveError(
            f"the ranks {listed} are in different calls of {name}: in training all ranks must call "
            "the same layers, in the same order and the same number of times"
        )


def _sum_ranks(
    name: str,
    group: distributed.ProcessGroup | None,
    number: int,
    is_apart: bool,
    total: Tensor,
) -> Tensor:
    """Return the gradient sums of all ranks; every rank's backward must call this.

    A rank that ``is_apart`` adds nothing and gets zeros, because the statistics do not depend on
    its samples.

    The call numbers of the ranks and their squares are summed as well. Both sums have the expected
    values only if the numbers of all ranks are equal.
    """
    if is_apart:
        total = torch.zeros_like(total)
    numbers = total.new_tensor([[number], [number**2]])
    message = torch.cat([total, numbers], dim=1).to(comm_device(group, prefer=total.device))
    with calling(f"{name}.backward", group, lambda: f"{total.size(1)} channels"):
        distributed.all_reduce(message, group=group)
    world_size = distributed.get_world_size(group)
    if message[:, -1].tolist() != [world_size * number, world_size * number**2]:
        raise CollectiveError(
            f"the ranks are in the backward of different calls of {name}: all ranks must run the "
            "backward of the same outputs, in the same order"
        )
    return total if is_apart else message[:, :-1].to(total.device)


@MODELS.register_module()
class SynchronizedBatchNorm1d(SynchronizedBatchNorm):
    """Normalise ``(batch, channels)`` or ``(batch, channels, length)``; see the 2d class."""

    _check_input_dim = nn.BatchNorm1d._check_input_dim


@MODELS.register_module()
class SynchronizedBatchNorm2d(SynchronizedBatchNorm):
    """A ``BatchNorm2d`` that trains with the statistics of the whole batch.

    The batch may be split over the replicas of a ``StepDataParallel`` (or another wrapper with
    replication callbacks), or over the ranks of a process group. Statistics, outputs and gradients
    are the same as with ``BatchNorm2d`` on the whole batch; parts may be uneven or empty. In
    evaluation, and with only one replica and rank, it runs torch's ``batch_norm`` without
    communication.

    In training every replica, or every rank, must call the layer the same number of times and in
    the same order. If any rank's input requires a gradient, every rank must also run the backward.
    docs/data_parallel.md lists the limits: compiling, CUDA graphs, double backward, checkpointing.

    Args:
        num_features: as in torch's class.
        eps: as in torch's class.
        momentum: as in torch's class.
        affine: as in torch's class.
        track_running_stats: as in torch's class.
        process_group: the ranks to synchronise over; default: all ranks.
        eps_mode: in synchronised training, divide by sqrt(var + eps) ("plus", as torch does) or by
            sqrt(max(var, eps)) ("clamp"); default: the mode of ``set_sbn_eps_mode``, or "plus".
        precision: the precision of synchronised training, "fp32" or "fp64". Means, variances and
            fp64 inputs always use fp64.
        factory: ``device``, ``dtype`` and other options of torch's class.

    Raises:
        ValueError: ``eps_mode`` or ``precision`` is unknown, the input has the wrong number of
            dimensions, the whole batch has fewer than two values per channel, or ``num_features``
            differs between ranks.
        TypeError: the input is not floating point.
        AssertionError: the input has the wrong number of channels.
        CollectiveError: a rank failed, or the ranks make different calls; raised on every rank,
            with the ranks and the reason.
        ReplicationError: a replica does not call the layer.
    """

    _check_input_dim = nn.BatchNorm2d._check_input_dim


@MODELS.register_module()
class SynchronizedBatchNorm3d(SynchronizedBatchNorm):
    """Normalise inputs ``(batch, channels, depth, height, width)``; see the 2d class."""

    _check_input_dim = nn.BatchNorm3d._check_input_dim
