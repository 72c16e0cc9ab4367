"""The language model on lines: its token-weighted loss does not depend on the batch split."""

import json
import re
from pathlib import Path

import pytest
import torch
from marks import slow
from ranks import run_ranks
from warm import run

from stepwrap.loops import find_checkpoint, load_checkpoint
from stepwrap.registry import load_config
from stepwrap.runner import Runner

# Two epochs of 32 lines per update; the last update of an epoch is smaller.
SMALL = (
    "model.net.width=16",
    "model.net.depth=1",
    "model.net.heads=2",
    "data.train.dataset.limit=150",
    "data.val.dataset.limit=50",
    "schedulers=null",
    "hooks.progress=false",
    "train.max_steps=8",
    "train.val_interval=8",
    "train.log_every_steps=1",
)
WHOLE = ("optim_wrapper.accumulative_counts=1", "data.train.batch_size=32")
QUARTERS = ("optim_wrapper.accumulative_counts=4", "data.train.batch_size=8")
HALVES_OF_TWO_RANKS = ("optim_wrapper.accumulative_counts=2", "data.train.batch_size=8")


def train_in_fp64(run_dir: Path, *overrides: str, resume: bool = False) -> None:
    torch.set_default_dtype(torch.float64)
    try:
        config = load_config("source_lines", [*SMALL, *overrides, f"run_dir={run_dir}"])
        Runner.from_config(config).train(resume=resume)
    finally:
        torch.set_default_dtype(torch.float32)


def get_losses(run_dir: Path) -> list[float]:
    """Return the loss of every update and the validation loss."""
    records = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [record["loss"] for record in records]


def weights_apart(run_a: Path, other: Path) -> float:
    """Return the largest difference between the final weights of two runs."""
    weights, second = (
        load_checkpoint(find_checkpoint(run)).read("model") for run in (run_a, other)
    )
    assert weights.keys() == second.keys()
    return max(float((weights[name] - second[name]).abs().max()) for name in weights)


@pytest.mark.parametrize(
    ("ranks", "split"),
    [
        (1, QUARTERS),
        *slow((2, HALVES_OF_TWO_RANKS), (2, ("wrapper.type=fsdp", *HALVES_OF_TWO_RANKS))),
    ],
    ids=["micro-batches", "ddp", "fsdp"],
)
def test_any_split_of_a_batch_gives_the_same_run(
    ranks: int, split: tuple[str, ...], tmp_path: Path
) -> None:
    undivided, divided = tmp_path / "whole", tmp_path / "parts"
    train_in_fp64(undivided, *WHOLE)
    run_ranks(train_in_fp64, ranks, divided, *split)
    assert get_losses(divided) == pytest.approx(get_losses(undivided), abs=1e-12)
    assert weights_apart(undivided, divided) < 1e-12


def test_without_a_weight_the_split_matters(tmp_path: Path) -> None:
    undivided, divided = tmp_path / "whole", tmp_path / "parts"
    for run_dir, split in ((undivided, WHOLE), (divided, QUARTERS)):
        train_in_fp64(run_dir, "optim_wrapper.loss_weight=null", *split)
    assert weights_apart(undivided, divided) > 1e-6


def test_validation_is_a_mean_over_characters(tmp_path: Path) -> None:
    small, large = tmp_path / "few", tmp_path / "many"
    train_in_fp64(small, "train.max_steps=1", "data.val.batch_size=7")
    train_in_fp64(large, "train.max_steps=1", "data.val.batch_size=50")
    assert get_losses(small)[-1] == pytest.approx(get_losses(large)[-1], abs=1e-12)


def test_a_run_resumes_with_another_batch_size(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    uninterrupted, resumed = tmp_path / "whole", tmp_path / "parts"
    train_in_fp64(uninterrupted, "train.max_steps=4")
    train_in_fp64(resumed, "train.max_steps=2")
    with caplog.at_level("INFO"):
        train_in_fp64(resumed, "train.max_steps=4", "data.train.batch_size=32", resume=True)
    # Two updates are left, although two batches of the new size have been counted as read.
    assert "nothing is left to train" not in caplog.text
    assert weights_apart(uninterrupted, resumed) < 1e-12


@pytest.mark.slow
def test_the_example_of_the_page_on_exactness(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs/exactness.md").read_text()
    top = page.partition("\n## ")[0]
    commands = re.findall(r"^stepwrap (.*)$", top, flags=re.MULTILINE)
    outputs = [run("-m", "stepwrap.runner", *command.split(), cwd=tmp_path) for command in commands]
    assert len(outputs) == 3
    (code,) = re.findall(r"```python\n(.*?)```", top, flags=re.DOTALL)
    assert float(run("-c", code, cwd=tmp_path)) < 1e-5


@pytest.mark.slow
def test_the_model_learns(tmp_path: Path) -> None:
    words = "-m", "stepwrap.runner", "train", "source_lines", "--run-dir", str(tmp_path / "run")
    run(*words, "train.max_steps=100", "train.val_interval=100", cwd=tmp_path)
    records = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    record = [record for record in records if record["phase"] == "val"][-1]
    assert 2.5 < record["unigram"] < 3.6
    assert record["loss"] < record["unigram"] - 0.5
