"""What a micro-batch weighs, and gradients as those of one mean over all that was weighed."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed import ReduceOp
from torch.optim import Optimizer

from ...collectives import comm_device
from ...registry import did_you_mean, import_path
from ..sharding.layout import local_part, parameters_of

_TARGETS = ("labels", "targets", "target")
_NAMED_TARGETS = "tokens needs an entry labels, targets or target with the targets"
_SECOND_ENTRY = "tokens needs a second entry with the targets"
_IGNORED = -100
_BY_NAME = ("samples", "tokens")
# Up to so many targets a list is counted sooner than two kernels are started.
_FEW = 512
_INSTEAD = "name the entry whose sum is the weight, {key: ...}, or give a function of the batch"
_ADVICE = (
    "with loss_weight each micro-batch is weighed before its backward, and its loss scaled: call "
    "optim_wrapper.weigh(batch) with the preprocessed batch in a train_step of your own, then "
    "optim_wrapper.update_params(loss), or backward(scale_loss(loss))"
)


class LossWeight:
    """What the losses of a batch are means over: how much of it there is in a batch.

    Args:
        setting: "samples": the first dimension of the first tensor. "tokens": the targets that are
            not -100, torch's ``ignore_index``; targets are the entry "labels", "targets" or
            "target", or the second one. ``{"key": name_or_index}``: the sum of that entry, a mask
            or weights. A function, or its import path, called with the preprocessed batch, that
            returns a number or a tensor without dimensions.

    Raises:
        TypeError, ValueError: the setting is none of these.
        ImportError: the path leads to nothing.
    """

    def __init__(self, setting: Any) -> None:
        self.setting = setting
        function = _read(setting)
        is_own = function in (_samples, _tokens)
        self._measure = function if is_own else partial(self._checked, function)

    def of(self, batch: Any) -> float | Tensor:
        """The weight of a preprocessed batch: a number, on accelerators maybe a 0-d tensor.

        Raises:
            KeyError: the batch has no such entry.
            ValueError: it is negative or not finite; of a tensor on an accelerator nobody looks.
        """
        return self._measure(batch)

    def _checked(self, function: Callable[[Any], Any], batch: Any) -> float | Tensor:
        found = function(batch)
        if isinstance(found, Tensor):
            if found.numel() != 1:
                shape = tuple(found.shape)
                raise ValueError(f"{self} must give one number for a batch, got shape {shape}")
            if not found.is_cpu:
                return found.detach().reshape(()).double()
            found = found.item()
        weight = float(found)
        if not 0 <= weight < math.inf:
            raise ValueError(f"{self} must give a finite number of at least 0, got {weight}")
        return weight

    def __repr__(self) -> str:
        return f"loss_weight={getattr(self.setting, '__qualname__', None) or repr(self.setting)}"


class WeightedWindow:
    """The weights of the micro-batches whose gradients meet in an update.

    A loss is scaled by its weight in some unit, and when the window has ended the gradients are
    divided by the weight of the window on all ranks that average their gradients.

    Attributes:
        measure: what ``loss_weight.of`` calls.
        unit: a power of two near the first weight, the same on all ranks: it keeps float16 in
            range and changes no digit; 0 while there has been no weight.
        weight: of the micro-batch whose backward comes next.
        total: of the micro-batches on this rank whose gradients are held; None for none, also to
            be set when they have been cleared.
        model: returns what was noted last; None where it is gone, or nobody has noted any.
        ranks: how many average their gradients.
        is_whole: a window is one micro-batch on one rank: its loss is the mean as it is, and
            needs no ``scaled`` and no ``take``.
    """

    def __init__(
        self, loss_weight: LossWeight, optimizer: Optimizer, accumulative_counts: int
    ) -> None:
        if hasattr(optimizer, "averager"):
            raise ValueError(
                f"{type(optimizer).__name__} steps by the gradients of one rank, which loss_weight "
                "makes those of all: leave one of the two out"
            )
        self.measure = loss_weight._measure
        self._loss_weight = loss_weight
        self.unit = 0.0
        self.weight: float | Tensor | None = None
        self.total: float | Tensor | None = None
        self.model: Callable[[], Any] = _nobody
        self.ranks = 1
        self.is_whole = False
        self._optimizer = optimizer
        self._counts = accumulative_counts
        self._group: Any = None
        self._device = torch.device("cpu")
        self._sent: tuple[Tensor, Any] | None = None

    def accumulate(self, counts: int) -> None:
        """Take that many micro-batches from here on, where no gradients are held."""
        self._counts = counts
        self.is_whole = counts == 1 and self.ranks == 1 and self.model is not _nobody

    def note(self, model: Any) -> None:
        """Learn which ranks average their gradients, from what wraps the model.

        A wrapper that has ``weigh_by(loss_weight)`` is told, and may raise ValueError.
        """
        weigh_by = getattr(model, "weigh_by", None)
        if weigh_by is not None:
            weigh_by(self._loss_weight)
        # Known from here on only: where that raises, the next call must raise as well.
        self.model = weakref.ref(model)
        # torch's own DistributedDataParallel averages as well.
        averages = getattr(model, "averages_ranks", hasattr(model, "require_backward_grad_sync"))
        self._group = getattr(model, "data_group", getattr(model, "process_group", None))
        spread = averages and distributed.is_initialized()
        self.ranks = distributed.get_world_size(self._group) if spread else 1
        # By what is the same on all ranks, not by where the weights are.
        near = next(parameters_of(self._optimizer)).device
        self._device = comm_device(self._group, prefer=near) if spread else near
        self.accumulate(self._counts)

    def share(self) -> float | Tensor:
        """The weight of the coming micro-batch in the unit; every rank must call this."""
        if self.weight is None:
            raise RuntimeError(_ADVICE)
        if self.model is _nobody:
            _refuse_ranks()
            self.is_whole = self._counts == 1
        if self.is_whole:
            return 1.0
        if not self.unit:
            self._agree_on_unit()
        return self.weight / (self.unit or 1.0)

    def scaled(self, loss: Tensor) -> Tensor:
        """The loss times its share; every rank must call this."""
        share = self.share()
        if isinstance(share, Tensor):
            return loss * share.to(loss.dtype)
        return loss if share == 1 else loss * share

    def take(self) -> None:
        """Count the micro-batch whose backward begins."""
        weight = self.weight
        if weight is None:
            raise RuntimeError(_ADVICE)
        self.total = weight if self.total is None else self.total + weight
        self.weight = self._sent = None

    def send(self) -> None:
        """Begin to add up the window's weight over the ranks, where its last backward begins."""
        summed = self._tensor(self.total)
        self._sent = summed, distributed.all_reduce(summed, group=self._group, async_op=True)

    def average(self) -> None:
        """Bring the gradients from sums in the unit to the mean; every rank must call this.

        Where nothing in the window weighs anything they become zero.
        """
        factor = self.factor()
        if not isinstance(factor, Tensor) and factor == 1:
            # As where all micro-batches are full.
            return
        gradients = [
            local_part(p.grad) for p in parameters_of(self._optimizer) if p.grad is not None
        ]
        with torch.no_grad():
            if isinstance(factor, float) and factor == 0:
                # Not times 0, which would leave a NaN: a mean over nothing may have one.
                torch._foreach_zero_(gradients)
            else:
                _multiply(gradients, factor)

    def factor(self) -> float | Tensor:
        """End the window; return what makes the mean of its gradients, 0 where nothing weighs.

        Every rank must call this.
        """
        total = self.total
        if total is None:
            raise RuntimeError(_ADVICE)
        if self.ranks > 1:
            total = self._received()
        self.total = None
        if isinstance(total, float) and total == 0:
            return 0.0
        factor = (total if self.is_whole else self.unit * self.ranks) / total
        # On an accelerator nobody looks whether there is anything: then this is not finite.
        return factor.where(factor.isfinite(), 0.0) if isinstance(factor, Tensor) else factor

    def _received(self) -> float | Tensor:
        if self._sent is None:
            # A step by hand, before the window's end.
            self.send()
        assert self._sent is not None
        summed, work = self._sent
        work.wait()
        return summed.item() if summed.device.type == "cpu" else summed

    def _agree_on_unit(self) -> None:
        most = self._tensor(self.weight)
        if self.ranks > 1:
            distributed.all_reduce(most, ReduceOp.MAX, group=self._group)
        weight = most.item()
        if weight:
            self.unit = 2.0 ** (math.frexp(weight)[1] - 1)

    def _tensor(self, value: Any) -> Tensor:
        """``value`` where the ranks communicate."""
        if isinstance(value, Tensor):
            return value.to(self._device, torch.float64, copy=True)
        # On an accelerator a copy from the host would wait.
        return torch.full((), value, dtype=torch.float64, device=self._device)


def _nobody() -> None:
    """Stands for the reference to a model while none is known."""


def _refuse_ranks() -> None:
    """Raise RuntimeError where there are ranks, and nobody has said which average gradients."""
    if distributed.is_initialized() and distributed.get_world_size() > 1:
        raise RuntimeError(
            "with loss_weight the optimizer wrapper must know whose gradients are averaged: enter "
            "optim_wrapper.optim_context(self) of the model's wrapper for the forward, or call "
            "optim_wrapper.weigh(batch, self)"
        )


def _multiply(gradients: list[Tensor], factor: float | Tensor) -> None:
    kinds: dict[Any, list[Tensor]] = {}
    for one in gradients:
        kinds.setdefault((one.device, one.dtype), []).append(one)
    for (device, dtype), some in kinds.items():
        own = factor.to(device, dtype) if isinstance(factor, Tensor) else factor
        torch._foreach_mul_(some, own)


def _read(setting: Any) -> Callable[[Any], Any]:
    """The function that measures a batch."""
    if callable(setting):
        return setting  # type: ignore[no-any-return]
    if isinstance(setting, Mapping):
        key = setting.get("key")
        if list(setting) != ["key"] or isinstance(key, bool) or not isinstance(key, (str, int)):
            raise ValueError(f"loss_weight must be {{key: name or index}}, got {dict(setting)!r}")
        return lambda batch: _summed(_entry(batch, key, f"{{key: {key!r}}} needs that entry"))
    if not isinstance(setting, str):
        raise TypeError(
            "loss_weight must be samples, tokens, {key: ...}, a function or its import path, "
            f"got {setting!r}"
        )
    if setting in _BY_NAME:
        return _samples if setting == "samples" else _tokens
    if "." not in setting:
        raise ValueError(
            f"loss_weight must be {', '.join(_BY_NAME)}, {{key: ...}} or the import path of a "
            f"function, got {setting!r}{did_you_mean(setting, _BY_NAME)}"
        )
    found = import_path(setting)
    if not callable(found):
        raise TypeError(f"loss_weight: {setting} is no function, but {type(found).__name__}")
    return found  # type: ignore[no-any-return]


def _samples(batch: Any) -> float:
    """The first dimension of the first tensor; the length of a list inside: it holds samples."""
    count = _first_count(batch)
    if count is None:
        raise KeyError(f"loss_weight=samples needs a tensor, but {_described(batch)}; {_INSTEAD}")
    return float(count)


def _first_count(data: Any) -> int | None:
    if isinstance(data, (tuple, list)):
        entries = data
    else:
        entries = (data,) if isinstance(data, Tensor) else getattr(data, "values", tuple)()
    for one in entries:
        if isinstance(one, Tensor):
            if shape := one.shape:
                return shape[0]
        elif isinstance(one, list):
            return len(one)
        elif isinstance(one, (tuple, Mapping)) and (count := _first_count(one)) is not None:
            return count
    return None


def _tokens(batch: Any) -> float | Tensor:
    is_pair = isinstance(batch, (tuple, list)) and len(batch) > 1
    target = batch[1] if is_pair else _target_in(batch)
    if type(target) is Tensor and target.is_cpu and target.numel() <= _FEW:
        values = (target if target.dim() == 1 else target.flatten()).tolist()
        return float(len(values) - values.count(_IGNORED))
    if not isinstance(target, Tensor):
        kind = type(target).__name__
        raise TypeError(f"loss_weight=tokens counts targets in a tensor, got {kind}; {_INSTEAD}")
    count = (target != _IGNORED).count_nonzero()
    return float(count) if target.is_cpu else count.double()


def _target_in(batch: Any) -> Any:
    # Not isinstance(batch, Mapping), which takes as long as the counting.
    if hasattr(batch, "keys"):
        key = next((name for name in _TARGETS if name in batch), None)
        return _entry(batch, key, _NAMED_TARGETS)
    return _entry(batch, 1, _SECOND_ENTRY)


def _summed(entry: Any) -> Any:
    return entry.sum(dtype=torch.float64) if isinstance(entry, Tensor) else entry


def _entry(batch: Any, key: Any, needed: str) -> Any:
    # An index into a tensor would choose a sample.
    if not isinstance(batch, Tensor):
        try:
            return batch[key]
        except (LookupError, TypeError):
            pass
    raise KeyError(f"loss_weight={needed}, but {_described(batch)}; {_INSTEAD}")


def _described(batch: Any) -> str:
    if isinstance(batch, Mapping):
        return f"the batch has the keys {list(batch)}"
    if isinstance(batch, (tuple, list)):
        return f"the batch has {len(batch)} entries"
    return f"the batch is of type {type(batch).__name__}"
