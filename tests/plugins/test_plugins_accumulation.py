"""Accumulation windows and weighted losses under the Trainer equal those of a plain loop."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning_parts import QUIET
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from stepwrap.collectives import end_group
from stepwrap.plugins.lightning import StepLightningModule, StepStrategy
from stepwrap.plugins.lightning.tree import Trainer
from stepwrap.wrappers import OptimWrapper, SupervisedModel

pytestmark = pytest.mark.filterwarnings(*QUIET)
IGNORED = -100


def make_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(3, 4, dtype=torch.float64)


def make_loader() -> DataLoader[Any]:
    """Return five batches per pass; the last one is smaller, and some labels do not count."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(9, 3, generator=generator, dtype=torch.float64)
    labels = torch.tensor([0, 1, IGNORED, IGNORED, 2, 3, IGNORED, 0, 1])
    return DataLoader(TensorDataset(inputs, labels), batch_size=2)


def fit(counts: int, loss_weight: str | None, strategy: Any = "auto", **options: Any) -> Any:
    """Return the trained module and the Trainer."""
    module = StepLightningModule(
        SupervisedModel(make_net(), nn.CrossEntropyLoss()),
        lambda model: OptimWrapper(
            torch.optim.SGD(model.parameters(), lr=0.1),
            accumulative_counts=counts,
            loss_weight=loss_weight,
        ),
    )
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        strategy=strategy,
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        **options,
    )
    try:
        trainer.fit(module, make_loader(), make_loader())
    finally:
        # Lightning keeps its group until the process ends.
        end_group()
    return module, trainer


def train_plainly(counts: int) -> Tensor:
    """Train with windows that continue in the next pass."""
    net = make_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for index, (inputs, labels) in enumerate([*make_loader(), *make_loader()]):
        (nn.functional.cross_entropy(net(inputs), labels) / counts).backward()
        if (index + 1) % counts == 0:
            optimizer.step()
            optimizer.zero_grad()
    return net.weight.detach()


@pytest.mark.parametrize("strategy", ["auto", "stepwrap"])
@pytest.mark.parametrize("options", [{}, {"val_check_interval": 1}])
def test_a_validation_inside_a_window_keeps_its_gradients(
    strategy: str, options: dict[str, Any]
) -> None:
    """The second batch of a window may be the first of the next pass."""
    used: Any = StepStrategy() if strategy == "stepwrap" else strategy
    module, _ = fit(2, None, used, **options)
    assert (module.model.net.weight.detach() - train_plainly(2)).abs().max() <= 1e-15


def test_windows_with_weights_end_with_the_pass() -> None:
    module, trainer = fit(2, "tokens")
    net = make_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(2):
        batches = list(make_loader())
        for window in (batches[:2], batches[2:4], batches[4:]):
            inputs, labels = (torch.cat(tensors) for tensors in zip(*window, strict=True))
            loss = nn.functional.cross_entropy(net(inputs), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert (module.model.net.weight.detach() - net.weight.detach()).abs().max() <= 1e-15

    inputs, labels = make_loader().dataset.tensors
    expected = nn.functional.cross_entropy(net(inputs), labels)
    assert trainer.callback_metrics["val_loss"].item() == pytest.approx(expected.item(), rel=1e-6)
