"""A LightningModule whose training step is the ``train_step`` of a model wrapper."""

from __future__ import annotations

import inspect
import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial, wraps
from types import MethodType
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torchmetrics import Metric

from ...collectives import all_gather_object, get_rank, get_world_size
from ...registry import MODELS, OPTIM_WRAPPERS, OPTIMIZERS, PARAM_SCHEDULERS, build_tree
from ...registry.registry import find_component
from ...wrappers import OptimWrapperDict, SingleDevice
from ...wrappers.features import ModelFeatures, optim_features
from ...wrappers.optimizers.optimizer_fit import build_optimizer
from .tree import Callback, LightningModule, ParallelStrategy, Trainer

logger = logging.getLogger(__name__)

_STATE_KEY = "stepwrap"
_OPTIM_WRAPPER_TYPES = (
    "optim_wrapper must be an OptimWrapper, a config of one, or a function that takes the wrapped "
    "model and returns an OptimWrapper"
)
# Lightning saves these itself.
_TORCH_KEYS = ("state", "param_groups")
# A key next to the names of optimizer wrappers. Names are keyword arguments without spaces.
_STEP_STATES = "step_state of all ranks"


class _Schedule(NamedTuple):
    """A scheduler, the unit in which it is stepped, and the metric that it watches or None."""

    scheduler: Any
    by: Literal["step", "epoch"]
    metric: str | None

    def step(self, *measured: Any) -> None:
        """Step the scheduler; suppress torch's warning if a loss scaler skipped the update."""
        with warnings.catch_warnings():
            # torch warns because it does not know about skipped updates (pytorch/pytorch#44511).
            warnings.filterwarnings("ignore", r"Detected call of `lr_scheduler.step\(\)`")
            self.scheduler.step(*measured)


class StepLightningModule(LightningModule):
    """A model under Lightning's Trainer, trained by its wrapper's ``train_step``.

    The Trainer's ``StepStrategy`` wraps ``model``. On a single device without that strategy, the
    wrapper is ``SingleDevice``. The optimizer wrapper controls accumulation, clipping and
    precision.

    Args:
        model: a model, or its config.
        optim_wrapper: an optimizer wrapper, a function that takes the wrapped model and returns
            one, or a config with the key ``optimizer``. None if the module is only evaluated.
        schedulers: a list of configs or functions. A config of a scheduler can also have ``by``
            ("step" or "epoch"), ``metric`` (the logged value that ReduceLROnPlateau watches) and
            ``optimizer`` (its name, if there are several), and its ``type`` may be a function. A
            function alone needs a single optimizer: it takes this optimizer and returns a
            scheduler, which is stepped after each epoch.
        metrics: torchmetrics by name, updated with the outputs of ``val_step`` and ``test_step``.

    Raises:
        TypeError: ``model``, ``optim_wrapper`` or ``metrics`` has the wrong type.
        ValueError: in ``fit``, if the Trainer is configured to accumulate, clip or use mixed
            precision, which the optimizer wrapper does, or if a scheduler is invalid.
        RuntimeError: in ``fit``, if the Trainer has a distributed strategy that does not wrap
            ``model``.
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
            # Saved, so that `load_from_checkpoint` can build the module again.
            self.save_hyperparameters("model", "optim_wrapper", "schedulers")
        built = build_tree(model, MODELS) if isinstance(model, Mapping) else model
        if not isinstance(built, nn.Module):
            raise TypeError(f"model must be a module or a config, got {type(built).__name__}")
        _check_optim_wrapper(optim_wrapper)
        metrics = {} if metrics is None else metrics
        is_mapping = isinstance(metrics, Mapping)
        if not is_mapping or not all(isinstance(metric, Metric) for metric in metrics.values()):
            raise TypeError(
                "metrics must be torchmetrics by name, such as {'accuracy': MulticlassAccuracy("
                f"num_classes=10)}}, got {metrics!r}"
            )
        self.automatic_optimization = False
        self.model = built
        self.val_metrics = nn.ModuleDict({k: metric.clone() for k, metric in metrics.items()})
        self.test_metrics = nn.ModuleDict({k: metric.clone() for k, metric in metrics.items()})
        self._given_optim, self._given_schedulers = optim_wrapper, list(schedulers)
        self._optim: Any = None
        self._schedules: list[_Schedule] = []
        # A list keeps the wrapper from becoming a child module, which would rename parameters.
        self._wrapper: list[Any] = []
        self._step_state: dict[str, Any] | None = None
        self._restored: Mapping[str, Any] | None = None
        self._undo: list[Callable[[], None]] = []
        # False before the first batch of a training, which may be inside a pass.
        self._is_in_pass = False

    def set_wrapper(self, wrapped: nn.Module | None) -> None:
        """Use ``wrapped`` as the model's wrapper; None means ``SingleDevice``."""
        # Keep the state of the old wrapper: a checkpoint may be written after the run.
        self._step_state = _get_step_state(self._wrapper[0]) if self._wrapper else None
        self._wrapper = [] if wrapped is None else [wrapped]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model."""
        return self.model(*args, **kwargs)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        """Train on one batch with the wrapper's ``train_step`` and log the scalars it returns."""
        if batch_idx == 0 or not self._is_in_pass:
            self._begin_pass(batch_idx)
        optim_features(self._optim).begin_batch()
        logs = self._wrapped().train_step(batch, self._optim)
        self.log_dict(
            {
                name: value
                for name, value in logs.items()
                if isinstance(value, (int, float)) or getattr(value, "numel", lambda: 0)() == 1
            }
        )
        for schedule in self._schedules:
            # Stepped here, as Lightning does, because a checkpoint may be written before the epoch
            # ends.
            due = (
                self._optim.should_update() if schedule.by == "step" else self.trainer.is_last_batch
            )
            if schedule.metric is None and due:
                schedule.step()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Evaluate one batch with the wrapper's ``val_step``."""
        _measure(self, "val", batch)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        """Evaluate one batch with the wrapper's ``test_step``."""
        _measure(self, "test", batch)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        """Return the model's predictions for one batch."""
        preprocess = getattr(self.model, "data_preprocessor", None)
        data = batch if preprocess is None else preprocess(batch, training=False)
        if isinstance(data, Mapping):
            return self._wrapped()(**data, mode="predict")
        if isinstance(data, (list, tuple)):
            return self._wrapped()(*data, mode="predict")
        raise TypeError(
            "a batch must be a list, tuple or dict that contains the model's inputs, got "
            f"{type(data).__name__}"
        )

    def configure_optimizers(self) -> Any:
        """Build the optimizer wrapper and the schedulers, and return them for checkpoints."""
        if self._given_optim is None:
            raise TypeError("StepLightningModule needs an optim_wrapper for training, got None")
        self._optim = _build_optim_wrapper(self._given_optim, self._wrapped())
        optimizers = {name: member.optimizer for name, member in _members(self._optim).items()}
        self._schedules = [_schedule(settings, optimizers) for settings in self._given_schedulers]
        return list(optimizers.values()), [schedule.scheduler for schedule in self._schedules]

    def configure_callbacks(self) -> Sequence[Callback]:
        """Check the Trainer's settings and return no callbacks.

        The check is here because Lightning calls this method before all others.
        """
        # Discards the state that an earlier run loaded.
        self._restored = None
        if self.trainer.state.fn == "fit":
            _check_trainer_settings(self.trainer)
        return []

    def on_train_start(self) -> None:
        """Restore the state that Lightning does not restore; set the number of micro-batches."""
        epochs, batches, done = self.trainer.max_epochs, self.trainer.num_training_batches, 0
        remaining = (epochs or 0) - self.trainer.current_epoch
        if self._restored is not None:
            _load_extra_state(self._optim, self._wrapped(), self._restored)
            done, remaining = optim_features(self._optim).inner_count, epochs or 0
            self._restored = None
        ends = epochs is not None and epochs >= 0 and batches != float("inf")
        total = int(remaining * batches) if ends else -1
        self._optim.initialize_count_status(self._wrapped(), done, total)
        # Called here because Lightning does not call `teardown` after a run that failed.
        StepLightningModule.teardown(self, "fit")
        outer = self.optimizers()
        outer = outer if isinstance(outer, list) else [outer]
        inner = [member.optimizer for member in _members(self._optim).values()]
        self._undo = [_route_steps(*pair) for pair in zip(inner, outer, strict=True)]

        self._is_in_pass = False

    def on_validation_model_zero_grad(self) -> None:
        """Keep the gradients, because a window may not have ended; its update clears them."""

    def _begin_pass(self, done: int) -> None:
        """Let windows with ``loss_weight`` end with the pass; ``done`` of its batches are done."""
        self._is_in_pass = True
        begin = getattr(self._optim, "begin_pass", None)
        if begin is not None:
            length = self.trainer.num_training_batches
            start = optim_features(self._optim).inner_count - done
            begin(start, None if length == float("inf") else int(length))

    def on_train_epoch_end(self) -> None:
        """Step the schedulers that watch a metric, with its mean over the ranks."""
        logged = self.trainer.callback_metrics
        for schedule in self._schedules:
            if schedule.metric is None:
                continue
            if schedule.metric not in logged:
                raise ValueError(
                    f"a scheduler watches metric={schedule.metric!r}, which was not logged; logged "
                    f"values: {', '.join(sorted(logged)) or 'none'}"
                )
            value = logged[schedule.metric].clone()
            schedule.step(self.trainer.strategy.reduce(value, reduce_op="mean"))

    def teardown(self, stage: str) -> None:
        """Restore the optimizers' ``step``."""
        for undo in self._undo:
            undo()
        self._undo = []

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add the state that Lightning does not save; every rank must call this."""
        if self._optim is not None:
            current = _get_step_state(self._wrapped())
            step_state = self._step_state if current is None else current
            checkpoint[_STATE_KEY] = _extra_state(self._optim, step_state)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Keep the added state until training starts."""
        self._restored = checkpoint.get(_STATE_KEY)

    def _wrapped(self) -> Any:
        if not self._wrapper:
            self._wrapper.append(SingleDevice(self.model))
        (wrapped,) = self._wrapper
        wrapped.training = self.training
        return wrapped


def _measure(module: StepLightningModule, stage: str, batch: Any) -> None:
    """Evaluate one batch and log the results; during ``fit``, use the training's precision."""
    in_fit = module.trainer.state.fn == "fit"
    precision = optim_features(module._optim).precision_context if in_fit else None
    with (precision or nullcontext)():
        outputs = getattr(module._wrapped(), f"{stage}_step")(batch)
    size = outputs.get("num_samples") if isinstance(outputs, Mapping) else None
    loss_weight = optim_features(module._optim).loss_weight
    if loss_weight is not None:
        size = float(loss_weight.of(batch, model=module.model))
    if isinstance(outputs, Mapping) and isinstance(outputs.get("loss"), Tensor):
        # A mean over nothing is NaN, which a weight of 0 would keep.
        loss = outputs["loss"] if size != 0 else torch.zeros_like(outputs["loss"])
        module.log(f"{stage}_loss", loss, batch_size=size, sync_dist=True)
    for name, metric in getattr(module, f"{stage}_metrics").items():
        if isinstance(outputs, Mapping):
            # Pass only the outputs that the metric's `update` accepts.
            params = inspect.signature(metric.update).parameters.values()
            takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in params)
            names = (
                outputs
                if takes_all
                else [parameter.name for parameter in params if parameter.name in outputs]
            )
            values = {name: outputs[name] for name in names}
            if loss_weight is not None and values.keys() >= {"loss", "num_samples"}:
                values["num_samples"] = size
            metric.update(**values)
        else:
            metric.update(outputs, batch)
        module.log(f"{stage}_{name}", metric, batch_size=size)


def _check_trainer_settings(trainer: Trainer) -> None:
    """Check that the Trainer leaves updates to the optimizer wrapper and wraps the model.

    Raises:
        ValueError: a setting or callback of the Trainer has no effect on a StepLightningModule.
        RuntimeError: a distributed strategy does not wrap the model.
    """
    # StepStrategy is recognised by an attribute, because its module imports this one.
    wraps = hasattr(trainer.strategy, "wrapper_options")
    if isinstance(trainer.strategy, ParallelStrategy) and not wraps:
        raise RuntimeError(
            f"{type(trainer.strategy).__name__} does not wrap the model of a StepLightningModule, "
            'so weights would differ between ranks: use strategy="stepwrap" or StepStrategy(...)'
        )
    replacements = {
        "accumulate_grad_batches": (trainer.accumulate_grad_batches, 1, "accumulative_counts"),
        "gradient_clip_val": (trainer.gradient_clip_val or None, None, "clip_grad"),
    }
    for name, (value, default, replacement) in replacements.items():
        if value != default:
            raise ValueError(
                f"Trainer({name}={value!r}) has no effect on a StepLightningModule, because its "
                f"optimizer wrapper makes the updates: remove it and set {replacement} of the "
                "optimizer wrapper"
            )
    for callback in getattr(trainer, "callbacks", ()):
        if any(kind.__name__ == "StochasticWeightAveraging" for kind in type(callback).__mro__):
            raise ValueError(
                f"{type(callback).__name__} sets learning rates by schedules that are not stepped "
                "in a StepLightningModule: use Lightning's WeightAveraging (2.6 or newer)"
            )
    if not str(trainer.precision).endswith("true"):
        raise ValueError(
            f"Trainer(precision={str(trainer.precision)!r}) has no effect on a "
            "StepLightningModule, because its optimizer wrapper makes the steps: remove it and use "
            "AmpOptimWrapper(dtype='bfloat16') or 'float16'"
        )


def _check_optim_wrapper(candidate: Any) -> None:
    """Raise TypeError unless ``candidate`` can be turned into an optimizer wrapper."""
    is_function = callable(candidate) and not isinstance(candidate, type)
    if (
        candidate is None
        or is_function
        or isinstance(candidate, Mapping)
        or _is_optim_wrapper(candidate)
    ):
        return
    kind = candidate.__name__ if isinstance(candidate, type) else type(candidate).__name__
    example = "lambda model: OptimWrapper(AdamW(model.parameters()))"
    raise TypeError(f"{_OPTIM_WRAPPER_TYPES}, got {kind}; for example {example}")


def _is_optim_wrapper(candidate: Any) -> bool:
    return hasattr(candidate, "update_params") and hasattr(candidate, "state_dict")


def _build_optim_wrapper(candidate: Any, wrapped: nn.Module) -> Any:
    """Return the given optimizer wrapper, or build one from the given config or function."""
    if isinstance(candidate, Mapping) and not isinstance(candidate, OptimWrapperDict):
        return _from_config(candidate, wrapped)
    if callable(candidate):
        candidate = candidate(wrapped)
    if not _is_optim_wrapper(candidate):
        raise TypeError(f"{_OPTIM_WRAPPER_TYPES}, got {type(candidate).__name__}")
    return candidate


def _from_config(config: Mapping[str, Any], wrapped: nn.Module) -> Any:
    settings = {"type": "OptimWrapper", **config}
    optimizer = settings.pop("optimizer", None)
    example = "{'optimizer': {'type': 'AdamW', 'lr': 1e-3}}"
    if "type" not in config and "optimizer" not in config:
        raise TypeError(
            f"optim_wrapper as a config needs the key optimizer, such as {example}, got the keys "
            f"{', '.join(map(repr, config)) or 'none'}"
        )
    if not isinstance(optimizer, Mapping) or "type" not in optimizer:
        raise TypeError(
            f"optim_wrapper as a config needs one optimizer with a type, such as {example}; for "
            "several optimizers, give a function of the model that returns an OptimWrapperDict"
        )
    fastest = partial(build_optimizer, find_component(optimizer, OPTIMIZERS))
    parameters = {"params": list(wrapped.parameters())}
    built = build_tree({**optimizer, "type": fastest}, OPTIMIZERS, parameters)
    return build_tree(settings, OPTIM_WRAPPERS, {"optimizer": built})


def _members(optim_wrapper: Any) -> dict[str, Any]:
    """Return the optimizer wrappers by name; an unnamed single one has the name ``""``."""
    return dict(optim_wrapper) if isinstance(optim_wrapper, Mapping) else {"": optim_wrapper}


def _schedule(source: Any, optimizers: Mapping[str, Optimizer]) -> _Schedule:
    settings = dict(source) if isinstance(source, Mapping) else {"type": source}
    by, metric = settings.pop("by", "epoch"), settings.pop("metric", None)
    name = settings.pop("optimizer", next(iter(optimizers)) if len(optimizers) == 1 else None)
    if by not in ("step", "epoch"):
        raise ValueError(f"by of a scheduler must be 'step' or 'epoch', got {by!r}")
    if name not in optimizers:
        names = list(optimizers)
        remedy = (
            ""
            if isinstance(source, Mapping)
            else f"; instead of a function, give {{'type': function, 'optimizer': {names[0]!r}}}"
        )
        raise ValueError(
            f"optimizer of a scheduler must be one of {', '.join(map(repr, names))}, got {name!r}"
            f"{remedy}"
        )
    if isinstance(source, Mapping):
        scheduler = build_tree(settings, PARAM_SCHEDULERS, {"optimizer": optimizers[name]})
    else:
        scheduler = source(optimizers[name])
    watches = isinstance(scheduler, ReduceLROnPlateau)
    if watches and metric is None:
        raise ValueError("ReduceLROnPlateau needs metric, the name of a logged value to watch")
    if metric is not None and not (watches and by == "epoch"):
        raise ValueError(
            f"metric={metric!r} needs ReduceLROnPlateau with by=epoch, got "
            f"{type(scheduler).__name__} with by={by}"
        )
    return _Schedule(scheduler, by, metric)


def _extra_state(optim_wrapper: Any, step_state: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the state that Lightning does not save: counts, loss scale, each rank's step_state.

    Every rank must call this if there is a step state.
    """
    state: dict[str, Any] = {
        name: {key: value for key, value in member.state_dict().items() if key not in _TORCH_KEYS}
        for name, member in _members(optim_wrapper).items()
    }
    if step_state is not None:
        state[_STEP_STATES] = all_gather_object(step_state)
    return state


def _load_extra_state(optim_wrapper: Any, wrapped: Any, state: Mapping[str, Any]) -> None:
    """Load a result of ``_extra_state``; Lightning has already restored the optimizers."""
    for name, member in _members(optim_wrapper).items():
        if name in state:
            member.load_state_dict({**member.state_dict(), **state[name]})
    if not _has_step_state(wrapped):
        return
    by_rank = state.get(_STEP_STATES, ())
    if len(by_rank) == get_world_size():
        wrapped.load_step_state(by_rank[get_rank()])
        return
    logger.warning(
        "the checkpoint has the step_state of %d ranks, but there are %d: it is not loaded, and "
        "the training step starts with its initial state",
        len(by_rank),
        get_world_size(),
    )


def _get_step_state(wrapped: Any) -> dict[str, Any] | None:
    """Return the state that a custom step keeps between batches; None without ``step_state``."""
    return wrapped.step_state() if _has_step_state(wrapped) else None


def _has_step_state(wrapped: Any) -> bool:
    default = ModelFeatures.step_state
    return getattr(type(wrapped), "step_state", default) is not default


def _route_steps(optimizer: Any, lightning_optimizer: Any) -> Callable[[], None]:
    """Route every step of ``optimizer`` through Lightning's optimizer; return an undo function.

    Lightning counts steps and calls hooks only if its own optimizer object is stepped.
    """
    before = vars(optimizer).get("step")
    plain = optimizer.step
    is_inside = False

    # `wraps` also copies the attribute by which torch's schedulers recognise a patched step.
    @wraps(plain)
    def step(self: Any, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        nonlocal is_inside
        if is_inside:
            return plain(closure, **kwargs)
        is_inside = True
        try:
            return lightning_optimizer.step(closure, **kwargs)
        finally:
            is_inside = False

    # torch's schedulers expect a bound method.
    optimizer.step = MethodType(step, optimizer)

    def undo() -> None:
        if before is None:
            del optimizer.step
        else:
            optimizer.step = before

    return undo
