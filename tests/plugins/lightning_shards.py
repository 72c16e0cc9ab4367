"""Modules that behave differently under fsdp."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from lightning_parts import (
    BATCH,
    Automatic,
    Manual,
    join_lightning,
    lightning,
    loader,
    make_trainer,
)
from lightning_runs import whole_weights
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, Subset
from weights import apart

from stepwrap.configs.digits import Digits
from stepwrap.plugins.lightning import StepStrategy


class OwnScale(Automatic):
    """A module with manual optimization and a parameter outside its children."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, images: Tensor) -> Any:
        return self.net(images) * self.scale

    def loss(self, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> None:
        (optimizer,) = [self.optimizers()]
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class OwnScaleUncalled(OwnScale):
    def loss(self, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]) * self.scale, batch[1])


class Toggling(Manual):
    """Train one optimizer after the other, the last layer first."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for optimizer in self.optimizers()[::-1]:
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()
            self.untoggle_optimizer(optimizer)


class Thawing(Automatic):
    """Train the first layer from the second epoch on."""

    def __init__(self) -> None:
        super().__init__(sgd=True)
        self.net[1].requires_grad_(False)

    def on_train_epoch_start(self) -> None:
        self.net[1].requires_grad_(self.current_epoch > 0)


def _catch_error(run: Callable[[], Any]) -> str:
    try:
        run()
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def _fit(module: Any, strategy: Any, **options: Any) -> dict[str, Tensor]:
    trainer = make_trainer(strategy, limit_val_batches=0, **options)
    trainer.fit(module, loader())
    return whole_weights(trainer)


def _thawed_plainly() -> dict[str, Tensor]:
    """Train on both ranks' batches in plain PyTorch (DDP does not average the thawed layer)."""
    module = Thawing()
    optimizer = module.configure_optimizers()
    data = loader().dataset
    halves = [
        DataLoader(data, BATCH, sampler=DistributedSampler(data, 2, rank, shuffle=False))
        for rank in range(2)
    ]
    for epoch in range(2):
        module.net[1].requires_grad_(epoch > 0)
        for pair in zip(*halves, strict=True):
            optimizer.zero_grad()
            images, labels = (torch.cat(tensors) for tensors in zip(*pair, strict=True))
            module.loss((images, labels)).backward()
            optimizer.step()
    return {name: value.detach() for name, value in module.state_dict().items()}


def unusual_modules() -> dict[str, Any]:
    join_lightning()
    plain = _fit(OwnScale(), "ddp")
    toggled = _fit(Toggling(), "ddp_find_unused_parameters_true")
    swa = lightning.callbacks.StochasticWeightAveraging(0.01, swa_epoch_start=1)
    data: Any = DataLoader(Subset(Digits("val"), range(17)), batch_size=4)
    trainer = make_trainer(StepStrategy("fsdp"))
    foreign = Automatic()
    _fit(foreign, StepStrategy("fsdp"))
    return {
        "left by another": _catch_error(lambda: _fit(foreign, StepStrategy())),
        "own, called": apart(_fit(OwnScale(), StepStrategy("fsdp")), plain),
        "own, not called": _catch_error(lambda: _fit(OwnScaleUncalled(), StepStrategy("fsdp"))),
        "toggled": apart(_fit(Toggling(), StepStrategy("fsdp")), toggled),
        "thawed": apart(_fit(Thawing(), StepStrategy("fsdp"), max_epochs=2), _thawed_plainly()),
        "averaged": _catch_error(lambda: _fit(Automatic(), StepStrategy("fsdp"), callbacks=[swa])),
        # Lightning's own sampler gives the first rank one more batch.
        "unequal": _catch_error(lambda: trainer.predict(Automatic(), data)),
        "unequal at first": _catch_error(
            lambda: make_trainer(
                StepStrategy("fsdp"), num_sanity_val_steps=2, use_distributed_sampler=False
            ).fit(Automatic(), loader(), loader("val", 8 * (2 - dist.get_rank()), undivided=True))
        ),
        "unequal by ddp": _catch_error(
            lambda: make_trainer(StepStrategy()).predict(Automatic(), data)
        ),
    }
