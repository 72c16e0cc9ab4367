"""A config with several validation and test sets: runs, records and mistakes."""

import json
import re
from pathlib import Path

import pytest
import yaml
from marks import slow
from ranks import run_ranks
from runner_parts import CONFIG, records, run_command

from stepwrap.registry import ConfigError, load_config, name_problems
from stepwrap.runner import Runner
from stepwrap.runner.command.cli import main
from stepwrap.runner.sections import read_sections

WORDS = (
    "data.val={_delete_: true, clean: {dataset: {type: points.Points, size: 7}, batch_size: 2}, "
    "noisy: {dataset: {type: points.Points, size: 10}, batch_size: 4}}",
    "data.test={_delete_: true, noisy: {dataset: {type: points.Points, size: 5}, batch_size: 2}}",
    "hooks.checkpoint={keep_best: noisy/accuracy}",
    "hooks.early_stop={metric: noisy/loss, patience: 9}",
    "schedulers={type: ReduceLROnPlateau, metric: clean/loss}",
    "train.max_epochs=2",
    "train.val_begin=0",
    "metrics.half={type: MulticlassAccuracy, num_classes: 2, transform: points.half, "
    "sets: [noisy]}",
)


@pytest.mark.parametrize("ranks", [2, *slow(1, 3)])
def test_a_run_names_each_set(run: Path, ranks: int, capsys: pytest.CaptureFixture[str]) -> None:
    with (run / "points.py").open("a") as module:
        module.write("\n\ndef half(preds):\n    return preds / 2\n")
    words = ("points.yaml", "--run-dir", "run", *WORDS)
    assert run_ranks(run_command, ranks, run, "train", *words) == [0] * ranks
    val_records = [record for record in records(run / "run") if record["phase"] == "val"]
    assert [record["epoch"] for record in val_records] == [1, 1, 2]
    assert val_records[0]["step"] == 0
    names = {"clean/accuracy", "clean/loss", "noisy/accuracy", "noisy/loss", "noisy/half"}
    for record in val_records:
        assert {name for name in record if "/" in name} == names
    (tested,) = (record for record in records(run / "run") if record["phase"] == "test")
    assert {name for name in tested if "/" in name} == {n for n in names if "noisy" in n}
    if ranks > 1:
        return
    best = max(val_records, key=lambda record: record["noisy/accuracy"])
    saved = {path.name for path in (run / "run" / "checkpoints").iterdir()}
    assert f"step_{best['step']:08}" in saved
    assert main(["validate", "run"]) == 0
    again = [record for record in records(run / "run") if record["phase"] == "val"][-1]
    assert {n: again[n] for n in names} == {n: best[n] for n in names}
    assert main(["predict", "run", "--out", "all.jsonl"]) != 0
    assert "choose one: --data test.noisy" in capsys.readouterr().err
    assert main(["predict", "run", "--out", "all.jsonl", "--data", "val.nosy"]) != 0
    err = capsys.readouterr().err
    assert re.search(r"data\.val .*'nosy'; .*you mean noisy\?", err)
    assert main(["predict", "run", "--out", "all.jsonl", "--data", "val.clean"]) == 0
    lines = (run / "all.jsonl").read_text().splitlines()
    assert [json.loads(line)["index"] for line in lines] == [*range(7)]
    assert main(["plot", "run"]) == 0
    with pytest.raises(ValueError, match="one set, .*several: noisy"):
        Runner.from_config(load_config(run / "run" / "config.yaml")).predict(run / "b.jsonl")


ONE = "{dataset: {type: points.Points}, batch_size: 4}"


@pytest.mark.parametrize(
    ("word", "key", "text"),
    [
        ("hooks.checkpoint.keep_best=nosy/loss", "hooks.checkpoint.keep_best", "mean noisy/loss"),
        ("hooks.checkpoint.keep_best=loss", "hooks.checkpoint.keep_best", "there is no metric"),
        ("hooks.early_stop.metric=clean/half", "hooks.early_stop.metric", "noisy/half"),
        ("metrics.half.sets=[nois]", "metrics.half.sets.0", "mean noisy?; the sets are: clean"),
        ("data.val.batch_size=4", "data.val.batch_size", "is a setting of a single set, but"),
        (f"data.val.dataset={ONE}", "data.val.dataset", "choose another name for the set"),
        (f"data.val.lr={ONE}", "data.val.lr", "the name of a set must be text without"),
        ("data.val.noisy.batchsize=4", "data.val.noisy.batchsize", "did you mean batch_size?"),
        (f"data.train={{_delete_: true, a: {ONE}}}", "data.train", "must be a single set, got"),
        ("metrics.half.head=3", "metrics.half.head", "must be text"),
    ],
)
def test_a_mistake_has_its_key_and_the_nearest_name(
    run: Path, word: str, key: str, text: str
) -> None:
    config = load_config(run / "points.yaml", [*WORDS, word])
    problems_by_key = {problem.key: problem for problem in name_problems(config)}
    assert text in problems_by_key[key].what
    assert word in problems_by_key[key].origin


def test_a_single_set_keeps_its_messages(run: Path) -> None:
    word = "data.val={_delete_: true, datset: {type: points.Points}, batch_size: 4}"
    (problem,) = name_problems(load_config(run / "points.yaml", [word]))
    assert (problem.key, "mean dataset?" in problem.what) == ("data.val.datset", True)


def test_a_function_that_does_not_exist_is_named(run: Path) -> None:
    word = "metrics.accuracy.transform=torch.sigmiod"
    with pytest.raises(ConfigError, match=r"metrics.accuracy.transform: .*mean sigmoid"):
        read_sections(load_config(run / "points.yaml", [word]))


def test_an_unknown_head_is_a_mistake_in_the_config(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with (run / "points.py").open("a") as module:
        module.write(
            "\n\nclass Heads(Net):\n    def forward(self, x):\n"
            "        return {'side': super().forward(x)}\n"
            "\n\ndef loss(preds, target):\n"
            "    return nn.functional.cross_entropy(preds['side'], target)\n"
        )
    text = CONFIG.replace("points.Net,", "points.Heads,").replace(
        "loss: {type: CrossEntropyLoss}", "loss: {_ref_: points.loss}"
    )
    (run / "points.yaml").write_text(text.replace("average: micro}", "average: micro, head: sid}"))
    assert main(["train", "points.yaml"]) != 0
    error = capsys.readouterr().err
    assert re.search(r"metrics\.accuracy\.head: .*'sid'; .*you mean side\?", error)
    assert f"points.yaml:{text.splitlines().index('metrics:') + 2}: " in error


@pytest.mark.slow
def test_the_example_of_the_docs_runs(run: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "configs.md").read_text()
    text = page.partition("\n## Evaluation\n")[2].partition("```yaml\n")[2].partition("```")[0]
    (run / "digits_sets.yaml").write_text(text)
    assert main(["train", "digits_sets.yaml"]) == 0
    val_records = [
        record for record in records(run / "runs" / "digits_sets") if record["phase"] == "val"
    ]
    assert len(val_records) == 1 + yaml.safe_load(text)["train"]["max_epochs"]
    results = {"accuracy", "f1", "loss"}
    names = {f"{set_name}/{name}" for set_name in ("unseen", "seen") for name in results}
    assert {name for name in val_records[0] if "/" in name} == {*names, "unseen/distance"}
