"""A model of ours as a LightningModule that is stepped by its wrapper."""

from __future__ import annotations

import inspect
import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial, wraps
from types import MethodType
from typing import Any, Literal, NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torchmetrics import Metric

from ...collectives import all_gather_object, get_rank, get_world_size
from ...registry import MODELS, OPTIM_WRAPPERS, OPTIMIZERS, PARAM_SCHEDULERS, build_tree
from ...wrappers import OptimWrapperDict, SingleDevice
from ...wrappers.features import ModelFeatures, optim_features
from ...wrappers.optimizers.optimizer_fit import build_optimizer
from .tree import Callback, LightningModule, ParallelStrategy, Trainer

logger = logging.getLogger(__name__)

_STATE_KEY = "stepwrap"
_WANTED = (
    "optim_wrapper must be an OptimWrapper, a config, or a function of the wrapped model that "
    "returns one"
)
# What Lightning saves by itself.
_TORCH_KEYS = ("state", "param_groups")
# Beside the members of the optimizer wrapper, whose names are arguments.
_CARRIED = "step_state of all ranks"


class _Schedule(NamedTuple):
    """A scheduler, when it is stepped and the metric that it watches, if any."""

    scheduler: Any
    by: Literal["step", "epoch"]
    metric: str | None

    def step(self, *measured: Any) -> None:
        """Step, also where a loss scaler has skipped the update: a rate depends on its number."""
        with warnings.catch_warnings():
            # It knows nothing of skipped updates (pytorch/pytorch#44511).
            warnings.filterwarnings("ignore", r"Detected call of `lr_scheduler.step\(\)`")
            self.scheduler.step(*measured)


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
        _check_optim_wrapper(optim_wrapper)
        fits = metrics is None or isinstance(metrics, Mapping)
        if not fits or not all(isinstance(one, Metric) for one in (metrics or {}).values()):
            raise TypeError(
                "metrics must be torchmetrics by name, as in {'accuracy': MulticlassAccuracy("
                f"num_classes=10)}}, got {metrics!r}"
            )
        self.automatic_optimization = False
        self.model = built
        self.val_metrics = nn.ModuleDict({k: one.clone() for k, one in (metrics or {}).items()})
        self.test_metrics = nn.ModuleDict({k: one.clone() for k, one in (metrics or {}).items()})
        self._given_optim, self._given_schedulers = optim_wrapper, list(schedulers)
        self._optim: Any = None
        self._schedules: list[_Schedule] = []
        # In a list, so that it is no child: names in state dicts are those of the model.
        self._stepper: list[Any] = []
        self._carried: dict[str, Any] | None = None
        self._restored: Mapping[str, Any] | None = None
        self._undo: list[Callable[[], None]] = []

    def step_by(self, wrapped: nn.Module | None) -> None:
        """Take ``wrapped`` for the model's wrapper; None: on one device again."""
        # A checkpoint may be written after the run.
        self._carried = _carried_by(self._stepper[0]) if self._stepper else None
        self._stepper = [] if wrapped is None else [wrapped]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model."""
        return self.model(*args, **kwargs)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        """Train on one batch by the wrapper's ``train_step`` and log what it returns."""
        optim_features(self._optim).begin_batch()
        logs = self._wrapped().train_step(batch, self._optim)
        self.log_dict(
            {
                name: value
                for name, value in logs.items()
                if isinstance(value, (int, float)) or getattr(value, "numel", lambda: 0)() == 1
            }
        )
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
        self._optim = _build_optim_wrapper(self._given_optim, self._wrapped())
        optimizers = {name: one.optimizer for name, one in _members(self._optim).items()}
        self._schedules = [_schedule(one, optimizers) for one in self._given_schedulers]
        return list(optimizers.values()), [one.scheduler for one in self._schedules]

    def configure_callbacks(self) -> Sequence[Callback]:
        """No callbacks: the first that Lightning asks, hence where its settings are checked."""
        # What a run before this one has loaded is not gone on with.
        self._restored = None
        if self.trainer.state.fn == "fit":
            _refuse_settings(self.trainer)
        return []

    def on_train_start(self) -> None:
        """Restore what Lightning does not, and set how many batches the optimizers will get."""
        epochs, batches, done = self.trainer.max_epochs, self.trainer.num_training_batches, 0
        to_come = (epochs or 0) - self.trainer.current_epoch
        if self._restored is not None:
            _load_further_state(self._optim, self._wrapped(), self._restored)
            done, to_come = optim_features(self._optim).inner_count, epochs or 0
            self._restored = None
        ends = epochs is not None and epochs >= 0 and batches != float("inf")
        total = int(to_come * batches) if ends else -1
        self._optim.initialize_count_status(self._wrapped(), done, total)
        # A run that ended by an error has not.
        StepLightningModule.teardown(self, "fit")
        theirs = self.optimizers()
        theirs = theirs if isinstance(theirs, list) else [theirs]
        mine = [one.optimizer for one in _members(self._optim).values()]
        self._undo = [_step_through(*pair) for pair in zip(mine, theirs, strict=True)]

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
        for undo in self._undo:
            undo()
        self._undo = []

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add what Lightning does not save; every rank must call this."""
        if self._optim is not None:
            now = _carried_by(self._wrapped())
            carried = self._carried if now is None else now
            checkpoint[_STATE_KEY] = _further_state(self._optim, carried)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Keep that until training starts."""
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
    precision = optim_features(module._optim).precision_context if in_fit else None
    with (precision or nullcontext)():
        outputs = getattr(module._wrapped(), f"{stage}_step")(batch)
    size = outputs.get("num_samples") if isinstance(outputs, Mapping) else None
    if isinstance(outputs, Mapping) and isinstance(outputs.get("loss"), Tensor):
        module.log(f"{stage}_loss", outputs["loss"], batch_size=size, sync_dist=True)
    for name, metric in getattr(module, f"{stage}_metrics").items():
        if isinstance(outputs, Mapping):
            # By the names of the metric's arguments.
            wanted = inspect.signature(metric.update).parameters.values()
            takes_all = any(one.kind is one.VAR_KEYWORD for one in wanted)
            names = outputs if takes_all else [one.name for one in wanted if one.name in outputs]
            metric.update(**{name: outputs[name] for name in names})
        else:
            metric.update(outputs, batch)
        module.log(f"{stage}_{name}", metric, batch_size=size)


def _refuse_settings(trainer: Trainer) -> None:
    """Refuse what the optimizer wrapper does, and strategies that average nothing of ours."""
    # By an attribute of our strategy, whose file imports this one.
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


def _check_optim_wrapper(given: Any) -> None:
    """Raise TypeError for what can never become an optimizer wrapper."""
    makes_one = callable(given) and not isinstance(given, type)
    if given is None or makes_one or isinstance(given, Mapping) or _is_optim_wrapper(given):
        return
    found = given.__name__ if isinstance(given, type) else type(given).__name__
    example = "lambda model: OptimWrapper(AdamW(model.parameters()))"
    raise TypeError(f"{_WANTED}, got {found}; as in {example}")


def _is_optim_wrapper(given: Any) -> bool:
    return hasattr(given, "update_params") and hasattr(given, "state_dict")


def _build_optim_wrapper(given: Any, wrapped: nn.Module) -> Any:
    """Return the optimizer wrapper: ``given`` itself, what it returns, or what it describes."""
    if isinstance(given, Mapping) and not isinstance(given, OptimWrapperDict):
        return _from_config(given, wrapped)
    if callable(given):
        given = given(wrapped)
    if not _is_optim_wrapper(given):
        raise TypeError(f"{_WANTED}, got {type(given).__name__}")
    return given


def _from_config(given: Mapping[str, Any], wrapped: nn.Module) -> Any:
    settings = {"type": "OptimWrapper", **given}
    optimizer = settings.pop("optimizer", None)
    if "type" not in given and "optimizer" not in given:
        raise TypeError(
            "optim_wrapper as a config needs the key optimizer, as in {'optimizer': {'type': "
            f"'AdamW', 'lr': 1e-3}}}}, got the keys {', '.join(map(repr, given)) or 'none'}"
        )
    if not isinstance(optimizer, Mapping) or "type" not in optimizer:
        raise TypeError(
            "optim_wrapper as a config holds one optimizer with a type, as in {'optimizer': "
            "{'type': 'AdamW', 'lr': 1e-3}}; for several give a function of the model that "
            "returns an OptimWrapperDict"
        )
    fastest = partial(build_optimizer, OPTIMIZERS.resolve(optimizer["type"]))
    parameters = {"params": list(wrapped.parameters())}
    built = build_tree({**optimizer, "type": fastest}, OPTIMIZERS, parameters)
    return build_tree(settings, OPTIM_WRAPPERS, {"optimizer": built})


def _members(optim_wrapper: Any) -> dict[str, Any]:
    """The optimizer wrappers by name; a single one is called ``""``."""
    return dict(optim_wrapper) if isinstance(optim_wrapper, Mapping) else {"": optim_wrapper}


def _schedule(given: Any, optimizers: Mapping[str, Optimizer]) -> _Schedule:
    settings = dict(given) if isinstance(given, Mapping) else {"type": given}
    by, metric = settings.pop("by", "epoch"), settings.pop("metric", None)
    name = settings.pop("optimizer", next(iter(optimizers)) if len(optimizers) == 1 else None)
    if by not in ("step", "epoch"):
        raise ValueError(f"a schedule's by must be 'step' or 'epoch', got {by!r}")
    if name not in optimizers:
        known = ", ".join(map(repr, optimizers))
        raise ValueError(f"a schedule's optimizer must be one of {known}, got {name!r}")
    if isinstance(given, Mapping):
        scheduler = build_tree(settings, PARAM_SCHEDULERS, {"optimizer": optimizers[name]})
    else:
        scheduler = given(optimizers[name])
    watches = isinstance(scheduler, ReduceLROnPlateau)
    if watches and metric is None:
        raise ValueError("ReduceLROnPlateau needs metric, the name of a logged value to watch")
    if metric is not None and not (watches and by == "epoch"):
        raise ValueError(
            f"metric={metric!r} is for ReduceLROnPlateau by epoch, got "
            f"{type(scheduler).__name__} by {by}"
        )
    return _Schedule(scheduler, by, metric)


def _further_state(optim_wrapper: Any, carried: Mapping[str, Any] | None) -> dict[str, Any]:
    """What Lightning does not save: counts, the loss scale, and what each rank's step carries.

    Every rank must call this where anything is carried.
    """
    state: dict[str, Any] = {
        name: {key: value for key, value in one.state_dict().items() if key not in _TORCH_KEYS}
        for name, one in _members(optim_wrapper).items()
    }
    if carried is not None:
        state[_CARRIED] = all_gather_object(carried)
    return state


def _load_further_state(optim_wrapper: Any, wrapped: Any, state: Mapping[str, Any]) -> None:
    """Restore ``_further_state()``; the optimizers have theirs already."""
    for name, one in _members(optim_wrapper).items():
        if name in state:
            one.load_state_dict({**one.state_dict(), **state[name]})
    if not _carries(wrapped):
        return
    by_rank = state.get(_CARRIED, ())
    if len(by_rank) == get_world_size():
        wrapped.load_step_state(by_rank[get_rank()])
        return
    logger.warning(
        "the checkpoint has what the steps of %d ranks carry from batch to batch, here are %d: "
        "they start with an empty state",
        len(by_rank),
        get_world_size(),
    )


def _carried_by(wrapped: Any) -> dict[str, Any] | None:
    """What a step of one's own carries from batch to batch; None, on all ranks, if it does not."""
    return wrapped.step_state() if _carries(wrapped) else None


def _carries(wrapped: Any) -> bool:
    plain = ModelFeatures.step_state
    return getattr(type(wrapped), "step_state", plain) is not plain


def _step_through(optimizer: Any, lightning_optimizer: Any) -> Callable[[], None]:
    """Let Lightning see every step of ``optimizer``, whatever calls it; returns the undo function.

    It counts them, and calls its hooks, only where its own object around the optimizer is stepped.
    """
    before = vars(optimizer).get("step")
    plain = optimizer.step
    is_inside = False

    # With its attributes: torch's schedulers look there for their own mark.
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

    # Bound, as torch's schedulers expect it of a step that they have not marked yet.
    optimizer.step = MethodType(step, optimizer)

    def undo() -> None:
        if before is None:
            del optimizer.step
        else:
            optimizer.step = before

    return undo
