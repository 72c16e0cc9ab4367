"""Converted configs of mmengine: in a process of its own, and with the user's own classes."""

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

import torch
from mmengine_parts import train_theirs

from stepwrap.runner import Runner
from stepwrap.runner.convert.convert import convert_config

CONFIG = """
custom_imports = dict(imports=["mmengine_parts"], allow_failed_imports=False)
model = dict(type="Classifier", backbone=dict(type="Backbone", width=8), classes=2)
train_dataloader = dict(
    batch_size=8,
    sampler=dict(type="DefaultSampler", shuffle=True),
    dataset=dict(type="Points", size=16),
)
train_cfg = dict(by_epoch=True, max_epochs=1)
optim_wrapper = dict(optimizer=dict(type="SGD", lr=0.1))
"""


@pytest.mark.slow
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


OWN = """
from mmengine.hooks import EMAHook as TheirEMAHook
from mmengine.optim import LinearLR as TheirLinearLR


class EMAHook(TheirEMAHook):
    pass


class LinearLR(TheirLinearLR):
    pass
"""
WITH_OWN = """
from mmengine.hooks import EMAHook as Average
from own_names import EMAHook, LinearLR

model = dict(type="torch.nn.Linear", in_features=1, out_features=1)
custom_hooks = [dict(type=Average), dict(type=EMAHook)]
param_scheduler = dict(type=LinearLR, end=5)
"""


def test_classes_of_ones_own_are_not_taken_for_those_of_the_same_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_names.py").write_text(OWN)
    (tmp_path / "mm.py").write_text(WITH_OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    config, misses = convert_config(tmp_path / "mm.py")
    (hook,) = misses
    assert (hook.key, hook.what.split()[0]) == ("custom_hooks.1", "own_names.EMAHook")
    assert config["hooks"] == {"ema": {"decay": 1 - 0.0002, "start_step": 1}}
    (schedule,) = config["schedulers"]
    assert schedule["type"] == "own_names.LinearLR"


def test_weights_of_a_checkpoint_of_mmengine(tmp_path: Path) -> None:
    (tmp_path / "mm.py").write_text(CONFIG)
    theirs, _ = train_theirs(tmp_path / "mm.py")
    # As the page on moving here says.
    saved = torch.load(tmp_path / "theirs/epoch_1.pth", weights_only=False)
    torch.save(saved["state_dict"], tmp_path / "weights.pth")
    weights = f'dict(type="Pretrained", checkpoint="{tmp_path / "weights.pth"}")'
    (tmp_path / "mm.py").write_text(CONFIG.replace("classes=2", f"classes=2, init_cfg={weights}"))
    config = convert_config(tmp_path / "mm.py").config
    ours = Runner.from_config({**config, "device": "cpu", "hooks": {"log": False}})
    for name, value in theirs.model.state_dict().items():
        assert torch.equal(ours.state.model.module.get_parameter(name), value)
