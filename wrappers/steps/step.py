"""The training, validation and test steps of all wrappers, and functions as training steps."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager
from copy import deepcopy
from dataclasses import is_dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias, TypeVar

import torch
from torch import Tensor, distributed, nn

from ...primitives.tensor_bits import as_float
from ..features import ModelFeatures, OptimFeatures, explain_optim_wrapper, optim_features
from ..layout import broadcast_from_first_rank, refusal
from ..torch_functions import check_options
from .preprocess import Preprocessing, as_call
from .step_checks import (
    detect_anomalous_params,
    log_frozen_norms,
    warn_of_total_loss,
    watch_gradients,
)

if TYPE_CHECKING:
    from typing_extensions import Self

StepFunction: TypeAlias = Callable[[Any, Any, Any], Mapping[str, Any]]
BatchRunner: TypeAlias = Callable[[Any, Any, Any], Any]
UpdateFunction: TypeAlias = Callable[[Tensor], Any]


class OptimizerWrapper(Protocol):
    """The methods of an optimizer wrapper that a training step calls."""

    def optim_context(self, model: Any) -> AbstractContextManager[Any]:
        """Return the context for the forward."""

    def update_params(self, loss: Tensor) -> None:
        """Run backward and, at the end of a window, an optimizer step."""


class MissingLossError(ValueError):
    """Raised if the output of a model has no loss, usually because the batch has no targets."""


def parse_losses(losses: Mapping[str, Tensor | list[Tensor]]) -> tuple[Tensor, dict[str, Tensor]]:
    """Sum the losses; return the total and the detached values to log.

    The value of an entry is the mean of a tensor, or the sum of the means of a list of tensors. The
    total is the sum of the entries whose name contains "loss"; the others are only logged. If there
    are none, as in torchvision's RetinaNet, it is the sum of the entries that require a gradient.
    The logs contain the total as ``loss``, then every entry. If one of several losses is named
    ``loss``, it is logged as ``loss_raw``; a warning says if it is the sum of the others.

    A mapping that is also a dataclass, such as the output of a Hugging Face model, may contain
    further values, of which only 0-d tensors and losses are used. If it has a field ``loss``, this
    is the total and is assumed to include the other losses.

    Raises:
        TypeError: an entry is neither a tensor nor a list of tensors.
        ValueError: no entry is a loss to optimise.
    """
    if not isinstance(losses, Mapping):
        raise TypeError(
            f"forward(..., mode='loss') must return a dict of losses, got {type(losses).__name__}; "
            "wrap a network that returns predictions as SupervisedModel(net, loss)"
        )
    only = losses.get("loss") if len(losses) == 1 else None
    if isinstance(only, Tensor) and only.ndim == 0 and only.is_floating_point():
        # Fast path: a single scalar loss.
        return only, {"loss": only.detach()}
    if is_dataclass(losses):
        return _parse_output(losses)
    means = {name: _mean(name, loss) for name, loss in losses.items()}
    averaged = {name: mean for name, mean in means.items() if mean is not None}
    counted = [mean for name, mean in averaged.items() if "loss" in name]
    counted = counted or [mean for mean in averaged.values() if mean.requires_grad]
    if not counted:
        raise ValueError(
            "found no loss to optimise: a name must contain 'loss', or its value must require a "
            f"gradient, and must not be empty; got {sorted(losses)}"
        )
    total = sum(counted[1:], counted[0])
    logs = {"loss": total.detach()}
    logs |= {name: detach_value(mean) for name, mean in averaged.items() if name != "loss"}
    if "loss" in averaged and len(counted) > 1:
        logs["loss_raw"] = detach_value(averaged["loss"])
        warn_of_total_loss(averaged)
    return total, logs


def _parse_output(output: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Parse a dataclass; its field ``loss`` is the total, if it exists."""
    tensors = {name: value for name, value in output.items() if isinstance(value, Tensor)}
    figures = {name: value for name, value in tensors.items() if value.ndim == 0 or "loss" in name}
    if not hasattr(output, "loss") and any("loss" in name for name in figures):
        return parse_losses(figures)
    if "loss" not in figures:
        raise MissingLossError(
            f"{type(output).__name__} has no loss to optimise, only {sorted(output)}; the batch "
            "must contain the targets from which the model computes its loss, usually as `labels`"
        )
    total, logs = parse_losses({"loss": figures.pop("loss")})
    return total, logs | {name: _figure(value).mean() for name, value in figures.items()}


def _figure(value: Tensor) -> Tensor:
    """Return a detached value in float32, or in float64 for integers and float64."""
    value = as_float(value.detach())
    return value if value.dtype == torch.float64 else value.float()


def _mean(name: str, value: Any) -> Tensor | None:
    """Return the value of an entry as a 0-d floating tensor; None for an empty list."""
    if isinstance(value, Tensor):
        if not (value.is_floating_point() or value.is_complex()):
            # A part of the total must not change the dtype of the other losses.
            value = value.float() if "loss" in name else as_float(value)
        # A 0-d tensor is its own mean; mean() would only add a node to the graph.
        mean: Tensor = value.mean() if value.ndim else value
        return mean
    if not isinstance(value, list) or not all(isinstance(entry, Tensor) for entry in value):
        raise TypeError(f"{name} is not a tensor or list of tensors, got {type(value).__name__}")
    means = [entry_mean for entry in value if (entry_mean := _mean(name, entry)) is not None]
    return sum(means[1:], means[0]) if means else None


class _Modes(nn.Module):
    """The training and evaluation mode of a model wrapper."""

    module: Any
    # Modules that stay in evaluation mode during training.
    _in_eval: Collection[nn.Module] = ()
    # Whether training has begun, that is, whether `train()` has been called.
    _is_trained: bool = False

    def train(self, mode: bool = True) -> Self:
        """Set training or evaluation mode, except for the modules of ``keep_in_eval``."""
        super().train(mode)
        for module in self._in_eval:
            module.eval()
        if mode and not self._is_trained:
            self._is_trained = True
            log_frozen_norms(self.module)
        return self

    def keep_in_eval(self, modules: Collection[nn.Module]) -> None:
        """Keep ``modules`` in evaluation mode, also after ``train()``; release other modules.

        Their running statistics stay unchanged, and dropout has no effect in them. Calls of
        ``train()`` on the model instead of the wrapper are not noticed.
        """
        for module in self._in_eval:
            module.train(self.module.training)
        self._in_eval = tuple(modules)
        for module in self._in_eval:
            module.eval()


class StepProgress(NamedTuple):
    """What a training step has computed when an error is raised; None for what is missing.

    Attributes:
        data: the batch as the step got it.
        optim_wrapper: the second argument of the step.
        batch: the preprocessed batch.
        losses: the output of the forward.
        total: the loss to optimise.
    """

    data: Any = None
    optim_wrapper: Any = None
    batch: Any = None
    losses: Any = None
    total: Any = None


class StepSupport:
    """What the steps of a wrapper do apart from the common case; this class does nothing.

    ``prepare_steps`` gives each wrapper another one, which supports models that are not written for
    stepwrap and explains errors.
    """

    def explain(self, wrapper: Any, error: BaseException, progress: StepProgress) -> None:
        """Raise a clearer error from the ``error`` of a training step if its cause is known."""

    def explain_forward(self, wrapper: Any, error: BaseException, data: Any) -> None:
        """Raise a clearer error from the ``error`` of a forward if its cause is known."""

    def explain_update(self, wrapper: Any, error: BaseException) -> None:
        """Raise a clearer error from the ``error`` of an update if its cause is known."""

    def name_outputs(self, model: Any, outputs: Any, args: Any, kwargs: Any) -> Any:
        """Return the outputs of an evaluation step with names for metrics."""
        return outputs


class ModelWrapper(_Modes, Preprocessing, ModelFeatures):
    """Base class that gives model wrappers their training, validation and test steps.

    A model wrapper is a module with the user's model as child ``module``. If the model has no
    ``data_preprocessor``, ``parse_losses``, ``val_step`` or ``test_step``, the steps use the
    defaults of ``BaseModel``.

    ``train_step`` contains only the common case. Other parts are attached to it from outside:

    Attributes:
        batch_runner: runs a batch (forward, backward and update) instead of the default; called as
            ``batch_runner(wrapper, data, optim_wrapper)``. It returns the values to log, or
            NotImplemented to run the batch by the default. Set for models with their own
            ``train_step`` and for compiled steps.
        update_decorators: functions that take the wrapper and the function that updates by a loss,
            and return another such function.
        support: explains errors and names the outputs of evaluations.
        passed_on: parameters that ``**options`` accepts although no base class declares them.
    """

    module: Any
    batch_runner: BatchRunner | None = None
    update_decorators: tuple[Callable[[Any, UpdateFunction], UpdateFunction], ...] = ()
    support: StepSupport = StepSupport()
    passed_on: Iterable[inspect.Parameter] = ()
    __call__: Callable[..., Any]
    # Whether the training step may skip self.forward, because it only calls the model.
    _calls_model_directly: bool = False

    def train_step(self, data: Any, optim_wrapper: Any) -> dict[str, Tensor]:
        """Train on one batch; return the detached values to log. Every rank must call this."""
        batch = losses = total = None
        try:
            if (run := self.batch_runner) is not None:
                logs = run(self, data, optim_wrapper)
                if logs is not NotImplemented:
                    return logs  # type: ignore[no-any-return]
            with optim_wrapper.optim_context(self):
                batch = self.preprocess(data, training=True)
                # Saves a call for our own optimizer wrappers.
                is_ours = isinstance(optim_wrapper, OptimFeatures)
                features = optim_wrapper if is_ours else optim_features(optim_wrapper)
                features.weigh(batch, self)
                args, kwargs = ((), batch) if isinstance(batch, dict) else (batch, {})
                forward = self.module if self._calls_model_directly else self
                losses = forward(*args, **kwargs, mode="loss")
            parse = getattr(self.module, "parse_losses", parse_losses)
            total, logs = parse(losses)
            update = optim_wrapper.update_params
            for decorate in self.update_decorators:
                update = decorate(self, update)
            update(total)
        except BaseException as error:
            progress = StepProgress(data, optim_wrapper, batch, losses, total)
            self.support.explain(self, error, progress)
            raise
        return logs if parse is parse_losses else detached(logs)

    def train_steps(
        self, batches: Iterable[Any], optim_wrapper: OptimizerWrapper
    ) -> list[dict[str, Tensor]]:
        """Train on several batches by ``train_step``; return the logs of each.

        A compiled step checks the model only before the first batch, so the iterable must not
        change the model. Every rank must call this.
        """
        return [self.train_step(batch, optim_wrapper) for batch in batches]

    def val_step(self, data: Any) -> Any:
        """Evaluate one batch by the model's ``val_step``.

        Every rank must call this if ``collective_eval`` is true.
        """
        return self._evaluate("val_step", data)

    def test_step(self, data: Any) -> Any:
        """Evaluate one batch by the model's ``test_step``.

        Every rank must call this if ``collective_eval`` is true.
        """
        return self._evaluate("test_step", data)

    def sync_buffers(self) -> None:
        """Copy the buffers (such as running statistics) of the first rank to all ranks.

        Every rank must call this before an evaluation. DDP copies buffers only before a training
        forward, so they differ between ranks after the last step. With one rank nothing happens.
        """
        if self.averages_ranks and distributed.is_initialized():
            broadcast_from_first_rank(self.module.buffers(), self.data_group)

    def average(self, value: Tensor) -> Tensor:
        """Return the mean of a detached ``value`` over the ranks that average their gradients.

        Every rank must call this, in the same order. With one rank it returns ``value``. The mean
        of integers has the widest float of the device.
        """
        if not (self.averages_ranks and distributed.is_initialized()):
            return value
        # Contiguous, because backends add tensors by position in memory, not by index.
        mean = as_float(value.detach()).contiguous() / distributed.get_world_size(self.data_group)
        distributed.all_reduce(mean, group=self.data_group)
        return mean

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Copy the model and wrap the copy for the same ranks; every rank must call this."""
        duplicate: Any = type(self).__new__(type(self))
        memo[id(self)] = duplicate
        if self.data_group is not None:
            memo[id(self.data_group)] = self.data_group
        reduced: Any = super().__reduce_ex__(4)
        duplicate.__setstate__(deepcopy(reduced[2], memo))
        return duplicate

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the wrapper; raise TypeError if it has a ``data_group``."""
        if self.data_group is not None:
            raise TypeError(refusal(f"a {type(self).__name__} of a group of ranks"))
        return super().__reduce_ex__(protocol)

    @property
    def detect_anomalous_params(self) -> bool:
        """Whether every step searches for parameters without a gradient."""
        return _detecting in self.update_decorators

    @detect_anomalous_params.setter
    def detect_anomalous_params(self, detect: bool) -> None:
        decorators = [decorate for decorate in self.update_decorators if decorate is not _detecting]
        self.update_decorators = (*decorators, _detecting) if detect else tuple(decorators)

    def update_and_detect(self, total: Tensor, optim_wrapper: OptimizerWrapper) -> None:
        """Call ``optim_wrapper.update_params``; log parameters that got no gradient."""
        model: Any = self
        with watch_gradients(model) as received:
            try:
                optim_wrapper.update_params(total)
            except BaseException as error:
                # Custom steps and the Lightning strategy call this method too.
                self.support.explain_update(self, error)
                raise
        detect_anomalous_params(total, model, received=received)

    def _explain_update(self, error: BaseException) -> None:
        """Raise a clearer error if an update failed for a reason that this wrapper knows."""

    def _evaluate(self, name: str, data: Any) -> Any:
        model = self.module
        if (step := getattr(model, name, None)) is not None:
            return step(data)
        args, kwargs = as_call(self.preprocess(data, training=False))
        try:
            outputs = model(*args, **kwargs, mode="predict")
        except (TypeError, RuntimeError) as error:
            self.support.explain_forward(self, error, data)
            raise
        return self.support.name_outputs(model, outputs, args, kwargs)

    @classmethod
    def config_signature(cls) -> inspect.Signature:
        """Return the signature with ``**options`` replaced by the parameters they may contain."""
        parameters: dict[str, inspect.Parameter] = {}
        for base in (base for base in cls.__mro__ if "__init__" in vars(base)):
            declared = list(inspect.signature(vars(base)["__init__"]).parameters.values())[1:]
            passes_on = any(parameter.kind is parameter.VAR_KEYWORD for parameter in declared)
            further = vars(base).get("passed_on", ()) if passes_on else ()
            is_first = not parameters
            for parameter in (*declared, *further):
                if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                    kind = parameter.kind if is_first else parameter.KEYWORD_ONLY
                    parameters.setdefault(parameter.name, parameter.replace(kind=kind))
            if not passes_on:
                break
        return inspect.Signature(list(parameters.values()))

    @classmethod
    def check_options(cls, options: Mapping[str, Any]) -> None:
        """Raise TypeError for an option that this class does not take."""
        names = [name for name in cls.config_signature().parameters if name != "module"]
        check_options(cls.__name__, options, names)

    def _adopt_model_step(self) -> None:
        """Run batches by the model's own ``train_step`` if it has one."""
        self.runs_model_step = overrides_train_step(self.module)
        self.batch_runner = _run_model_step if self.runs_model_step else None


def _detecting(wrapper: ModelWrapper, update: UpdateFunction) -> UpdateFunction:
    """Return an update that logs parameters without a gradient."""
    return lambda total: wrapper.update_and_detect(total, SimpleNamespace(update_params=update))


def _run_model_step(wrapper: Any, data: Any, optim_wrapper: Any) -> Mapping[str, Any]:
    try:
        logs = wrapper.module.train_step(data, optim_wrapper)
    except BaseException as error:
        wrapper.support.explain_update(wrapper, error)
        raise
    return detached(logs) if isinstance(logs, Mapping) else logs


def detach_value(value: Any) -> Any:
    """Return a value for the log: a detached tensor that the training cannot change in place.

    The log reads values only at the next record. A parameter, a buffer or a view may have changed
    by then, so it is copied.
    """
    if not isinstance(value, Tensor):
        return value
    is_fresh = not value.is_leaf and value._base is None
    return value.detach() if is_fresh else value.detach().clone()


def detached(logs: Mapping[str, Any]) -> dict[str, Any]:
    """Return logs with detached tensors."""
    return {name: detach_value(value) for name, value in logs.items()}


_W = TypeVar("_W", bound=ModelWrapper)


def overrides_train_step(model: nn.Module) -> bool:
    """Return whether ``model`` has a ``train_step`` other than stepwrap's or mmengine's default."""
    step = getattr(type(model), "train_step", None)
    # Compared by name: mmengine is not a dependency, and importing model.py here would be a cycle.
    if getattr(step, "__qualname__", "") == "BaseModel.train_step":
        return not f"{step.__module__}.".startswith(("stepwrap.wrappers.", "mmengine."))
    return step is not None


def reject_model_train_step(
    wrapper: type[ModelWrapper], model: nn.Module, why: str, remedy: str = ""
) -> None:
    """Raise TypeError if ``model`` defines a ``train_step`` that cannot run in ``wrapper``.

    Args:
        why: the end of the message "the step calls the model directly, which ...".
        remedy: text with another solution, which the message gives first.
    """
    if wrapper.train_step is not ModelWrapper.train_step or not overrides_train_step(model):
        return
    public = next(
        base for base in wrapper.__mro__ if base.__module__.startswith("stepwrap.wrappers.")
    )
    raise TypeError(
        f"{type(model).__name__} overrides train_step, which cannot work under "
        f"{wrapper.__name__}: the step calls the model directly, which {why}. {remedy}Put the step "
        f"into a subclass of {public.__name__} (with self(...) for the forward) and name it as the "
        "wrapper"
    )


def with_train_step(wrapper: type[_W], function: StepFunction) -> type[_W]:
    """Return a subclass of ``wrapper`` whose training step is ``function``.

    Like an overridden ``train_step``, the function calls ``wrapper(...)`` for the forward and
    ``optim_wrapper`` for the update; docs/custom_steps.md has an example. It may also be the
    ``train_step`` method of another wrapper class.

    Args:
        wrapper: the class of a model wrapper.
        function: called as ``function(wrapper, data, optim_wrapper)``; returns a dict of numbers
            and tensors to log.

    Raises:
        TypeError: ``wrapper`` is not the class of a wrapper, or ``function`` does not take three
            arguments. The training step raises it if the function does not return such a dict.
    """
    if not (isinstance(wrapper, type) and issubclass(wrapper, ModelWrapper)):
        raise TypeError(f"with_train_step needs the class of a model wrapper, got {wrapper!r}")
    check_step_function(function)
    name = _get_name(function)

    def train_step(self: Any, data: Any, optim_wrapper: Any) -> dict[str, Any]:
        try:
            logs = function(self, data, optim_wrapper)
        except (AttributeError, TypeError) as error:
            explain_optim_wrapper(error, optim_wrapper, data)
            raise
        if not isinstance(logs, Mapping):
            kind = type(logs).__name__
            raise TypeError(
                f"the training step {name} must return a dict of values to log, got {kind}"
            )
        return {key: _loggable(name, key, value) for key, value in logs.items()}

    members = {
        "train_step": train_step,
        "__module__": getattr(function, "__module__", __name__),
        "__doc__": f"``{wrapper.__name__}`` with the training step ``{name}``.",
    }
    return type(f"{wrapper.__name__}_with_{name}", (wrapper,), members)


def check_step_function(function: Any) -> None:
    """Raise TypeError if ``function`` cannot be called as a training step."""
    if isinstance(function, type) or not callable(function):
        raise TypeError(
            "a training step must be a function(wrapper, data, optim_wrapper) that returns a dict "
            f"of values to log, got {function!r}"
        )
    try:
        inspect.signature(function).bind(None, None, None)
    except ValueError:
        return
    except TypeError as error:
        name = _get_name(function)
        raise TypeError(
            f"the training step {name} must take (wrapper, data, optim_wrapper): {error}"
        ) from error


def _loggable(name: str, key: str, value: Any) -> Any:
    if not hasattr(value, "__float__"):
        raise TypeError(
            f"the training step {name} must return numbers or tensors, got {key}={value!r}"
        )
    # Without this the value would keep its graph in memory until it is logged.
    return detach_value(value)


def _get_name(function: Any) -> str:
    inner = getattr(function, "func", function)
    return str(getattr(inner, "__qualname__", type(inner).__name__)).rpartition(".")[2]
