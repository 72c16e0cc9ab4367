"""Streams of Hugging Face from local files, in runs on two ranks."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from ranks import RanksError, run_ranks
from torch import Tensor, nn
from weights import whole_weights

from stepwrap.loops import Hook, LoopState
from stepwrap.runner import Runner

pytest.importorskip("datasets", reason="datasets is not installed")
pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

pytestmark = pytest.mark.slow
UNEVEN = {"uneven": {"wrapper": {"type": "ddp", "uneven_inputs": True}},
          "weighted": {"optim_wrapper": {"loss_weight": "samples"}}}  # fmt: skip


class Net(nn.Module):
    """Classifies rows."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x: Tensor, y: Tensor, id: Tensor, mode: str = "tensor") -> Any:
        scores = self.layer(x)
        if mode == "loss":
            return {"loss": nn.functional.cross_entropy(scores, y)}
        return {"preds": scores, "target": y}


class Record(Hook):
    """Records the rows of each batch by epoch, and stops at an update."""

    rows: ClassVar[dict[str, list[int]]] = {}

    def __init__(self, stop_at: int = 0) -> None:
        self.stop_at = stop_at
        self.rows.clear()

    def on_batch_end(self, state: LoopState, batch: Any, logs: Any) -> None:
        if state.optim_wrapper.batch_counts:
            self.rows.setdefault(str(state.epoch), []).extend(batch["id"].tolist())

    def on_eval_batch_end(self, state: LoopState, batch: Any, outputs: Any) -> None:
        self.rows.setdefault("val", []).extend(batch["id"].tolist())

    def on_update(self, state: LoopState) -> None:
        if state.step == self.stop_at:
            state.request_stop("enough")


def write(kind: str, rows: int, files: int) -> dict[str, Any]:
    """Write rows into files, and return the section of a stream of them."""
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(rows, 4, generator=generator).tolist()
    data = [{"id": at, "x": values[at], "y": at % 2} for at in range(rows)]
    for at in range(files):
        file_rows = data[at * rows // files : (at + 1) * rows // files]
        if kind == "parquet":
            parquet.write_table(pyarrow.Table.from_pylist(file_rows), f"{at}.parquet")
        else:
            Path(f"{at}.json").write_text("".join(json.dumps(row) + "\n" for row in file_rows))
    named = [f"{at}.{kind}" for at in range(files)]
    return {"type": "datasets.load_dataset", "path": kind, "data_files": named,
            "split": "train", "streaming": True, "cache_dir": "cache"}  # fmt: skip


def make_config(dataset: dict[str, Any], workers: int = 0, **sections: Any) -> dict[str, Any]:
    train = {"dataset": dataset, "batch_size": 4, "num_workers": workers}
    return {
        "model": {"type": Net},
        "device": "cpu",
        "wrapper": {"type": "ddp"},
        "optimizer": {"type": "AdamW", "lr": 0.01},
        "data": {"train": train, "val": {**train, "num_workers": 0}},
        "train": {"type": "EpochTrainLoop", "max_epochs": 2, "sanity_val": False},
        "metrics": {"accuracy": {"type": "MulticlassAccuracy", "num_classes": 2}},
        **sections,
    }


def trained(config: dict[str, Any], resume: bool = False, stop_at: int = 0) -> Any:
    """Return the rows by epoch, the weights, and the metrics."""
    hooks: dict[str, Any] = dict.fromkeys(("progress", "log", "throughput"), False)
    record = {"type": Record, "stop_at": stop_at}
    runner = Runner.from_config({**config, "hooks": {**hooks, "record": record}})
    state = runner.train(resume=resume)
    return Record.rows, whole_weights(state.model.module), state.metrics


def seen(*rank_counts: dict[str, list[int]]) -> dict[str, Counter[int]]:
    epochs = sorted({epoch for counts in rank_counts for epoch in counts})
    return {e: Counter(row for counts in rank_counts for row in counts.get(e, ())) for e in epochs}


@pytest.mark.parametrize(
    ("kind", "rows", "files", "workers", "sections"),
    [
        ("json", 32, 2, 0, ""),
        ("json", 32, 1, 0, ""),
        ("parquet", 32, 4, 2, ""),
        ("parquet", 33, 3, 0, "uneven"),
        ("json", 33, 3, 0, "weighted"),
    ],
)
def test_each_row_once_per_epoch_and_after_a_resume(
    kind: str, rows: int, files: int, workers: int, sections: str
) -> None:
    config = make_config(write(kind, rows, files), workers, **UNEVEN.get(sections, {}))
    uninterrupted = run_ranks(trained, 2, {**config, "run_dir": "runs/whole"})
    once = Counter(range(rows))
    counted = seen(*(counts for counts, _, _ in uninterrupted))
    assert counted["0"] == counted["1"] == once
    # Two validations.
    assert counted["val"] == once + once

    settings = {**config, "run_dir": "runs/parts"}
    stopped = run_ranks(trained, 2, settings, stop_at=2)
    resumed = run_ranks(trained, 2, settings, resume=True)
    counted = seen(*(counts for counts, _, _ in (*stopped, *resumed)))
    assert counted["0"] == counted["1"] == once
    for (_, weights, metrics), (_, expected, expected_metrics) in zip(
        resumed, uninterrupted, strict=True
    ):
        assert metrics == expected_metrics
        assert all(torch.equal(weights[name], expected[name]) for name in expected)


def test_rows_that_do_not_divide_evenly_are_an_error_that_names_the_remedy() -> None:
    config = make_config(write("json", 33, 3), run_dir="runs/uneven")
    with pytest.raises(RanksError, match="rank 1 ran .*4 batches .*epoch 1.*uneven_inputs"):
        run_ranks(trained, 2, config)
