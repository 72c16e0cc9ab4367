"""Call models that are not written for stepwrap, name their outputs and explain errors of steps.

Models of transformers return an output with the loss, and accept any keyword argument. Detectors of
torchvision return losses in training mode and predictions in eval mode, and take no ``mode``.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import is_dataclass
from typing import Any, NoReturn

from torch import Tensor, nn

from ...collectives import explain_transport
from ...registry import did_you_mean, nearest
from ..features import explain_optim_wrapper
from .preprocess import as_call, get_fields, only_moves
from .step import MissingLossError, ModelWrapper, StepProgress, StepSupport

_TARGETS = ("labels", "targets", "target")


class BatchMismatchError(TypeError):
    """Raised if the entries of a batch are not the arguments of ``forward``."""


def accept_mode(model: nn.Module) -> None:
    """Make a model that computes its own losses accept ``mode`` if its ``forward`` does not.

    This applies to models whose ``forward`` has an optional argument ``labels``, ``targets`` or
    ``target``, and neither ``mode`` nor ``**kwargs``. A hook removes ``mode``; other calls and the
    names of the weights do not change.
    """
    if _needs_hook(model) and not drops_mode(model):
        model.register_forward_pre_hook(_drop_mode, with_kwargs=True)


def drops_mode(model: nn.Module) -> bool:
    """Return whether ``accept_mode`` has changed how ``model`` can be called."""
    return _drop_mode in model._forward_pre_hooks.values()


def _drop_mode(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return args, {name: value for name, value in kwargs.items() if name != "mode"}


def _needs_hook(model: nn.Module) -> bool:
    parameters = _parameters(model)
    optional = any(
        name in parameters and parameters[name].default is not inspect.Parameter.empty
        for name in _TARGETS
    )
    return optional and not _takes_mode(parameters)


def _takes_mode(parameters: Mapping[str, inspect.Parameter]) -> bool:
    return any(
        parameter.name == "mode" or parameter.kind is parameter.VAR_KEYWORD
        for parameter in parameters.values()
    )


def _parameters(model: nn.Module) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(model.forward).parameters
    except (TypeError, ValueError):
        # A scripted module has no signature.
        return {}


def remove_targets(model: nn.Module, batch: Mapping[str, Any]) -> Mapping[str, Any]:
    """Leave out the targets of a batch if the model needs them only to compute its loss."""
    parameters = _parameters(model)
    # A decoder behind an encoder gets its inputs from the labels.
    config = getattr(model, "config", None)
    if "mode" in parameters or getattr(config, "is_encoder_decoder", False):
        return batch
    optional = {key for key in _TARGETS if key in parameters}
    return {name: value for name, value in batch.items() if name not in optional}


def named_outputs(
    model: nn.Module, outputs: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Name the outputs of an evaluation step like ``SupervisedModel``, for metrics.

    The outputs of a model of transformers get the entries ``preds`` (its logits), ``target`` (the
    batch's labels) and ``num_samples``. A detector's list of predictions becomes a dict with these
    entries. If the model predicts the next token, ``preds`` and ``target`` are shifted like its
    loss: entry t of ``preds`` belongs to entry t of ``target``. Other outputs are unchanged.
    """
    if is_dataclass(outputs) and isinstance(outputs, MutableMapping):
        named = _name_typed_output(model, outputs, kwargs)
        outputs |= {name: value for name, value in named.items() if name not in outputs}
    elif isinstance(outputs, list) and drops_mode(model):
        arguments = inspect.signature(model.forward).bind(*args, **kwargs).arguments
        target = next(
            (arguments[name] for name in _TARGETS if arguments.get(name) is not None), None
        )
        named = {"preds": outputs, "num_samples": len(outputs)}
        return named if target is None else {**named, "target": target}
    return outputs


def _name_typed_output(
    model: nn.Module, output: Mapping[str, Any], batch: Mapping[str, Any]
) -> dict[str, Any]:
    sizes = (len(value) for value in batch.values() if isinstance(value, Tensor) and value.ndim)
    preds, target = output.get("logits"), batch.get("labels")
    if isinstance(preds, Tensor) and isinstance(target, Tensor) and predicts_next(model):
        preds, target = preds[:, :-1], target[:, 1:]
    named = {"preds": preds, "target": target, "num_samples": next(sizes, None)}
    return {name: value for name, value in named.items() if value is not None}


def predicts_next(model: Any) -> bool:
    """Return whether a model of transformers compares its logits with the next labels.

    Its function ForCausalLMLoss does so. Some decoders, such as BartForCausalLM, do not call it.
    """
    model = model.get_base_model() if hasattr(model, "get_base_model") else model
    code = getattr(inspect.unwrap(type(model).forward), "__code__", None)
    if code is None or "loss_function" not in code.co_names:
        return False
    return getattr(model.loss_function, "__name__", "") == "ForCausalLMLoss"


class ModelSupport(StepSupport):
    """Names outputs of models that are not written for stepwrap, and explains errors of steps."""

    def explain(self, wrapper: Any, error: BaseException, progress: StepProgress) -> None:
        """Raise a clearer error from the ``error`` of a training step if its cause is known."""
        explain_optim_wrapper(error, progress.optim_wrapper, progress.data)
        if progress.batch is not None and progress.losses is None:
            self.explain_forward(wrapper, error, progress.data)
        elif progress.total is not None:
            self.explain_update(wrapper, error)
        else:
            explain_transport(error, "train_step")
        if isinstance(error, MissingLossError):
            explain_batch(wrapper.module, error, progress.data)

    def explain_forward(self, wrapper: Any, error: BaseException, data: Any) -> None:
        """Raise a clearer error from the ``error`` of a forward if its cause is known."""
        explain_transport(error, "forward")
        explain_forward(wrapper.module, error, data if only_moves(wrapper) else None)

    def explain_update(self, wrapper: Any, error: BaseException) -> None:
        """Raise a clearer error from the ``error`` of an update if its cause is known."""
        wrapper._explain_update(error)
        explain_transport(error, "train_step")

    def name_outputs(self, model: Any, outputs: Any, args: Any, kwargs: Any) -> Any:
        """Return the outputs of an evaluation step with names for metrics."""
        return named_outputs(model, outputs, args, kwargs)


def prepare_steps(wrapper: ModelWrapper, detect_anomalous_params: bool = False) -> None:
    """Prepare a wrapper's steps; wrappers call this when ``wrapper.module`` is set."""
    wrapper.detect_anomalous_params = detect_anomalous_params
    wrapper.support = ModelSupport()
    accept_mode(wrapper.module)
    wrapper.add_preprocessor()


@contextmanager
def explaining(model: nn.Module, batch: Any) -> Iterator[None]:
    """Explain errors of a forward of ``model`` with a preprocessed batch, and of its losses."""
    try:
        yield
    except MissingLossError as error:
        explain_batch(model, error, batch)
    except TypeError as error:
        explain_forward(model, error, batch)
        raise


def explain_forward(model: nn.Module, error: BaseException, batch: Any) -> None:
    """Raise a clearer error if ``forward`` has no argument ``mode``, or does not accept the batch.

    Args:
        batch: the batch as ``forward`` got it, apart from its device; None if unknown.
    """
    if not isinstance(error, TypeError):
        return
    parameters, name = _parameters(model), type(model).__name__
    if not _takes_mode(parameters) and not drops_mode(model):
        raise TypeError(
            f"{name}.forward has no argument 'mode', which it needs to return losses; wrap the "
            f"network as SupervisedModel(net, loss), or write {name}.forward(..., mode='tensor')"
        ) from error
    if not isinstance(get_fields(batch), (list, tuple, Mapping)):
        return
    args, kwargs = as_call(batch)
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    mode = {} if drops_mode(model) else {"mode": "loss"}
    try:
        inspect.signature(model.forward).bind(*args, **{**kwargs, **mode})
    except TypeError as mismatch:
        names = [name for name in parameters if name != "mode"]
        unknown = [] if takes_any else [key for key in kwargs if key not in parameters]
        free = [name for name in names if name not in kwargs]
        hints = [f"it has no argument {key!r}{did_you_mean(str(key), free)}" for key in unknown]
        raise BatchMismatchError(
            f"the batch does not fit {name}.forward: {'; '.join(hints) or mismatch}. The batch has "
            f"{_described(batch)}; forward takes {', '.join(names)}. Change the data set, or "
            "rename or leave out entries in collate"
        ) from error


def explain_batch(model: nn.Module, error: MissingLossError, batch: Any) -> NoReturn:
    """Raise an error that adds to ``error`` how the batch or the model should change."""
    named, parameters = get_fields(batch), _parameters(model)
    text = f"{error}. The batch has {_described(batch)}"
    if not isinstance(named, Mapping):
        text += ", which are arguments by position: use a dict, with the names of forward"
    elif "labels" in parameters and (near := nearest("labels", map(str, named), 1)):
        text += f"; did you mean labels instead of {near[0]}?"
    elif "labels" in named:
        text += (
            f", but {type(model).__name__}.forward has no argument labels: choose a class with a "
            "head, such as ...ForSequenceClassification"
        )
    raise MissingLossError(text) from error


def _described(batch: Any) -> str:
    named = get_fields(batch)
    if isinstance(named, Mapping):
        return f"the keys {', '.join(map(str, named))}"
    return (
        f"{len(named)} entries" if isinstance(named, Sequence) else f"type {type(batch).__name__}"
    )
