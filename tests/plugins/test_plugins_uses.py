"""Evaluation, prediction, compiled modules and launchers."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning_parts import (
    QUIET,
    TREE,
    Automatic,
    Manual,
    distance,
    join_lightning,
    loader,
    make_trainer,
    weights,
)
from lightning_runs import WRAPPERS, whole_weights
from ranks import run_ranks
from torch import nn

from stepwrap.plugins.lightning import StepStrategy

pytestmark = [pytest.mark.filterwarnings(one) for one in QUIET]
ROOT = Path(__file__).parents[2]


def _evaluate() -> dict[str, Any]:
    """Without a fit before: losses over all ranks, and this rank's predictions."""
    join_lightning()
    found: dict[str, Any] = {}
    with torch.no_grad():
        plain = [Automatic().eval().loss(batch).item() for batch in loader("val", whole=True)]
    for wrapper in WRAPPERS:
        for cls in (Automatic, Manual):
            module, data = cls().eval(), loader("val")
            alone = [one.predict_step(batch, 0) for one in (cls().eval(),) for batch in data]
            trainer = make_trainer(StepStrategy(wrapper))
            (validated,) = trainer.validate(module, data, verbose=False)
            (tested,) = trainer.test(module, data, verbose=False)
            predicted = trainer.predict(module, data)
            found[f"{wrapper}-{cls.__name__}"] = {
                "losses": [validated["val_loss"], tested["test_loss"]],
                "apart": (torch.cat(predicted) - torch.cat(alone)).abs().max().item(),
            }
    return {"plain": sum(plain) / len(plain), **found}


def test_validate_test_and_predict() -> None:
    for rank in run_ranks(_evaluate, 2, timeout_s=120):
        plain = rank.pop("plain")
        assert len(rank) == 6
        for found in rank.values():
            assert found["losses"] == pytest.approx([plain, plain], abs=1e-5)
            assert found["apart"] <= 1e-6


def _compiled() -> dict[str, Any]:
    join_lightning()
    torch.compiler.reset()
    found: dict[str, Any] = {}
    trainer = make_trainer("ddp")
    trainer.fit(Automatic(), loader())
    plain = whole_weights(trainer)
    for wrapper in WRAPPERS:
        module = Automatic()
        module.net.compile(backend="eager")
        trainer = make_trainer(StepStrategy(wrapper))
        trainer.fit(module, loader(), loader("val"))
        found[f"{wrapper}, net"] = distance(whole_weights(trainer), plain)
        if wrapper != "fsdp":
            whole = Automatic()
            whole.log = _log_nothing  # type: ignore[method-assign]
            trainer = make_trainer(StepStrategy(wrapper), limit_val_batches=0)
            trainer.fit(torch.compile(whole, backend="eager"), loader())  # type: ignore[arg-type]
            found[f"{wrapper}, module"] = distance(weights(whole), plain)
    return found


def _log_nothing(*args: Any, **kwargs: Any) -> None:
    """Logging is no matter of the graph, and breaks it."""


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_compiled_modules_reach_the_same_weights() -> None:
    for rank in run_ranks(_compiled, 2, timeout_s=200):
        assert len(rank) == 5
        assert rank == pytest.approx(dict.fromkeys(rank, 0.0), abs=1e-6)


class Seen(Automatic):
    """Writes down who it is and what it started from."""

    def on_train_end(self) -> None:
        rank = torch.distributed.get_rank()
        name = type(self.trainer.model).__name__
        Path(f"rank{rank}").write_text(f"{name} {torch.distributed.get_backend()}")


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp"])
def test_the_spawn_launcher(wrapper: str, tmp_path: Path) -> None:
    os.chdir(tmp_path)
    os.environ["PYTHONWARNINGS"] = "ignore"
    strategy: Any = StepStrategy(wrapper, start_method="spawn")
    module = Seen()
    before = weights(module)
    trainer = make_trainer("stepwrap_spawn" if wrapper == "ddp" else strategy, devices=2)
    trainer.fit(module, loader())
    kind = "StepFullySharded" if wrapper == "fsdp" else "StepDistributed"
    for rank in range(2):
        assert Path(f"rank{rank}").read_text() == f"{kind}DataParallel gloo"
    # What the processes reached comes back into this one.
    after = weights(module)
    assert distance(before, after) > 1e-3
    assert all(type(one) is torch.Tensor for one in after.values())


@pytest.mark.skipif(TREE != "pytorch_lightning", reason="the example imports pytorch_lightning")
def test_the_example_by_the_subprocess_launcher(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(ROOT / "examples/lightning_strategy.py"), "4"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    accuracies = [
        float("".join(one for one in line if one in "0123456789."))
        for line in done.stdout.splitlines()
        if "test_accuracy" in line
    ]
    assert len(accuracies) == 2
    assert min(accuracies) > 0.85


def test_one_device_needs_no_launcher() -> None:
    module, net = Automatic(sgd=True), Automatic(sgd=True).net
    make_trainer("stepwrap").fit(module, loader())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for images, labels in loader():
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(images), labels).backward()
        optimizer.step()
    assert distance(weights(module.net), weights(net)) <= 1e-6
