"""How many operations of a run wait for the device: in steps, records, validations, checkpoints."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy
from waits import counting_waits, single_rank_group

from stepwrap.diagnostics import LedgerHook
from stepwrap.loops import (
    CheckpointHook,
    EMAHook,
    GradNormHook,
    Hook,
    IterTrainLoop,
    LoopState,
    MeanLoss,
    SpikeGuardHook,
    SystemHook,
    TimeLimitHook,
    ValLoop,
    build_loader,
)
from stepwrap.runner import Runner
from stepwrap.wrappers import (
    AmpOptimWrapper,
    BaseModel,
    OptimWrapper,
    OptimWrapperDict,
    SupervisedModel,
    wrap_model,
)
from stepwrap.wrappers.optimizers.optimizer_fit import build_optimizer

pytestmark = pytest.mark.gpu

# The updates of a run by what happens at their end. The first ones may wait.
PLAIN, RECORD, VALIDATION, CHECKPOINT, LAST = (9, 10, 11, 12), 16, 18, 20, 22
EVAL_BATCHES = 3


class Pair(BaseModel):
    """Two nets with an optimizer each, trained in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, inputs: Tensor, target: Tensor, mode: str = "predict") -> Any:
        return list(self.second(self.first(inputs)))

    def train_step(self, data: Any, optim_wrapper: OptimWrapperDict) -> dict[str, Tensor]:
        inputs, target = self.data_preprocessor(data, training=True)
        encoder, head = optim_wrapper["first"], optim_wrapper["second"]
        with encoder.optim_context(self.first):
            reconstruction = nn.functional.mse_loss(self.first(inputs), inputs)
        encoder.update_params(reconstruction)
        with head.optim_context(self.second):
            features = self.first(inputs).detach()
            loss = nn.functional.cross_entropy(self.second(features), target)
        head.update_params(loss)
        return {"loss": loss.detach(), "reconstruction": reconstruction.detach()}


class WaitsOfSteps(Hook):
    """Note the waits of each update, from the end of the one before to its own."""

    order = 1000

    def __init__(self, waits: list[str]) -> None:
        self._waits = waits
        self._num_before = 0
        self.by_step: dict[int, list[str]] = {}

    def on_save_point(self, state: LoopState) -> None:
        self.by_step[state.step] = self._waits[self._num_before :]
        self._num_before = len(self._waits)


@dataclass
class Setting:
    """What a run has in addition to the default hooks.

    Attributes:
        hooks: functions that create further hooks, by name.
        optim: arguments of the optimizer wrapper.
        loop: arguments of the training loop.
        fused: whether the optimizer is fused.
        amp: whether the optimizer wrapper is an `AmpOptimWrapper`.
    """

    hooks: Mapping[str, Callable[[], Hook]] = field(default_factory=dict)
    optim: Mapping[str, Any] = field(default_factory=dict)
    loop: Mapping[str, Any] = field(default_factory=dict)
    fused: bool = True
    amp: bool = False


SETTINGS = {
    "default": Setting(),
    "not fused": Setting(fused=False),
    "ema": Setting({"ema": EMAHook}),
    "grad_norm": Setting({"grad_norm": GradNormHook}),
    "clipping": Setting({"grad_norm": GradNormHook}, {"clip_grad": {"max_norm": 0.1}}),
    "clipping by value": Setting(optim={"clip_grad": {"type": "value", "clip_value": 0.1}}),
    "accumulation": Setting(optim={"accumulative_counts": 2}),
    "loss_weight": Setting(optim={"loss_weight": "tokens"}),
    "prefetch": Setting(loop={"prefetch_to_device": True}),
    "monitors": Setting(
        {"system": SystemHook, "time_limit": partial(TimeLimitHook, max_seconds=1e6)}
    ),
    "bfloat16": Setting(optim={"dtype": "bfloat16"}, amp=True),
    "float16": Setting({"grad_norm": GradNormHook}, {"dtype": "float16"}, amp=True),
    "float16, not fused": Setting(optim={"dtype": "float16"}, fused=False, amp=True),
    "spike_guard": Setting({"spike_guard": partial(SpikeGuardHook, warmup=2)}),
    "ledger": Setting({"ledger": LedgerHook}),
}


def make_data(samples: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(samples, 6, generator=generator)
    return TensorDataset(inputs, torch.randint(3, (samples,), generator=generator))


def make_optim_wrapper(model: nn.Module, setting: Setting) -> OptimWrapper:
    options = {} if setting.fused else {"fused": False}
    optimizer = build_optimizer(torch.optim.AdamW, model.parameters(), lr=0.01, **options)
    kind = AmpOptimWrapper if setting.amp else OptimWrapper
    return kind(optimizer, **setting.optim)


def make_parts(wrapper: str, setting: Setting) -> tuple[nn.Module, Any, dict[str, Any]]:
    """Return the wrapped model, its optimizer wrapper and the metrics of validations."""
    torch.manual_seed(0)
    if wrapper == "separate":
        pair = wrap_model("separate", Pair(), device="cuda")
        children = {"first": pair.module.first, "second": pair.module.second}
        optims = {name: make_optim_wrapper(child, setting) for name, child in children.items()}
        return pair, OptimWrapperDict(**optims), {}
    net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.1), nn.Linear(8, 3))
    options = {"dp": {"device_ids": [0]}, "dp of two": {"device_ids": [0, 0]}}.get(wrapper, {})
    kind = wrapper.split()[0]
    supervised = SupervisedModel(net, nn.CrossEntropyLoss())
    model = wrap_model(kind, supervised, device="cuda", **options)
    metrics = {"loss": MeanLoss(), "accuracy": MulticlassAccuracy(num_classes=3)}
    return model, make_optim_wrapper(model, setting), metrics


def count_waits(wrapper: str, setting: Setting, folder: Path) -> dict[str, list[str]]:
    """Train, and return the waits of a plain step, a record, a validation and a checkpoint."""
    model, optim_wrapper, metrics = make_parts(wrapper, setting)
    counts = setting.optim.get("accumulative_counts", 1)
    data = build_loader(make_data(4 * LAST * counts), batch_size=4, train=True)
    eval_data = DataLoader(make_data(4 * EVAL_BATCHES), batch_size=4, pin_memory=True)
    loop = IterTrainLoop(
        data,
        max_steps=LAST,
        val_loop=ValLoop(eval_data, metrics),
        val_interval=VALIDATION,
        log_every_steps=RECORD // 2,
        **setting.loop,
    )
    hooks = {name: make() for name, make in setting.hooks.items()}
    checkpoint = CheckpointHook(every_steps=CHECKPOINT)
    with counting_waits() as waits:
        watch = WaitsOfSteps(waits)
        named = {**hooks, "checkpoint": checkpoint, "watch": watch}
        Runner(
            model, loop, optim_wrapper=optim_wrapper, hooks=named, run_dir=folder / "run", seed=0
        ).train()
    steps = watch.by_step
    return {
        "step": max((steps[step] for step in PLAIN), key=len),
        "record": steps[RECORD],
        "validation": steps[VALIDATION],
        "checkpoint": steps[CHECKPOINT],
    }


# The largest numbers of waits with the default hooks. A checkpoint waits once for each tensor that
# it copies. A validation with these metrics waits 18 times in torchmetrics, which resets its states
# from the host and counts there.
LIMITS = {
    "single": {"step": 0, "record": 1, "validation": 27, "checkpoint": 29},
    "ddp": {"step": 0, "record": 1, "validation": 27, "checkpoint": 29},
    "fsdp": {"step": 0, "record": 1, "validation": 27, "checkpoint": 32},
    "dp": {"step": 0, "record": 1, "validation": 27, "checkpoint": 29},
    "dp of two": {"step": 0, "record": 1, "validation": 27, "checkpoint": 29},
    "separate": {"step": 0, "record": 1, "validation": 0, "checkpoint": 19},
}
# What a setting adds: to each step, to a record, and to a checkpoint, which has other tensors (an
# optimizer that is not fused has its counts of steps on the host).
MORE = {
    "not fused": {"checkpoint": -6},
    "ema": {"checkpoint": 9},
    "grad_norm": {"checkpoint": 1},
    "clipping": {"checkpoint": 1},
    "loss_weight": {"checkpoint": 1},
    "float16": {"checkpoint": 4},
    "float16, not fused": {"step": 1, "checkpoint": -4},
    "spike_guard": {"step": 1},
    "ledger": {"step": 1},
}
# It has two optimizers.
MORE_OF_SEPARATE = {
    "not fused": {"checkpoint": -4},
    "ema": {"checkpoint": 4},
    "grad_norm": {"checkpoint": 2},
    "clipping": {"checkpoint": 2},
    "float16": {"checkpoint": 8},
    "float16, not fused": {"step": 2, "checkpoint": 0},
}
UNSUPPORTED = {("separate", "spike_guard"), ("separate", "loss_weight")}


def get_limits(wrapper: str, setting: str) -> dict[str, int]:
    more = MORE.get(setting, {})
    if wrapper == "separate":
        more = MORE_OF_SEPARATE.get(setting, more)
    # What waits in each step also does so in the steps with a record and so on.
    each_step = more.get("step", 0)
    return {
        event: limit + each_step + (more.get(event, 0) if event != "step" else 0)
        for event, limit in LIMITS[wrapper].items()
    }


def make_cases() -> list[Any]:
    cases = []
    for wrapper in LIMITS:
        for setting in SETTINGS:
            if (wrapper, setting) in UNSUPPORTED:
                continue
            case = pytest.param(wrapper, setting, id=f"{wrapper}-{setting}")
            if wrapper != "single" and setting != "default":
                case = pytest.param(wrapper, setting, marks=pytest.mark.nightly, id=case.id)
            cases.append(case)
    return cases


@pytest.mark.parametrize(("wrapper", "setting"), make_cases())
def test_waits(wrapper: str, setting: str, tmp_path: Path) -> None:
    needs_group = wrapper in ("ddp", "fsdp", "separate")
    with single_rank_group(tmp_path) if needs_group else nullcontext():
        waits = count_waits(wrapper, SETTINGS[setting], tmp_path)
    limits = get_limits(wrapper, setting)
    too_many = {
        event: Counter(lines) for event, lines in waits.items() if len(lines) > limits[event]
    }
    assert too_many == {}
