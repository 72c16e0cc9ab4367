"""Strategies for Lightning's Trainer and for Fabric that use stepwrap's model wrappers."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeVar
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ...primitives.suggestions import did_you_mean
from ...registry import MODEL_WRAPPERS
from ...wrappers import (
    SeparateDistributedDataParallel,
    StepDistributedDataParallel,
    revert_sync_batchnorm,
    wrap_model,
)
from ...wrappers.features import model_features
from ...wrappers.layout import get_parameters, unreduced
from ...wrappers.optimizers.first_update import compare_gradients, compare_used_parameters
from ...wrappers.steps.buffers import buffers_of_first_rank
from .module import StepLightningModule
from .shards import (
    FullStateStrategy,
    check_equal_batches,
    check_no_averaging,
    check_not_sharded,
    explain_shard_errors,
    get_module,
    holds_shards,
    make_state_dict_full,
    synchronize_loss_scaler,
)
from .tree import (
    FABRIC_REGISTRY,
    DDPStrategy,
    FabricDDPStrategy,
    StrategyRegistry,
    Trainer,
)

T = TypeVar("T")
# The optimizers whose first update was compared; not in a strategy, which is sent to spawned ranks.
_checked: WeakSet[Optimizer] = WeakSet()


class StepStrategy(FullStateStrategy):
    """Lightning's DDP strategy, with a stepwrap model wrapper around the LightningModule.

    If the module is a ``StepLightningModule``, the wrapper is put around its inner model, and the
    wrapper's ``train_step`` is used.

    Args:
        wrapper: a registered name, an import path or a class. Default: "ddp".
        wrapper_options: options of the wrapper, and options of Lightning's ``DDPStrategy``
            (``accelerator``, ``process_group_backend``, ``timeout``, ``start_method``, ...) except
            those for communication hooks and model averaging.

    Raises:
        KeyError: the wrapper does not exist.
        TypeError: an option does not exist, or ``wrapper`` is not a model wrapper. In ``fit``: the
            wrapper has a custom ``train_step``, but the module is not a ``StepLightningModule``.
        ValueError: an option has an invalid value.
    """

    def __init__(
        self, wrapper: str | Callable[..., nn.Module] | None = None, **wrapper_options: Any
    ) -> None:
        choice = _read_options(StepStrategy, wrapper, wrapper_options)
        super().__init__(**choice.own)
        self.wrapper = choice.wrapper
        self.wrapper_options = choice.options
        self._shards = choice.shards
        self._keeps_process = choice.own.get("start_method", "popen") == "popen"
        self._wrapped: Any = None
        self._is_sharded = False
        # The context of the current evaluation.
        self._evaluation: ExitStack | None = None

    def setup(self, trainer: Trainer) -> None:
        """Wrap the model for training and, if it is sharded, for evaluation."""
        module = get_module(self)
        is_fit = trainer.state.fn == "fit"
        is_plain = not isinstance(module, StepLightningModule)
        if is_fit and is_plain and has_custom_step(self.wrapper):
            raise TypeError(
                f"{getattr(self.wrapper, '__name__', '')} has a custom train_step, but the Trainer "
                f"calls the training_step of {type(module).__name__} instead: pass "
                "StepLightningModule(model, optim_wrapper=...) to the Trainer, or use another "
                "wrapper"
            )
        if is_fit or not (self._shards or holds_shards(module)):
            super().setup(trainer)
            if holds_shards(module):
                check_no_averaging(getattr(trainer, "callbacks", ()))
                synchronize_loss_scaler(self.precision_plugin, self.optimizers)
            return
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        self.model = self.precision_plugin.convert_module(module)
        self.model_to_device()
        self.configure_ddp()
        self.setup_precision_plugin()

    def configure_ddp(self) -> None:
        """Wrap the model; communication hooks are not registered here, but by the wrapper."""
        self.model = self._setup_model(get_module(self))

    def _setup_model(self, model: nn.Module) -> Any:
        """Wrap ``model``; this is the only private method of Lightning that stepwrap overrides."""
        if not isinstance(model, StepLightningModule):
            return self._wrap(model)
        model.set_wrapper(self._wrap(model.model))
        return model

    def _wrap(self, model: nn.Module) -> nn.Module:
        if self._wrapped is not None and self._wrapped.module is model and holds_shards(model):
            # The module is still sharded from an earlier fit or evaluation.
            wrapped: nn.Module = self._wrapped
            return wrapped
        check_not_sharded(model)
        if not getattr(model, "automatic_optimization", True):
            # Lightning has this method since 2.6. Without it, a static graph's first gradients are
            # not averaged.
            averages = "post_backward" in vars(DDPStrategy)
            if self.wrapper_options.get("static_graph") and not averages:
                raise ValueError(
                    "static_graph=True with manual optimization needs Lightning 2.6 or newer, "
                    "because older releases do not average the first gradients: remove it, or "
                    "update Lightning"
                )
        with _side_stream(self.root_device):
            self._wrapped = wrap_model(self.wrapper, model, **self.wrapper_options)
        self._is_sharded = holds_shards(model)
        return self._wrapped  # type: ignore[no-any-return]

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's step; under fsdp, run a manual step outside the wrapper's forward."""
        module = get_module(self)
        if module.automatic_optimization or not self._is_sharded:
            return super().training_step(*args, **kwargs)
        with self.precision_plugin.train_step_context(), explain_shard_errors():
            return module.training_step(*args, **kwargs)

    def backward(
        self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Run backward; if ``detect_anomalous_params`` is set, log parameters without gradient."""
        plain = super().backward
        return _run_backward(
            self.model, closure_loss, lambda loss: plain(loss, optimizer, *args, **kwargs)
        )

    def optimizer_step(self, optimizer: Optimizer, closure: Any, *args: Any, **kwargs: Any) -> Any:
        """Step with reduced gradients; before the first update, compare them between the ranks."""

        def prepared() -> Any:
            loss = closure()
            # Automatic optimization may skip the step of a rank, whose loss is then None.
            if loss is not None or not module.automatic_optimization:
                _prepare_step(optimizer)
            return loss

        module = get_module(self)
        is_prepared = isinstance(module, StepLightningModule)
        step = closure if is_prepared else prepared
        return super().optimizer_step(optimizer, step, *args, **kwargs)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Skip averaging of gradients inside this context."""
        with getattr(self.model, "no_sync", nullcontext)():
            yield

    def on_validation_start(self) -> None:
        """Copy rank 0's buffers to all ranks, because running statistics differ after training."""
        self._evaluation = ExitStack()
        if self._wrapped is not None:
            self._evaluation.enter_context(buffers_of_first_rank(self._wrapped))
        if self._is_sharded:
            check_equal_batches(get_module(self).trainer)

    def on_validation_end(self) -> None:
        """Give each rank the buffers back with which it trains."""
        if self._evaluation is not None:
            self._evaluation.close()
            self._evaluation = None

    on_test_start = on_predict_start = on_validation_start
    on_test_end = on_predict_end = on_validation_end

    def teardown(self) -> None:
        """End the run and unwrap the module; a sharded module stays wrapped and sharded."""
        wrapped = self._wrapped
        if wrapped is not None and holds_shards(wrapped.module):
            self._leave_shards()
            return
        super().teardown()
        self._wrapped, self.model = None, self.lightning_module
        if wrapped is None:
            return
        if isinstance(wrapped, SeparateDistributedDataParallel):
            for name, child in list(wrapped.module.named_children()):
                if isinstance(child, StepDistributedDataParallel):
                    setattr(wrapped.module, name, child.module)
        if self.wrapper_options.get("sync_batchnorm"):
            revert_sync_batchnorm(wrapped.module)
        if isinstance(self.lightning_module, StepLightningModule):
            self.lightning_module.set_wrapper(None)

    def _leave_shards(self) -> None:
        """End the run, but leave the shards on their devices, where they can still be gathered."""
        module = get_module(self)
        self.model = module
        if not self._keeps_process:
            # Lightning sends the weights to the parent process next.
            make_state_dict_full(module)
        assert self.cluster_environment is not None
        assert self.accelerator is not None
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()


def _run_backward(wrapped: Any, loss: Tensor, plain: Callable[[Tensor], T]) -> T:
    if not model_features(wrapped).detect_anomalous_params:
        return plain(loss)
    results: list[T] = []
    update = SimpleNamespace(update_params=lambda loss: results.append(plain(loss)))
    wrapped.update_and_detect(loss, update)
    return results[0]


def _prepare_step(optimizer: Optimizer) -> None:
    """Reduce the gradients of modules that the last batch of the window did not use.

    Raises:
        RuntimeError: at the first update gradients differ, because of a forward outside of the
            wrapper, or ranks have used different sharded parameters.
    """
    unreduced.reduce(get_parameters(optimizer))
    if optimizer in _checked:
        return
    has_gradient = any(parameter.grad is not None for parameter in get_parameters(optimizer))
    compare_used_parameters(optimizer)
    if compare_gradients(optimizer) and has_gradient:
        _checked.add(optimizer)


class StepFabricStrategy(FabricDDPStrategy):
    """Fabric's DDP strategy, with stepwrap's ``ddp`` wrapper or another one around modules.

    Args:
        wrapper: a subclass of DistributedDataParallel, or its registered name or import path.
            Default: "ddp".
        wrapper_options: options of the wrapper and of Fabric's ``DDPStrategy``.

    Raises:
        KeyError: the wrapper does not exist.
        TypeError: an option does not exist, the wrapper is not a subclass of
            DistributedDataParallel, which ``fabric.no_backward_sync`` requires, or it has a custom
            ``train_step``.
        ValueError: an option has an invalid value.
    """

    def __init__(
        self, wrapper: str | Callable[..., nn.Module] | None = None, **wrapper_options: Any
    ) -> None:
        choice = _read_options(StepFabricStrategy, wrapper, wrapper_options)
        kind = choice.wrapper
        if not (isinstance(kind, type) and issubclass(kind, DistributedDataParallel)):
            raise TypeError(
                "with Fabric the wrapper must be a subclass of DistributedDataParallel, as "
                f"fabric.no_backward_sync requires, got {getattr(kind, '__name__', kind)}: use "
                "the Trainer, or call the wrapper's train_step in a loop without Fabric"
            )
        if has_custom_step(kind):
            raise TypeError(
                f"{kind.__name__} has a custom train_step, which Fabric does not call: use "
                "StepStrategy with a StepLightningModule, or call it in a loop without Fabric"
            )
        super().__init__(**choice.own)
        self.wrapper = choice.wrapper
        self.wrapper_options = choice.options
        self._detecting: Any = None

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        """Step with reduced gradients; before the first update, compare them between the ranks."""
        if "closure" not in kwargs:
            _prepare_step(optimizer)
        return super().optimizer_step(optimizer, **kwargs)

    def setup_module(self, module: nn.Module) -> Any:
        """Wrap ``module``; every rank must call this."""
        with _side_stream(self.root_device):
            wrapped: Any = wrap_model(self.wrapper, module, **self.wrapper_options)
        # `fabric.backward(loss)` without a model uses the model that was set up last.
        self._detecting = wrapped
        return wrapped

    def backward(self, tensor: Tensor, module: nn.Module | None, *args: Any, **kwargs: Any) -> None:
        """Run backward; if ``detect_anomalous_params`` is set, log parameters without gradient."""
        plain = super().backward
        wrapped = self._detecting if module is None else module
        _run_backward(wrapped, tensor, lambda loss: plain(loss, module, *args, **kwargs))


_OURS = wrap_model.__module__.rpartition(".")[0]
# Options of Lightning's strategy that are not accepted: stepwrap's wrappers have their own options
# for communication hooks, which work on the CPU as well.
_EXCLUDED = {
    "kwargs",
    "ddp_comm_hook",
    "ddp_comm_state",
    "ddp_comm_wrapper",
    "model_averaging_period",
}


class _Choice(NamedTuple):
    """A wrapper with its options, and the options of Lightning's strategy."""

    wrapper: Callable[..., nn.Module]
    options: dict[str, Any]
    own: dict[str, Any]
    shards: bool


def _read_options(
    strategy: type, wrapper: str | Callable[..., nn.Module] | None, passed: Mapping[str, Any]
) -> _Choice:
    """Find the wrapper and check its options and the options of Lightning's strategy."""
    chosen = _find_wrapper(wrapper)
    params = inspect.signature(strategy.__mro__[1]).parameters
    of_strategy = [name for name in params if name not in _EXCLUDED]
    of_wrapper = _get_options(chosen)
    options = {name: value for name, value in passed.items() if name not in of_strategy}
    title = getattr(chosen, "__name__", repr(chosen))
    for name in options:
        if name not in of_wrapper:
            allowed = of_wrapper + of_strategy
            other_wrappers = [n for kind, n in _short_names().items() if name in _get_options(kind)]
            hint = did_you_mean(name, allowed, limit=1) or f"; it takes {', '.join(allowed)}"
            if other_wrappers:
                hint = f"; that is an option of {' and '.join(sorted(other_wrappers))}"
            raise TypeError(
                f"{strategy.__name__} with wrapper {title} has no option {name!r}{hint}"
            )
    if options.get("uneven_inputs"):
        raise ValueError(
            "uneven_inputs must not be set, because Lightning's samplers give all ranks the same "
            "number of batches: remove it"
        )
    check = getattr(chosen, "check_options", None)
    if check is not None:
        check(options)
    strategy_options = {name: value for name, value in passed.items() if name in of_strategy}
    return _Choice(chosen, options, strategy_options, "mesh" in of_wrapper)


def has_custom_step(wrapper: Any) -> bool:
    """Return whether a wrapper's ``train_step`` is defined outside this library."""
    kinds = getattr(wrapper, "__mro__", ())
    owner = next((base for base in kinds if "train_step" in vars(base)), None)
    return owner is not None and not owner.__module__.startswith(f"{_OURS}.")


def _find_wrapper(wrapper: Any) -> Callable[..., nn.Module]:
    """Return the wrapper class or function for a name or object; check that it is a wrapper."""
    if wrapper is None or isinstance(wrapper, str):
        chosen: Any = MODEL_WRAPPERS.resolve(wrapper or "ddp")
    else:
        chosen = wrapper
    is_registered = chosen in [MODEL_WRAPPERS.get(name) for name in MODEL_WRAPPERS.names()]
    steps = isinstance(chosen, type) and hasattr(chosen, "train_step")
    torchs = isinstance(chosen, type) and issubclass(chosen, DistributedDataParallel)
    if is_registered or steps or torchs:
        return chosen  # type: ignore[no-any-return]
    description = getattr(chosen, "__name__", None) or f"an object of type {type(chosen).__name__}"
    raise TypeError(
        f"wrapper must be a class with a train_step, or the name of a wrapper "
        f"({', '.join(sorted(_short_names().values()))}), got {description}"
    )


def _short_names() -> dict[Any, str]:
    """Map each registered wrapper to its shortest name."""
    names = sorted(MODEL_WRAPPERS.names(), key=len, reverse=True)
    return {MODEL_WRAPPERS.get(name): name for name in names}


def _side_stream(device: torch.device) -> AbstractContextManager[Any]:
    """Return the context in which to build a wrapper: a side stream on a GPU, for CUDA graphs.

    https://docs.pytorch.org/docs/stable/notes/cuda.html#usage-with-distributeddataparallel
    """
    if device.type != "cuda":
        return nullcontext()
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    return torch.cuda.stream(stream)


def _get_options(wrapper: Any) -> list[str]:
    read_signature = getattr(wrapper, "config_signature", None)
    signature: inspect.Signature = (
        inspect.signature(wrapper) if read_signature is None else read_signature()
    )
    return [name for name in signature.parameters if name != "module"]


for _name, _method in (("stepwrap", "popen"), ("stepwrap_spawn", "spawn")):
    for _registry, _strategy in (
        (StrategyRegistry, StepStrategy),
        (FABRIC_REGISTRY, StepFabricStrategy),
    ):
        _registry.register(
            _name,
            _strategy,
            description=f"stepwrap's ddp wrapper, processes by {_method}",
            override=True,
            start_method=_method,
        )
