"""Parameters frozen until a step, compared with plain PyTorch and after a resume."""

from __future__ import annotations

from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import torch
from marks import slow
from parallel_runs import BATCH, PLAN, Sentences, Transformer, settings
from ranks import run_ranks
from safetensors.torch import load_file
from torch import Tensor, nn
from weights import apart, whole_weights

from stepwrap.runner import Runner
from stepwrap.runner.command.cli import main

FREEZE = {
    "net.embed": None,
    "net.blocks.0": {"until_step": 3},
    "net.blocks.*.norm1": {"until_step": 5},
}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1},
    "AdamW": {"lr": 1e-2, "weight_decay": 0.1},
}


def until(name: str) -> float:
    if name.startswith("embed."):
        return float("inf")
    if fnmatch(name, "blocks.*.norm1.*"):
        return 5
    return 3 if name.startswith("blocks.0.") else 0


def train_plainly(optimizer: str) -> list[dict[str, Tensor]]:
    """Return the weights after each step of plain PyTorch that switches `requires_grad`."""
    torch.manual_seed(0)
    net = Transformer(dtype="float64")
    stepping = getattr(torch.optim, optimizer)(net.parameters(), **OPTIMIZERS[optimizer])
    weights: list[dict[str, Tensor]] = []
    for batch in (*Sentences().words.split(BATCH),) * 2:
        for name, parameter in net.named_parameters():
            parameter.requires_grad_(until(name) <= len(weights))
        stepping.zero_grad()
        nn.functional.cross_entropy(net(batch[:, :-1]), batch[:, 1:]).backward()
        trained = [param for param in net.parameters() if param.requires_grad]
        nn.utils.clip_grad_norm_(trained, 0.5)
        stepping.step()
        weights.append({f"net.{k}": v.detach().clone() for k, v in net.named_parameters()})
    return weights


def make_config(optimizer: str, data_size: int, **sections: Any) -> dict[str, Any]:
    config = settings(data_size, freeze=FREEZE, **sections)
    config["optim_wrapper"] = {"clip_grad": {"max_norm": 0.5}, **config.get("optim_wrapper", {})}
    return {**config, "optimizer": {"type": optimizer, **OPTIMIZERS[optimizer]}}


def trained_and_resumed(config: dict[str, Any], resume: str) -> tuple[Any, Any]:
    """Return the weights of a run, and of one that continues its checkpoint."""
    results = []
    for source in (False, resume):
        runner = Runner.from_config({**config, "run_dir": f"runs/{bool(source)}"})
        runner.train(resume=source)
        results.append(whole_weights(runner.state.model.module))
    return results[0], results[1]


FORMS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "single": (1, 1, {}),
    "compiled": (1, 1, {"compile": {"step": True, "min_steps": 0}}),
    "accumulated": (1, 2, {"optim_wrapper": {"accumulative_counts": 2}}),
    "dp": (1, 1, {"wrapper": {"type": "dp", "device_ids": ["cpu", "cpu"]}}),
    "ddp": (2, 2, {"wrapper": {"type": "ddp", "gradient_as_bucket_view": True}}),
    "ddp on 4": (4, 4, {"wrapper": {"type": "ddp"}}),
    "fsdp on 4": (4, 4, {"wrapper": {"type": "fsdp", "shard": ["Block"]}}),
    "separate": (2, 2, {"wrapper": {"type": "separate"}}),
    "fsdp": (2, 2, {"wrapper": {"type": "fsdp", "shard": ["Block"]}}),
    "tensor": (2, 1, {"mesh": {"tensor": 2}, "tensor_parallel": {"plan": PLAN}}),
}


@pytest.mark.parametrize(
    ("form", "optimizer", "at"),
    [
        ("single", "SGD", 2),
        ("single", "AdamW", 3),
        ("ddp", "AdamW", 3),
        ("fsdp", "AdamW", 6),
        *slow(
            *(
                (form, "AdamW", 2)
                for form in ("accumulated", "compiled", "dp", "separate", "tensor")
            ),
            *((form, "AdamW", 3) for form in ("ddp on 4", "fsdp on 4")),
            *((form, "SGD", 3) for form in ("ddp", "fsdp", "separate")),
        ),
    ],
)
def test_like_plain_pytorch_and_after_a_resume(form: str, optimizer: str, at: int) -> None:
    ranks, data_size, sections = FORMS[form]
    config = make_config(optimizer, data_size, **sections)
    config["hooks"] = {**config["hooks"], "checkpoint": {"every_steps": 1, "keep_last": None}}
    checkpoint = f"runs/False/checkpoints/step_{at:08d}"
    expected = train_plainly(optimizer)
    for uninterrupted, resumed in run_ranks(trained_and_resumed, ranks, config, checkpoint):
        assert apart(uninterrupted, expected[-1]) <= 1e-12
        assert apart(resumed, uninterrupted) == 0
    # Frozen parameters are unchanged and have no optimizer state.
    torch.manual_seed(0)
    initial = {f"net.{k}": v for k, v in Transformer(dtype="float64").named_parameters()}
    saved = load_file(f"{checkpoint}/model.safetensors")
    for name in initial:
        if isinstance(saved[name], Tensor):
            is_frozen = until(name.removeprefix("net.")) >= at
            assert torch.equal(saved[name], initial[name]) == is_frozen, name


MISTAKES = {
    "{net.0: {until_stp: 3}}": "freeze.net.0.until_stp: there is no such setting; did you mean u",
    "{net.0: {until_step: 0}}": "freeze.net.0.until_step: must be at least 1, got 0",
    "{net.0: 3}": "freeze.net.0: must be a section of settings, got 3",
    "{net.00: {until_step: 3}}": "no parameter of the model has the name or path 'net.00'; did you",
    "{net: {until_step: 3}}": "every parameter is frozen until step 3: leave a part of the model",
}


@pytest.mark.parametrize("setting", MISTAKES)
def test_mistakes(setting: str, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "points.yaml", f"freeze={setting}"]) == 2
    assert MISTAKES[setting] in capsys.readouterr().err


def test_the_step_is_printed(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "points.yaml", "freeze={net.0: {until_step: 4}}"]) == 0
    assert "step 4: unfreezing net.0" in capsys.readouterr().err
