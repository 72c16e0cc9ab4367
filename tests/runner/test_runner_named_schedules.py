"""Schedules by name in configs: exact on any number of ranks, and checked before a run starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from marks import slow
from ranks import run_ranks
from runner_parts import records
from test_runner_ddp_options import SAMPLES, Net, Points, flat, settings
from test_runner_ddp_resume import train
from torch import nn
from torch.utils.data import IterableDataset

from stepwrap.registry import ConfigError, config_from_dict
from stepwrap.runner import Runner
from stepwrap.runner.command.cli import main
from stepwrap.runner.finders.schedule import planned_rates
from stepwrap.runner.parts import rehearse
from stepwrap.runner.sections import read_sections

SIZE, EPOCHS, LR = 12, 6, 0.5
UPDATES = EPOCHS * SAMPLES // SIZE
Capture = pytest.CaptureFixture[str]


def schedule_config(scheduler: Any, *, ranks: int = 1, **changes: Any) -> dict[str, Any]:
    config = settings({"type": "ddp" if ranks > 1 else "single"}, schedulers=scheduler, **changes)
    config["data"]["train"]["batch_size"] = SIZE // ranks
    config["train"] = {"type": "EpochTrainLoop", "max_epochs": EPOCHS}
    config["launch"] = {"nproc": ranks}
    return config


def train_plainly(factors: list[float]) -> torch.Tensor:
    """Return the weights of a training by hand whose update `k` has the rate `factors[k]`."""
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=LR, momentum=0.9)
    inputs, target = Points()[:]
    for update, factor in enumerate(factors):
        optimizer.param_groups[0]["lr"] = LR * factor
        start = update * SIZE % SAMPLES
        batch = slice(start, start + SIZE)
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(inputs[batch]), target[batch]).backward()
        optimizer.step()
    return flat(net)


WSD = {"type": "wsd", "warmup": 3, "decay": "2 epochs", "shape": "sqrt", "end": 0.1}
WSD_FACTORS = [
    *(k / 3 for k in (1, 2, 3)),
    *[1.0] * 5,
    *(0.1 + 0.9 * (1 - (k / 4) ** 0.5) for k in range(4)),
]
STEPS = {"type": "StepLR", "step_size": 2, "warmup": 0.5, "gamma": 0.1}
STEPS_FACTORS = [min(1, k / 6) * 0.1 ** ((k - 1) // 4) for k in range(1, UPDATES + 1)]
CASES = {"wsd": (WSD, WSD_FACTORS), "warm-up and steps": (STEPS, STEPS_FACTORS)}


@pytest.mark.parametrize(
    ("name", "before", "after", "stop"),
    [
        ("wsd", 1, 2, 2),
        ("warm-up and steps", 2, 3, 5),
        *slow(
            *(
                (n, a, b, s)
                for n in CASES
                for a, b in [(1, 1), (2, 2), (3, 3), (3, 1)]
                for s in (2, 9)
            )
        ),
    ],
)
def test_a_stopped_and_resumed_run_equals_a_loop_by_hand(
    tmp_path: Path, name: str, before: int, after: int, stop: int
) -> None:
    scheduler, factors = CASES[name]
    config = schedule_config(scheduler, ranks=before)
    run_ranks(train, before, config, tmp_path, stop)
    if after > 1:
        config["wrapper"] = {"type": "ddp"}
    plain = train_plainly(factors)
    for weights, step in run_ranks(train, after, config, tmp_path):
        assert step == UPDATES
        assert (weights - plain).abs().max().item() <= 1e-12


def test_a_resume_is_bit_exact(tmp_path: Path) -> None:
    config = schedule_config(WSD)
    expected, _ = train(config, tmp_path / "uninterrupted")
    for stop in (2, 9):
        train(config, tmp_path / f"{stop}", stop)
        assert torch.equal(train(config, tmp_path / f"{stop}")[0], expected)


def test_a_checkpoint_of_the_constant_phase_starts_another_decay(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    long = schedule_config(WSD, hooks={"progress": False, "checkpoint": {"every_steps": 1}})
    train(long, tmp_path / "long", 6)
    shorter = {**long, "schedulers": {**WSD, "decay": 2, "shape": "linear"}}
    shorter["train"] = {"type": "EpochTrainLoop", "max_epochs": 4}
    runner = Runner.from_config({**shorter, "run_dir": str(tmp_path / "other")})
    state = runner.train(resume=tmp_path / "long")
    factors = [*WSD_FACTORS[:6], 1, 0.1 + 0.9 * 0.5]
    assert (flat(state.model) - train_plainly(factors)).abs().max().item() <= 1e-12
    assert "has another rate" not in caplog.text


def test_parameter_groups_keep_their_ratios() -> None:
    keys = {"net.0": {"lr_mult": 0.1}, "net.2": {"lr": 0.25}}
    config = schedule_config({"type": "linear", "warmup": 2}, optimizer={"type": "SGD", "lr": LR})
    config["optimizer"]["paramwise"] = {"custom_keys": keys}
    parts = rehearse(read_sections(config_from_dict(config)))
    rates = [group["lr"] for group in parts.optim_wrapper.optimizer.param_groups]
    assert sorted(rates) == pytest.approx([LR * 0.1 / 2, 0.25 / 2])


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        yield from Points()


MISTAKES: dict[str, tuple[Any, list[str]]] = {
    "warmup": (
        {"type": "cosine", "warmup": 1.5},
        ["schedulers.warmup: must be a number of steps", "got 1.5"],
    ),
    "text": (
        {"type": "StepLR", "step_size": 1, "warmup": "2 eons"},
        ["schedulers.warmup:", "2 epochs"],
    ),
    "name": ({"type": "cosin"}, ["did you mean cosine"]),
    "argument": (
        {"type": "cosine", "warmup_steps": 5},
        ["CosineDecay has no such argument", "warmup: 500"],
    ),
    "end": ({"type": "linear", "end": 3}, ["schedulers.end: must be a share", "got 3"]),
    "shape": ({"type": "wsd", "shape": "sq"}, ["schedulers.shape:", "linear, sqrt or cosine"]),
    "two": (
        [{"type": "StepLR", "step_size": 1, "warmup": 5}] * 2,
        ["schedulers.1.warmup: an optimizer can have one warm-up"],
    ),
    "later": (
        {"type": "StepLR", "step_size": 1, "warmup": 5, "after": 3},
        ["schedulers.warmup: begins with the run"],
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_reported_before_a_run(name: str) -> None:
    scheduler, texts = MISTAKES[name]
    with pytest.raises(ConfigError) as error:
        read_sections(config_from_dict(schedule_config(scheduler)))
    for text in texts:
        assert text in str(error.value)


CONFIG = """\
model:
  type: SupervisedModel
  net: {type: test_runner_ddp_options.Net}
  loss: {type: CrossEntropyLoss}
optimizer: {type: SGD, lr: 0.5}
data:
  train: {dataset: {type: test_runner_ddp_options.Points}, batch_size: 6}
train: {type: EpochTrainLoop, max_epochs: 5}
schedulers: {type: cosine, warmup: 0.25}
"""


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "60")
    Path("run.yaml").write_text(CONFIG)
    return "run.yaml"


def test_an_unknown_length_is_a_mistake_in_the_config(config: str, capsys: Capture) -> None:
    stream = "data.train.dataset.type=test_runner_named_schedules.Stream"
    assert main(["check", config, stream]) == 2
    text = capsys.readouterr().err
    assert "run.yaml:9: schedulers" in text
    assert "IterTrainLoop, max_steps" in text
    loop = "train={_delete_: true, type: IterTrainLoop, max_steps: 20}"
    assert main(["check", config, stream, loop]) == 0
    assert main(["check", config, stream, "schedulers.total=20"]) == 0


def test_check_warns_of_another_total(config: str, capsys: Capture) -> None:
    assert main(["check", config, "schedulers.total=15"]) == 0
    assert "total is 15, but it acts for 20; remove total" in capsys.readouterr().out


def test_list_shows_the_schedules_with_their_arguments(capsys: Capture) -> None:
    assert main(["list", "PARAM_SCHEDULERS"]) == 0
    listed = capsys.readouterr().out
    for text in (
        "wsd",
        "cosine",
        "linear",
        "inverse_sqrt",
        "constant",
        "warmup: int | float | str",
    ):
        assert text in listed


def test_plot_draws_the_rates_of_a_config(config: str, capsys: Capture) -> None:
    assert main(["plot", config, "--schedule"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "lr: 0.1 in update 1, 0.5 in update 5, 0.005463 in update 20"
    bars = [line.partition("│")[2] for line in lines if "│" in line]
    # Twenty columns of nine rows with eighths; the highest are the updates 5 and 6.
    heights = [sum(" ▁▂▃▄▅▆▇█".index(bar.ljust(20)[at]) for bar in bars) for at in range(20)]
    assert heights[:6] == [round(72 * min(1, k / 5)) for k in range(1, 7)]
    assert heights[5:] == sorted(heights[5:], reverse=True)
    assert not Path("runs").exists()


def test_plotted_rates_are_those_of_the_records(
    config: str, tmp_path: Path, capsys: Capture
) -> None:
    changes = {
        "schedulers": [
            {"type": "StepLR", "step_size": 2, "warmup": "1.5 epochs"},
            {"type": "linear", "after": 6, "until": 9},
        ],
        "optim_wrapper": {"type": "OptimWrapper", "accumulative_counts": 3},
        "train": {"type": "EpochTrainLoop", "max_epochs": 5, "log_every_steps": 1},
        "hooks": {"progress": False},
        "run_dir": str(tmp_path / "run"),
    }
    run = read_sections(config_from_dict({**schedule_config([]), **changes}))
    curves = planned_rates(run, rehearse(run))
    Runner.from_config(config_from_dict({**schedule_config([]), **changes})).train()
    logged = [(r["step"], r["lr"]) for r in records(tmp_path / "run") if "lr" in r]
    assert curves == {"lr": logged}


def test_plot_writes_a_picture(config: str, capsys: Capture) -> None:
    pytest.importorskip("matplotlib")
    assert main(["plot", config, "--schedule", "--out", "lr.png"]) == 0
    assert Path("lr.png").read_bytes().startswith(b"\x89PNG")
    assert main(["plot", config, "--out", "lr.png"]) == 2
    assert "--out needs --schedule" in capsys.readouterr().err


def test_a_resume_names_the_changed_settings(
    config: str, capsys: Capture, caplog: pytest.LogCaptureFixture
) -> None:
    options = [
        "hooks.progress=false",
        "schedulers={type: wsd, warmup: 2, decay: 5, _delete_: true}",
    ]
    assert main(["train", config, *options, "train.max_epochs=2"]) == 0
    assert main(["train", config, *options, "--resume", "schedulers.decay=8"]) == 0
    output = caplog.text + capsys.readouterr().err
    assert "schedulers.decay: 5 -> 8\n" in output
    assert "update 9 has another rate: lr 0 -> 0.5" in output
