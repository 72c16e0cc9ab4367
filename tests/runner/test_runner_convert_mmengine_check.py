"""A converted config, checked in a process of its own as users do it."""

import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    # Its OpenCV may find no libGL.
    reason = "mmengine, the extra of that name, cannot be imported"
    pytest.importorskip("mmengine.runner", reason=reason, exc_type=ImportError)

CONFIG = """
custom_imports = dict(imports=["mmengine_parts"], allow_failed_imports=False)
model = dict(type="Classifier", backbone=dict(type="Backbone", width=8), classes=2)
train_dataloader = dict(
    batch_size=8,
    sampler=dict(type="DefaultSampler", shuffle=True),
    dataset=dict(type="Points", size=16),
)
train_cfg = dict(max_epochs=1)
optim_wrapper = dict(optimizer=dict(type="SGD", lr=0.1))
"""


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    here = str(Path(__file__).parent)
    return subprocess.run(
        [sys.executable, "-m", "stepwrap.runner", *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": here, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_a_check_prints_no_line_for_each_parameter(tmp_path: Path) -> None:
    (tmp_path / "mm.py").write_text(CONFIG)
    converted = run(tmp_path, "convert", "mm.py")
    assert converted.returncode == 0, converted.stderr
    (tmp_path / "ours.yaml").write_text(converted.stdout)
    checked = run(tmp_path, "check", "ours.yaml")
    assert checked.returncode == 0, checked.stderr
    assert "every part can be built" in checked.stdout
    assert "init_weights" not in checked.stdout + checked.stderr
