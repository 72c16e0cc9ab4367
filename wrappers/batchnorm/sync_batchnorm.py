"""Batch normalisation by the statistics of the whole batch, however it is spread."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any, get_args

import torch
from torch import Tensor, distributed
from torch.nn.modules.batchnorm import _BatchNorm

from ...registry import MODELS
from ..replicas.replicate import CallbackContext
from ..replicas.session import ReplicationSession
from ..torch_functions import uncompiled
from .node import Chunk, Plan, join
from .ranks import FAILED, IN_GRAPH, MOVES_INPUT, Agreed, Ranks, is_shared
from .statistics import EpsMode, Moments, Statistics, merge, moments, normalise, statistics

_WITHOUT_GRAPHS = (
    "SynchronizedBatchNorm waits for other replicas or ranks in its forward, which cannot be part "
    "of a compiled graph; compile the parts of the model between these layers"
)
_default_eps_mode: list[EpsMode] = ["plus"]
_NOT_SAVED = ("_place", "_agreed")

logger = logging.getLogger(__name__)


def set_sbn_eps_mode(mode: EpsMode) -> None:
    """Choose how layers without an ``eps_mode`` of their own use eps from now on.

    Args:
        mode: "plus" or "clamp", see ``SynchronizedBatchNorm2d``.

    Raises:
        AssertionError: another mode.
    """
    if mode not in get_args(EpsMode):
        # As documented by the systems this is for.
        raise AssertionError(f"the eps mode must be 'clamp' or 'plus', got {mode!r}")
    _default_eps_mode[0] = mode


@dataclass(frozen=True)
class _Place:
    """The place of a layer in a replication; gone with the copy that has it."""

    session: Callable[[], ReplicationSession | None]
    layer: str
    copy_id: int


@dataclass(frozen=True)
class _Message:
    """What a replica brings to the meeting."""

    moments: Moments
    chunk: Chunk


@dataclass(frozen=True)
class _Reply:
    stats: Statistics
    output: Tensor


class SynchronizedBatchNorm(_BatchNorm):
    """The layer for inputs of any dimension; see ``SynchronizedBatchNorm2d``."""

    process_group: distributed.ProcessGroup | None = None
    eps_mode: EpsMode | None = None
    _place: _Place | None = None
    _agreed: Agreed | None = None

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
        **factory: Any,
    ) -> None:
        if eps_mode is not None and eps_mode not in get_args(EpsMode):
            raise ValueError(f"eps_mode must be 'plus' or 'clamp', got {eps_mode!r}")
        super().__init__(num_features, eps, momentum, affine, track_running_stats, **factory)
        self.process_group = process_group
        self.eps_mode = eps_mode

    def forward(self, input: Tensor) -> Tensor:
        """Normalise; in training every replica, or every rank of the group, must call this."""
        if self.training and (self._place is not None or is_shared(self.process_group)):
            synchronised: Tensor = self._synchronised(input)
            return synchronised
        return super().forward(input)

    def __data_parallel_replicate__(self, ctx: CallbackContext, copy_id: int) -> None:
        """Join the replication; called for every copy."""
        session: Any = ctx.session
        # A layer that is no copy outlives the replication, which must not stay in it.
        owned = copy_id or getattr(self, "_is_replica", False)
        find = (lambda: session) if owned else weakref.ref(session)
        self._place = None
        if ctx.num_copies > 1:
            self._place = _Place(find, ctx.layer, copy_id)

    @uncompiled(_WITHOUT_GRAPHS)
    def _synchronised(self, x: Tensor) -> Tensor:
        if x.is_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(_WITHOUT_GRAPHS.replace("a compiled graph", "a CUDA graph"))
        session = self._place.session() if self._place else None
        if self._place is None or session is None:
            if not is_shared(self.process_group):
                return super().forward(x)
            return self._over_ranks(x)
        return self._over_replicas(x, self._place, session)

    def _over_replicas(self, x: Tensor, place: _Place, session: ReplicationSession) -> Tensor:
        self._check(x)
        message = _Message(moments(x.detach()), self._chunk(x))
        reply: _Reply = session.rendezvous(place.layer, place.copy_id, message, self._combine)
        if place.copy_id == 0:
            self._update(reply.stats)
        return self._filled(reply.output, x, reply.stats)

    def _combine(self, messages: Sequence[_Message]) -> list[_Reply]:
        """Merge what the replicas know, and put their outputs into one node of the graph."""
        device = messages[0].moments.mean.device
        parts = [message.moments.to(device) for message in messages]
        means, m2s = (torch.stack(one) for one in ([p.mean for p in parts], [p.m2 for p in parts]))
        with torch.no_grad():
            merged = merge([part.count for part in parts], means, m2s)
            stats = statistics(merged, self.eps, self._eps_mode())
        chunks = [message.chunk for message in messages]
        moves_input = any(chunk.x.requires_grad for chunk in chunks)
        outputs = join(Plan(stats, type(self).__name__, moves_input), chunks)
        return [_Reply(stats.to(output.device), output) for output in outputs]

    def _over_ranks(self, x: Tensor) -> Tensor:
        ranks = Ranks(type(self).__name__, self.num_features, self.process_group)
        world = self.process_group or distributed.group.WORLD
        assert world is not None
        if self._agreed is None or self._agreed.group() is not world:
            self._agreed = ranks.agree()
        number = self._agreed.next_call()
        try:
            self._check(x)
            own, chunk = moments(x.detach()), self._chunk(x)
        except Exception as error:
            # The other ranks are waiting; they learn of it in the message.
            zeros = torch.zeros(self.num_features, dtype=torch.float64, device=x.device)
            ranks.merge(Moments(0, zeros, zeros), FAILED, number, error)
            raise
        flags = chunk.in_graph * IN_GRAPH + chunk.x.requires_grad * MOVES_INPUT
        with torch.no_grad():
            merged, moves_input = ranks.merge(own, flags, number)
            stats = statistics(merged, self.eps, self._eps_mode())
        self._update(stats)
        plan = Plan(stats, type(self).__name__, moves_input, True, self.process_group, number)
        (output,) = join(plan, [chunk])
        return self._filled(output, x, stats)

    def _chunk(self, x: Tensor) -> Chunk:
        given: list[Tensor | None] = [self.weight, self.bias]
        if not torch.is_grad_enabled():
            x = x.detach()
            given = [one if one is None else one.detach() for one in given]
        return Chunk(x, torch.empty_like(x), *given)

    @torch.no_grad()
    def _filled(self, output: Tensor, x: Tensor, stats: Statistics) -> Tensor:
        # Into a detached alias: the values belong to an output of the graph already.
        weight, bias = self.weight, self.bias
        normalise(x.detach(), output.detach(), stats=stats, weight=weight, bias=bias)
        return output

    @torch.no_grad()
    def _update(self, stats: Statistics) -> None:
        """Move the running statistics in place: others may hold these very tensors."""
        if not self.track_running_stats or self.running_mean is None:
            return
        factor = self.momentum
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if factor is None:
                factor = 1.0 / float(self.num_batches_tracked)
        factor = factor or 0.0
        for buffer, new in (
            (self.running_mean, stats.mean),
            (self.running_var, stats.unbiased_var()),
        ):
            assert buffer is not None
            buffer.copy_(buffer.double().mul_(1 - factor).add_(new * factor))

    def _check(self, x: Tensor) -> None:
        self._check_input_dim(x)
        if x.size(1) != self.num_features:
            raise AssertionError(
                f"Channel size mismatch: the layer has {self.num_features} channels, got an input "
                f"of shape {tuple(x.shape)}"
            )
        if not x.is_floating_point():
            raise TypeError(f"the input must be floating point, got {x.dtype}")

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")

    def _eps_mode(self) -> EpsMode:
        return self.eps_mode or _default_eps_mode[0]

    def __getstate__(self) -> dict[str, Any]:
        state = {name: value for name, value in self.__dict__.items() if name not in _NOT_SAVED}
        if state.get("process_group") is not None:
            state["process_group"] = None
            logger.warning(
                "a %s is pickled without its process_group, which belongs to this process; it "
                "will synchronise over all ranks unless it is given one again",
                type(self).__name__,
            )
        return state

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        state = {name: value for name, value in self.__dict__.items() if name not in _NOT_SAVED}
        # A connection between processes: shared by the copy, as by any other user of it.
        group = state.pop("process_group", None)
        copied.__setstate__(deepcopy(state, memo))  # type: ignore[no-untyped-call]
        copied.process_group = group
        if self._agreed is not None:
            # Else a copy that one rank makes would ask ranks that do not answer.
            copied._agreed = replace(self._agreed)
        return copied


@MODELS.register_module()
class SynchronizedBatchNorm1d(SynchronizedBatchNorm):
    """``SynchronizedBatchNorm2d`` for ``(batch, channels)`` and ``(batch, channels, length)``."""

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() not in (2, 3):
            raise ValueError(f"expected 2D or 3D input (got {input.dim()}D input)")


@MODELS.register_module()
class SynchronizedBatchNorm2d(SynchronizedBatchNorm):
    """``BatchNorm2d`` that trains with the statistics of the whole batch, however it is spread.

    Over the replicas of a ``StepDataParallel`` (or another wrapper with replication callbacks),
    else over the ranks of a process group when there are several. Statistics, outputs and
    gradients are those of ``BatchNorm2d`` on the whole batch; parts may be uneven or empty. Alone
    and in evaluation it is torch's ``batch_norm``, without communication.

    In training every replica, or every rank, must call the layer equally often and in the same
    order. With ranks, also the backward is collective, when any rank's input needs a gradient.
    The backward cannot be differentiated again. A synchronised forward is left out of graphs of
    ``torch.compile`` (an error with ``fullgraph=True``) and cannot be captured in a CUDA graph.

    Args:
        num_features: as in torch, like ``eps``, ``momentum``, ``affine`` and
            ``track_running_stats``.
        process_group: the ranks to synchronise over; default: all.
        eps_mode: in synchronised training divide by sqrt(var + eps) ("plus", as torch) or
            sqrt(max(var, eps)) ("clamp"); default: what ``set_sbn_eps_mode`` said, else "plus".
        factory: ``device``, ``dtype`` and what else torch's class takes.

    Raises:
        ValueError: another dimension of the input, or only one value per channel.
        AssertionError: another number of channels.
        CollectiveError: a rank failed; raised on every rank, with the rank and the reason.
        ReplicationError: a replica does not come to the layer.
    """

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() != 4:
            raise ValueError(f"expected 4D input (got {input.dim()}D input)")


@MODELS.register_module()
class SynchronizedBatchNorm3d(SynchronizedBatchNorm):
    """``SynchronizedBatchNorm2d`` for inputs ``(batch, channels, depth, height, width)``."""

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() != 5:
            raise ValueError(f"expected 5D input (got {input.dim()}D input)")
