"""Train on pretend devices of one type, and print what `test_pretend_other_devices.py` compares.

Each function of `REPORTS` gives one entry of the JSON object; an error gives its traceback.
"""

from __future__ import annotations

import json
import logging
import sys
import time
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from pretend_devices import limited_memory
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from stepwrap.diagnostics import LedgerHook
from stepwrap.diagnostics.fingerprint import hash_streams
from stepwrap.diagnostics.verify_hooks import _namespaces
from stepwrap.loops import (
    CheckpointHook,
    EMAHook,
    EpochTrainLoop,
    GradNormHook,
    Hook,
    HookList,
    LoopState,
    RunInfoHook,
    SpikeGuardHook,
    SystemHook,
    ThroughputHook,
    ValLoop,
    build_loader,
    find_checkpoint,
    load_checkpoint,
    prefetch_to_device,
    seed_rng,
)
from stepwrap.loops.metrics.mean_loss import MeanLoss
from stepwrap.loops.rng import preserved_rng
from stepwrap.registry import ConfigError, load_config
from stepwrap.runner import Runner
from stepwrap.runner.command.cli import main
from stepwrap.runner.finders.batch_size import try_batch_size
from stepwrap.runner.sections import read_sections
from stepwrap.wrappers import AmpOptimWrapper, OptimWrapper, SingleDevice, SupervisedModel
from stepwrap.wrappers.wrapping import compile_step

KIND = sys.argv[1] if len(sys.argv) > 1 else "cpu"
WORDS = 9
CONFIG = """
name: small
device: {kind}
run_dir: config
model: {{type: train_other_device.TokenModel}}
optimizer: {{type: AdamW, lr: 0.05}}
optim_wrapper: {{type: AmpOptimWrapper, dtype: bfloat16}}
train: {{type: EpochTrainLoop, max_epochs: 1}}
data: {{train: {{dataset: {{type: train_other_device.tokens}}, batch_size: 4}}}}
"""


class TokenModel(SupervisedModel):
    """Predicts each token from itself."""

    def __init__(self, dropout: float = 0.0) -> None:
        net = nn.Sequential(
            *(nn.Embedding(WORDS, 8), nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU()),
            *(nn.Dropout(dropout), nn.Linear(8, WORDS), nn.Flatten(0, 1)),
        )
        super().__init__(net, _loss)


def _loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs.float(), targets.flatten())


def tokens() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randint(0, WORDS, (12, 5), generator=generator)
    return TensorDataset(inputs, inputs)


class Recorder(Hook):
    """Keeps the records, the metrics, and the dtypes and devices of the outputs."""

    def __init__(self) -> None:
        self.records: list[dict[str, float]] = []
        self.metrics: list[dict[str, float]] = []
        self.outputs: set[str] = set()

    def on_train_start(self, state: LoopState) -> None:
        linear: Any = state.model.module.net[5]
        linear.register_forward_hook(self._note)

    def on_log(self, state: LoopState, record: dict[str, float]) -> None:
        self.records.append(record)

    def on_eval_end(self, state: LoopState, metrics: dict[str, float]) -> None:
        self.metrics.append(metrics)

    def _note(self, module: nn.Module, inputs: Any, output: Tensor) -> None:
        self.outputs.add(f"{output.dtype} on {output.device.type}")


def build(
    device: str,
    *hooks: Hook,
    dtype: str = "",
    dropout: float = 0.0,
    run_dir: str | None = None,
    **options: Any,
) -> tuple[Runner, Recorder]:
    seed_rng(0)
    model = SingleDevice(TokenModel(dropout).to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    if dtype:
        wrapper: Any = AmpOptimWrapper(optimizer, dtype=dtype, **options)
    else:
        wrapper = OptimWrapper(optimizer, **options)
    loader = build_loader(tokens(), batch_size=2, shuffle=True)
    loop = EpochTrainLoop(
        loader,
        max_epochs=2,
        val_loop=ValLoop(loader, {"loss": MeanLoss()}),
        log_every_steps=1,
        prefetch_to_device=True,
    )
    recorder = Recorder()
    hooks = (*hooks, recorder)
    return Runner(model, loop, optim_wrapper=wrapper, hooks=hooks, run_dir=run_dir), recorder


def train(device: str, *hooks: Hook, **options: Any) -> dict[str, Any]:
    monitors = (EMAHook, GradNormHook, ThroughputHook, SpikeGuardHook, SystemHook, LedgerHook)
    runner, recorder = build(
        *(device, *hooks, *(monitor() for monitor in monitors)),
        accumulative_counts=2,
        clip_grad={"max_norm": 0.5},
        loss_weight="tokens",
        **options,
    )
    runner.train()
    return {
        "losses": [record["loss"] for record in recorder.records],
        "norms": [record.get("grad_norm") for record in recorder.records],
        "metrics": [metrics["loss"] for metrics in recorder.metrics],
        "outputs": sorted(recorder.outputs),
        "last": recorder.records[-1],
    }


# Reports ------------------------------------------------------------------------------------------


def full_precision() -> Any:
    return {device: train(device) for device in ("cpu", KIND)}


def bfloat16() -> Any:
    return train(KIND, dtype="bfloat16")


class Scales(Hook):
    """Keeps the loss scale and whether the weights changed, by update."""

    def __init__(self) -> None:
        self.updates: list[tuple[float, bool]] = []
        self._before: list[Tensor] = []

    def on_train_start(self, state: LoopState) -> None:
        self._before = _weights(state)

    def on_update(self, state: LoopState) -> None:
        after = _weights(state)
        changed = not all(map(torch.equal, self._before, after))
        self.updates.append((float(state.optim_wrapper.loss_scale), changed))
        self._before = after


def float16() -> Any:
    scales = Scales()
    result = train(KIND, scales, dtype="float16", loss_scale={"init_scale": 2.0**19})
    return {**result, "updates": scales.updates}


def _weights(state: LoopState) -> list[Tensor]:
    return [parameter.detach().cpu().clone() for parameter in state.model.parameters()]


def resumed() -> Any:
    hooks = [CheckpointHook(every_steps=5, every_epochs=None), RunInfoHook()]
    uninterrupted, recorder = build(KIND, *hooks, dropout=0.5, run_dir="whole")
    uninterrupted.train()
    middle = Path("whole/checkpoints/step_00000005")
    continued, other = build(KIND, dropout=0.5)
    # Draws other numbers than a run from the beginning.
    torch.rand(7, device=KIND)
    continued.train(resume=middle)
    on_host, _ = build("cpu", dropout=0.5)
    latest = find_checkpoint("whole")
    assert latest is not None
    load_checkpoint(latest).restore(on_host.state)
    info = json.loads(Path("whole/environment.json").read_text())
    return {
        "losses": [record["loss"] for record in recorder.records[5:]],
        "resumed": [record["loss"] for record in other.records],
        "is_same": all(map(torch.equal, _weights(uninterrupted.state), _weights(continued.state))),
        "on_host": all(map(torch.equal, _weights(uninterrupted.state), _weights(on_host.state))),
        "device": info["ranks"][0]["device_name"],
    }


def compiled() -> Any:
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("stepwrap").addHandler(handler)
    model = SingleDevice(TokenModel().to(KIND))
    compile_step(model, min_steps=0)
    wrapper = OptimWrapper(torch.optim.AdamW(model.parameters()))
    batch = tokens()[:4]
    losses = [float(model.train_step(batch, wrapper)["loss"]) for _ in range(3)]
    logging.getLogger("stepwrap").removeHandler(handler)
    return {"losses": losses, "messages": messages}


def config() -> Any:
    Path("small.yaml").write_text(CONFIG.format(kind=KIND))
    code = main(["train", "small.yaml", "hooks.progress=false"])
    records = [json.loads(line) for line in Path("config/metrics.jsonl").read_text().splitlines()]
    problems = []
    for word in ("launch.nproc=2", "device=cuda"):
        try:
            read_sections(load_config("small.yaml", [word]))
        except ConfigError as error:
            problems.append(str(error))
    return {"code": code, "records": records, "problems": problems}


def out_of_memory() -> Any:
    module = torch.get_device_module(KIND)
    calls, empty_cache = [], module.empty_cache
    module.empty_cache = lambda: calls.append(empty_cache())
    settings = load_config("small.yaml")
    with limited_memory(2000):
        fit = try_batch_size(settings, read_sections(settings), size=4)
    return {"fit": fit.name, "calls": len(calls)}


def streams() -> Any:
    device = torch.device(KIND, 0)
    torch.rand(1, device=device)
    names = [name for name, _ in hash_streams(device)]
    last_device = torch.device(KIND, torch.accelerator.device_count() - 1)
    before = dict(_namespaces(sys._getframe()))[""]
    torch.rand(1, device=device)
    after = dict(_namespaces(sys._getframe()))[""]
    with preserved_rng():
        drawn = torch.rand(1, device=last_device).item()
    return {
        "hashed": names,
        "traced": [name for name in before if before[name] != after[name]],
        "preserved": torch.rand(1, device=last_device).item() == drawn,
    }


def prefetched() -> Any:
    loader = build_loader(tokens(), batch_size=4)
    batches = list(prefetch_to_device(loader, KIND))
    return {
        "devices": sorted({tensor.device.type for batch in batches for tensor in batch}),
        "is_equal": all(
            torch.equal(batch[0].cpu(), other[0])
            for batch, other in zip(batches, loader, strict=True)
        ),
        "is_pinned": [tensor.is_pinned() for tensor in next(iter(loader))],
    }


def pinned_by_request() -> Any:
    loader = build_loader(tokens(), batch_size=4, pin_memory=True)
    return [tensor.is_pinned() for tensor in next(iter(loader))]


class SlowLoader:
    """Gives batches 0.1 s late, except for the first."""

    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Iterator[Any]:
        first_batch, *batches = build_loader(tokens(), batch_size=4)
        yield first_batch
        for batch in batches:
            time.sleep(0.1)
            yield batch


class LongWork(Hook):
    """Makes the device work until the host waits for it."""

    # Before the hook that measures.
    order = 0

    def on_batch_end(self, state: LoopState, batch: Any, logs: Any) -> None:
        torch.accelerator._sleep(1)  # type: ignore[attr-defined]


def throughput() -> Any:
    model = SingleDevice(TokenModel().to(KIND))
    wrapper = OptimWrapper(torch.optim.AdamW(model.parameters()))
    recorder = Recorder()
    hooks = [LongWork(), ThroughputHook(), recorder]
    loop = EpochTrainLoop(SlowLoader(), max_epochs=1, log_every_steps=3)
    # Without the default hooks of a runner, some of which wait for the device.
    loop.run(LoopState(model=model, optim_wrapper=wrapper), HookList(hooks))
    record = recorder.records[-1]
    seconds_per_step = 1 / record["steps_per_s"]
    return record["data_share"] * 3 * seconds_per_step


REPORTS = (
    *(full_precision, bfloat16, float16, resumed, compiled, config, out_of_memory, streams),
    *(prefetched, pinned_by_request, throughput),
)


def report() -> Mapping[str, Any]:
    results = {}
    for function in REPORTS:
        try:
            results[function.__name__] = function()
        except Exception:
            results[function.__name__] = traceback.format_exc()
    return results


if __name__ == "__main__":
    Path("report.json").write_text(json.dumps(report(), default=str))
