"""A model of ours as a LightningModule that is stepped by its wrapper."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

from torch import Tensor, nn
from torchmetrics import Metric

from ..registry import MODELS, build_tree
from ..wrappers import SingleDevice
from ._lightning_optim import (
    Schedule,
    build_optim_wrapper,
    build_schedules,
    further_state,
    load_further_state,
    members,
    step_through,
    walk_logged,
)
from ._lightning_tree import Callback, LightningModule, ParallelStrategy, Trainer

_STATE_KEY = "stepwrap"


class StepLightningModule(LightningModule):
    """Any model of ours under the Trainer, trained by its wrapper's own ``train_step``.

    ``StepStrategy`` wraps ``model``; on a single device without it the wrapper is
    ``SingleDevice``. Accumulation, clipping and precision are those of the optimizer wrapper.

    Args:
        model: a model, or its config.
        optim_wrapper: an optimizer wrapper, a function of the wrapped model that returns one, or
            a config with the key ``optimizer``. None: the module is only evaluated.
        schedulers: configs of schedulers, with ``by`` ("step", "epoch"), ``metric`` (the logged
            value that ReduceLROnPlateau watches) and ``optimizer`` (the name of one of several);
            or functions of the optimizer, whose schedulers are stepped after each epoch.
        metrics: torchmetrics by name, fed by the outputs of ``val_step`` and ``test_step``.

    Raises:
        TypeError: ``model`` or ``optim_wrapper`` is nothing of that kind.
        ValueError: in ``fit``: the Trainer's settings contradict the optimizer wrapper's.
        RuntimeError: in ``fit``: another distributed strategy than ``StepStrategy``.
    """

    def __init__(
        self,
        model: nn.Module | Mapping[str, Any],
        optim_wrapper: Any = None,
        *,
        schedulers: Sequence[Any] = (),
        metrics: Mapping[str, Metric] | None = None,
    ) -> None:
        super().__init__()
        if isinstance(model, Mapping) and isinstance(optim_wrapper, Mapping):
            # load_from_checkpoint then builds the same again.
            self.save_hyperparameters("model", "optim_wrapper", "schedulers")
        built = build_tree(model, MODELS) if isinstance(model, Mapping) else model
        if not isinstance(built, nn.Module):
            raise TypeError(f"model must be a module or a config, got {type(built).__name__}")
        self.automatic_optimization = False
        self.model = built
        self.val_metrics = nn.ModuleDict({k: one.clone() for k, one in (metrics or {}).items()})
        self.test_metrics = nn.ModuleDict({k: one.clone() for k, one in (metrics or {}).items()})
        self._given_optim, self._given_schedulers = optim_wrapper, list(schedulers)
        self._optim: Any = None
        self._schedules: list[Schedule] = []
        # In a list, so that it is no child: names in state dicts are those of the model.
        self._stepper: list[Any] = []
        self._restored: Mapping[str, Any] | None = None
        self._undo: list[Callable[[], None]] = []

    def step_by(self, wrapped: nn.Module | None) -> None:
        """Take ``wrapped`` for the model's wrapper; None: on one device again."""
        self._stepper = [] if wrapped is None else [wrapped]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model."""
        return self.model(*args, **kwargs)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        """Train on one batch by the wrapper's ``train_step`` and log what it returns."""
        logs = self._wrapped().train_step(batch, self._optim)
        self.log_dict(dict(walk_logged(logs)))
        if self._optim.should_update():
            for one in self._schedules:
                if one.by == "step" and one.metric is None:
                    one.step()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Evaluate one batch by the wrapper's ``val_step``."""
        _measure(self, "val", batch)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        """Evaluate one batch by the wrapper's ``test_step``."""
        _measure(self, "test", batch)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        """The model's predictions for one batch."""
        preprocess = getattr(self.model, "data_preprocessor", None)
        data = batch if preprocess is None else preprocess(batch, training=False)
        if isinstance(data, Mapping):
            return self._wrapped()(**data, mode="predict")
        return self._wrapped()(*data, mode="predict")

    def configure_optimizers(self) -> Any:
        """Build optimizer wrapper and schedules; Lightning saves and restores their states."""
        if self._given_optim is None:
            raise TypeError("StepLightningModule needs an optim_wrapper to be trained")
        self._optim = build_optim_wrapper(self._given_optim, self._wrapped())
        self._schedules = build_schedules(self._given_schedulers, self._optim)
        optimizers = [one.optimizer for one in members(self._optim).values()]
        return optimizers, [one.scheduler for one in self._schedules]

    def configure_callbacks(self) -> Sequence[Callback]:
        """No callbacks: the first that Lightning asks, hence where its settings are checked."""
        if self.trainer.state.fn == "fit":
            _refuse_settings(self.trainer)
        return []

    def on_train_start(self) -> None:
        """Restore what Lightning does not, and tell the optimizers how many batches will come."""
        resumed = self._restored is not None or self.trainer.current_epoch > 0
        if self._restored is not None:
            load_further_state(self._optim, self._restored)
            self._restored = None
        epochs, batches = self.trainer.max_epochs, self.trainer.num_training_batches
        ends = epochs is not None and epochs >= 0 and batches != float("inf")
        total = int(epochs * batches) if ends and epochs is not None else -1
        done = self._optim.inner_count if resumed else 0
        self._optim.initialize_count_status(self._wrapped(), done, total)
        theirs = self.optimizers()
        theirs = theirs if isinstance(theirs, list) else [theirs]
        mine = [one.optimizer for one in members(self._optim).values()]
        self._undo = [step_through(*pair) for pair in zip(mine, theirs, strict=True)]

    def on_train_epoch_end(self) -> None:
        """Step the schedules that count epochs, or watch a metric."""
        for one in self._schedules:
            if one.metric is not None:
                one.step(self.trainer.callback_metrics[one.metric])
            elif one.by == "epoch":
                one.step()

    def teardown(self, stage: str) -> None:
        """Let the optimizers go."""
        for undo in self._undo:
            undo()
        self._undo = []

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add the optimizer wrapper's counts and loss scale; every rank must call this."""
        if self._optim is not None:
            checkpoint[_STATE_KEY] = further_state(self._optim)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Keep those until training starts."""
        self._restored = checkpoint.get(_STATE_KEY)

    def _wrapped(self) -> Any:
        if not self._stepper:
            self._stepper.append(SingleDevice(self.model))
        (wrapped,) = self._stepper
        wrapped.training = self.training
        return wrapped


def _measure(module: StepLightningModule, stage: str, batch: Any) -> None:
    """Evaluate one batch, in the precision of the training inside of one, and log the results."""
    in_fit = module.trainer.state.fn == "fit"
    precision = getattr(module._optim, "precision_context", nullcontext)
    with precision() if in_fit else nullcontext():
        outputs = getattr(module._wrapped(), f"{stage}_step")(batch)
    size = outputs.get("num_samples") if isinstance(outputs, Mapping) else None
    if isinstance(outputs, Mapping) and isinstance(outputs.get("loss"), Tensor):
        module.log(f"{stage}_loss", outputs["loss"], batch_size=size, sync_dist=True)
    for name, metric in getattr(module, f"{stage}_metrics").items():
        _feed(metric, outputs, batch)
        module.log(f"{stage}_{name}", metric, batch_size=size)


def _feed(metric: Metric, outputs: Any, batch: Any) -> None:
    """Update by what a step returned: by the metric's argument names, or outputs and batch."""
    if not isinstance(outputs, Mapping):
        metric.update(outputs, batch)
        return
    wanted = inspect.signature(metric.update).parameters.values()
    if any(one.kind is one.VAR_KEYWORD for one in wanted):
        metric.update(**outputs)
        return
    metric.update(**{one.name: outputs[one.name] for one in wanted if one.name in outputs})


def _refuse_settings(trainer: Trainer) -> None:
    """Refuse what the optimizer wrapper does, and strategies that average nothing of ours."""
    # A strategy of ours says so itself: its file imports this one.
    wraps = hasattr(trainer.strategy, "wrapper_options")
    if isinstance(trainer.strategy, ParallelStrategy) and not wraps:
        raise RuntimeError(
            f"{type(trainer.strategy).__name__} does not wrap the model of a StepLightningModule, "
            'so its ranks would drift apart: use strategy="stepwrap" or StepStrategy(...)'
        )
    instead = {
        "accumulate_grad_batches": (trainer.accumulate_grad_batches, 1, "accumulative_counts"),
        "gradient_clip_val": (trainer.gradient_clip_val or None, None, "clip_grad"),
    }
    for name, (value, default, ours) in instead.items():
        if value != default:
            raise ValueError(
                f"Trainer({name}={value!r}) has no effect on a StepLightningModule, whose "
                f"optimizer wrapper steps: leave it out and use its {ours}"
            )
    if not str(trainer.precision).endswith("true"):
        raise ValueError(
            f"Trainer(precision={str(trainer.precision)!r}) has no effect on a "
            "StepLightningModule, whose optimizer wrapper steps: leave it out and use "
            "AmpOptimWrapper(dtype='bfloat16') or 'float16'"
        )
