"""The Fabric strategy on two ranks, compared with Fabric's ddp."""

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning_parts import QUIET, join_lightning, loader, small_net, weights
from lightning_runs import Messages, sent
from ranks import run_ranks
from torch import nn
from weights import apart

from stepwrap.plugins.lightning import StepFabricStrategy
from stepwrap.plugins.lightning.tree import FabricDDPStrategy

pytestmark = [pytest.mark.filterwarnings(ignored) for ignored in QUIET]
Fabric = import_module(FabricDDPStrategy.__module__.partition(".strategies")[0]).Fabric


def _train(strategy: Any, every: int = 1, net: Any = None, path: str = "", **more: Any) -> Any:
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy, **more)
    fabric.launch()
    net = small_net() if net is None else net
    model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=0.01))
    for index, (images, labels) in enumerate(loader()):
        holds = (index + 1) % every != 0
        with fabric.no_backward_sync(model, enabled=holds):
            fabric.backward(nn.functional.cross_entropy(model(images), labels))
        if not holds:
            fabric.clip_gradients(model, optimizer, max_norm=0.5)
            optimizer.step()
            optimizer.zero_grad()
    if path:
        fabric.save(path, {"model": model, "optimizer": optimizer})
        saved = fabric.load(path)
        assert list(saved["model"]) == list(net.state_dict())
    return weights(net)


class Spare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.spare = small_net(), nn.Linear(2, 2)

    def forward(self, images: torch.Tensor) -> Any:
        return self.net(images)


def _both(folder: str) -> dict[str, Any]:
    join_lightning()
    distances: dict[str, Any] = {}
    for every in (1, 2):
        for precision in ("32-true", "bf16-mixed"):
            ours = _train("stepwrap", every, precision=precision, path=f"{folder}/file.ckpt")
            theirs = _train("ddp", every, precision=precision)
            distances[f"{every}, {precision}"] = apart(ours, theirs)
    strategy = StepFabricStrategy(detect_anomalous_params=True, find_unused_parameters=True)
    with Messages("stepwrap.wrappers.steps.step_checks") as texts:
        _train(strategy, net=Spare())
    kinds = {"reduced": "c10d::allreduce_"}
    counts = [sent(lambda k=k: _train("stepwrap", k), kinds)["reduced"] for k in (1, 2)]
    return {"weights": distances, "texts": texts, "counts": counts}


def test_fabric_trains_as_by_its_own_ddp(tmp_path: Path) -> None:
    for rank in run_ranks(_both, 2, str(tmp_path)):
        assert rank["weights"] == pytest.approx(dict.fromkeys(rank["weights"], 0), abs=1e-6)
        assert len(rank["weights"]) == 4
        assert any("spare.weight" in text for text in rank["texts"])
        # Two updates of four batches save two reductions.
        assert rank["counts"][0] - rank["counts"][1] >= 2


def _inner_call() -> str:
    join_lightning()
    fabric = Fabric(accelerator="cpu", devices=2, strategy="stepwrap")
    fabric.launch()
    net = small_net()
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.01))
    images, labels = next(iter(loader()))
    try:
        fabric.backward(nn.functional.cross_entropy(model.module(images), labels))
        optimizer.step()
    except RuntimeError as error:
        return str(error)
    return ""


def test_fabric_notices_a_call_of_the_inner_module() -> None:
    for text in run_ranks(_inner_call, 2):
        assert "different gradients" in text
        assert "wrapper(...)" in text
