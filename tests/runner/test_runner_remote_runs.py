"""Runs whose folder is a URL: uploads, resuming elsewhere, locks, several ranks."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from marks import slow
from ranks import run_ranks
from remote_store import Bucket, Proxy
from runner_parts import Command, assert_identical, run_command
from safetensors.torch import load
from torch import Tensor

from stepwrap.collectives import get_rank
from stepwrap.registry import load_config
from stepwrap.registry.local_paths import local_path
from stepwrap.runner import Runner, load_model, load_weights
from stepwrap.runner.command import run_commands
from stepwrap.runner.command.cli import main
from stepwrap.runner.remote import locks
from stepwrap.runner.remote.locks import LOCK, RemoteLock
from stepwrap.runner.remote.stores import Store

URL = "s3://bucket/runs/points"
RUN = "runs/points"
TRAIN = ("train", "points.yaml", f"--run-dir={URL}")
SHORT = ("train.max_epochs=1", "hooks.checkpoint.every_steps=4", "hooks.progress=false")


@pytest.fixture(autouse=True)
def empty(bucket: Bucket) -> None:
    for name in bucket.names():
        bucket.delete(name)


def loss_records(text: bytes) -> list[dict[str, Any]]:
    """Return the records without values that depend on the time."""
    names = ("step", "epoch", "phase", "loss", "lr", "accuracy")
    return [{k: v for k, v in json.loads(line).items() if k in names} for line in text.splitlines()]


def final_state(bucket: Bucket, run: str = RUN) -> dict[str, Tensor]:
    text = bucket.get(f"{run}/checkpoints/{bucket.checkpoints(run)[-1]}/model.safetensors")
    assert text is not None
    return load(text)


def drop_cache() -> None:
    shutil.rmtree(os.environ["STEPWRAP_CACHE"])


def test_a_run_uploads_its_files_and_writes_none_elsewhere(
    run: Path, s3: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_commands, "plots_available", lambda: True)
    assert main([*TRAIN, *SHORT]) == 0
    assert {path.name for path in run.iterdir()} <= {
        *("cache", "points.py", "points.yaml", "__pycache__"),
    }
    working = local_path(URL)
    assert s3.checkpoints(RUN) == sorted(path.name for path in (working / "checkpoints").iterdir())
    for name in ("metrics.jsonl", "config.yaml", "events.jsonl", "curves.png"):
        assert s3.get(f"{RUN}/{name}") == (working / name).read_bytes()
    assert s3.get(f"{RUN}/{LOCK}") is None


def test_a_kill_during_an_upload_leaves_the_checkpoint_before_it(
    start: Callable[..., Command], run: Path, s3: Bucket, proxy: Proxy
) -> None:
    assert main(["train", "points.yaml", "--run-dir=whole", *SHORT]) == 0
    proxy.hold = lambda method, path: method == "PUT" and "step_00000008/optim" in path
    command = start(*TRAIN, *SHORT)
    command.wait_until(proxy.held.is_set, "no upload of step 8")
    os.kill(command.process.pid, signal.SIGKILL)
    command.wait_gone()
    proxy.hold = lambda method, path: False
    assert s3.checkpoints(RUN) == ["step_00000004"]
    assert any("step_00000008/model" in name for name in s3.names(RUN))
    drop_cache()

    proxy.seen.clear()
    # The other machine has no config either.
    assert main(["train", URL, "--resume"]) == 0
    downloads = [path for method, path in proxy.seen if method == "GET" and "safetensors" in path]
    assert downloads
    assert all("step_00000004" in path for path in downloads)
    newest = sorted(Path("whole/checkpoints").iterdir())[-1]
    expected = load((newest / "model.safetensors").read_bytes())
    assert_identical(final_state(s3), expected)
    lines = s3.get(f"{RUN}/metrics.jsonl")
    assert lines is not None
    assert loss_records(lines) == loss_records(Path("whole/metrics.jsonl").read_bytes())


@pytest.mark.slow
def test_a_resumed_run_keeps_the_best_checkpoint_and_removes_old_ones(
    run: Path, s3: Bucket, proxy: Proxy
) -> None:
    """Remote ones are removed too, unlike in mmengine #1084 (and only those of this run)."""
    # With "min", the first validation has the best accuracy.
    words = ("hooks.checkpoint.keep_last=1", "hooks.checkpoint.mode=min", "train.max_epochs=2")
    assert main([*TRAIN, *SHORT, *words]) == 0
    best, newest = s3.checkpoints(RUN)
    assert (best[:13], newest[:13]) == ("step_00000012", "step_00000024")
    drop_cache()
    proxy.seen.clear()
    assert main(["train", URL, "--resume", "train.max_epochs=3"]) == 0
    saved = s3.checkpoints(RUN)
    assert saved[0] == best
    assert [name[:13] for name in saved] == ["step_00000012", "step_00000036"]
    removed = [path.split("/")[-2:] for method, path in proxy.seen if method == "DELETE"]
    removed = [words for words in removed if words[0].startswith("step_")]
    first_files = dict(reversed(removed))
    assert newest in first_files
    assert set(first_files.values()) == {"checkpoint.json"}
    # The best one is tested at the end, and downloaded only then.
    downloads = [
        path for method, path in proxy.seen if method == "GET" and path.endswith("safetensors")
    ]
    assert [name[:13] for name in dict.fromkeys(path.split("/")[-2] for path in downloads)] == [
        "step_00000024",
        "step_00000012",
    ]


@pytest.mark.slow
def test_going_back_renames_later_checkpoints_in_the_store(run: Path, s3: Bucket) -> None:
    assert main([*TRAIN, *SHORT, "data.test=null"]) == 0
    before = s3.checkpoints(RUN)
    content = s3.get(f"{RUN}/checkpoints/step_00000008/model.safetensors")
    drop_cache()
    words = ("hooks.checkpoint.every_steps=5", "data.test=null", "train.max_epochs=1")
    assert main(["train", URL, "--resume=step_00000004", *words]) == 0
    assert s3.checkpoints(RUN) == [
        *(f"abandoned_{name}" for name in before[1:]),
        *("step_00000004", "step_00000005", "step_00000010", "step_00000012"),
    ]
    assert s3.get(f"{RUN}/checkpoints/abandoned_step_00000008/model.safetensors") == content


def test_a_folder_with_results_needs_a_choice(
    run: Path, s3: Bucket, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*TRAIN, *SHORT]) == 0
    drop_cache()
    assert main([*TRAIN, *SHORT]) == 2
    text = capsys.readouterr().err
    assert all(fact in text for fact in (URL, "3 checkpoint(s)", "--resume", "--fresh", "run_dir"))
    runner = Runner.from_config(load_config("points.yaml", [f"run_dir={URL}"]))
    with pytest.raises(FileExistsError, match="3 checkpoint"):
        runner.train()
    s3.put(f"{RUN}/notes.md", b"mine")
    drop_cache()
    assert main([*TRAIN, "--fresh", "train.max_epochs=1", "hooks.checkpoint.every_steps=6"]) == 0
    assert [name[:13] for name in s3.checkpoints(RUN)] == ["step_00000006", "step_00000012"]
    # Files of the user stay.
    assert s3.get(f"{RUN}/notes.md") == b"mine"


def test_a_run_that_starts_from_another_one_leaves_it_alone(run: Path, s3: Bucket) -> None:
    """Unlike in Lightning #21813, where the resumed run removed the checkpoint that it read."""
    assert main([*TRAIN, *SHORT]) == 0
    before = s3.names(RUN)
    drop_cache()
    words = ("train.max_epochs=2", "hooks.checkpoint.keep_last=1", "data.test=null")
    assert main(["train", URL, "--run-dir=s3://bucket/second", f"--resume={URL}", *words]) == 0
    assert s3.names(RUN) == before
    assert s3.checkpoints("second")[-1].startswith("step_00000024")


def test_a_second_run_is_refused_until_the_first_has_ended(
    run: Path, s3: Bucket, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = RemoteLock(Store(URL))
    lock.acquire()
    assert main([*TRAIN, *SHORT]) == 2
    text = capsys.readouterr().err
    assert all(fact in text for fact in (URL, f"process {os.getpid()} on ", LOCK, "run_dir"))
    with pytest.raises(BlockingIOError, match=f"process {os.getpid()}"):
        Runner.from_config(load_config("points.yaml", [f"run_dir={URL}"])).train()
    assert main(["checkpoint", "prune", URL, "--keep-last=1"]) == 2

    # Another host: it counts until it has not refreshed its lock for some minutes.
    about = json.loads(s3.get(f"{RUN}/{LOCK}") or b"")
    s3.put(f"{RUN}/{LOCK}", json.dumps({**about, "host_identity": "other", "pid": 1}).encode())
    assert main([*TRAIN, *SHORT]) == 2
    monkeypatch.setattr(locks, "STALE_S", -1.0)
    assert main([*TRAIN, *SHORT]) == 0
    # The first run notices that its lock is gone.
    s3.put(f"{RUN}/{LOCK}", b'{"pid": 7, "host": "thief", "token": "x"}')
    with pytest.raises(RuntimeError, match="process 7 on thief"):
        lock.require_own()


def test_a_lock_of_a_dead_process_of_this_host_is_free(s3: Bucket) -> None:
    lock = RemoteLock(Store(URL))
    lock.acquire()
    about = json.loads(s3.get(f"{RUN}/{LOCK}") or b"")
    s3.put(f"{RUN}/{LOCK}", json.dumps({**about, "pid": 2**22 + 1}).encode())
    RemoteLock(Store(URL)).acquire()
    assert json.loads(s3.get(f"{RUN}/{LOCK}") or b"")["pid"] == os.getpid()


def train_on_two_ranks(folder: str, *words: str) -> int:
    os.chdir(folder)
    return run_command(Path(folder), "train", *words)


@pytest.mark.slow
@pytest.mark.parametrize("resumes", [False, *slow(True)])
def test_two_ranks_upload_one_run_and_resume_it(resumes: bool, run: Path, s3: Bucket) -> None:
    words = ("points.yaml", f"--run-dir={URL}", "wrapper.type=ddp", "hooks.progress=false")
    short = ("train.max_epochs=1", "hooks.checkpoint.every_steps=3", "data.test=null")
    assert run_ranks(train_on_two_ranks, 2, str(run), *words, *short) == [0, 0]
    saved = s3.checkpoints(RUN)
    assert [name[:13] for name in saved] == ["step_00000003", "step_00000006"]
    assert s3.get(f"{RUN}/checkpoints/{saved[0]}/rank_00001.safetensors") is not None
    if not resumes:
        return
    drop_cache()
    more = ("train.max_epochs=2", "hooks.checkpoint.every_steps=3", "--resume")
    assert run_ranks(train_on_two_ranks, 2, str(run), *words, *more) == [0, 0]
    assert s3.checkpoints(RUN)[-1].startswith("step_00000012")


def cache_of_own(folder: str) -> str:
    """Train with a cache that the other rank does not see, and return the error."""
    os.chdir(folder)
    os.environ["STEPWRAP_CACHE"] = f"{folder}/cache{get_rank()}"
    sys.modules.pop("points", None)
    runner = Runner.from_config(load_config("points.yaml", [f"run_dir={URL}", "wrapper.type=ddp"]))
    try:
        runner.train()
    except RuntimeError as error:
        return str(error)
    return ""


def test_ranks_that_do_not_share_the_working_folder_are_refused(run: Path, s3: Bucket) -> None:
    texts = run_ranks(cache_of_own, 2, str(run))
    assert all("STEPWRAP_CACHE" in text and "rank 0" in text for text in texts)
    assert s3.get(f"{RUN}/{LOCK}") is None


@pytest.mark.parametrize("kind", ["memory", *slow("file")])
def test_other_protocols(kind: str, run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "points"
    url = f"file://{folder}" if kind == "file" else f"memory://{tmp_path.name}/points"
    words = ("train", "points.yaml", f"run_dir={url}", *SHORT)
    assert main([*words]) == 0
    assert main([*words]) == 2
    assert main([*words, "--resume"]) == 0
    assert main(["validate", url]) == 0
    assert folder.is_dir() == (kind == "file")
    assert local_path(url) == folder if kind == "file" else local_path(url).is_dir()


def test_a_runner_in_python(run: Path, s3: Bucket) -> None:
    config = load_config("points.yaml", [f"run_dir={URL}", *SHORT])
    runner = Runner.from_config(config)
    state = runner.train()
    metrics = runner.test("best")
    drop_cache()
    # Another machine has none of the files.
    sys.modules.pop("points", None)
    assert Runner.from_config(config).test("best") == metrics
    assert Runner.from_config(config).train(resume=True).step == state.step
    model = load_model(URL)
    again = load_model(Path(URL), f"{URL}/checkpoints/step_00000004")
    assert load_weights(again, URL) == list(model.state_dict())
    assert_identical(again.state_dict(), model.state_dict())
