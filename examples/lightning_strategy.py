"""Lightning's Trainer with `StepStrategy`: an ordinary LightningModule, and a custom step.

Run it on two processes: python examples/lightning_strategy.py
"""

import sys

import torch
from own_train_step import MixupDDP
from pytorch_lightning import LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader
from torchmetrics.classification import MulticlassAccuracy

from stepwrap.configs.digits import Digits, SmallCNN
from stepwrap.plugins.lightning import StepLightningModule, StepStrategy
from stepwrap.wrappers import OptimWrapper, SupervisedModel


class DigitsModule(LightningModule):
    """An ordinary LightningModule that does not use stepwrap."""

    def __init__(self) -> None:
        super().__init__()
        self.net = SmallCNN()
        self.accuracy = MulticlassAccuracy(num_classes=10, average="micro")

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        return torch.nn.functional.cross_entropy(self.net(images), labels)

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        images, labels = batch
        self.accuracy(self.net(images), labels)
        self.log("test_accuracy", self.accuracy)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def own_step() -> StepLightningModule:
    """Return a module with the same network, for training by `MixupDDP.train_step`."""
    return StepLightningModule(
        SupervisedModel(SmallCNN(), torch.nn.CrossEntropyLoss()),
        optim_wrapper=lambda model: OptimWrapper(torch.optim.AdamW(model.parameters(), lr=3e-3)),
        metrics={"accuracy": MulticlassAccuracy(num_classes=10, average="micro")},
    )


def main(epochs: int = 8) -> None:
    train = DataLoader(Digits("train"), batch_size=32, shuffle=True)
    test = DataLoader(Digits("test"), batch_size=150)
    for module, strategy in (
        (DigitsModule(), StepStrategy(comm_hook="bf16_compress", sync_batchnorm=True)),
        (own_step(), StepStrategy(wrapper=MixupDDP)),
    ):
        torch.manual_seed(0)
        trainer = Trainer(
            accelerator="cpu",
            devices=2,
            strategy=strategy,
            max_epochs=epochs,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
        )
        trainer.fit(module, train)
        trainer.test(module, test)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
