"""Training on devices without float64, such as those of MPS."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.pretend

PROGRAM = """
import json
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

from stepwrap.loops import (
    EpochTrainLoop,
    GradNormHook,
    HookList,
    LogHook,
    LoopState,
    SpikeGuardHook,
    ThroughputHook,
    ValLoop,
    build_loader,
)
from stepwrap.diagnostics import LedgerHook
from stepwrap.loops.metrics.mean_loss import MeanLoss
from stepwrap.primitives import tensor_bits
from stepwrap.wrappers import OptimWrapper, SingleDevice, SupervisedModel

# These devices have the type "cuda", but stand for others.
tensor_bits.WITH_FLOAT64.remove("cuda")
records, metrics = {}, {}


class Records:
    def on_log(self, state, record):
        records.update(record)

    def on_eval_end(self, state, metrics):
        globals()["metrics"].update(metrics)


for device in ("cpu", "cuda"):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(9, 8), nn.Linear(8, 9), nn.Flatten(0, 1)).to(device)
    tokens = torch.randint(0, 9, (16, 5), generator=torch.Generator().manual_seed(1))
    loss = nn.CrossEntropyLoss()
    model = SupervisedModel(net, lambda outputs, targets: loss(outputs, targets.flatten()))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    state = LoopState(
        run_dir=Path(device),
        model=SingleDevice(model),
        optim_wrapper=OptimWrapper(
            optimizer, accumulative_counts=2, loss_weight="tokens", clip_grad={"max_norm": 1.0}
        ),
    )
    loader = build_loader(TensorDataset(tokens, tokens), batch_size=2)
    hooks = [LogHook(), SpikeGuardHook(), GradNormHook(), ThroughputHook(), LedgerHook(), Records()]
    validation = ValLoop(loader, {"loss": MeanLoss()})
    loop = EpochTrainLoop(loader, max_epochs=2, val_loop=validation, log_every_steps=2)
    loop.run(state, HookList(hooks))
    print(json.dumps([records["loss"], records["grad_norm"], metrics["loss"]]))
"""


def test_a_run_equals_that_of_the_host(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, "program.py"],
        cwd=tmp_path,
        env={**os.environ, "PRETEND_WITHOUT_FLOAT64": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    host, device = (json.loads(line) for line in done.stdout.splitlines())
    assert device == pytest.approx(host, rel=1e-5)
