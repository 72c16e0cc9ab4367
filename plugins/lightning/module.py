"""A model of ours as a LightningModule that is stepped by its wrapper."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

from torch import Tensor, nn
from torchmetrics import Metric

from ...registry import MODELS, build_tree
from ...wrappers import SingleDevice
from .optim import (
    Schedule,
    build_optim_wrapper,
    build_schedules,
    carried_by,
    check_optim_wrapper,
    further_state,
    load_further_state,
    members,
    step_through,
    walk_logged,
)
from .tree import Callback, LightningModule, ParallelStrategy, Trainer

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
        TypeError: ``model``, ``optim_wrapper`` or ``metrics`` is nothing of that kind.
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
        check_optim_wrapper(optim_wrapper)
        _check_metrics(metrics)
        self.automatic_optimization = False
        self.model = built
        self.val_metrics = nn.ModuleDict({k: one.clone() for k, one in (metrics or {}).items()})
        self.test_metrics = nn.ModuleDict({k: one.clone() for k, one in (metrics or {}).items()})
        self._given_optim, self._given_schedulers = optim_wrapper, list(schedulers)
        self._optim: Any = None
        self._schedules: list[Schedule] = []
        # In a list, so that it is no child: names in state dicts are those of the model.
        self._stepper: list[Any] = []
        self._carried: dict[str, Any] | None = None
        self._restored: Mapping[str, Any] | None = None
        self._undo: list[Callable[[], None]] = []

    def step_by(self, wrapped: nn.Module | None) -> None:
        """Take ``wrapped`` for the model's wrapper; None: on one device again."""
        # A checkpoint may be written after the run.
        self._carried = carried_by(self._stepper[0]) if self._stepper else None
        self._stepper = [] if wrapped is None else [wrapped]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model."""
        return self.model(*args, **kwargs)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        """Train on one batch by the wrapper's ``train_step`` and log what it returns."""
        getattr(self._optim, "begin_batch", lambda: None)()
        logs = self._wrapped().train_step(batch, self._optim)
        self.log_dict(dict(walk_logged(logs)))
        for one in self._schedules:
            # Now, as Lightning does, since a checkpoint may be written before the epoch's end.
            due = self._optim.should_update() if one.by == "step" else self.trainer.is_last_batch
            if one.metric is None and due:
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
        if isinstance(data, (list, tuple)):
            return self._wrapped()(*data, mode="predict")
        raise TypeError(
            "a batch must be a list, tuple or dict that holds the model's inputs, got "
            f"{type(data).__name__}"
        )

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
        # What a run before this one has loaded is not gone on with.
        self._restored = None
        if self.trainer.state.fn == "fit":
            _refuse_settings(self.trainer)
        return []

    def on_train_start(self) -> None:
        """Restore what Lightning does not, and tell the optimizers how many batches will come."""
        epochs, batches, done = self.trainer.max_epochs, self.trainer.num_training_batches, 0
        to_come = (epochs or 0) - self.trainer.current_epoch
        if self._restored is not None:
            load_further_state(self._optim, self._wrapped(), self._restored)
            done, to_come = self._optim.inner_count, epochs or 0
            self._restored = None
        ends = epochs is not None and epochs >= 0 and batches != float("inf")
        total = int(to_come * batches) if ends else -1
        self._optim.initialize_count_status(self._wrapped(), done, total)
        # Where the run before ended by an error nobody has.
        _let_go(self)
        theirs = self.optimizers()
        theirs = theirs if isinstance(theirs, list) else [theirs]
        mine = [one.optimizer for one in members(self._optim).values()]
        self._undo = [step_through(*pair) for pair in zip(mine, theirs, strict=True)]

    def on_train_epoch_end(self) -> None:
        """Step the schedules that watch a metric, by its mean over the ranks."""
        logged = self.trainer.callback_metrics
        for one in self._schedules:
            if one.metric is None:
                continue
            if one.metric not in logged:
                raise ValueError(
                    f"a schedule watches metric={one.metric!r}, which was not logged; logged "
                    f"were {', '.join(sorted(logged)) or 'none'}"
                )
            value = logged[one.metric].clone()
            one.step(self.trainer.strategy.reduce(value, reduce_op="mean"))

    def teardown(self, stage: str) -> None:
        """Let the optimizers go."""
        _let_go(self)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add what Lightning does not save; every rank must call this."""
        if self._optim is not None:
            now = carried_by(self._wrapped())
            carried = self._carried if now is None else now
            checkpoint[_STATE_KEY] = further_state(self._optim, carried)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Keep that until training starts."""
        self._restored = checkpoint.get(_STATE_KEY)

    def _wrapped(self) -> Any:
        if not self._stepper:
            self._stepper.append(SingleDevice(self.model))
        (wrapped,) = self._stepper
        wrapped.training = self.training
        return wrapped


def _let_go(module: StepLightningModule) -> None:
    for undo in module._undo:
        undo()
    module._undo = []


def _check_metrics(metrics: Any) -> None:
    fits = metrics is None or isinstance(metrics, Mapping)
    if not fits or not all(isinstance(one, Metric) for one in (metrics or {}).values()):
        raise TypeError(
            "metrics must be torchmetrics by name, as in {'accuracy': MulticlassAccuracy("
            f"num_classes=10)}}, got {metrics!r}"
        )


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
    for one in getattr(trainer, "callbacks", ()):
        if any(kind.__name__ == "StochasticWeightAveraging" for kind in type(one).__mro__):
            raise ValueError(
                f"{type(one).__name__} sets rates by schedules that are not stepped in a "
                "StepLightningModule: use Lightning's WeightAveraging (2.6 or newer)"
            )
    if not str(trainer.precision).endswith("true"):
        raise ValueError(
            f"Trainer(precision={str(trainer.precision)!r}) has no effect on a "
            "StepLightningModule, whose optimizer wrapper steps: leave it out and use "
            "AmpOptimWrapper(dtype='bfloat16') or 'float16'"
        )
