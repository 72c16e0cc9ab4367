"""Write run folders without a training, for tests of reports."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def record(step: int, phase: str = "train", **values: Any) -> dict[str, Any]:
    return {"step": step, "epoch": 1, "phase": phase, "time": 1000.0 + step / 10, **values}


def lines(records: Iterable[dict[str, Any]]) -> str:
    return "".join(f"{json.dumps(record)}\n" for record in records)


def write_folder(
    folder: Path,
    records: Iterable[dict[str, Any]] = (),
    *,
    config: str = "name: run\n",
    events: Iterable[dict[str, Any]] = (),
    **files: Any,
) -> Path:
    """Write a run folder; `files` maps stems of further JSON files to their contents."""
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text(lines(records))
    (folder / "config.yaml").write_text(config)
    if events:
        (folder / "events.jsonl").write_text(lines(events))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def two_runs(root: Path) -> list[Path]:
    """Write two runs with different learning rates and losses."""
    paths = []
    for name, lr, scale in (("slow", 0.1, 2.0), ("fast", 0.3, 1.0)):
        losses = [record(step, loss=scale / (1 + step / 10)) for step in range(10, 101, 10)]
        rates = [{**record, "samples_per_s": 100 * scale, "lr": lr} for record in losses]
        scores = [record(step, "val", accuracy=1 - scale / step) for step in (50, 100)]
        config = f"name: {name}\noptimizer: {{type: SGD, lr: {lr}}}\nseed: 1\nrun_dir: x/{name}\n"
        origins = {"optimizer.lr": f"/home/me/configs/{name}.yaml:2"}
        paths.append(write_folder(root / name, [*rates, *scores], config=config, origins=origins))
    return paths
