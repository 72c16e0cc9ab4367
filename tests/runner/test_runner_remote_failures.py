"""Stores that cannot be reached, or whose content is damaged or listed late."""

from __future__ import annotations

import builtins
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from remote_store import Bucket, Proxy, forget_connections
from safetensors.torch import load

from stepwrap.loops import CheckpointError, Hook, LoopState
from stepwrap.registry import load_config
from stepwrap.registry.local_paths import local_path
from stepwrap.runner import Runner
from stepwrap.runner.command.cli import main
from stepwrap.runner.parts import build_parts
from stepwrap.runner.remote.copies import local_copy, run_copy
from stepwrap.runner.remote.locks import LOCK
from stepwrap.runner.remote.manifests import read_checkpoints
from stepwrap.runner.remote.stores import RemoteError, Store
from stepwrap.runner.sections import read_sections

URL = "s3://bucket/runs/points"
RUN = "runs/points"
SHORT = ("train.max_epochs=1", "hooks.checkpoint.every_steps=4", "hooks.progress=false")


@pytest.fixture(autouse=True)
def empty(bucket: Bucket) -> None:
    for name in bucket.names():
        bucket.delete(name)


def runner(*words: str) -> Runner:
    return Runner.from_config(load_config("points.yaml", [f"run_dir={URL}", *SHORT, *words]))


def drop_cache() -> None:
    shutil.rmtree(os.environ["STEPWRAP_CACHE"])


@pytest.mark.slow
def test_lost_connections_are_retried(run: Path, s3: Bucket, proxy: Proxy) -> None:
    """Each request is cut once; a slow-down of the store is one more such failure."""
    cut: set[tuple[str, str]] = set()

    def once(method: str, path: str) -> bool:
        is_new = (method, path) not in cut and "step_" in path
        cut.add((method, path))
        return is_new

    proxy.cut = once
    runner().train()
    assert len(s3.checkpoints(RUN)) == 3


def test_a_failed_upload_is_reported_and_the_next_save_tries_again(
    run: Path, s3: Bucket, proxy: Proxy, caplog: pytest.LogCaptureFixture
) -> None:
    """A failure neither stops the training, as in composer #1438, nor leaves ranks waiting."""
    proxy.cut = lambda method, path: method == "PUT" and "step_00000004/model" in path
    trained = runner()

    def restore(path: Path) -> None:
        if path.name == "step_00000004":
            proxy.cut = lambda method, path: False

    trained.state.after_save.append(restore)
    trained.train()
    texts = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    facts = ("step_00000004", URL, str(local_path(URL)), "next save")
    assert [all(fact in text for fact in facts) for text in texts] == [True]
    assert len(s3.checkpoints(RUN)) == 3


@pytest.mark.slow
def test_a_store_that_is_lost_for_ever_ends_the_run_with_an_error(
    run: Path, s3: Bucket, proxy: Proxy, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("train", "points.yaml", f"--run-dir={URL}", *SHORT, "hooks.checkpoint.every_steps=8")
    proxy.cut = lambda method, path: method == "PUT" and "step_" in path
    assert main([*words]) == 1
    text = capsys.readouterr().err
    assert all(fact in text for fact in (URL, str(local_path(URL)), "--resume", "step_00000008"))
    assert s3.checkpoints(RUN) == []
    # All of it is on this machine, and a resume uploads it.
    proxy.cut = lambda method, path: False
    assert main([*words]) == 2
    assert "--resume" in capsys.readouterr().err
    assert main([*words, "--resume"]) == 0
    assert len(s3.checkpoints(RUN)) == 2


def test_a_run_that_fails_uploads_what_it_has(run: Path, s3: Bucket) -> None:
    """The error is that of the training, and the lock does not stay."""
    words = ("data.train.dataset.bad=30", "seed=3")
    with pytest.raises(ValueError, match="sample 30 is broken"):
        runner(*words).train()
    saved = s3.names(f"{RUN}/checkpoints/")
    assert any("step_00000004/checkpoint.json" in name for name in saved)
    assert s3.get(f"{RUN}/metrics.jsonl") is not None
    assert s3.get(f"{RUN}/{LOCK}") is None


class RemovingHook(Hook):
    """Remove the working folder, as a user might by mistake."""

    def on_update(self, state: LoopState) -> None:
        if state.step == 6:
            assert state.run_dir is not None
            shutil.rmtree(state.run_dir)


def test_a_removed_working_folder_removes_nothing_in_the_store(run: Path, s3: Bucket) -> None:
    config = load_config(
        "points.yaml", [f"run_dir={URL}", *SHORT, "hooks.checkpoint.background=false"]
    )
    parts = build_parts(read_sections(config))
    parts = replace(parts, hooks={**parts.hooks, "removing": RemovingHook()})
    with pytest.raises(CheckpointError, match="was removed while the run used it"):
        Runner.from_parts(parts, config).train()
    assert s3.checkpoints(RUN) == ["step_00000004"]
    assert s3.get(f"{RUN}/config.yaml") is not None


MISTAKES = {
    "bucket": ("s3://absent/x", {}, ("s3://absent/x", "bucket")),
    "credentials": (URL, {"AWS_ACCESS_KEY_ID": None}, (URL, "credentials", "remote.md")),
    "connection": (URL, {"AWS_ENDPOINT_URL_S3": "http://127.0.0.1:9"}, (URL, "network")),
    "package": ("gs://bucket/x", {}, ("gs://bucket/x", "stepwrap[remote]", "gcsfs")),
    "protocol": ("htp://bucket/x", {}, ("htp", "s3://")),
    "parents": ("s3://bucket/../x", {}, ("s3://bucket/../x",)),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_found_before_training(
    name: str,
    run: Path,
    s3: Bucket,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    url, variables, facts = MISTAKES[name]
    for variable, value in variables.items():
        monkeypatch.delenv(variable) if value is None else monkeypatch.setenv(variable, value)
    forget_connections()
    config = (run / "points.yaml").read_text()
    (run / "points.yaml").write_text(f"{config}run_dir: {url}\n")
    line = len(config.splitlines()) + 1
    assert main(["train", "points.yaml", *SHORT]) == 2
    text = capsys.readouterr().err
    assert all(fact in text for fact in (*facts, f"points.yaml:{line}: run_dir"))
    assert not local_path(url).exists()
    if name != "parents":
        assert main(["predict", "points.yaml", f"--out={url}/p.npz"]) == 2
        text = capsys.readouterr().err
        assert all(fact in text for fact in ("--out", *facts[1:]))
    # No bucket is created.
    assert s3.request("GET", "/absent?list-type=2")[0] == 404


def test_a_missing_package_names_the_extra(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    load = builtins.__import__

    def import_others(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.partition(".")[0] == "fsspec":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return load(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", import_others)
    assert main(["train", "points.yaml", f"--run-dir={URL}"]) == 2
    text = capsys.readouterr().err
    assert all(fact in text for fact in ("run_dir", 'pip install "stepwrap[remote]"', "s3fs"))


@pytest.fixture
def trained(run: Path, s3: Bucket) -> Bucket:
    """Return a bucket with a run whose files are not in the cache."""
    runner().train()
    drop_cache()
    return s3


def test_a_damaged_file_is_named_and_the_checkpoint_before_it_is_used(
    trained: Bucket, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    *_, newest = trained.checkpoints(RUN)
    name = f"{RUN}/checkpoints/{newest}/optim.safetensors"
    content = trained.get(name) or b""
    trained.put(name, content[:-1] + b"?")
    assert main(["checkpoint", "verify", URL]) == 1
    assert f"{newest}" in capsys.readouterr().out
    assert runner().resolve("latest").name == "step_00000008"
    warned = next(r.getMessage() for r in caplog.records if "checksum" in r.getMessage())
    assert f"{newest}/optim.safetensors" in warned
    with pytest.raises(CheckpointError, match=f"{newest}/optim.safetensors.*checksum"):
        local_copy(f"{URL}/checkpoints/{newest}")
    # A resume continues from there, and the later ones are renamed in the store.
    state = runner().train(resume=True)
    assert state.step == 12
    assert f"abandoned_{newest}" in trained.checkpoints(RUN)


def test_a_folder_without_a_manifest_and_a_damaged_manifest_do_not_count(
    trained: Bucket, caplog: pytest.LogCaptureFixture
) -> None:
    """As levanter #991: nothing but an incomplete upload means a start from the beginning."""
    oldest, _, newest = trained.checkpoints(RUN)
    trained.put(f"{RUN}/checkpoints/step_00000099/model.safetensors", b"half")
    trained.delete(f"{RUN}/checkpoints/{newest}/checkpoint.json")
    name = f"{RUN}/checkpoints/step_00000008/checkpoint.json"
    trained.put(name, (trained.get(name) or b"").replace(b'"step": 8', b'"step": 9'))
    assert runner().resolve("latest").name == oldest
    assert "checksum" in caplog.text
    trained.delete(name)
    trained.delete(f"{RUN}/checkpoints/{oldest}/checkpoint.json")
    assert runner().train(resume=True).step == 12


def test_a_manifest_cannot_name_files_outside_of_the_cache(s3: Bucket, tmp_path: Path) -> None:
    folder = f"{RUN}/checkpoints/step_00000001"
    outside = {"../../../../../../escaped": {"size": 1, "sha256": "0"}}
    from stepwrap.loops.checkpoints.checkpoint import sealed_text

    meta = {"format": 3, "step": 1, "serial": 1, "best": True, "files": outside}
    s3.put(f"{folder}/checkpoint.json", sealed_text(meta).encode())
    s3.put(f"{RUN}/checkpoints/index.json", b'{"checkpoints": ["../step_1", "x/../step_2"]}')
    with pytest.raises(CheckpointError, match="escaped"):
        local_copy(f"{URL}/checkpoints/step_00000001")
    run_copy(URL)
    assert not [path for path in tmp_path.rglob("*") if "escaped" in path.name]
    assert list(read_checkpoints(Store(URL)).texts) == ["step_00000001"]


@pytest.mark.slow
def test_a_late_listing_hides_no_checkpoint_and_shows_no_removed_one(
    trained: Bucket, proxy: Proxy
) -> None:
    proxy.listings = {}
    before = list(read_checkpoints(Store(URL)).texts)
    runner("train.max_epochs=2", "hooks.checkpoint.keep_last=1").train(resume=True)
    drop_cache()
    # The listings are still the first ones.
    now = list(read_checkpoints(Store(URL)).texts)
    assert now == trained.checkpoints(RUN)
    assert not set(now) & set(before[:2])
    assert runner().resolve("latest").name == now[-1]


@pytest.mark.slow
def test_files_in_the_cache_are_not_downloaded_again(trained: Bucket, proxy: Proxy) -> None:
    copy = run_copy(URL, "latest")
    *_, newest = trained.checkpoints(RUN)
    weights = copy / "checkpoints" / newest / "model.safetensors"

    def downloads() -> list[str]:
        paths = [path for method, path in proxy.seen if method == "GET"]
        proxy.seen.clear()
        return [path.rpartition("/")[2] for path in paths if path.endswith(".safetensors")]

    assert len(downloads()) == 4
    run_copy(URL, "latest")
    assert downloads() == []
    weights.write_bytes(b"changed")
    run_copy(URL, "latest")
    assert downloads() == ["model.safetensors"]
    assert load(weights.read_bytes())
    # A single file is known by what the store says about it.
    trained.put("weights/a.safetensors", weights.read_bytes())
    for expected in (1, 0):
        local_copy("s3://bucket/weights/a.safetensors")
        assert len(downloads()) == expected
    with pytest.raises(CheckpointError, match="s3://bucket/weights/b"):
        local_copy("s3://bucket/weights/b")
    with pytest.raises(RemoteError, match="s3://absent"):
        Store("s3://absent/x").require_writable()
