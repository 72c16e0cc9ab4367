"""Checkpoints of `.pt` files, written by an earlier release, restore bit for bit and resume."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from format_1.write import CASES, HERE, Record, Seen, digest, elastic, fsdp, unpack, window
from ranks import run_ranks
from torch import Tensor

from stepwrap.loops import find_checkpoint, list_checkpoints, load_checkpoint


@cache
def expected(name: str) -> dict[str, Any]:
    """Return what the release that wrote a checkpoint restored, and how it went on, by rank."""
    content: dict[str, Any] = json.loads((HERE / "expected.json").read_text())[name]
    return content


def call_ranks(size: int, function: Any, *args: Any) -> list[Any]:
    return [function(*args)] if size == 1 else run_ranks(function, size, *args)


def find(name: str, folder: Path, which: Any = "latest") -> Path:
    path = find_checkpoint(unpack(name, folder), which)
    assert path is not None
    return path


def _resume(name: str, folder: Path, target: Path) -> tuple[Record, list[float], Record, Record]:
    """Restore and continue; return both states, what the new checkpoint restores, and losses."""
    build = CASES[name][1]
    run = build(seed=7)
    restored = run.restore(folder)
    saved, losses = run.continue_to(target, 2)
    return restored, losses, saved, build(seed=8).restore(target)


@pytest.mark.parametrize("name", [name for name in CASES if name != "adapter"])
def test_a_run_restores_bit_for_bit_and_continues(name: str, tmp_path: Path) -> None:
    folder = unpack(name, tmp_path)
    results = call_ranks(CASES[name][0], _resume, name, folder, tmp_path / "new")
    assert [restored for restored, *_ in results] == expected(name)["restored"]
    # Other processors round differently.
    losses = [loss for _, of_rank, *_ in results for loss in of_rank]
    assert losses == pytest.approx(sum(expected(name)["losses"], []), rel=1e-3)
    for _, _, saved, again in results:
        assert again == saved


def test_an_adapter_restores_bit_for_bit_and_continues(tmp_path: Path) -> None:
    """The run's folder then has checkpoints of both formats."""
    pytest.importorskip("peft")
    folder = unpack("adapter", tmp_path)
    build = CASES["adapter"][1]
    assert build(seed=7).restore(folder) == expected("adapter")["restored"][0]
    saved, _ = build(seed=7).continue_to(folder, 2)
    assert build(seed=8).restore(folder) == saved
    steps = [meta["step"] for _, meta in list_checkpoints(folder / "checkpoints")]
    assert steps == [6, 3]


def _restore_sharded(kind: str, folder: Path) -> Record:
    return fsdp(seed=7, kind=kind).restore(folder)


@pytest.mark.parametrize(("kind", "ranks"), [("single", 1), ("ddp", 2), ("fsdp", 1), ("fsdp", 3)])
def test_sharded_tensors_are_whole_elsewhere(kind: str, ranks: int, tmp_path: Path) -> None:
    folder = unpack("fsdp", tmp_path)
    if kind == "single":
        records = [_restore_sharded(kind, folder)]
    else:
        records = run_ranks(_restore_sharded, ranks, kind, folder)
    # All ranks get the buffers of the first one.
    record = expected("fsdp")["restored"][0]
    for restored in records:
        assert restored["tensors"] == record["tensors"]
        for key in ("counters.step", "counters.iteration", "optimizer 0.group 0"):
            assert restored["values"][key] == record["values"][key]


def test_gradients_of_two_ranks_on_one(tmp_path: Path) -> None:
    path = find("window", tmp_path)
    run = window(seed=7, kind="single")
    restored = run.restore(path.parent)
    files = [load_checkpoint(path).read(f"rank_{rank:05d}.pt") for rank in range(2)]
    for name, parameter in run.state.model.module.named_parameters():
        total = sum(content["gradients"][name] for content in files)
        assert torch.equal(parameter.grad, total)
    weights = [content["window_weights"][0] for content in files]
    assert run.state.optim_wrapper.window_weight == sum(weights) > 0
    optimizer = "optimizer 0.net.weight.momentum_buffer"
    assert restored["tensors"][optimizer] == expected("window")["restored"][0]["tensors"][optimizer]


def _continue_elastic(
    folder: Path, target: Path
) -> tuple[Record, list[list[int]], dict[str, Tensor]]:
    run = elastic(seed=7)
    restored = run.restore(folder)
    run.continue_to(target, 2)
    assert run.state.step == 7
    (recorder,) = [hook for hook in run.hooks if isinstance(hook, Seen)]
    return restored, recorder.samples[5:], run.state.model.module.state_dict()


def test_an_epoch_of_two_ranks_continues_on_three(tmp_path: Path) -> None:
    folder = unpack("elastic", tmp_path)
    two, three = (
        run_ranks(_continue_elastic, ranks, folder, tmp_path / str(ranks)) for ranks in (2, 3)
    )
    assert [samples for _, samples, _ in two] == expected("elastic")["samples"]
    for restored, _, weights in three:
        assert restored["tensors"] == expected("elastic")["restored"][0]["tensors"]
        torch.testing.assert_close(weights, two[0][2])
    for update in range(2):
        # Six samples, each of them once.
        numbers = [
            [number for _, samples, _ in ranks for number in samples[update]]
            for ranks in (two, three)
        ]
        assert sorted(numbers[0]) == sorted(numbers[1])
        assert len({*numbers[1]}) == 6


def test_descriptions_and_files_are_read(tmp_path: Path) -> None:
    path = find("single", tmp_path, "best")
    checkpoint, record = load_checkpoint(path), expected("single")["restored"][0]
    meta = checkpoint.meta
    assert (meta["format"], meta["step"], meta["reason"], meta["best"]) == (1, 4, "signal", True)
    assert str(meta["metrics"]["loss"]) in record["values"]["counters.metrics"]
    assert {*meta["files"]} == {"model.pt", "optim.pt", "state.pt", "rank_00000.pt"}
    for content in (checkpoint.read("model.pt"), checkpoint.read_model()):
        assert_recorded(content, record, "model.")
    average = checkpoint.read_model(evaluated=True)
    del average["net._extra_state"]
    assert_recorded(average, record, "hooks.ema.")
    assert not torch.equal(average["net.conv.weight"], checkpoint.read_model()["net.conv.weight"])


def test_parts_are_read_as_whole_tensors(tmp_path: Path) -> None:
    checkpoint = load_checkpoint(find("fsdp", tmp_path))
    assert checkpoint.meta["format"] == 2
    assert_recorded(checkpoint.read("model.pt"), expected("fsdp")["restored"][0], "model.")


def assert_recorded(tensors: dict[str, Tensor], record: Record, prefix: str) -> None:
    """Fail unless each tensor is the recorded one, bit for bit."""
    for name, value in tensors.items():
        assert digest(value) == record["tensors"][f"{prefix}{name}"], name
