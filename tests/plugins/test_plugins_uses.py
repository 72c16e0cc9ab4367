"""Evaluation, prediction, compiled modules and launchers."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning_parts import (
    QUIET,
    TREE,
    Automatic,
    Manual,
    join_lightning,
    loader,
    make_trainer,
    weights,
)
from lightning_runs import WRAPPERS, whole_weights
from marks import slow
from programs import run_script
from ranks import run_ranks
from torch import nn
from weights import apart

from stepwrap.plugins.lightning import StepStrategy
from stepwrap.plugins.lightning.strategy import has_custom_step
from stepwrap.registry import MODEL_WRAPPERS

pytestmark = [pytest.mark.filterwarnings(ignored) for ignored in QUIET]
ROOT = Path(__file__).parents[2]


def _evaluate() -> dict[str, Any]:
    """Compare losses over all ranks and this rank's predictions, without a fit before."""
    join_lightning()
    results: dict[str, Any] = {}
    with torch.no_grad():
        plain = [Automatic().eval().loss(batch).item() for batch in loader("val", undivided=True)]
    for wrapper in WRAPPERS:
        for cls in (Automatic, Manual):
            module, data = cls().eval(), loader("val")
            alone = [module.predict_step(batch, 0) for module in (cls().eval(),) for batch in data]
            trainer = make_trainer(StepStrategy(wrapper))
            (validated,) = trainer.validate(module, data, verbose=False)
            (tested,) = trainer.test(module, data, verbose=False)
            predicted = trainer.predict(module, data)
            results[f"{wrapper}-{cls.__name__}"] = {
                "losses": [validated["val_loss"], tested["test_loss"]],
                "apart": (torch.cat(predicted) - torch.cat(alone)).abs().max().item(),
            }
    return {"plain": sum(plain) / len(plain), **results}


@pytest.mark.slow
def test_validate_test_and_predict() -> None:
    for rank in run_ranks(_evaluate, 2):
        plain = rank.pop("plain")
        assert len(rank) == 6
        for result in rank.values():
            assert result["losses"] == pytest.approx([plain, plain], abs=1e-5)
            assert result["apart"] <= 1e-6


def _compiled() -> dict[str, Any]:
    join_lightning()
    torch.compiler.reset()
    distances: dict[str, Any] = {}
    trainer = make_trainer("ddp")
    trainer.fit(Automatic(), loader())
    plain = whole_weights(trainer)
    for wrapper in WRAPPERS:
        module = Automatic()
        module.net.compile(backend="eager")
        trainer = make_trainer(StepStrategy(wrapper))
        trainer.fit(module, loader(), loader("val"))
        distances[f"{wrapper}, net"] = apart(whole_weights(trainer), plain)
        model = Automatic()
        model.log = _log_nothing  # type: ignore[method-assign]
        trainer = make_trainer(StepStrategy(wrapper), limit_val_batches=0)
        trainer.fit(torch.compile(model, backend="eager"), loader())  # type: ignore[arg-type]
        distances[f"{wrapper}, module"] = apart(whole_weights(trainer), plain)
    return distances


def _log_nothing(*args: Any, **kwargs: Any) -> None:
    """Replace logging, which breaks the graph."""


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.slow
def test_compiled_modules_reach_the_same_weights() -> None:
    for rank in run_ranks(_compiled, 2):
        assert len(rank) == 6
        assert rank == pytest.approx(dict.fromkeys(rank, 0.0), abs=1e-6)


class Seen(Automatic):
    """Write a file with the wrapper's class and the backend."""

    def on_train_end(self) -> None:
        rank = torch.distributed.get_rank()
        name = type(self.trainer.model).__name__
        Path(f"rank{rank}").write_text(f"{name} {torch.distributed.get_backend()}")


@pytest.mark.parametrize("wrapper", ["ddp", *slow("fsdp")])
@pytest.mark.slow
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
    # The trained weights are returned to this process.
    after = weights(module)
    assert apart(before, after) > 1e-3
    assert all(type(value) is torch.Tensor for value in after.values())


_EXAMPLE = f"""
import atexit, os, sys
import torch.distributed as dist

def report():
    folder = "/proc/self/task"
    tasks = [open(f"{{folder}}/{{one}}/comm").read() for one in os.listdir(folder)]
    # In one write: two processes print.
    sys.stdout.write(f"end {{dist.is_initialized()}} {{any('gloo' in one for one in tasks)}}\\n")
    sys.stdout.flush()

# Runs after what stepwrap registers, since it is registered before. That needs a new interpreter.
if os.path.exists("/proc/self/task"):
    atexit.register(report)
sys.path.insert(0, {str(ROOT / "examples")!r})
from lightning_strategy import main

if __name__ == "__main__":
    main(4)
"""


@pytest.mark.slow
@pytest.mark.skipif(TREE != "pytorch_lightning", reason="the example imports pytorch_lightning")
def test_the_example_by_the_subprocess_launcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONWARNINGS", "ignore")
    lines = run_script(_EXAMPLE, tmp_path).splitlines()
    accuracies = [
        float("".join(character for character in line if character in "0123456789."))
        for line in lines
        if "test_accuracy" in line
    ]
    assert len(accuracies) == 2
    assert min(accuracies) > 0.85
    # A gloo thread that still runs when the interpreter is finalized may abort the process.
    ends = [line for line in lines if line.startswith("end")]
    assert ends == ["end False False"] * (2 if Path("/proc/self/task").exists() else 0)


def _one_device() -> dict[str, float]:
    net = Automatic(sgd=True).net
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for images, labels in loader():
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(images), labels).backward()
        optimizer.step()
    distances = {}
    # Skip wrappers with custom steps, which other tests in this process have registered.
    ours = [
        name for name in MODEL_WRAPPERS.names() if not has_custom_step(MODEL_WRAPPERS.get(name))
    ]
    for name in ours:
        module = Automatic(sgd=True)
        options: dict[str, Any] = {"use_distributed_sampler": False, "limit_val_batches": 0}
        trainer = make_trainer(StepStrategy(name), devices=1, **options)
        trainer.fit(module, loader(undivided=True))
        reached = {key.removeprefix("net."): value for key, value in whole_weights(trainer).items()}
        distances[name] = apart(reached, weights(net))
    return distances


def test_every_registered_wrapper_trains_on_one_device() -> None:
    # Without a group, which Lightning creates.
    (distances,) = run_ranks(_one_device, 1, init=False)
    assert {"ddp", "fsdp", "separate", "single", "dp", "auto"} <= set(distances)
    assert distances == pytest.approx(dict.fromkeys(distances, 0.0), abs=1e-6)


class Stopping(Automatic):
    """Raise in the third step of the first run."""

    def __init__(self) -> None:
        super().__init__()
        self.fails = True

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 2 and self.fails:
            self.fails = False
            raise ValueError("on purpose")
        return super().training_step(batch, batch_idx)


def _failing() -> dict[str, Any]:
    join_lightning()
    results = {}
    for wrapper in WRAPPERS:
        module = Stopping()
        trainer = make_trainer(StepStrategy(wrapper))
        with pytest.raises(ValueError, match="on purpose"):
            trainer.fit(module, loader())
        children = [type(child).__name__ for child in module.children()]
        before = whole_weights(trainer)
        again = trainer if wrapper == "fsdp" else make_trainer(StepStrategy(wrapper))
        again.fit(module, loader())
        results[wrapper] = (children, apart(before, whole_weights(again)))
    return results


def test_an_error_of_a_step_is_reported_and_the_module_can_be_trained_again() -> None:
    for rank in run_ranks(_failing, 2):
        for children, moved in rank.values():
            assert children == ["Sequential"]
            assert moved > 1e-3
