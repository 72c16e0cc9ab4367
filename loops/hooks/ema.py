"""Averages of the weights, for evaluation: exponential (EMA) and with equal weights (SWA)."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed import all_reduce
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim.swa_utils import get_ema_multi_avg_fn, get_swa_multi_avg_fn

from ...collectives import distributed_available
from ...primitives.notes import add_note
from ...primitives.tensor_bits import as_float
from ...registry import HOOKS
from ...wrappers.features import model_features, optim_features
from ...wrappers.layout import as_global, copy_whole_, local_part, reshard
from ...wrappers.steps.buffers import restore_buffers, save_buffers
from ...wrappers.steps.preprocess import as_call, get_device
from ...wrappers.unwrap import plain_name, user_model
from ..checkpoints.saved_tensors import load_whole_tensors
from ..checkpoints.weights import get_state, saved_parameters
from ..data.loaders import read_aside
from ..hook import Hook
from ..rng import preserved_generators, preserved_rng
from ..schedule import positive
from ..state import LoopState
from ..undo import attribute_restorer

# rule(averages, parameters, count) adds new parameter values to averages of `count` earlier values.
_Rule: TypeAlias = Callable[[list[Tensor], list[Tensor], int], None]


class _AveragingHook(Hook):
    """Keep an average of the model's parameters and evaluate with it.

    Subclasses override ``_collect``, and ``_replacements`` if evaluations replace buffers too.
    """

    # Called before all other hooks, so that at the end of an evaluation they see the model's own
    # weights.
    order = 10
    # `load_state_dict` accepts SavedTensor objects, which are read from disk when they are sliced.
    reads_parts = True

    def __init__(self, average_into: _Rule, *, evaluate: bool) -> None:
        self._average_into = average_into
        self._evaluate = evaluate
        self._model: nn.Module | None = None
        self._params: list[nn.Parameter] = []
        self._average: list[Tensor] = []
        self._own: list[Tensor] = []
        self._restored: dict[str, Any] | None = None
        # Buffers that belong to the average, by name.
        self._statistics: dict[str, Tensor] = {}

    @abstractmethod
    def _collect(self, state: LoopState) -> None:
        """Update the average after an update of the weights, if it is due."""

    def on_train_start(self, state: LoopState) -> None:
        averages = {n: h for n, h in state.stateful.items() if isinstance(h, _AveragingHook)}
        sources = [name for name, hook in averages.items() if hook._evaluate]
        if len(sources) > 1:
            raise ValueError(
                f"evaluations can use one average only, got {', '.join(sources)}: remove one, or "
                "set its evaluate_with_ema or evaluate_with_swa to false"
            )
        if self._restored is not None:
            self._start(state)

    def on_update(self, state: LoopState) -> None:
        if self._restored is not None:
            # At the end of an uneven pass, this rank has loaded the average of another rank, which
            # had more batches.
            self._start(state)
        if not state.skipped:
            self._collect(state)

    def on_eval_start(self, state: LoopState) -> None:
        if self._restored is not None:
            self._start(state)
        if self._evaluate and self._average:
            self._swap_in(state)

    def on_eval_end(self, state: LoopState, metrics: dict[str, float]) -> None:
        self._restore_own_weights()

    def on_exception(self, state: LoopState, error: BaseException) -> None:
        self._restore_own_weights()

    @property
    def evaluated_entry(self) -> str:
        """The key in ``state_dict`` of the weights that evaluations use; "" for the model's own."""
        return "model" if self._evaluate and (self._average or self._restored) else ""

    def state_dict(self) -> dict[str, Any]:
        """Return ``{"model": averaged weights}``; the inner dict is empty without an average."""
        if self._model is None or self._restored is not None:
            return {"model": load_whole_tensors(self._restored or {})}
        reshard(self._model)
        pairs = zip(self._params, self._average, strict=True)
        by_param = {id(param): as_global(mean, param) for param, mean in pairs}
        # Tied parameters have several names.
        named = saved_parameters(self._model).items()
        average = {name: by_param[id(p)] for name, p in named if id(p) in by_param}
        average |= self._statistics
        weights = {plain_name(name): value for name, value in get_state(self._model).items()}
        tensors = {name: value for name, value in weights.items() if isinstance(value, Tensor)}
        return {"model": {name: average.get(name, value) for name, value in tensors.items()}}

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        """Store the average of a checkpoint; the next training or evaluation restores it."""
        average = {plain_name(name): value for name, value in state["model"].items()}
        if not all(hasattr(value, "shape") for value in average.values()):
            raise TypeError("the saved average must be tensors")
        self._restored = average or None
        self._average = []
        self._model = None

    def _start(self, state: LoopState) -> None:
        self._model = user_model(state.model)
        reshard(self._model)
        # The last name of a shared parameter counts.
        names_by_param = {p: name for name, p in saved_parameters(self._model).items()}
        named = {
            name: p for p, name in names_by_param.items() if p.is_floating_point() or p.is_complex()
        }
        self._params = list(named.values())
        # bfloat16 has 8 significant bits: adding 0.001 of a difference often changes nothing.
        kinds = [_averaged_dtype(param.dtype) for param in self._params]
        pairs = zip(_local_parts(self._params), kinds, strict=True)
        self._average = [param.detach().to(kind, copy=True) for param, kind in pairs]
        if self._restored is not None:
            names = list(named)
            missing = [name for name in names if name not in self._restored]
            if missing:
                raise ValueError(
                    "the saved average must hold every parameter of the model; it lacks "
                    f"{', '.join(missing[:3])} ({len(missing)} in all)"
                )
            for name, param, mean in zip(names, self._params, self._average, strict=True):
                copy_whole_(as_global(mean, param), self._restored[name])
            self._restored = None

    def _add(self, count: int = 0) -> None:
        """Add the current parameters to the average, which contains ``count`` sets so far."""
        pairs = zip(_local_parts(self._params), self._average, strict=True)
        self._average_into(self._average, [p.to(mean.dtype) for p, mean in pairs], count)

    def _replacements(self) -> list[tuple[Tensor, Tensor]]:
        """Return the model's tensors that an evaluation replaces, each with its replacement."""
        return list(zip(_local_parts(self._params), self._average, strict=True))

    def _swap_in(self, state: LoopState) -> None:
        if self._model is not user_model(state.model):
            raise ValueError(
                f"this {type(self).__name__} has the average of another model: evaluate that model "
                "with it, or create a new one"
            )
        reshard(state.model)
        pairs = self._replacements()
        self._own = [target.detach().clone() for target, _ in pairs]
        _copy(pairs)

    def _restore_own_weights(self) -> None:
        if self._own and self._model is not None:
            # FSDP2 may still hold full parameters gathered from the averages.
            reshard(self._model)
            targets = [target for target, _ in self._replacements()]
            _copy(zip(targets, self._own, strict=True))
            self._own = []


@HOOKS.register_module()
class EMAHook(_AveragingHook):
    """Keep an exponential moving average of the model's parameters.

    The average starts with the parameters at the start of training, or after update
    ``start_step`` (Tarvainen and Valpola, "Mean teachers are better role models", 2017, section 2;
    averaging was introduced by Polyak and Juditsky, 1992). Each rank averages its shards of sharded
    parameters, without any communication. Parameters below 32 bits are averaged in float32.

    Args:
        decay: the factor by which each update multiplies the old average, within [0, 1).
        every_steps: optimizer updates between two updates of the average.
        start_step: up to and including this update, the average is a copy of the weights.
        evaluate_with_ema: evaluate with the averaged weights. The model's weights are restored
            after the evaluation, even after an error.

    Raises:
        ValueError: ``decay``, ``every_steps`` or ``start_step`` is not allowed.
    """

    def __init__(
        self,
        decay: float = 0.999,
        *,
        every_steps: int = 1,
        start_step: int = 0,
        evaluate_with_ema: bool = True,
    ) -> None:
        if not 0 <= decay < 1:
            raise ValueError(f"decay must be within [0, 1), got {decay!r}")
        if start_step < 0:
            raise ValueError(f"start_step must be at least 0, got {start_step!r}")
        rule: _Rule = get_ema_multi_avg_fn(decay)  # type: ignore[no-untyped-call]
        super().__init__(rule, evaluate=evaluate_with_ema)
        self._every_steps = positive("every_steps", every_steps)
        self._start_step = start_step

    def on_train_start(self, state: LoopState) -> None:
        super().on_train_start(state)
        if not self._average:
            self._start(state)

    def _collect(self, state: LoopState) -> None:
        since = state.step - self._start_step
        if since <= 0:
            _copy(zip(self._average, _local_parts(self._params), strict=True))
        elif since % self._every_steps == 0:
            self._add()


@HOOKS.register_module()
class SWAHook(_AveragingHook):
    """Keep the plain mean of the model's weights at several points of the training.

    This is stochastic weight averaging (Izmailov et al., "Averaging weights leads to wider optima
    and better generalization", 2018). Evaluations use the average as soon as it exists.

    BatchNorm layers need running statistics that fit the averaged weights. They are computed in a
    pass over the training data without gradients, and averaged over the ranks: before an
    evaluation if the average has changed, and at the end of training. The model's own weights,
    buffers, plain attributes and random generators are not changed.

    Args:
        from_epoch: the first epoch whose final weights are averaged; epochs are counted from 1.
        from_step: the first update whose weights are averaged.
        every: average the weights after each ``every``-th epoch or, if ``from_step`` is given, each
            ``every``-th update.
        evaluate_with_swa: evaluate with the averaged weights.
        update_bn: compute BatchNorm statistics for the average. If false, evaluations use the
            model's own statistics.

    Raises:
        ValueError: both or none of ``from_epoch`` and ``from_step`` are given, or a number is not
            allowed. ``on_train_start`` raises it if the training data cannot be read twice.
    """

    def __init__(
        self,
        *,
        from_epoch: int | None = None,
        from_step: int | None = None,
        every: int = 1,
        evaluate_with_swa: bool = True,
        update_bn: bool = True,
    ) -> None:
        if (from_epoch is None) == (from_step is None):
            raise ValueError(
                "SWAHook requires from_epoch or from_step, and only one of them, got "
                f"from_epoch={from_epoch}, from_step={from_step}"
            )
        rule: _Rule = get_swa_multi_avg_fn()  # type: ignore[no-untyped-call]
        super().__init__(rule, evaluate=evaluate_with_swa)
        self._from_epoch = None if from_epoch is None else positive("from_epoch", from_epoch)
        self._from_step = None if from_step is None else positive("from_step", from_step)
        self._every = positive("every", every)
        self._update_bn = update_bn
        self._count = 0
        # The last epoch that was considered, and `_count` when the statistics were computed.
        self._epoch = 0
        self._measured_at = 0
        self._buffers: dict[str, Tensor] = {}

    def on_train_start(self, state: LoopState) -> None:
        super().on_train_start(state)
        if self._update_bn and _batch_norms(state.model):
            read_aside(state.dataloader)

    def on_save_point(self, state: LoopState) -> None:
        self._collect_epoch(state)

    def on_eval_start(self, state: LoopState) -> None:
        self._collect_epoch(state)
        if self._evaluate:
            self._measure(state)
        super().on_eval_start(state)

    def on_train_end(self, state: LoopState) -> None:
        # After a signal there may not be enough time for a pass over the data.
        if not state.signal:
            self._measure(state)

    def state_dict(self) -> dict[str, Any]:
        """Return the averaged weights as ``model``, and counters."""
        counters = {"count": self._count, "epoch": self._epoch, "measured_at": self._measured_at}
        return {**super().state_dict(), **counters}

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        super().load_state_dict(state)
        self._count, self._epoch = int(state["count"]), int(state["epoch"])
        self._measured_at = int(state["measured_at"])
        self._statistics = {}

    def _collect(self, state: LoopState) -> None:
        if self._from_step is not None:
            self._collect_if_due(state, state.step - self._from_step)

    def _collect_epoch(self, state: LoopState) -> None:
        """Add the weights at the end of an epoch, before its validation, if it is due."""
        if self._from_epoch is None or state.batch or state.epoch <= self._epoch:
            return
        self._epoch = state.epoch
        self._collect_if_due(state, state.epoch - self._from_epoch)

    def _collect_if_due(self, state: LoopState, since: int) -> None:
        if since < 0 or since % self._every:
            return
        if self._average:
            self._add(self._count)
        else:
            self._start(state)
        self._count += 1

    def _start(self, state: LoopState) -> None:
        restored = self._restored or {}
        super()._start(state)
        self._buffers = _running_statistics(state.model) if self._update_bn else {}
        if self._measured_at:
            self._statistics = {
                name: restored[name][...].to(buffer.device, copy=True)
                for name, buffer in self._buffers.items()
            }

    def _replacements(self) -> list[tuple[Tensor, Tensor]]:
        buffers = [(buffer, self._statistics.get(n, buffer)) for n, buffer in self._buffers.items()]
        return [*super()._replacements(), *buffers]

    def _measure(self, state: LoopState) -> None:
        """Compute BatchNorm statistics if the average has changed; every rank must call this."""
        if self._restored is not None:
            self._start(state)
        if not self._buffers or self._measured_at == self._count or state.dataloader is None:
            return
        # The pass is in training mode, in which other layers may change their state as well.
        buffers, restore_attributes = save_buffers(state.model), attribute_restorer(state.model)
        self._swap_in(state)
        try:
            with preserved_generators(user_model(state.model).modules()):
                _update_batch_norms(state)
            self._statistics = {name: buffer.clone() for name, buffer in self._buffers.items()}
        finally:
            self._restore_own_weights()
            restore_attributes()
            restore_buffers(buffers)
        self._measured_at = self._count


def _batch_norms(model: nn.Module) -> list[_BatchNorm]:
    """Return the BatchNorm layers with running statistics in the state dict of the model.

    If an adapter trains a copy of a layer, the original layer is not in the state dict.
    """
    model = user_model(model)
    saved = {id(value) for value in model.state_dict(keep_vars=True).values()}
    layers = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    return [
        layer
        for layer in layers
        if layer.running_mean is not None and id(layer.running_mean) in saved
    ]


def _running_statistics(model: nn.Module) -> dict[str, Tensor]:
    """Return the buffers of BatchNorm layers by their names in the state dict."""
    identities = {
        id(buffer) for layer in _batch_norms(model) for buffer in layer.buffers(recurse=False)
    }
    state = user_model(model).state_dict(keep_vars=True)
    return {plain_name(name): value for name, value in state.items() if id(value) in identities}


def _update_batch_norms(state: LoopState) -> None:
    """Compute BatchNorm statistics over the training data; every rank must call this.

    Like ``torch.optim.swa_utils.update_bn``, but averages over the batches of all ranks.
    """
    model: Any = state.model
    features = model_features(model)
    flags = [(module, module.training) for module in model.modules()]
    model.train()
    # Layers that stay in evaluation mode keep their statistics.
    layers = [layer for layer in _batch_norms(model) if layer.training]
    momenta = [layer.momentum for layer in layers]
    # Bypass DDP, whose forward would replace the statistics of this rank.
    forward = model.module if features.averages_ranks else model
    precision = optim_features(state.optim_wrapper).precision_context or state.precision
    try:
        for layer in layers:
            layer.reset_running_stats()
            # None means the mean over all batches, not a moving average.
            layer.momentum = None
        with preserved_rng(get_device(model)), torch.no_grad():
            for batch in read_aside(state.dataloader):
                args, kwargs = as_call(model.preprocess(batch, training=True))
                with precision():
                    forward(*args, **kwargs, mode="loss")
    except Exception as error:
        add_note(error, "while SWAHook computed BatchNorm statistics; update_bn: false skips this")
        raise
    finally:
        for layer, momentum in zip(layers, momenta, strict=True):
            layer.momentum = momentum
        for module, training in flags:
            module.training = training
    if distributed_available():
        for layer in layers:
            _merge_over_ranks(layer, features.data_group)


def _merge_over_ranks(layer: _BatchNorm, group: Any) -> None:
    """Average the statistics of a layer, weighted by batches; every rank must call this."""
    buffers = dict(layer.named_buffers(recurse=False))
    count = buffers["num_batches_tracked"]
    total = count.clone()
    all_reduce(total, group=group)
    if not total:
        # No forward uses the layer.
        return
    # The quotient of integers would have the default dtype.
    share = as_float(count) / total
    for name in ("running_mean", "running_var"):
        buffers[name].mul_(share)
        all_reduce(buffers[name], group=group)
    count.copy_(total)


def _averaged_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which parameters of a dtype are averaged: 32 bits per number or more."""
    if dtype.is_complex:
        return torch.promote_types(dtype, torch.complex64)
    return dtype if dtype.itemsize >= 4 else torch.float32


def _local_parts(params: Sequence[Tensor]) -> list[Tensor]:
    """Return this rank's shards of the parameters, as tensors that share their memory."""
    return [local_part(param) for param in params]


@torch.no_grad()
def _copy(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Copy the second tensor of each pair into the first."""
    for target, source in pairs:
        target.copy_(source)
