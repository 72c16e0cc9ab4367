"""Our wrappers inside Lightning: `Trainer(strategy="stepwrap")`, and in Fabric."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ...registry import MODEL_WRAPPERS, nearest
from ...wrappers import (
    SeparateDistributedDataParallel,
    StepDistributedDataParallel,
    revert_sync_batchnorm,
    wrap_model,
)
from ...wrappers.features import model_features
from .module import StepLightningModule
from .shards import (
    WholeStates,
    agree_on_scale,
    explained,
    holds_shards,
    keep_whole,
    own_module,
    refuse_averaging,
    refuse_shards,
    refuse_unequal,
)
from .tree import (
    FABRIC_REGISTRY,
    DDPStrategy,
    FabricDDPStrategy,
    StrategyRegistry,
    Trainer,
)

T = TypeVar("T")


class StepStrategy(WholeStates):
    """Lightning's DDP strategy with a model wrapper of ours around the LightningModule.

    Of a ``StepLightningModule`` it wraps the model inside, whose ``train_step`` is then called.

    Args:
        wrapper: a registered name, an import path or a class; default: "ddp".
        wrapper_options: options of the wrapper, and those of Lightning's ``DDPStrategy`` but the
            communication hooks (``accelerator``, ``process_group_backend``, ``timeout``,
            ``start_method``, ...).

    Raises:
        KeyError: no such wrapper.
        TypeError: no such option.
        ValueError: an option has a value that cannot be used.
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

    def setup(self, trainer: Trainer) -> None:
        """Wrap the model, to train it, and where it is sharded also to evaluate it."""
        module = own_module(self)
        fits = trainer.state.fn == "fit"
        if fits and has_own_step(self.wrapper) and not isinstance(module, StepLightningModule):
            raise TypeError(
                f"{getattr(self.wrapper, '__name__', '')} has a train_step of its own, but the "
                f"Trainer calls the training_step of {type(module).__name__} in its place: give "
                "the Trainer StepLightningModule(model, optim_wrapper=...), or use a wrapper "
                "without one"
            )
        if fits or not (self._shards or holds_shards(module)):
            super().setup(trainer)
            if holds_shards(module):
                refuse_averaging(getattr(trainer, "callbacks", ()))
                agree_on_scale(self.precision_plugin, self.optimizers)
            return
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        self.model = self.precision_plugin.convert_module(module)
        self.model_to_device()
        self.configure_ddp()
        self.setup_precision_plugin()

    def configure_ddp(self) -> None:
        """Wrap the model; there are no communication hooks to add."""
        self.model = self._setup_model(own_module(self))

    def _setup_model(self, model: nn.Module) -> Any:
        """Wrap ``model``: Lightning's only private method that is overridden here."""
        if not isinstance(model, StepLightningModule):
            return self._wrap(model)
        model.step_by(self._wrap(model.model))
        return model

    def _wrap(self, model: nn.Module) -> nn.Module:
        if self._wrapped is not None and self._wrapped.module is model and holds_shards(model):
            # Shards stay when a fit or a validation has ended.
            wrapped: nn.Module = self._wrapped
            return wrapped
        refuse_shards(model)
        if not getattr(model, "automatic_optimization", True):
            # What averages the gradients of a static graph's first backward came with 2.6.
            averages = "post_backward" in vars(DDPStrategy)
            if self.wrapper_options.get("static_graph") and not averages:
                raise ValueError(
                    "static_graph=True with manual optimization leaves the first gradients of each "
                    "rank apart in this release of Lightning: leave it out, or update Lightning"
                )
        with _aside(self.root_device):
            self._wrapped = wrap_model(self.wrapper, model, **self.wrapper_options)
        self._is_sharded = holds_shards(model)
        return self._wrapped  # type: ignore[no-any-return]

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's step; a manual one calls what is sharded, and is not inside of it."""
        module = own_module(self)
        if module.automatic_optimization or not self._is_sharded:
            return super().training_step(*args, **kwargs)
        with self.precision_plugin.train_step_context(), explained():
            return module.training_step(*args, **kwargs)

    def backward(
        self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Run backward; log the parameters that the loss does not reach, where that is wanted."""
        plain = super().backward
        return _run_backward(
            self.model, closure_loss, lambda loss: plain(loss, optimizer, *args, **kwargs)
        )

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Leave the gradients of what runs inside on their ranks."""
        with getattr(self.model, "no_sync", nullcontext)():
            yield

    def on_validation_start(self) -> None:
        """Give every rank the buffers of the first: statistics differ after a training step."""
        model_features(self._wrapped).sync_buffers()
        if self._is_sharded:
            refuse_unequal(own_module(self).trainer)

    on_test_start = on_predict_start = on_validation_start

    def teardown(self) -> None:
        """End the run; what was put around and into the module is taken off, shards stay."""
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
            self.lightning_module.step_by(None)

    def _leave_shards(self) -> None:
        """End the run, but leave the shards on the devices where they can be gathered."""
        module = own_module(self)
        self.model = module
        if not self._keeps_process:
            # The parent process is sent the weights now.
            keep_whole(module)
        assert self.cluster_environment is not None
        assert self.accelerator is not None
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()


def _run_backward(wrapped: Any, loss: Tensor, plain: Callable[[Tensor], T]) -> T:
    """Run backward; log the parameters that the loss does not reach, where that is wanted."""
    if not model_features(wrapped).detect_anomalous_params:
        return plain(loss)
    ended: list[T] = []
    update = SimpleNamespace(update_params=lambda loss: ended.append(plain(loss)))
    wrapped.update_and_detect(loss, update)
    return ended[0]


class StepFabricStrategy(FabricDDPStrategy):
    """Fabric's DDP strategy with our ``ddp`` wrapper, or a subclass of it, around modules.

    Args:
        wrapper: a registered name, an import path or a class; default: "ddp".
        wrapper_options: options of the wrapper, and those of Fabric's ``DDPStrategy``.

    Raises:
        KeyError: no such wrapper.
        TypeError: no such option, or a wrapper that is not built on DistributedDataParallel:
            ``fabric.no_backward_sync`` would not know it. Or one with a ``train_step`` of its own.
    """

    def __init__(
        self, wrapper: str | Callable[..., nn.Module] | None = None, **wrapper_options: Any
    ) -> None:
        choice = _read_options(StepFabricStrategy, wrapper, wrapper_options)
        kind = choice.wrapper
        if not (isinstance(kind, type) and issubclass(kind, DistributedDataParallel)):
            raise TypeError(
                f"Fabric takes wrappers built on DistributedDataParallel, not "
                f"{getattr(kind, '__name__', kind)}: fabric.no_backward_sync knows no other. Use "
                "the Trainer, or call the wrapper's train_step in a loop without Fabric"
            )
        if has_own_step(kind):
            raise TypeError(
                f"{kind.__name__} has a train_step of its own, which Fabric does not call: use "
                "StepStrategy with a StepLightningModule, or call it in a loop without Fabric"
            )
        super().__init__(**choice.own)
        self.wrapper = choice.wrapper
        self.wrapper_options = choice.options
        self._detecting: Any = None

    def setup_module(self, module: nn.Module) -> Any:
        """Wrap ``module``; every rank must call this."""
        with _aside(self.root_device):
            wrapped: Any = wrap_model(self.wrapper, module, **self.wrapper_options)
        # Who names no model in fabric.backward has one, or means the last.
        self._detecting = wrapped
        return wrapped

    def backward(self, tensor: Tensor, module: nn.Module | None, *args: Any, **kwargs: Any) -> None:
        """Run backward; log the parameters that the loss does not reach, where that is wanted."""
        plain = super().backward
        wrapped = self._detecting if module is None else module
        _run_backward(wrapped, tensor, lambda loss: plain(loss, module, *args, **kwargs))


_OURS = wrap_model.__module__.rpartition(".")[0]
# Hooks and averaging are the wrapper's: there they work on the CPU as well.
_NOT_OURS = {
    "kwargs",
    "ddp_comm_hook",
    "ddp_comm_state",
    "ddp_comm_wrapper",
    "model_averaging_period",
}


class _Choice(NamedTuple):
    """A wrapper with its options, and the options of Lightning's own strategy."""

    wrapper: Callable[..., nn.Module]
    options: dict[str, Any]
    own: dict[str, Any]
    shards: bool


def _read_options(
    strategy: type, wrapper: str | Callable[..., nn.Module] | None, given: Mapping[str, Any]
) -> _Choice:
    """Find the wrapper and check all options, those of Lightning's strategy as well."""
    chosen = _find(wrapper)
    theirs = [
        name for name in inspect.signature(strategy.__mro__[1]).parameters if name not in _NOT_OURS
    ]
    mine = _options_of(chosen)
    options = {name: value for name, value in given.items() if name not in theirs}
    title = getattr(chosen, "__name__", repr(chosen))
    for name in options:
        if name not in mine:
            others = [n for one, n in _short_names().items() if name in _options_of(one)]
            close = nearest(name, mine + theirs)
            hint = f"did you mean {close[0]}?" if close else f"it takes {', '.join(mine + theirs)}"
            if others:
                hint = f"that is an option of {' and '.join(sorted(others))}"
            raise TypeError(
                f"{strategy.__name__} with wrapper {title} has no option {name!r}; {hint}"
            )
    if options.get("uneven_inputs"):
        raise ValueError(
            "uneven_inputs is for loops of ours: Lightning's samplers give all ranks equally many "
            "batches; leave it out"
        )
    check = getattr(chosen, "check_options", None)
    if check is not None:
        check(options)
    own = {name: value for name, value in given.items() if name in theirs}
    return _Choice(chosen, options, own, "mesh" in mine)


def has_own_step(wrapper: Any) -> bool:
    """Whether a wrapper's ``train_step`` is its author's, not that of one of ours."""
    kinds = getattr(wrapper, "__mro__", ())
    owner = next((one for one in kinds if "train_step" in vars(one)), None)
    return owner is not None and not owner.__module__.startswith(f"{_OURS}.")


def _find(wrapper: Any) -> Callable[..., nn.Module]:
    """The wrapper that is meant."""
    if wrapper is None or isinstance(wrapper, str):
        chosen: Any = MODEL_WRAPPERS.resolve(wrapper or "ddp")
    else:
        chosen = wrapper
    known = chosen in [MODEL_WRAPPERS.get(name) for name in MODEL_WRAPPERS.names()]
    steps = isinstance(chosen, type) and hasattr(chosen, "train_step")
    torchs = isinstance(chosen, type) and issubclass(chosen, DistributedDataParallel)
    if known or steps or torchs:
        return chosen  # type: ignore[no-any-return]
    given = getattr(chosen, "__name__", None) or f"an object of type {type(chosen).__name__}"
    raise TypeError(
        f"wrapper must be a model wrapper, that is a class with a train_step, or the name of one "
        f"({', '.join(sorted(_short_names().values()))}), got {given}"
    )


def _short_names() -> dict[Any, str]:
    """The registered wrappers, each with its shortest name."""
    names = sorted(MODEL_WRAPPERS.names(), key=len, reverse=True)
    return {MODEL_WRAPPERS.get(name): name for name in names}


def _aside(device: torch.device) -> AbstractContextManager[Any]:
    """Where a wrapper is made: on a GPU on a stream of its own, which CUDA graphs need.

    https://docs.pytorch.org/docs/stable/notes/cuda.html#usage-with-distributeddataparallel
    """
    if device.type != "cuda":
        return nullcontext()
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    return torch.cuda.stream(stream)


def _options_of(wrapper: Any) -> list[str]:
    made = getattr(wrapper, "config_signature", None)
    signature: inspect.Signature = inspect.signature(wrapper) if made is None else made()
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
