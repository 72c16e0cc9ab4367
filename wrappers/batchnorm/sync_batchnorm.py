"""BatchNorm layers that compute statistics over all replicas of a module or all ranks."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

import torch
from torch import Tensor, distributed, nn
from torch.nn.modules.batchnorm import _BatchNorm

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

if TYPE_CHECKING:
    from .exchange import CallCounter

_WITHOUT_GRAPHS = (
    "SynchronizedBatchNorm waits for other replicas or ranks in its forward, which cannot be part "
    "of a compiled graph; compile the parts of the model between these layers"
)
_default_eps_mode: list[EpsMode] = ["plus"]
_DTYPES = {"fp32": torch.float32, "fp64": torch.float64}

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


class SynchronizedBatchNorm(_BatchNorm):
    """Normalise like ``SynchronizedBatchNorm2d``, for inputs with any number of dimensions."""

    process_group: distributed.ProcessGroup | None = None
    eps_mode: EpsMode | None = None
    precision: Precision = "fp32"
    _place: _Place | None = None
    _call_counter: CallCounter | None = None
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
        # Only runs whose ranks share statistics need it.
        from . import exchange

        world = self.process_group or distributed.group.WORLD
        assert world is not None
        name, counter = type(self).__name__, self._call_counter
        if counter is None or counter.group() is not world:
            self._call_counter = counter = exchange.number_layer(name, self.num_features, world)
        call = exchange.LayerCall(name, world, counter, counter.next_call(), self.leaves_out)
        try:
            self._check_input(x)
            local_moments, chunk = moments(x.detach(), _DTYPES[self.precision]), self._chunk(x)
        except Exception as error:
            exchange.report_failure(call, no_moments(self.num_features, x.device), error)
            raise
        flags = chunk.is_in_graph * exchange.IN_GRAPH
        flags += chunk.x.requires_grad * exchange.INPUT_NEEDS_GRAD
        merged = exchange.merge_ranks(call, local_moments, flags)
        stats = self._statistics(merged.moments)
        self._update_running_stats(stats, merged.counts)
        sum_gradients = partial(exchange.sum_ranks, call, merged.counts)
        options = BackwardOptions(stats, merged.input_needs_grad, sum_gradients)
        (output,) = connect(options, [chunk])
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
    def _update_running_stats(self, stats: Statistics, counts: bool | Tensor = True) -> None:
        """Update the running statistics in place; other objects may refer to their tensors."""
        if not self.track_running_stats or self.running_mean is None or counts is False:
            return
        factor: float | Tensor = self.momentum or 0.0
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(counts)
            if self.momentum is None:
                factor = 1.0 / self.num_batches_tracked.clamp(min=1).to(self.running_mean.dtype)
        if isinstance(counts, Tensor):
            factor = factor * counts.to(self.running_mean.dtype)
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
