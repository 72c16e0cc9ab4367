"""Reading run folders: growing, incomplete, old and hostile ones."""

import json
import math
import os
from pathlib import Path

import pytest
import torch
from run_folders import lines, record, two_runs, write_folder
from torch import nn

from stepwrap.collectives import BaseMetric
from stepwrap.diagnostics.reports.page import as_json, page
from stepwrap.diagnostics.reports.run_files import Run, RunError, find_runs, open_run
from stepwrap.loops import CheckpointHook, EpochTrainLoop, ValLoop
from stepwrap.runner import Runner
from stepwrap.wrappers import OptimWrapper, SupervisedModel


def read(folder: Path) -> Run:
    return Run(folder, folder.name).update()


def values(run: Run, name: str) -> list[tuple[int, float]]:
    (curve,) = [curve for curve in run.curves() if curve.name == name]
    return list(zip(curve.steps, curve.values, strict=True))


def test_a_growing_file_is_read_to_its_last_complete_line(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "run", [record(1, loss=3.0)])
    run = read(folder)
    second = json.dumps(record(2, loss=2.0))
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(second[:20])
    assert values(run.update(), "loss") == [(1, 3.0)]
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(f"{second[20:]}\n[1]\nnot json\n{lines([record(3, loss=1.0)])}")
    assert values(run.update(), "loss") == [(1, 3.0), (2, 2.0), (3, 1.0)]


@pytest.mark.parametrize(
    ("speeds", "middle"),
    [([100.0, 900.0], 500.0), ([40, 10, 30, 20], 25.0), ([3, 1, math.nan, 2], 2.0), ([7], 7.0)],
)
def test_the_speed_is_the_median(speeds: list[float], middle: float, tmp_path: Path) -> None:
    records = [record(step, samples_per_s=speed) for step, speed in enumerate(speeds)]
    assert read(write_folder(tmp_path / "run", records)).speed() == {"samples_per_s": middle}


def test_a_replaced_file_is_read_again(tmp_path: Path) -> None:
    """A resumed run drops the records after its checkpoint."""
    folder = write_folder(tmp_path / "run", [record(n, loss=1.0) for n in (1, 2, 3)])
    run = read(folder)
    (folder / "draft").write_text(lines([record(1, loss=1.0), record(2, loss=0.5)]))
    os.replace(folder / "draft", folder / "metrics.jsonl")
    assert values(run.update(), "loss") == [(1, 1.0), (2, 0.5)]


def test_the_last_record_of_a_step_counts_and_steps_are_sorted(tmp_path: Path) -> None:
    records = [record(20, "test", f1=0.5), record(10, "test", f1=0.7), record(20, "test", f1=0.6)]
    assert values(read(write_folder(tmp_path / "run", records)), "f1") == [(10, 0.7), (20, 0.6)]


def test_many_records_keep_their_extremes(tmp_path: Path) -> None:
    records = [record(n, loss=1.0) for n in range(10_000)]
    records[1234]["loss"], records[4321]["loss"], records[777]["loss"] = 9.0, -9.0, None
    data = read(write_folder(tmp_path / "run", records)).page_data()
    (curve,) = data["curves"]
    assert len(curve["step"]) < 2300
    assert curve["points"] == 10_000
    points = dict(zip(curve["step"], curve["value"], strict=True))
    assert (points[1234], points[4321], points[777]) == (9.0, -9.0, None)
    assert curve["not_finite"] == [777]
    assert (curve["step"][0], curve["step"][-1]) == (0, 9_999)
    assert data["metrics"]["train/loss"]["best"] == -9.0


def test_best_values_use_the_direction_of_the_metric(tmp_path: Path) -> None:
    names = ("score", "val_loss", "wer", "noisy/wer", "far/wer", "wers/noisy", "terrain", "f1")
    records = [record(n, "val", **dict.fromkeys(names, float(n))) for n in (1, 2, 3)]
    records += [record(n, lossy=float(n)) for n in (1, 2, 3)]
    directions = {"noisy/wer": False, "wers": False, "a/f1": False, "b/f1": True}
    known = write_folder(tmp_path / "known", records, environment={"higher_is_better": directions})
    best = {name: extreme.best_step for name, extreme in read(known).extremes().items()}
    # Nothing says which values of a score are better, so none is shown as the best.
    expected = dict.fromkeys(("score", "terrain"))
    expected |= dict.fromkeys(("val_loss", "wer", "noisy/wer", "far/wer", "wers/noisy"), 1)
    expected |= {"f1": 3}
    assert best == {f"val/{name}": step for name, step in expected.items()} | {"train/lossy": 1}
    assert read(known).extremes()["val/score"] == (None, None, 3.0, 3)


def test_the_direction_that_a_hook_sets_decides(tmp_path: Path) -> None:
    class Misses(BaseMetric):
        def add(self, preds: torch.Tensor) -> None:
            self._results += preds[:, 0].tolist()

        def compute_metric(self, results: list[float]) -> float:
            return float(len(results))

    model = SupervisedModel(nn.Linear(2, 1), nn.MSELoss())
    batches = [(torch.ones(4, 2), torch.ones(4, 1))]
    validation = ValLoop(batches, {"miss2": Misses()})
    loop = EpochTrainLoop(batches, max_epochs=2, val_loop=validation)
    optim = OptimWrapper(torch.optim.SGD(model.parameters(), lr=0.1))
    hooks = {"checkpoint": CheckpointHook(keep_best="miss2", mode="min"), "progress": None}
    Runner(model, loop, optim_wrapper=optim, hooks=hooks, run_dir=tmp_path).train()
    run = read(tmp_path)
    assert run.status() == ("ended", "")
    assert run.read("environment.json")["higher_is_better"] == {"miss2": False}


def test_the_status_of_an_empty_folder_is_unknown(tmp_path: Path) -> None:
    data = read(write_folder(tmp_path / "run")).page_data()
    assert (data["curves"], data["metrics"], data["environment"]) == ([], {}, {})
    assert data["status"] == "unknown"
    assert "no hooks.run_info" in data["reason"]


@pytest.mark.parametrize(
    ("event", "status"),
    [
        ({"event": "start"}, ("unknown", "killed")),
        ({"event": "end", "text": ""}, ("ended", "")),
        ({"event": "end", "text": "SIGTERM"}, ("stopped", "SIGTERM")),
        ({"event": "error", "step": 7, "rank": 1, "text": "boom"}, ("failed", "rank 1: boom")),
    ],
)
def test_the_status_follows_from_the_last_event(
    event: dict[str, object], status: tuple[str, str], tmp_path: Path
) -> None:
    folder = write_folder(tmp_path / "run", events=[{"event": "start"}, event])
    actual, reason = read(folder).status()
    assert actual == status[0]
    assert status[1] in reason


# A list that contains itself, code, and invalid YAML.
HOSTILE = [
    "a: 1\nb: &x [[*x]]\n",
    "a: !!python/object/apply:os.system ['true']\n",
    "a: {b: [}\n",
    "- 1\n- 2\n",
]


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_configs_are_data(text: str, tmp_path: Path) -> None:
    assert read(write_folder(tmp_path / "run", config=text)).settings() == {}


def test_numbers_that_json_does_not_have(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "run")
    huge = "1" + "0" * 400
    (folder / "metrics.jsonl").write_text(
        f'{{"step": 1, "time": 1e999, "loss": NaN, "a": {huge}, "b": 1e999}}\n'
        f'{{"step": {huge}, "loss": 1}}\n{{"step": 2, "phase": ["x"], "loss": 2, "c": "text"}}\n'
    )
    (folder / "environment.json").write_text('{"cores": Infinity, "ranks": 1e999}')
    (folder / "origins.json").write_text("[" * 100_000)
    run = read(folder)
    assert math.isnan(values(run, "b")[0][1])
    assert json.loads(as_json(run.page_data()))["environment"] == {"cores": None, "ranks": None}


@pytest.mark.parametrize("time", ["null", '"noon"', "1e999", "NaN"])
def test_a_time_that_is_not_a_number_is_zero_in_the_list(time: str, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "run")
    (folder / "metrics.jsonl").write_text(f'{{"step": 1, "time": {time}, "loss": 1}}\n')
    entry = json.loads(as_json(Run(folder, "run").glance()))
    assert (entry["step"], entry["time"]) == (1, 0.0)


def test_no_text_of_a_run_can_end_the_script_element(tmp_path: Path) -> None:
    evil = "</script><script>alert(1)</script><!-- "
    config = f"name: {json.dumps(evil)}\n"
    folder = write_folder(tmp_path / "run", [record(1, **{evil: 1.0})], config=config)
    text = page({"runs": [read(folder).page_data()]}, "<script></script>")
    assert "alert(1)" in text
    assert evil not in text
    start = text.index('id="data">') + len('id="data">')
    data = json.loads(text[start : text.index("</script>", start)])
    assert data["runs"][0]["settings"]["name"] == json.dumps(evil)
    assert data["runs"][0]["curves"][0]["name"] == evil


def test_runs_in_nested_folders_are_found(tmp_path: Path) -> None:
    two_runs(tmp_path / "a" / "b")
    write_folder(tmp_path / "c", [record(1, loss=1.0)])
    write_folder(tmp_path / "c" / "checkpoints" / "no")
    (tmp_path / "link").symlink_to(tmp_path / "c")
    assert set(find_runs(tmp_path)) == {"a/b/slow", "a/b/fast", "c"}


def test_files_outside_of_the_folder_are_not_read(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "runs" / "one", [record(1, loss=1.0)])
    (tmp_path / "secret.yaml").write_text("password: 1\n")
    (folder / "config.yaml").unlink()
    (folder / "config.yaml").symlink_to(tmp_path / "secret.yaml")
    (folder / "metrics.jsonl").unlink()
    os.mkfifo(folder / "metrics.jsonl")
    run = Run(folder, "one", tmp_path / "runs").update()
    assert run.settings() == {}
    assert list(run.curves()) == []


def test_the_nearest_run_folder_is_named(tmp_path: Path) -> None:
    two_runs(tmp_path)
    with pytest.raises(RunError, match="slwo .*exist.*did you mean .*/slow"):
        open_run(tmp_path / "slwo")
    with pytest.raises(RunError, match=r"not a run folder.*metrics\.jsonl"):
        open_run(tmp_path)
