"""The three steps of a model, once for all wrappers."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from copy import deepcopy
from typing import Any, Protocol

from torch import Tensor, distributed, nn
from torch.distributed import ProcessGroup
from torch.nn.modules.module import _has_any_global_hook

from ...collectives import explain_transport
from ..sharding.layout import refusal
from .anomalies import detect_anomalous_params, watch_gradients
from .losses import parse_losses
from .preprocess import DataPreprocessor, device_of


class OptimizerWrapper(Protocol):
    """What a training step needs of an optimizer wrapper."""

    def optim_context(self, model: Any) -> AbstractContextManager[Any]:
        """What the forward runs in."""

    def update_params(self, loss: Tensor) -> None:
        """Backward and, where a window ends, a step."""


class Steps:
    """Training, validation and test step of ``self.module`` through ``self.forward``.

    A mixin of the model wrappers, which are modules with a child ``module``: the user's
    model. What the model does not offer (``data_preprocessor``, ``parse_losses``,
    ``val_step``, ``test_step``) gets the behaviour of ``BaseModel``.

    Attributes:
        data_group: the ranks that see different batches; None for all of them.
        collective_eval: whether evaluation steps need every rank of ``data_group``.
        averages_ranks: whether a backward averages the gradients over ``data_group``.
    """

    module: Any
    data_group: ProcessGroup | None = None
    collective_eval: bool = False
    averages_ranks: bool = False
    _modules: Any
    detect_anomalous_params: bool
    __call__: Callable[..., Any]
    _preprocessor: DataPreprocessor
    _model_steps: bool = False
    _direct: bool = False

    def train_step(self, data: Any, optim_wrapper: OptimizerWrapper) -> dict[str, Tensor]:
        """Train on one batch; returns what to log, detached.

        Every rank must call this.
        """
        # Children by `_modules`: nn.Module's attribute access looks everywhere else first.
        model = self._modules["module"]
        if self._model_steps:
            try:
                logs: dict[str, Tensor] = model.train_step(data, optim_wrapper)
            except BaseException as error:
                self._explain(error)
                raise
            return logs
        with optim_wrapper.optim_context(self):
            args, kwargs = as_call(self._preprocess(model)(data, training=True))
            engine = model if self._direct else self
            try:
                losses = engine(*args, **kwargs, mode="loss")
            except (TypeError, RuntimeError) as error:
                _explain_forward(model, error)
                raise
        parse = getattr(model, "parse_losses", parse_losses)
        total, logs = parse(losses)
        if self.detect_anomalous_params:
            self.update_and_detect(total, optim_wrapper)
        else:
            try:
                optim_wrapper.update_params(total)
            except BaseException as error:
                self._explain(error)
                raise
        if parse is parse_losses:
            return logs
        return {name: v.detach() if isinstance(v, Tensor) else v for name, v in logs.items()}

    def val_step(self, data: Any) -> Any:
        """Evaluate one batch by the model's ``val_step``; not collective."""
        return self._evaluate("val_step", data)

    def test_step(self, data: Any) -> Any:
        """Evaluate one batch by the model's ``test_step``; not collective."""
        return self._evaluate("test_step", data)

    def sync_buffers(self) -> None:
        """Give every rank the buffers of the first (running statistics), before evaluation.

        Every rank must call this; with one rank there is nothing to do.
        """

    def average(self, value: Tensor) -> Tensor:
        """The mean of a detached ``value`` over the ranks that average their gradients.

        Every rank must call this, in the same order; with one rank it is ``value`` itself.
        """
        if not (self.averages_ranks and distributed.is_initialized()):
            return value
        mean = value.detach().clone() / distributed.get_world_size(self.data_group)
        distributed.all_reduce(mean, group=self.data_group)
        return mean

    def step_state(self) -> dict[str, Any]:
        """The state that a custom training step keeps from batch to batch, for checkpoints.

        To be overridden together with ``load_step_state``: tensors, numbers, lists and dicts of
        this rank. It is restored on the same rank of a run with as many ranks.
        """
        return {}

    def load_step_state(self, state: dict[str, Any]) -> None:
        """Take over what ``step_state`` returned."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A wrapper of a copy of the model, for the same ranks; every rank must call this."""
        made: Any = type(self).__new__(type(self))
        memo[id(self)] = made
        if self.data_group is not None:
            memo[id(self.data_group)] = self.data_group
        reduced: Any = super().__reduce_ex__(4)
        made.__setstate__(deepcopy(reduced[2], memo))
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle; raises TypeError where the wrapper is for some of the ranks only."""
        if self.data_group is not None:
            raise TypeError(refusal(f"a {type(self).__name__} of a group of ranks"))
        return super().__reduce_ex__(protocol)

    def update_and_detect(self, total: Tensor, optim_wrapper: OptimizerWrapper) -> None:
        """Update by ``total`` and log the parameters that it does not reach.

        For callers that do not use ``train_step``; of ``optim_wrapper`` it only needs
        ``update_params``.
        """
        model: Any = self
        with watch_gradients(model) as received:
            try:
                optim_wrapper.update_params(total)
            except BaseException as error:
                self._explain(error)
                raise
        detect_anomalous_params(total, model, received=received)

    def _explain(self, error: BaseException) -> None:
        """Raise a better error than one of an update, where the wrapper knows one."""
        explain_transport(error, "train_step")

    def _evaluate(self, name: str, data: Any) -> Any:
        model = self.module
        step = getattr(model, name, None)
        if step is not None:
            return step(data)
        args, kwargs = as_call(self._preprocess(model)(data, training=False))
        try:
            return model(*args, **kwargs, mode="predict")
        except (TypeError, RuntimeError) as error:
            _explain_forward(model, error)
            raise

    def _preprocess(self, model: Any) -> Callable[..., Any]:
        for owner, name in ((model, "data_preprocessor"), (self, "_preprocessor")):
            preprocess = owner._modules.get(name)
            if type(preprocess) is DataPreprocessor and not (
                preprocess._forward_pre_hooks
                or preprocess._forward_hooks
                or preprocess._backward_pre_hooks
                or preprocess._backward_hooks
                or preprocess._compiled_call_impl
                or _has_any_global_hook()  # type: ignore[no-untyped-call]
            ):
                # The bare method: nn.Module's call around it costs more than its work.
                return preprocess.forward
            if preprocess is not None:
                return preprocess  # type: ignore[no-any-return]
        function: Callable[..., Any] = model.data_preprocessor
        return function

    def _prepare_steps(self, detect: bool) -> None:
        """Set what the steps need; called by the wrappers once the module is theirs."""
        self.detect_anomalous_params = detect
        if getattr(self.module, "data_preprocessor", None) is None:
            self._preprocessor = DataPreprocessor().to(device_of(self.module))


def as_call(data: Any) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """How a preprocessed batch is given to ``forward``: positional and keyword arguments."""
    if isinstance(data, (list, tuple)):
        return data, {}
    if isinstance(data, dict):
        return (), data
    raise TypeError(
        "Output of `data_preprocessor` should be list, tuple or dict, "
        f"but got {type(data).__name__}"
    )


def has_own_train_step(model: nn.Module) -> bool:
    """Whether ``model`` brings a ``train_step`` of its own, not the default of a base class."""
    step = getattr(type(model), "train_step", None)
    if step is None:
        return False
    # By name, since mmengine is no dependency and models.py imports this file.
    defaults = (("stepwrap.wrappers", "BaseModel.train_step"), ("mmengine", "BaseModel.train_step"))
    owner = getattr(step, "__module__", "") or ""
    name = getattr(step, "__qualname__", "")
    return not any(f"{owner}.".startswith(f"{pkg}.") and name == full for pkg, full in defaults)


def refuse_own_train_step(wrapper: type[Steps], model: nn.Module, why: str) -> None:
    """Raise TypeError for a model with a ``train_step`` that ``wrapper`` could not replace.

    Args:
        why: what a model that calls itself does there.
    """
    if wrapper.train_step is not Steps.train_step or not has_own_train_step(model):
        return
    public = next(one for one in wrapper.__mro__ if one.__module__.startswith("stepwrap.wrappers."))
    raise TypeError(
        f"{type(model).__name__} overrides train_step, which cannot work under "
        f"{wrapper.__name__}: a model that calls itself {why}. Put the step into a subclass of "
        f"{public.__name__} (with self(...) for the forward) and name it as the wrapper"
    )


def _explain_forward(model: nn.Module, error: TypeError | RuntimeError) -> None:
    """Raise a better error when ranks are missing or ``forward`` cannot be asked for losses."""
    explain_transport(error, "forward")
    if not isinstance(error, TypeError):
        return
    parameters = inspect.signature(model.forward).parameters.values()
    if any(one.name == "mode" or one.kind is one.VAR_KEYWORD for one in parameters):
        return
    name = type(model).__name__
    raise TypeError(
        f"{name}.forward has no argument 'mode', so it cannot be asked for its losses; wrap the "
        f"network as SupervisedModel(net, loss), or write {name}.forward(..., mode='tensor')"
    ) from error
