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

from stepwrap.runner.convert import convert_config

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


def test_a_check_prints_no_line_for_each_parameter(tmp_path: Path) -> None:
    (tmp_path / "mm.py").write_text(CONFIG)
    conversion = convert_config(tmp_path / "mm.py")
    assert not conversion.misses
    (tmp_path / "ours.yaml").write_text(conversion.text())
    checked = subprocess.run(
        [sys.executable, "-m", "stepwrap.runner", "check", "ours.yaml"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert checked.returncode == 0, checked.stderr
    assert "every part can be built" in checked.stdout
    assert "init_weights" not in checked.stdout + checked.stderr
