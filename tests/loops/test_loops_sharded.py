"""Checkpoints of which every rank writes and reads its own parts."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from loop_parts import Value
from marks import slow
from ranks import run_ranks
from safetensors.torch import load_file
from sharded_runs import CASES, batch, contents, gradients, make_run, same, train
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from stepwrap.loops import (
    CheckpointError,
    CheckpointHook,
    LoopState,
    find_checkpoint,
    load_checkpoint,
    save_alone,
    save_checkpoint,
)
from stepwrap.loops.checkpoints.saved_tensors import SavedTensor
from stepwrap.loops.schedule import start_counting
from stepwrap.wrappers import SingleDevice

TARGETS = [("single", 1), ("ddp", 2), ("fsdp", 2), ("tensor", 2), ("fsdp x tensor", 4)]


def _save(kind: str, folder: Path, steps: int = 3) -> tuple[Path, dict[str, Tensor]]:
    state = make_run(kind)
    train(state, range(steps))
    return save_checkpoint(folder, state), contents(state)


def _load(kind: str, path: Path) -> tuple[dict[str, Tensor], list[int]]:
    state = make_run(kind, seed=7)
    load_checkpoint(path).restore(state)
    state.stateful["hooks.ema"].on_train_start(state)
    return contents(state), [state.step, state.iteration]


def _run(kind: str, size: int, fn: Any, *args: Any) -> list[Any]:
    return [fn(kind, *args)] if kind == "single" else run_ranks(fn, size, kind, *args)


@pytest.mark.parametrize(("kind", "size"), CASES)
def test_loads_under_every_other_wrapper_and_size(kind: str, size: int, tmp_path: Path) -> None:
    """Weights, averages and optimizer state are restored bit for bit."""
    saved = run_ranks(_save, size, kind, tmp_path)
    path, expected = saved[0]
    assert all(same(other, expected) for _, other in saved)
    assert find_checkpoint(tmp_path) == path
    for target, ranks in TARGETS:
        for loaded, counters in _run(target, ranks, _load, path):
            assert same(loaded, expected), target
            assert counters == [3, 3]


@pytest.mark.parametrize(("kind", "size"), CASES)
def test_the_files(kind: str, size: int, tmp_path: Path) -> None:
    path = run_ranks(_save, size, kind, tmp_path)[0][0]
    meta = json.loads((path / "checkpoint.json").read_text())
    assert set(meta["files"]) | {"checkpoint.json"} == {file.name for file in path.iterdir()}
    ranks = {f"rank_{rank:05d}" for rank in range(size)}
    assert {name.removesuffix(".safetensors") for name in meta["files"]} == {
        *("model", "optim", "state"),
        *ranks,
    }
    saved = load_checkpoint(path).read("model")
    assert [type(value) for value in saved.values()] == [Tensor] * 8
    assert saved["net.0.weight"].shape == (512, 4)
    opened = load_file(path / "model.safetensors")
    assert opened.keys() == saved.keys()
    assert all(torch.equal(opened[name], value) for name, value in saved.items())


def _read_counting(kind: str, path: Path) -> tuple[int, int]:
    real, sizes = SavedTensor.__getitem__, []

    def counting(self: SavedTensor, index: Any) -> Tensor:
        chunk = real(self, index)
        sizes.append(chunk.numel())
        return chunk

    SavedTensor.__getitem__ = counting
    try:
        state = make_run(kind, seed=7)
        load_checkpoint(path).restore(state)
        state.stateful["hooks.ema"].on_train_start(state)
    finally:
        SavedTensor.__getitem__ = real
    wholes = sum(v.numel() for v in contents(state).values() if v.ndim)
    return sum(sizes), wholes


@pytest.mark.parametrize(("source", "size"), [("ddp", 2), ("fsdp", 4)])
def test_no_rank_reads_the_whole(source: str, size: int, tmp_path: Path) -> None:
    path = run_ranks(_save, size, source, tmp_path)[0][0]
    for target, ranks in (("fsdp", 2), ("fsdp", 4), ("tensor", 2)):
        for num_read, wholes in run_ranks(_read_counting, ranks, target, path):
            assert wholes > 15_000
            # Rows cannot be shared evenly.
            assert 1000 < num_read < 1.4 * wholes / ranks


def _resume(kind: str, folder: Path, stop: int) -> list[bool]:
    whole_run = make_run(kind, accumulative_counts=2)
    train(whole_run, range(6))
    stopped = make_run(kind, accumulative_counts=2)
    train(stopped, range(stop))
    path = save_checkpoint(folder, stopped)
    second = make_run(kind, seed=5, accumulative_counts=2)
    load_checkpoint(path).restore(second)
    if second.iteration == stop:
        pairs = zip(gradients(stopped), gradients(second), strict=True)
        assert all(a is b is None or torch.equal(a, b) for a, b in pairs)
    start_counting(second.optim_wrapper, second.model, second.iteration, -1)
    train(second, range(second.iteration, 6))
    return [same(contents(second), contents(whole_run)), second.step == 3, second.iteration == 6]


@pytest.mark.parametrize("stop", [3, *slow(2)])
@pytest.mark.parametrize(("kind", "size"), CASES)
def test_a_run_on_as_many_ranks_resumes_exactly(
    kind: str, size: int, stop: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Also inside an accumulation window, whose gradients FSDP2 does not expose."""
    assert run_ranks(_resume, size, kind, tmp_path, stop) == [[True, True, True]] * size


def _inside_a_window(kind: str, folder: Path) -> tuple[Path, list[Tensor | None]]:
    state = make_run(kind, accumulative_counts=2)
    train(state, range(3))
    return save_checkpoint(folder, state), gradients(state)


def _get_gradients(kind: str, path: Path) -> list[Tensor | None]:
    state = make_run(kind, seed=5, accumulative_counts=2)
    load_checkpoint(path).restore(state)
    return gradients(state)


@pytest.mark.parametrize(("source", "size"), [("ddp", 2), ("tensor", 2), ("ddp x tensor", 4)])
def test_gradients_of_a_window_at_another_size(source: str, size: int, tmp_path: Path) -> None:
    """Their mean is kept and sharded again."""
    saved = run_ranks(_inside_a_window, size, source, tmp_path)
    path, data_ranks = saved[0][0], 1 if source == "tensor" else 2
    # Ranks of one tensor-parallel group have the same whole gradients.
    by_data_rank = [grads for _, grads in saved[:: size // data_ranks]]
    means = [sum(grads) / data_ranks for grads in zip(*by_data_rank, strict=True)]
    for target, ranks in (("single", 1), ("tensor", 2), ("ddp x tensor", 4), ("ddp", 2)):
        for loaded in _run(target, ranks, _get_gradients, path):
            for got, expected in zip(loaded, means, strict=True):
                if (target, ranks) != (source, size):
                    torch.testing.assert_close(got, expected)


@contextmanager
def messages() -> Iterator[list[str]]:
    """Collect this rank's log messages about checkpoints."""
    texts: list[str] = []
    handler, logger = logging.Handler(), logging.getLogger("stepwrap.loops.checkpoints")
    handler.emit = lambda record: texts.append(record.getMessage())
    logger.addHandler(handler)
    try:
        yield texts
    finally:
        logger.removeHandler(handler)


def _lost_window(folder: Path) -> tuple[list[int], str]:
    with messages() as records:
        state = make_run("fsdp", accumulative_counts=2)
        train(state, range(3))
        meta = load_checkpoint(save_checkpoint(folder, state)).meta
        state.epoch, state.batch = 1, 0
        later = load_checkpoint(save_checkpoint(folder, state)).meta
    return [meta["iteration"], later["iteration"], later["epoch"]], "\n".join(records)


def test_saving_inside_a_window_of_fsdp_is_logged(tmp_path: Path) -> None:
    """The checkpoint goes back to the window's start, unless that is in an earlier epoch."""
    (counters, text), (other_counters, silence) = run_ranks(_lost_window, 2, tmp_path)
    assert counters == other_counters == [2, 3, 1]
    assert "middle of an accumulation window" in text
    assert re.search(r"repeats .*since the last update \(1\)", text)
    assert "lacks the gradients" in text
    assert not silence


def _damaged(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(path).restore(make_run("fsdp"))
    return str(caught.value)


@pytest.mark.parametrize("name", ["model.safetensors", "optim.safetensors"])
def test_a_damaged_part_is_named_and_the_one_before_taken(name: str, tmp_path: Path) -> None:
    checkpoint = run_ranks(_save, 2, "fsdp", tmp_path, 1)[0][0]
    bad = run_ranks(_save, 2, "fsdp", tmp_path)[0][0]
    content = bytearray((bad / name).read_bytes())
    content[len(content) // 2] ^= 255
    (bad / name).write_bytes(content)
    texts = run_ranks(_damaged, 2, bad)
    assert texts[0] == texts[1]
    assert name in texts[0]
    if name != "optim.safetensors":
        with pytest.raises(CheckpointError, match=name):
            load_checkpoint(bad).read("model")
    assert find_checkpoint(tmp_path) == checkpoint


def _alone(folder: Path) -> list[str]:
    with messages() as records:
        for kind in ("fsdp", "tensor"):
            state = make_run(kind)
            train(state, range(1))
            assert save_alone(folder, state) is None
    return records


def test_no_rank_saves_sharded_state_alone(tmp_path: Path) -> None:
    rank_0, second = run_ranks(_alone, 2, tmp_path)
    assert len(rank_0) == 2
    assert "sharded over the ranks" in rank_0[0]
    assert second == []
    assert list(tmp_path.iterdir()) == []


def _stateful(folder: Path) -> list[str]:
    state = make_run("fsdp")
    weight = state.model.module.net[0].weight.detach()
    assert isinstance(weight, DTensor)
    state.stateful["x"] = Value(weight)
    path = save_checkpoint(folder, state)
    other = make_run("fsdp", seed=3)
    other.stateful["x"] = Value(None)
    load_checkpoint(path).load_states(other)
    loaded = other.stateful["x"].value
    assert torch.equal(loaded, weight.full_tensor())
    assert not same(contents(other), contents(state))
    return [type(loaded).__name__]


def test_other_parts_of_a_run_get_whole_tensors(tmp_path: Path) -> None:
    assert run_ranks(_stateful, 2, tmp_path) == [["Tensor"]] * 2


def _failing_rank(kind: str, folder: Path) -> str:
    state = make_run(kind)
    real = os.fsync
    if dist.get_rank() == 1:
        os.fsync = _refuse
    try:
        with pytest.raises(CheckpointError) as caught:
            save_checkpoint(folder, state)
    finally:
        os.fsync = real
    return str(caught.value)


def _refuse(*args: Any) -> None:
    raise OSError("no space left")


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_a_failure_on_one_rank_is_raised_on_all_and_leaves_nothing(
    kind: str, tmp_path: Path
) -> None:
    texts = run_ranks(_failing_rank, 2, kind, tmp_path)
    assert texts[0] == texts[1]
    assert "rank 1: OSError: no space left" in texts[0]
    assert list(tmp_path.iterdir()) == []


def _bad_part(kind: str, folder: Path) -> list[str]:
    state = make_run(kind, run_dir=folder)
    train(state, range(1))
    hook = CheckpointHook(every_steps=1)
    hook.on_train_start(state)
    if dist.get_rank() == 1:
        weight = state.model.module.net[0].weight
        (weight.to_local() if isinstance(weight, DTensor) else weight).data[0, 0] = float("nan")
    hook.on_save_point(state)
    hook.on_train_end(state)
    return [path.name for path in folder.iterdir()]


@pytest.mark.parametrize("kind", ["fsdp", "tensor"])
def test_a_bad_part_of_any_rank_is_not_saved(kind: str, tmp_path: Path) -> None:
    assert run_ranks(_bad_part, 2, kind, tmp_path) == [[], []]


def _validate_and_save(folder: Path) -> bool:
    """FSDP2 keeps the outermost parameters gathered after a forward."""
    state, other = make_run("fsdp"), make_run("fsdp")
    train(state, range(2))
    with torch.inference_mode():
        state.model.val_step(batch(state, 9))
    with torch.no_grad():
        state.model.module(*batch(state, 9), mode="tensor")
    path = save_checkpoint(folder, state)
    assert load_checkpoint(path).meta["format"] == 3
    load_checkpoint(path).restore(state)
    train(state, range(2, 3))
    train(other, range(3))
    return same(contents(state), contents(other))


def test_saving_after_a_validation(tmp_path: Path) -> None:
    assert run_ranks(_validate_and_save, 2, tmp_path) == [True, True]


class Odd(nn.Module):
    """A module with a sharded weight whose name is unusual, and whose type may differ by rank."""

    def __init__(self, dtype: torch.dtype, rows: int) -> None:
        super().__init__()
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        local = torch.full((rows, 2), float(dist.get_rank()), dtype=dtype)
        self.__w = nn.Parameter(DTensor.from_local(local, mesh, [Shard(0)], run_check=False))


def _save_odd(folder: Path, *, is_equal: bool) -> Any:
    differs = dist.get_rank() == 1 and not is_equal
    odd = Odd(torch.float64 if differs else torch.float32, 3)
    try:
        return save_checkpoint(folder, LoopState(SingleDevice(odd)))
    except CheckpointError as error:
        return str(error)


def test_ranks_with_other_types_are_refused(tmp_path: Path) -> None:
    path, _ = run_ranks(_save_odd, 2, tmp_path, is_equal=True)
    (weight,) = load_checkpoint(path).read("model").values()
    assert weight[:, 0].tolist() == [0.0] * 3 + [1.0] * 3
    texts = run_ranks(_save_odd, 2, tmp_path, is_equal=False)
    assert texts[0] == texts[1]
    assert re.search(r"w in model\.safetensors differs.*float32.*float64", texts[0])


def test_parts_of_saved_tensors() -> None:
    tensor = torch.arange(24).view(4, 6)
    chunks = [((0, 0), (4, 2), lambda: tensor[:, :2]), ((0, 2), (4, 4), lambda: tensor[:, 2:])]
    saved = SavedTensor((4, 6), torch.int64, chunks)
    for index in [
        (slice(1, 3), slice(1, 5)),
        (slice(0, 0), slice(0, 6)),
        (slice(None), slice(5, 6)),
    ]:
        assert torch.equal(saved[index], tensor[index])
    assert torch.equal(saved[...], tensor)
    assert torch.equal(
        SavedTensor((), torch.float32, [((), (), lambda: torch.tensor(2.0))])[()], torch.tensor(2.0)
    )
