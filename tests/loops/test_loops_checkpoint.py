"""Checkpoints: content, damage, errors, pruning."""

from __future__ import annotations

import json
import logging
import os
import random
import re
import resource
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from loop_parts import Value, assert_identical, get_weights, make_loader, make_state
from ranks import run_ranks
from safetensors.torch import load_file
from torch import nn
from work import count_calls

from stepwrap.collectives import CollectiveError, get_rank
from stepwrap.loops import (
    CheckpointError,
    EpochTrainLoop,
    HookList,
    LoopState,
    find_checkpoint,
    load_checkpoint,
    prune_checkpoints,
    save_alone,
    save_checkpoint,
)
from stepwrap.wrappers import OptimWrapper, SingleDevice


def trained(steps: int = 2) -> LoopState:
    state = make_state()
    EpochTrainLoop(make_loader(2 * steps), max_epochs=1).run(state, HookList())
    return state


def test_everything_comes_back(tmp_path: Path) -> None:
    state = trained()
    state.metrics, state.evaluated_at, state.clock_s = {"loss": 0.5}, state.step, 12.5
    state.stateful = {"hooks.counter": Value([1, (2.5, None), {"a": torch.ones(2)}])}
    path = save_checkpoint(tmp_path, state)
    draws = random.random(), np.random.rand(), torch.rand(()).item()

    other = make_state()
    other.stateful = {"hooks.counter": Value()}
    load_checkpoint(path).restore(other)

    assert (random.random(), np.random.rand(), torch.rand(()).item()) == draws
    assert_identical(get_weights(other), get_weights(state))
    assert other.state_dict() == state.state_dict()
    assert other.stateful["hooks.counter"].value[1] == (2.5, None)
    saved_state, loaded_state = state.optim_wrapper.state_dict(), other.optim_wrapper.state_dict()
    assert saved_state["param_groups"] == loaded_state["param_groups"]
    for index, buffers in saved_state["state"].items():
        assert torch.equal(
            buffers["momentum_buffer"], loaded_state["state"][index]["momentum_buffer"]
        )


def test_the_folder_describes_itself(tmp_path: Path) -> None:
    state = trained()
    state.metrics, state.evaluated_at = {"loss": 0.5, "bad": float("nan")}, state.step
    path = save_checkpoint(tmp_path, state, reason="end", is_best=True)
    assert path.name == "step_00000002"
    meta = json.loads((path / "checkpoint.json").read_text())
    assert meta["step"] == 2
    assert meta["epoch"] == 1
    assert meta["metrics"] == {"loss": 0.5, "bad": None}
    assert (meta["reason"], meta["best"], meta["world_size"]) == ("end", True, 1)
    assert set(meta["files"]) == {
        "model.safetensors",
        "optim.safetensors",
        "state.safetensors",
        "rank_00000.safetensors",
    }
    assert set(os.listdir(path)) == {*meta["files"], "checkpoint.json"}
    weights = load_file(path / "model.safetensors")
    assert set(weights) == set(get_weights(state))


def test_the_folder_may_be_text(tmp_path: Path) -> None:
    path = save_checkpoint(f"{tmp_path}/checkpoints", trained())
    assert path == tmp_path / "checkpoints" / "step_00000002"
    assert find_checkpoint(str(tmp_path)) == path


def test_metrics_of_other_weights_are_not_claimed(tmp_path: Path) -> None:
    state = trained()
    state.metrics, state.evaluated_at = {"loss": 0.5}, state.step - 1
    meta = load_checkpoint(save_checkpoint(tmp_path, state)).meta
    assert meta["metrics"] == {}


def test_latest_and_best_are_found_from_the_folders(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    assert find_checkpoint(tmp_path) is None
    state = make_state()
    paths = []
    for step, best in ((10, False), (20, True), (5, False)):
        state.step = step
        paths.append(save_checkpoint(folder, state, is_best=best))
    # The last written checkpoint counts, also if its step is lower because the run went back.
    assert find_checkpoint(tmp_path) == paths[2]
    assert find_checkpoint(tmp_path, "best") == paths[1]
    with pytest.raises(ValueError, match="latest"):
        find_checkpoint(tmp_path, "newest")


def test_a_missing_file_or_an_unreadable_description_is_damage(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, make_state())
    (path / "optim.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"none .*optim\.safetensors: No such file"):
        find_checkpoint(tmp_path)
    assert find_checkpoint(tmp_path, "best") is None
    with pytest.raises(CheckpointError, match=r"damaged: optim\.safetensors"):
        load_checkpoint(path).restore(make_state())
    (path / "checkpoint.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"none of .*checkpoint\.json"):
        find_checkpoint(tmp_path)


def test_a_damaged_later_checkpoint_does_not_matter_to_a_search_before_it(tmp_path: Path) -> None:
    state, paths = make_state(), []
    for state.step in (10, 20):
        paths.append(save_checkpoint(tmp_path, state))
    (paths[1] / "checkpoint.json").write_text("{")
    assert find_checkpoint(tmp_path, before=10) is None
    assert find_checkpoint(tmp_path, before=20) == paths[0]
    (paths[0] / "checkpoint.json").write_text("{")
    with pytest.raises(CheckpointError) as caught:
        find_checkpoint(tmp_path, before=20)
    assert str(paths[0]) in str(caught.value)
    assert str(paths[1]) not in str(caught.value)


def test_going_back_abandons_later_checkpoints(tmp_path: Path) -> None:
    """The first save after a restore excludes later checkpoints from the search."""
    state = make_state()
    paths = []
    for step, best in ((10, False), (20, False), (30, True)):
        state.step = step
        paths.append(save_checkpoint(tmp_path, state, is_best=best))
    load_checkpoint(paths[1]).restore(state)
    assert find_checkpoint(tmp_path) == paths[2]

    state.step = 30
    again = save_checkpoint(tmp_path, state)
    assert find_checkpoint(tmp_path) == again
    assert not load_checkpoint(again).meta["best"]
    assert find_checkpoint(tmp_path, "best") is None
    assert {path.name for path in tmp_path.iterdir()} == {
        *("step_00000010", "step_00000020", "step_00000030", "abandoned_step_00000030")
    }
    state.step = 40
    assert find_checkpoint(tmp_path) != save_checkpoint(tmp_path / "elsewhere", state)
    save_checkpoint(tmp_path, state)
    assert again.exists()

    load_checkpoint(paths[0]).restore(state)
    state.step = 30
    save_checkpoint(tmp_path, state)
    assert (tmp_path / "abandoned_step_00000030-1").exists()


class Vocabulary(nn.Linear):
    """A layer with extra state that is not a tensor."""

    words: Any = None

    def get_extra_state(self) -> Any:
        return {"words": self.words}

    def set_extra_state(self, state: Any) -> None:
        self.words = state["words"]


def get_state(net: nn.Module) -> LoopState:
    return LoopState(SingleDevice(net), OptimWrapper(torch.optim.SGD(net.parameters(), 0.1)))


def vocabulary_state(words: Any) -> LoopState:
    net = Vocabulary(2, 2)
    net.words = words
    return get_state(net)


def test_the_models_extra_state_can_be_loaded_or_is_refused(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, vocabulary_state(["a", np.float64(2.0)]))
    other = vocabulary_state(None)
    load_checkpoint(path).restore(other)
    assert other.model.module.words == ["a", 2.0]
    with pytest.raises(CheckpointError, match=r"numpy\.ndarray in model\._extra_state\.words"):
        save_checkpoint(tmp_path, vocabulary_state(np.array([object()])))


class Holder(nn.Module):
    def __init__(self, *, inner: bool = False) -> None:
        super().__init__()
        norm = nn.BatchNorm1d(2)
        self.module = torch.compile(norm, backend="eager") if inner else norm
        self.head = nn.Linear(2, 1)


def test_weights_have_the_users_names(tmp_path: Path) -> None:
    """A child called module is not taken for a wrapper, and torch.compile adds no prefix."""
    plain = Holder()
    names = list(plain.state_dict())
    inside: Any = torch.compile(Holder(), backend="eager")
    models = [plain, SingleDevice(Holder()), Holder(inner=True), SingleDevice(inside)]
    for index, model in enumerate(models):
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, index)
        path = save_checkpoint(tmp_path / str(index), LoopState(model))
        saved = load_checkpoint(path).read("model")
        assert list(saved) == names
        assert saved._metadata["module"]["version"] == 2
        for target in models:
            load_checkpoint(path).restore(LoopState(target))
            loaded = target.state_dict().values()
            assert all(torch.equal(a, b) for a, b in zip(loaded, saved.values(), strict=True))
            assert all((p.grad == index).all() for p in target.parameters())


class Buffers(nn.Linear):
    """A layer with slices of a large table, one of them expanded."""

    def __init__(self, start: float = 0.0) -> None:
        super().__init__(2, 2)
        table = torch.arange(start, start + 100_000)
        views = {"first": table[:4], "second": table[2:6], "rows": table[7].expand(3, 4)}
        for name, view in views.items():
            self.register_buffer(name, view)


def test_buffers_that_are_slices_or_expanded(tmp_path: Path) -> None:
    net = Buffers()
    path = save_checkpoint(tmp_path, get_state(net))
    # The slices are stored, not the table.
    assert (path / "model.safetensors").stat().st_size < 10_000
    other = Buffers(start=5.0)
    load_checkpoint(path).restore(get_state(other))
    assert_identical(other.state_dict(), net.state_dict())


class Pair(nn.Module):
    def __init__(self, is_tied: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)
        if is_tied:
            self.second.weight = self.first.weight


def test_one_weight_cannot_get_two_values(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, get_state(Pair(is_tied=False)))
    tied = Pair(is_tied=True)
    before = tied.first.weight.clone()
    with pytest.raises(CheckpointError, match=r"second\.weight: .*same weight as first\.weight"):
        load_checkpoint(path).load_model(tied)
    assert torch.equal(tied.first.weight, before)
    # The values of one tied weight are equal.
    path = save_checkpoint(tmp_path, get_state(tied))
    load_checkpoint(path).load_model(Pair(is_tied=True))


def test_folders_that_are_not_checkpoints_or_too_new(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is not a checkpoint"):
        load_checkpoint(tmp_path)
    path = save_checkpoint(tmp_path, make_state())
    meta = json.loads((path / "checkpoint.json").read_text())
    (path / "checkpoint.json").write_text(json.dumps({**meta, "format": 99}))
    with pytest.raises(CheckpointError, match="format 99"):
        load_checkpoint(path)


def test_a_new_checkpoint_of_the_same_step_replaces_the_old_one(tmp_path: Path) -> None:
    state = make_state()
    save_checkpoint(tmp_path, state, is_best=True)
    second = save_checkpoint(tmp_path, state)
    third = save_checkpoint(tmp_path, state)
    assert list(tmp_path.iterdir()) == [third]
    assert second != third
    assert find_checkpoint(tmp_path, "best") == third


def test_drafts_of_killed_runs_are_removed(tmp_path: Path) -> None:
    stale = tmp_path / ".draft-0123"
    stale.mkdir()
    (stale / "model.safetensors").write_text("half")
    save_checkpoint(tmp_path, make_state())
    assert not stale.exists()


def test_pruning_keeps_the_last_and_the_named_checkpoints(tmp_path: Path) -> None:
    state = make_state()
    paths = []
    for step in range(5):
        state.step = step
        paths.append(save_checkpoint(tmp_path, state))
    assert set(prune_checkpoints(tmp_path, 2, {paths[1]})) == {paths[0], paths[2]}
    assert set(tmp_path.iterdir()) == {paths[1], paths[3], paths[4]}
    assert prune_checkpoints(tmp_path, None) == []


def test_a_state_that_could_not_be_loaded_safely_is_refused_by_name(tmp_path: Path) -> None:
    state = make_state()
    state.stateful = {"hooks.odd": Value({"when": {"inner": object()}})}
    with pytest.raises(
        CheckpointError,
        match=r"a builtins\.object in state\.stateful\.hooks\.odd\.value\.when\.inner",
    ):
        save_checkpoint(tmp_path, state)
    assert list(tmp_path.iterdir()) == []


def test_numpy_numbers_become_plain_ones(tmp_path: Path) -> None:
    state = make_state()
    state.stateful = {"x": Value([np.float64(0.5), np.int64(3), np.bool_(True), np.float32(2)])}
    path = save_checkpoint(tmp_path, state)
    load_checkpoint(path).restore(state)
    assert state.stateful["x"].value == [0.5, 3, True, 2.0]


def test_a_model_that_does_not_fit_is_explained(tmp_path: Path) -> None:
    class Net(nn.Module):
        def __init__(self, width: int, head: str) -> None:
            super().__init__()
            self.body = nn.Linear(2, width)
            self.add_module(head, nn.Linear(width, 1))

    path = save_checkpoint(tmp_path, get_state(Net(3, "head_old")))
    target = Net(4, "head_new")
    before = target.body.weight.clone()
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(path).restore(get_state(target))
    text = str(caught.value)
    assert "does not fit Net" in text
    assert re.search(r"body\.weight: .*\(3, 2\) .*checkpoint, \(4, 2\) .*model", text)
    assert re.search(r"head_new\.weight: missing .*checkpoint has head_old\.weight", text)
    assert "head_old.bias: not in the model" in text
    assert torch.equal(target.body.weight, before)


def test_similar_names_are_searched_only_for_shown_lines(tmp_path: Path) -> None:
    layers = nn.ModuleList(nn.Linear(1, 1, bias=False) for _ in range(30))
    path = save_checkpoint(tmp_path, get_state(nn.ModuleDict({"blocks": layers})))
    other = nn.ModuleDict({"block": layers})
    lines: list[str] = []

    def load() -> None:
        with pytest.raises(CheckpointError) as caught:
            load_checkpoint(path).load_model(other)
        lines.extend(str(caught.value).splitlines())

    assert count_calls("get_close_matches", load) == 8
    assert "(the checkpoint has blocks.0.weight)" in lines[1]
    assert lines[-1] == "  and 52 more"


def test_an_optimizer_that_does_not_fit_is_explained(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, make_state())
    other = make_state()
    other.optim_wrapper = OptimWrapper(torch.optim.Adam(other.model.parameters()))
    with pytest.raises(CheckpointError, match="does not fit .*optimizer"):
        load_checkpoint(path).restore(other)


def test_missing_and_unexpected_states_are_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = make_state()
    state.stateful = {"hooks.old": Value()}
    path = save_checkpoint(tmp_path, state)
    state.stateful = {"hooks.new": Value(7)}
    with caplog.at_level(logging.WARNING):
        load_checkpoint(path).restore(state)
    assert "hooks.new" in caplog.text
    assert "hooks.old" in caplog.text
    assert state.stateful["hooks.new"].value == 7


def test_only_the_model_can_be_loaded_into_a_bare_model(tmp_path: Path) -> None:
    state = trained()
    bare = make_state().model.module
    load_checkpoint(save_checkpoint(tmp_path, state)).load_model(bare)
    assert_identical(dict(bare.state_dict()), get_weights(state))


def test_reasons_are_checked(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="reason must be one of"):
        save_checkpoint(tmp_path, make_state(), reason="fun")


def _save_on_ranks(folder: Path) -> Path:
    state = make_state()
    loader = make_loader(8)
    EpochTrainLoop(loader, max_epochs=1).run(state, HookList())
    torch.manual_seed(100 + torch.distributed.get_rank())
    save_alone(folder / "alone", state)
    return save_checkpoint(folder, state)


def _restore_on_ranks(path: Path) -> tuple[dict[str, torch.Tensor], float]:
    state = make_state()
    load_checkpoint(path).restore(state)
    return get_weights(state), torch.rand(()).item()


def _save_gradients(folder: Path) -> Path:
    state = make_state()
    for parameter in state.model.parameters():
        # Their sum depends on the order.
        parameter.grad = torch.full_like(parameter, (1e8, -1e8, 1.0)[get_rank()])
    return save_checkpoint(folder, state)


def test_gradients_of_three_ranks_are_added_in_their_order(tmp_path: Path) -> None:
    path = run_ranks(_save_gradients, 3, tmp_path)[0]
    stems = load_checkpoint(path).stems
    assert [stem for stem in stems if "rank" in stem] == [f"rank_0000{rank}" for rank in range(3)]
    state = make_state()
    load_checkpoint(path).restore(state)
    for parameter in state.model.parameters():
        assert torch.equal(parameter.grad, torch.full_like(parameter, 1.0) / 3)


@pytest.mark.slow
def test_checkpoints_move_between_wrappers_and_world_sizes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = run_ranks(_save_on_ranks, 2, tmp_path)[0]
    assert {file.name for file in path.glob("rank_*")} == {
        "rank_00000.safetensors",
        "rank_00001.safetensors",
    }
    assert [p.name for p in (tmp_path / "alone").rglob("rank_*")] == ["rank_00000.safetensors"]
    single = make_state()
    load_checkpoint(path).restore(single)
    again = run_ranks(_restore_on_ranks, 3, path)
    for weights, _ in again:
        assert_identical(weights, get_weights(single))
    draws = [draw for _, draw in again]
    expected = [torch.rand((), generator=torch.Generator().manual_seed(100 + r)) for r in (0, 1)]
    assert draws[:2] == [value.item() for value in expected]
    assert draws[2] not in draws[:2]
    assert run_ranks(_restore_on_ranks, 3, path)[2][1] == draws[2]


def test_links_to_other_checkpoints_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, state, paths = tmp_path / "checkpoints", make_state(), []
    for state.step in (3, 6):
        paths.append(save_checkpoint(folder, state))
    link = folder / "step_00000009"
    link.symlink_to(paths[0].name)
    assert find_checkpoint(tmp_path) == paths[1]
    assert f"{link} is a link to step_00000003" in caplog.text
    # A checkpoint that was moved away counts with the step of its description.
    away = paths[1].rename(tmp_path / "away")
    moved = folder / "step_00000007"
    moved.symlink_to(away)
    assert find_checkpoint(tmp_path) == moved
    assert f"{moved} is a checkpoint of step 6" in caplog.text
    # Pruning counts no checkpoint twice, and removes links only.
    state.step = 9
    newest = save_checkpoint(folder, state)
    assert prune_checkpoints(folder, 2) == [paths[0]]
    assert prune_checkpoints(folder, 1) == [moved]
    assert load_checkpoint(away).meta["step"] == 6
    assert find_checkpoint(tmp_path) == newest


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Limit the size of the files that this process may write."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_file_above_the_limit_is_named(tmp_path: Path) -> None:
    state = get_state(nn.Linear(200, 200))
    with largest_file(50_000), pytest.raises(CheckpointError) as error:
        save_checkpoint(tmp_path, state)
    text = str(error.value)
    assert re.search(r"model\.safetensors .*larger than .*0\.05 MB", text)
    assert "checkpoint need 0.17" in text
    assert "ulimit -f" in text
    assert not list(tmp_path.iterdir())
    save_checkpoint(tmp_path, state)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a file system of 200 kB; root may do that."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=200k", "tmpfs", str(folder)]
    if os.getuid() or subprocess.run(command, check=False, capture_output=True).returncode:
        pytest.skip("cannot mount a file system")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_is_reported_with_the_space_that_is_needed(small_disk: Path) -> None:
    state = get_state(nn.Linear(150, 150))
    path = save_checkpoint(small_disk / "checkpoints", state)
    state.step = 1
    with pytest.raises(CheckpointError) as error:
        save_checkpoint(small_disk / "checkpoints", state)
    text = str(error.value)
    assert re.search(f"no space .* at {small_disk}", text)
    needed, free = map(float, re.findall(r"([\d.]+) MB", text))
    assert 0.09 < needed < 0.11
    assert free < needed
    assert "keep_last" in text
    assert find_checkpoint(small_disk) == path
    assert len(list((small_disk / "checkpoints").iterdir())) == 1


def _saved_slowly(folder: Path) -> str:
    state, sync = trained(), os.fsync
    done = folder.with_name("done")

    def wait_for_the_other_rank(file: int) -> None:
        while not done.exists():
            time.sleep(0.05)
        sync(file)

    if get_rank() == 0:
        os.fsync = wait_for_the_other_rank
    try:
        save_checkpoint(folder, state)
    except (CollectiveError, CheckpointError) as error:
        return str(error)
    finally:
        os.fsync = sync
        done.touch()
    return ""


def test_a_sync_that_takes_longer_than_the_timeout_names_the_setting(tmp_path: Path) -> None:
    texts = run_ranks(_saved_slowly, 2, tmp_path / "checkpoints", group_timeout_s=2.0)
    assert "saving the checkpoint of step" in texts[1]
    assert "reading, writing or syncing" in texts[1]
    assert "save_timeout_s" in texts[1]
    assert "launch.timeout_s" in texts[1]
