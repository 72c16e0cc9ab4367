"""The check of a machine with GPUs, `make test-gpu`."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import gpu_check
import pytest
import torch

ROOT = Path(__file__).parents[2]


def run_check(monkeypatch: pytest.MonkeyPatch, report: Path, *options: str) -> tuple[int, str]:
    """Return the exit code and the report."""
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--report", str(report), *options])
    code = 0
    try:
        gpu_check.main()
    except SystemExit as error:
        code = 1 if error.code else 0
    return code, report.read_text()


def test_every_file_of_gpu_tests_is_in_one_stage() -> None:
    marked = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "tests").rglob("test_*.py")
        if re.search(r"mark\.gpu\b", path.read_text(encoding="utf-8"))
    }
    stages = [stage for stage in gpu_check.STAGES if stage.paths and stage.num_devices == 1]
    assert marked
    for path in marked:
        homes = [
            stage.name
            for stage in stages
            if path.startswith(stage.paths) and not path.startswith(stage.excluded or "-")
        ]
        assert len(homes) == 1, path


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA devices")
def test_a_machine_without_a_device_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    code, report = run_check(monkeypatch, tmp_path / "report.txt")
    assert code == 1
    assert f"torch {torch.__version__}" in report
    assert report.splitlines()[-1].startswith("verdict: FAILED in environment")


@pytest.mark.pretend
def test_a_skipped_test_ends_the_check(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    options = ["--only", "compiled", "rpc"]
    code, report = run_check(monkeypatch, tmp_path / "report.txt", *options)
    assert code == 1
    assert re.findall(r"^== (\w+)$", report, re.MULTILINE) == ["compiled"]
    # Triton cannot compile for pretend devices.
    assert re.search(r"verdict: FAILED in compiled: \d+ skipped", report.splitlines()[-1])


@pytest.mark.pretend
def test_stages_without_skipped_tests_pass(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    code, report = run_check(monkeypatch, tmp_path / "report.txt", "--only", "batchnorm")
    assert code == 0
    assert "cuda:1: Pretend" in report
    assert re.search(r"verdict: PASSED: \d+ tests, none skipped", report.splitlines()[-1])
