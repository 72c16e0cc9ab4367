"""Commands that read and write URLs."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from remote_store import Bucket, Proxy, use_store
from runner_parts import write_run

from stepwrap.runner import load_model, load_weights
from stepwrap.runner.command.cli import main
from stepwrap.runner.remote.locks import LOCK

URL = "s3://bucket/runs/points"
RUN = "runs/points"
Output = Callable[[], str]


@pytest.fixture(scope="module")
def trained(bucket: Bucket, tmp_path_factory: pytest.TempPathFactory) -> Bucket:
    """Return a bucket with a run: checkpoints of the steps 6 and 12, which is the best."""
    folder = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(write_run(folder).parent)
        patch.setattr(sys, "path", list(sys.path))
        patch.delitem(sys.modules, "points", raising=False)
        use_store(patch, bucket.port, folder / "cache")
        words = ("train.max_epochs=1", "hooks.checkpoint.every_steps=6", "hooks.progress=false")
        assert main(["train", "points.yaml", f"--run-dir={URL}", *words]) == 0
    return bucket


@pytest.fixture
def out(run: Path, trained: Bucket, s3: Bucket, capsys: pytest.CaptureFixture[str]) -> Output:
    """Have a trained run in the store and an empty cache; return the output of the commands."""
    return lambda: capsys.readouterr().out


def test_evaluation_and_prediction(out: Output, trained: Bucket) -> None:
    *_, best = trained.checkpoints(RUN)
    assert main(["test", URL]) == 0
    assert f"{best}\n" in out()
    assert main(["validate", f"{URL}/config.yaml", "--checkpoint=step_00000006"]) == 0
    assert "step_00000006\n" in out()
    words = ("predict", URL, f"--checkpoint={URL}/checkpoints/step_00000006")
    assert main([*words, "--out=s3://bucket/out/points.jsonl"]) == 0
    assert "21 samples in s3://bucket/out/points.jsonl" in out()
    rows = trained.get("out/points.jsonl") or b""
    assert [json.loads(row)["index"] for row in rows.splitlines()] == list(range(21))
    # A file that exists is kept, and nothing is left here.
    assert main([*words, "--out=s3://bucket/out/points.jsonl"]) == 2
    assert not list(Path(os.environ["STEPWRAP_CACHE"], "outputs").iterdir())


def test_export_and_report(out: Output, trained: Bucket, run: Path) -> None:
    assert main(["export", URL, "--to=safetensors"]) == 0
    assert f"exported: {URL}/model.safetensors" in out()
    assert trained.get(f"{RUN}/model.safetensors")
    assert main(["report", URL, "--out=s3://bucket/out/report.html"]) == 0
    assert "1 run(s)" in out()
    assert b"accuracy" in (trained.get("out/report.html") or b"")
    assert not (run / "report.html").exists()


def test_listing_reads_only_descriptions(out: Output, trained: Bucket, proxy: Proxy) -> None:
    assert main(["checkpoint", "ls", URL, "--json"]) == 0
    rows = json.loads(out())["checkpoints"]
    assert [(row["step"], row["marks"], row["state"]) for row in rows] == [
        (6, "", "complete"),
        (12, "best, latest", "complete"),
    ]
    for row in rows:
        prefix = f"{RUN}/checkpoints/{row['name']}/"
        contents = [trained.get(name) or b"" for name in trained.names(prefix)]
        assert row["bytes"] == sum(map(len, contents))
    assert not [path for _, path in proxy.seen if path.endswith(".safetensors")]


def test_inspecting_comparing_and_verifying(out: Output, trained: Bucket) -> None:
    oldest, best = trained.checkpoints(RUN)
    step_6 = f"{URL}/checkpoints/{oldest}"
    assert main(["checkpoint", "inspect", step_6, "--json"]) == 0
    assert json.loads(out())["counters"]["step"] == 6
    assert main(["checkpoint", "inspect", f"{step_6}/model.safetensors"]) == 0
    assert main(["checkpoint", "diff", URL, step_6]) == 1
    assert main(["checkpoint", "diff", step_6, step_6]) == 0
    out()
    assert main(["checkpoint", "verify", step_6]) == 0
    assert "1 checked, 0 damaged" in out()
    assert main(["checkpoint", "verify", URL]) == 0
    assert "2 checked, 0 damaged" in out()


def test_weights_are_written_to_urls(out: Output, trained: Bucket) -> None:
    step_6 = f"{URL}/checkpoints/step_00000006"
    target = "s3://bucket/weights"
    assert main(["checkpoint", "average", URL, step_6, f"--out={target}/mean.safetensors"]) == 0
    assert main(["checkpoint", "average", URL, step_6, f"--out={target}/mean"]) == 0
    assert main(["checkpoint", "convert", URL, f"--out={target}/a.pt"]) == 0
    assert main(["checkpoint", "consolidate", step_6, f"--out={target}/b.safetensors"]) == 0
    assert f"{target}/b.safetensors" in out()
    names = ["weights/a.pt", "weights/b.safetensors", "weights/mean.safetensors"]
    assert trained.names("weights/") == [*names, "weights/mean/model.safetensors"]
    assert main(["checkpoint", "convert", URL, f"--out={target}/a.pt"]) == 2
    assert main(["checkpoint", "convert", URL, f"--out={target}/a.pt", "--force"]) == 0
    # Weights of the store are the start of a run: a folder, a file and a checkpoint.
    model = load_model(URL)
    for source in (f"{target}/mean", f"{target}/a.pt", step_6):
        assert load_weights(model, source) == list(model.state_dict())
    words = ("limit_batches=1", "data.test=null", f"load_from={target}/mean")
    assert main(["train", URL, "--run-dir=new", *words]) == 0


def test_pruning_removes_checkpoints_in_the_store(
    out: Output, trained: Bucket, proxy: Proxy
) -> None:
    contents = {name: trained.get(name) or b"" for name in trained.names(f"{RUN}/checkpoints")}
    oldest, best = trained.checkpoints(RUN)
    assert main(["checkpoint", "prune", URL, "--keep-last=1"]) == 0
    assert trained.checkpoints(RUN) == [oldest, best]
    proxy.seen.clear()
    assert main(["checkpoint", "prune", URL, "--keep-last=1", "--yes"]) == 0
    assert "removed 1 of 2" in out()
    assert trained.checkpoints(RUN) == [best]
    assert not trained.names(f"{RUN}/checkpoints/{oldest}/")
    removed = [path for method, path in proxy.seen if method == "DELETE" and oldest in path]
    assert removed[0].endswith("checkpoint.json")
    assert trained.get(f"{RUN}/{LOCK}") is None
    for name, content in contents.items():
        trained.put(name, content)


def test_unknown_urls_are_mistakes(out: Output, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (
        ["checkpoint", "ls", "s3://bucket/none"],
        ["test", "s3://bucket/none"],
        ["train", "s3://bucket/none.yaml"],
        ["report", "s3://absent/x"],
        ["train", "points.yaml", "load_from=s3://bucket/none"],
    ):
        assert main(words) == 2
        assert words[-1].partition("=")[2] or words[-1] in capsys.readouterr().err
