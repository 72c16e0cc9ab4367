"""The training, validation and test steps of all wrappers, and the wrapper for one device."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager
from copy import deepcopy
from dataclasses import is_dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar

from torch import Tensor, distributed, nn

from ...collectives import explain_transport
from ...registry import MODEL_WRAPPERS
from ..features import ModelFeatures, explain_optim_wrapper
from ..layout import refusal
from ..sharding.mesh import broadcast_from_first_rank
from ..torch_functions import check_options
from .plain_models import (
    MissingLossError,
    accept_mode,
    explain_batch,
    explain_forward,
    named_outputs,
)
from .preprocess import DataPreprocessor, as_call, get_device
from .step_checks import detect_anomalous_params, log_frozen_norms, watch_gradients

if TYPE_CHECKING:
    from typing_extensions import Self

# The dicts of a module that hold its hooks.
MODULE_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")

StepFunction: TypeAlias = Callable[[Any, Any, Any], Mapping[str, Any]]


class OptimizerWrapper(Protocol):
    """The methods of an optimizer wrapper that a training step calls."""

    def optim_context(self, model: Any) -> AbstractContextManager[Any]:
        """Return the context for the forward."""

    def update_params(self, loss: Tensor) -> None:
        """Run backward and, at the end of a window, an optimizer step."""


def parse_losses(losses: Mapping[str, Tensor | list[Tensor]]) -> tuple[Tensor, dict[str, Tensor]]:
    """Sum the losses; return the total and the detached values to log.

    The value of an entry is the mean of a tensor, or the sum of the means of a list of tensors. The
    total is the sum of the entries whose name contains "loss"; the others are only logged. If there
    are none, as in torchvision's RetinaNet, it is the sum of the entries that require a gradient.
    The logs contain the total as ``loss``, then every entry. If one of several losses is named
    ``loss``, it is logged as ``loss_raw``.

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
    logs |= {name: mean.detach() for name, mean in averaged.items() if name != "loss"}
    if "loss" in averaged and len(counted) > 1:
        logs["loss_raw"] = averaged["loss"].detach()
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
    return total, logs | {name: value.detach().float().mean() for name, value in figures.items()}


def _mean(name: str, value: Any) -> Tensor | None:
    """Return the value of an entry as a 0-d floating tensor; None for an empty list."""
    if isinstance(value, Tensor):
        if not (value.is_floating_point() or value.is_complex()):
            value = value.float()
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


class Steps(_Modes, ModelFeatures):
    """Base class that gives model wrappers their training, validation and test steps.

    A model wrapper is a module with the user's model as child ``module``. If the model has no
    ``data_preprocessor``, ``parse_losses``, ``val_step`` or ``test_step``, the steps use the
    defaults of ``BaseModel``.

    Attributes:
        passed_on: parameters that ``**options`` accepts although no base class declares them.
    """

    module: Any
    passed_on: Iterable[inspect.Parameter] = ()
    __call__: Callable[..., Any]
    _preprocessor: DataPreprocessor
    # Whether the training step is the model's own train_step.
    _uses_model_step: bool = False
    # Whether the steps may skip self.forward, because it only calls the model.
    _calls_model_directly: bool = False

    def train_step(self, data: Any, optim_wrapper: Any) -> dict[str, Tensor]:
        """Train on one batch; return the detached values to log. Every rank must call this."""
        model, stage = self.module, "preparation"
        try:
            if self._uses_model_step:
                stage = "update"
                return model.train_step(data, optim_wrapper)  # type: ignore[no-any-return]
            with optim_wrapper.optim_context(self):
                batch = self.preprocess(data, training=True)
                if getattr(optim_wrapper, "loss_weight", None) is not None:
                    optim_wrapper.weigh(batch, self)
                stage, forward = "forward", model if self._calls_model_directly else self
                args, kwargs = ((), batch) if isinstance(batch, dict) else (batch, {})
                losses = forward(*args, **kwargs, mode="loss")
            stage, parse = "losses", getattr(model, "parse_losses", parse_losses)
            total, logs = parse(losses)
            stage = "update"
            if self.detect_anomalous_params:
                # `update_and_detect` already explains errors of the update.
                stage = "detection"
                self.update_and_detect(total, optim_wrapper)
            else:
                optim_wrapper.update_params(total)
        except BaseException as error:
            explain_optim_wrapper(error, optim_wrapper, data)
            self._raise_explained(error, stage, data)
            raise
        if parse is parse_losses:
            return logs
        return {name: v.detach() if isinstance(v, Tensor) else v for name, v in logs.items()}

    def train_steps(
        self, batches: Iterable[Any], optim_wrapper: OptimizerWrapper
    ) -> list[dict[str, Tensor]]:
        """Train on several batches by ``train_step``; return the logs of each.

        A compiled step checks the model only before the first batch, so the iterable must not
        change the model. Every rank must call this.
        """
        self.recheck_every(sys.maxsize)
        try:
            return [self.train_step(batch, optim_wrapper) for batch in batches]
        finally:
            self.recheck_every(1)

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

        Every rank must call this, in the same order. With one rank it returns ``value``.
        """
        if not (self.averages_ranks and distributed.is_initialized()):
            return value
        # Contiguous, because backends add tensors by position in memory, not by index.
        mean = value.detach().contiguous() / distributed.get_world_size(self.data_group)
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

    def update_and_detect(self, total: Tensor, optim_wrapper: OptimizerWrapper) -> None:
        """Call ``optim_wrapper.update_params``; log parameters that got no gradient."""
        model: Any = self
        with watch_gradients(model) as received:
            try:
                optim_wrapper.update_params(total)
            except BaseException as error:
                # Custom steps and the Lightning strategy call this method too.
                self._raise_explained(error)
                raise
        detect_anomalous_params(total, model, received=received)

    def preprocess(self, data: Any, training: bool) -> Any:
        """Prepare a batch by the model's ``data_preprocessor``, or move it to the model's device.

        Raises:
            TypeError: the result is not a list, tuple, mapping or dataclass.
        """
        preprocessor = getattr(self.module, "data_preprocessor", None)
        batch = (self._preprocessor if preprocessor is None else preprocessor)(
            data, training=training
        )
        return batch if isinstance(batch, (list, tuple, dict)) else as_call(batch)[1]

    def _raise_explained(
        self, error: BaseException, stage: str = "update", data: Any = None
    ) -> None:
        """Raise a clearer error from ``error`` if its cause is known; otherwise do nothing."""
        if stage == "forward":
            explain_transport(error, "forward")
            explain_forward(self.module, error, data if only_moves(self) else None)
        else:
            explain_transport(error, "train_step")
        if isinstance(error, MissingLossError):
            explain_batch(self.module, error, data)

    def _evaluate(self, name: str, data: Any) -> Any:
        model = self.module
        if (step := getattr(model, name, None)) is not None:
            return step(data)
        args, kwargs = as_call(self.preprocess(data, training=False))
        try:
            outputs = model(*args, **kwargs, mode="predict")
        except (TypeError, RuntimeError) as error:
            self._raise_explained(error, "forward", data)
            raise
        return named_outputs(model, outputs, args, kwargs)

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

    def _prepare_steps(self, detect: bool) -> None:
        """Set up the steps; wrappers call this when ``self.module`` is set."""
        self.detect_anomalous_params = detect
        accept_mode(self.module)
        if getattr(self.module, "data_preprocessor", None) is None:
            self._preprocessor = DataPreprocessor().to(get_device(self.module))


_W = TypeVar("_W", bound=Steps)


@MODEL_WRAPPERS.register_module(name=["SingleDevice", "single"])
class SingleDevice(Steps, nn.Module):
    """Run the steps of a model on the device of the model.

    If the model defines ``train_step``, that method is used. To change a step, override
    ``train_step``, ``val_step`` or ``test_step`` in a subclass; see docs/custom_steps.md.

    Args:
        detect_anomalous_params: after every step, search for parameters without a gradient, and
            log each set of them once. It takes some microseconds per parameter and step, so use it
            for debugging only.

    Raises:
        ValueError: ``detect_anomalous_params`` is set, and the model defines ``train_step``.
    """

    def __init__(self, module: nn.Module, *, detect_anomalous_params: bool = False) -> None:
        super().__init__()
        self.module = module
        self._prepare_steps(detect_anomalous_params)
        self._calls_model_directly = type(self).forward is SingleDevice.forward
        self._uses_model_step = overrides_train_step(module)
        if detect_anomalous_params and self._uses_model_step:
            raise ValueError(
                "detect_anomalous_params needs the default train_step of the wrapper, but "
                f"{type(module).__name__} defines train_step; remove one of the two"
            )

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Call the model."""
        return self.module(*inputs, **kwargs)


def only_moves(wrapper: Any) -> bool:
    """Return whether a wrapper's preprocessor only moves batches to the device."""
    preprocessor = getattr(wrapper.module, "data_preprocessor", None)
    preprocess = wrapper._preprocessor if preprocessor is None else preprocessor
    return (
        type(preprocess) is DataPreprocessor
        and preprocess._mean is None
        and preprocess._std is None
        and not any(getattr(preprocess, hooks) for hooks in MODULE_HOOKS)
    )


def overrides_train_step(model: nn.Module) -> bool:
    """Return whether ``model`` has a ``train_step`` other than stepwrap's or mmengine's default."""
    step = getattr(type(model), "train_step", None)
    # Compared by name: mmengine is not a dependency, and importing model.py here would be a cycle.
    if getattr(step, "__qualname__", "") == "BaseModel.train_step":
        return not f"{step.__module__}.".startswith(("stepwrap.wrappers.", "mmengine."))
    return step is not None


def reject_model_train_step(
    wrapper: type[Steps], model: nn.Module, why: str, remedy: str = ""
) -> None:
    """Raise TypeError if ``model`` defines a ``train_step`` that cannot run in ``wrapper``.

    Args:
        why: the end of the message "the step calls the model directly, which ...".
        remedy: text with another solution, which the message gives first.
    """
    if wrapper.train_step is not Steps.train_step or not overrides_train_step(model):
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
    if not (isinstance(wrapper, type) and issubclass(wrapper, Steps)):
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
    # Detached, because the value would otherwise keep its graph in memory until it is logged.
    return value.detach() if isinstance(value, Tensor) else value


def _get_name(function: Any) -> str:
    inner = getattr(function, "func", function)
    return str(getattr(inner, "__qualname__", type(inner).__name__)).rpartition(".")[2]
