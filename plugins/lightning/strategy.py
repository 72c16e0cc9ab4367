"""Our wrappers inside Lightning: `Trainer(strategy="stepwrap")`."""

from __future__ import annotations

import atexit
import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from ...wrappers import (
    SeparateDistributedDataParallel,
    StepDistributedDataParallel,
    revert_sync_batchnorm,
    wrap_model,
)
from .fabric import StepFabricStrategy
from .module import StepLightningModule
from .options import aside, has_own_step, read_options
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
from .tree import DDPStrategy, LightningModule, StrategyRegistry, Trainer

__all__ = ["StepFabricStrategy", "StepLightningModule", "StepStrategy"]


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
        choice = read_options(StepStrategy, wrapper, wrapper_options)
        super().__init__(**choice.own)
        self.wrapper = choice.wrapper
        self.wrapper_options = choice.options
        self._shards = choice.shards
        self._keeps_process = choice.own.get("start_method", "popen") == "popen"
        self._wrapped: Any = None
        self._is_sharded = False

    def setup(self, trainer: Trainer) -> None:
        """Wrap the model, to train it, and where it is sharded also to evaluate it."""
        if not self._keeps_process:
            # torch may abort a process that ends while wrappers, in cycles, are still there.
            atexit.register(gc.collect)
        module = own_module(self)
        if trainer.state.fn == "fit":
            _refuse_lost_step(self.wrapper, module)
        if trainer.state.fn == "fit" or not (self._shards or holds_shards(module)):
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
            _refuse_lost_gradients(self.wrapper_options)
            if self._shards:
                _let_children_be_called(model)
        with aside(self.root_device):
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
        if not getattr(self.model, "detect_anomalous_params", False):
            return super().backward(closure_loss, optimizer, *args, **kwargs)
        ended: list[Tensor] = []

        def update_params(loss: Tensor) -> None:
            ended.append(super(StepStrategy, self).backward(loss, optimizer, *args, **kwargs))

        wrapped: Any = self.model
        wrapped.update_and_detect(closure_loss, SimpleNamespace(update_params=update_params))
        return ended[0]

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Leave the gradients of what runs inside on their ranks."""
        no_sync = getattr(self.model, "no_sync", nullcontext)
        with no_sync():
            yield

    def on_validation_start(self) -> None:
        """Give every rank the buffers of the first: statistics differ after a training step."""
        getattr(self._wrapped, "sync_buffers", lambda: None)()
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
        _take_off(wrapped, reverts=bool(self.wrapper_options.get("sync_batchnorm")))
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


def _take_off(wrapped: Any, *, reverts: bool) -> None:
    """Give the model its own children and layers back."""
    model = wrapped.module
    if isinstance(wrapped, SeparateDistributedDataParallel):
        for name, child in list(model.named_children()):
            if isinstance(child, StepDistributedDataParallel):
                setattr(model, name, child.module)
    if reverts:
        revert_sync_batchnorm(model)


def _refuse_lost_gradients(options: Mapping[str, Any]) -> None:
    # What averages the gradients of a static graph's first backward came with Lightning 2.6.
    if options.get("static_graph") and "post_backward" not in vars(DDPStrategy):
        raise ValueError(
            "static_graph=True with manual optimization leaves the first gradients of each rank "
            "apart in this release of Lightning: leave it out, or update Lightning"
        )


def _refuse_lost_step(wrapper: Any, module: LightningModule) -> None:
    if has_own_step(wrapper) and not isinstance(module, StepLightningModule):
        name = wrapper.__name__
        raise TypeError(
            f"{name} has a train_step of its own, but the Trainer calls the training_step of "
            f"{type(module).__name__} in its place: give the Trainer "
            "StepLightningModule(model, optim_wrapper=...), or use a wrapper without one"
        )


def _let_children_be_called(module: nn.Module) -> None:
    """Have each child of ``module`` sharded by itself, since a manual step may call them so.

    That is what the wrapper does for a model with a ``train_step``.
    """
    cls = type(module)
    members = {"__module__": cls.__module__, "train_step": _is_stepped_by_trainer}
    module.__class__ = type(cls.__name__, (cls,), members)


def _is_stepped_by_trainer(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("this module is stepped by Lightning's Trainer, by its training_step")


for _name, _method in (("stepwrap", "popen"), ("stepwrap_spawn", "spawn")):
    StrategyRegistry.register(
        _name,
        StepStrategy,
        description=f"stepwrap's ddp wrapper, processes by {_method}",
        override=True,
        start_method=_method,
    )
