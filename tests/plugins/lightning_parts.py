"""Small LightningModules on real digits, and Trainers inside the rank processes."""

import os
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, Subset

from stepwrap.configs.digits import Digits

if find_spec("lightning") is not None:
    # It includes pytorch_lightning, which would be used if neither were imported.
    import_module("lightning.pytorch")

from stepwrap.plugins.lightning import StepStrategy
from stepwrap.plugins.lightning.tree import TREE, LightningModule, Trainer

lightning = import_module(TREE)

# Warnings of Lightning, and of torch because of it, in all these runs.
QUIET = (
    "ignore:.*does not have many workers",
    "ignore:.*The number of training batches",
    "ignore:.*sync_dist=True",
    "ignore:.*isinstance.treespec, LeafSpec.",
    "ignore:.*Checkpoint directory",
    "ignore:.*callbacks used to create the checkpoint",
    "ignore:.*a checkpoint that ended before the epoch ended",
    "ignore:.*Using ModelCheckpoint with manual optimization",
    "ignore:.*you defined a `validation_step`",
    "ignore:.*You defined a `validation_step`",
    "ignore:.*DistributedSampler",
    "ignore:.*Experiment logs directory",
    "ignore:.*LOCAL_RANK",
)
BATCH, SAMPLES = 8, 64


def small_net(norm: bool = False) -> nn.Sequential:
    torch.manual_seed(1)
    layers: list[nn.Module] = [nn.Flatten(), nn.Linear(64, 12), nn.Tanh(), nn.Linear(12, 10)]
    if norm:
        layers.insert(2, nn.BatchNorm1d(12))
    return nn.Sequential(*layers)


def loader(
    split: str = "train", samples: int = SAMPLES, batch: int = BATCH, *, undivided: bool = False
) -> DataLoader[Any]:
    """Return a loader of this rank's part in order; Lightning's own sampler would shuffle it."""
    data: Any = Subset(Digits(split), range(samples))
    if undivided or not dist.is_initialized():
        return DataLoader(data, batch_size=batch)
    return DataLoader(data, batch_size=batch, sampler=DistributedSampler(data, shuffle=False))


class Automatic(LightningModule):
    """An ordinary module, optionally with a BatchNorm layer, unused parameters or SGD."""

    def __init__(self, norm: bool = False, spare: bool = False, sgd: bool = False) -> None:
        super().__init__()
        self.sgd = sgd
        self.net = small_net(norm)
        if spare:
            self.spare = nn.Linear(2, 2)

    def loss(self, batch: Any) -> Tensor:
        images, labels = batch
        return nn.functional.cross_entropy(self.net(images), labels)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss, sync_dist=True, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch), sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        scores: Tensor = self.net(batch[0])
        return scores

    def configure_optimizers(self) -> Any:
        if self.sgd:
            return torch.optim.SGD(self.parameters(), lr=0.1)
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


class Calling(Automatic):
    """A module whose steps call it, as most modules do."""

    def forward(self, images: Tensor) -> Any:
        return self.net(images)

    def loss(self, batch: Any) -> Tensor:
        images, labels = batch
        return nn.functional.cross_entropy(self(images), labels)


class Manual(Automatic):
    """The same with manual optimization and one optimizer per layer."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.automatic_optimization = False
        self.first, self.last = self.net[:-1], self.net[-1:]
        del self.net

    def loss(self, batch: Any) -> Tensor:
        images, labels = batch
        return nn.functional.cross_entropy(self.last(self.first(images)), labels)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        loss = self.loss(batch)
        for optimizer in self.optimizers():
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in self.optimizers():
            optimizer.step()
        self.log("train_loss", loss)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        scores: Tensor = self.last(self.first(batch[0]))
        return scores

    def configure_optimizers(self) -> Any:
        return [torch.optim.AdamW(layer.parameters(), lr=0.01) for layer in (self.first, self.last)]


def join_lightning() -> None:
    """Set the variables by which Lightning takes this rank for a launcher's process."""
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    os.environ.update(
        RANK=rank,
        LOCAL_RANK=rank,
        WORLD_SIZE=size,
        LOCAL_WORLD_SIZE=size,
        GROUP_RANK="0",
        GROUP_WORLD_SIZE="1",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="1",
        TORCHELASTIC_RUN_ID="test",
    )


def make_trainer(strategy: Any = None, **options: Any) -> Trainer:
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": dist.get_world_size() if dist.is_initialized() else 1,
        "strategy": StepStrategy() if strategy is None else strategy,
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
    }
    return Trainer(**{**defaults, **options})


def weights(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in module.state_dict().items()}
