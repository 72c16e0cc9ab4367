"""An exponential moving average of the weights, for evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from ...registry import HOOKS
from ...wrappers.sharding.layout import as_global, copy_whole_, local_part, reshard
from ..checkpoints.shards import with_whole_tensors
from ..checkpoints.weights import plain_name, state_of, user_model
from ..hook import Hook
from ..schedule import positive
from ..state import LoopState


@HOOKS.register_module()
class EMAHook(Hook):
    """Keep an exponential moving average of the model's parameters.

    The average starts with the parameters at the start of training, or after update
    ``start_step`` (Tarvainen and Valpola, "Mean teachers are better role models", 2017, section 2;
    averaging was introduced by Polyak and Juditsky, 1992). Each rank averages its parts of sharded
    parameters, without any communication. Parameters below 32 bits are averaged in float32.

    Args:
        decay: The factor of the old average at each update, within [0, 1).
        every_steps: Optimizer updates between two updates of the average.
        start_step: Up to and including this update, the average is a copy of the weights.
        evaluate_with_ema: Evaluate with the averaged weights. The model's weights are restored
            after the evaluation, even after an error.

    Raises:
        ValueError: ``decay``, ``every_steps`` or ``start_step`` is not allowed.
    """

    # Before all other hooks: at the end of an evaluation they see the model's own weights.
    order = 10
    # `load_state_dict` accepts sliceable objects instead of tensors.
    reads_parts = True

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
        self._average_into = get_ema_multi_avg_fn(decay)  # type: ignore[no-untyped-call]
        self._every_steps = positive("every_steps", every_steps)
        self._start_step = start_step
        self._evaluate = evaluate_with_ema
        self._model: nn.Module | None = None
        self._params: list[nn.Parameter] = []
        self._average: list[Tensor] = []
        self._own: list[Tensor] = []
        self._restored: dict[str, Any] | None = None

    def on_train_start(self, state: LoopState) -> None:
        if not self._average:
            self._start(state)

    def on_update(self, state: LoopState) -> None:
        if self._restored is not None:
            # Loaded from the rank with more batches at the end of an uneven pass.
            self._start(state)
        if state.skipped:
            return
        since = state.step - self._start_step
        if since <= 0:
            _copy(self._average, self._parts())
        elif since % self._every_steps == 0:
            pairs = zip(self._parts(), self._average, strict=True)
            self._average_into(self._average, [p.to(mean.dtype) for p, mean in pairs], 0)

    def on_eval_start(self, state: LoopState) -> None:
        if self._restored is not None:
            self._start(state)
        if self._evaluate and self._average:
            reshard(state.model)
            parts = self._parts()
            self._own = [part.detach().clone() for part in parts]
            _copy(parts, self._average)

    def on_eval_end(self, state: LoopState, metrics: dict[str, float]) -> None:
        self._restore_own_weights()

    def on_exception(self, state: LoopState, error: BaseException) -> None:
        self._restore_own_weights()

    @property
    def evaluated_entry(self) -> str:
        """The key of the evaluated weights in the state; empty for the model's weights."""
        return "model" if self._evaluate and (self._average or self._restored) else ""

    def state_dict(self) -> dict[str, Any]:
        """Return ``{"model": averaged weights}``, empty before training."""
        if self._model is None or self._restored is not None:
            return {"model": with_whole_tensors(self._restored or {})}
        reshard(self._model)
        pairs = zip(self._params, self._average, strict=True)
        by_param = {id(param): as_global(mean, param) for param, mean in pairs}
        # Tied parameters have several names.
        named = self._model.named_parameters(remove_duplicate=False)
        average = {plain_name(n): by_param[id(p)] for n, p in named if id(p) in by_param}
        own = {plain_name(name): value for name, value in state_of(self._model).items()}
        return {"model": {name: average.get(name, value) for name, value in own.items()}}

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        """Keep the average of a checkpoint, and restore it at the next training or evaluation."""
        average = {plain_name(name): value for name, value in state["model"].items()}
        if not all(hasattr(value, "shape") for value in average.values()):
            raise TypeError("the saved average must be tensors")
        self._restored = average or None
        self._average = []

    def _parts(self) -> list[Tensor]:
        """Return this rank's parts of the parameters, which share their memory."""
        return [local_part(param) for param in self._params]

    def _start(self, state: LoopState) -> None:
        self._model = user_model(state.model)
        reshard(self._model)
        named = [(n, p) for n, p in self._model.named_parameters() if p.is_floating_point()]
        self._params = [p for _, p in named]
        # A change of 1e-3 of the difference is lost in the eight bits of a bfloat16.
        kinds = [p.dtype if p.dtype.itemsize >= 4 else torch.float32 for p in self._params]
        parts = zip(self._parts(), kinds, strict=True)
        self._average = [part.detach().to(kind, copy=True) for part, kind in parts]
        if self._restored is not None:
            names = [plain_name(name) for name, _ in named]
            missing = [name for name in names if name not in self._restored]
            if missing:
                raise ValueError(
                    "the saved average must hold every parameter of the model; it lacks "
                    f"{', '.join(missing[:3])} ({len(missing)} in all)"
                )
            for name, param, mean in zip(names, self._params, self._average, strict=True):
                copy_whole_(as_global(mean, param), self._restored[name])
            self._restored = None

    def _restore_own_weights(self) -> None:
        if self._own and self._model is not None:
            # FSDP2 may still hold full parameters gathered from the averages.
            reshard(self._model)
            _copy(self._parts(), self._own)
            self._own = []


@torch.no_grad()
def _copy(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)
