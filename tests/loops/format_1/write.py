"""Runs whose checkpoints are kept in this folder, and the program that wrote these checkpoints.

`.pt` checkpoints of formats 1 and 2 must load and resume for ever. Each case is one function that
builds a run, and an archive with the folder of its checkpoint. The archives and `expected.json`
were written by the last release that saves `.pt` files:

    python tests/loops/format_1/write.py FOLDER [CASE ...]

The program needs only the library, so that it also runs with another release of it. `expected.json`
has what that release itself restored, in new processes.
"""

from __future__ import annotations

import hashlib
import json
import random
import shutil
import sys
import tempfile
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, TensorDataset

from stepwrap.loops import (
    EMAHook,
    EpochTrainLoop,
    Hook,
    HookList,
    IterTrainLoop,
    LoopState,
    MeanLoss,
    SchedulerHook,
    ValLoop,
    build_loader,
    find_checkpoint,
    load_checkpoint,
    save_checkpoint,
    seed_rng,
)
from stepwrap.runner import Runner
from stepwrap.wrappers import (
    AmpOptimWrapper,
    OptimWrapper,
    OptimWrapperDict,
    SingleDevice,
    StepDistributedDataParallel,
    SupervisedModel,
    build_mesh,
    wrap_model,
)

HERE = Path(__file__).parent
SAMPLES = 24
# The settings of a parameter group to compare; other releases of torch have further ones.
_SETTINGS = ("lr", "initial_lr", "betas", "eps", "weight_decay", "momentum", "name", "param_names")
Record = dict[str, dict[str, str]]


class Save(Hook):
    """Save a checkpoint, keep what it must restore, and stop the run.

    Args:
        folder: the folder for the checkpoint.
        step: the finished updates at which to save.
        iteration: the finished batches at which to save instead.
        options: options of `save_checkpoint`.
    """

    order = 90

    def __init__(
        self,
        folder: Path,
        step: int | None = None,
        iteration: int | None = None,
        **options: Any,
    ) -> None:
        self.folder, self.step, self.iteration, self.options = folder, step, iteration, options
        self.record: Record = {}
        self.losses: list[float] = []

    def on_batch_start(self, state: LoopState, batch: Any) -> None:
        if state.iteration == self.iteration:
            # As an error between two batches would do.
            state.in_step = False
            self._save(state)
            raise InterruptedError

    def on_batch_end(self, state: LoopState, batch: Any, logs: Mapping[str, Any]) -> None:
        self.losses.append(float(logs["loss"]))

    def on_save_point(self, state: LoopState) -> None:
        if state.step == self.step and not self.record:
            self._save(state)
            state.request_stop("saved")

    def _save(self, state: LoopState) -> None:
        save_checkpoint(self.folder, state, **self.options)
        self.record = record(state)


@dataclass
class Run:
    """A run of one case; every rank has one.

    Attributes:
        state: its state.
        loop: its training loop.
        hooks: hooks in addition to those in `state.stateful`.
        saved_at: the options of `Save` for the checkpoint in this folder.
    """

    state: LoopState
    loop: Any
    hooks: list[Hook] = field(default_factory=list)
    saved_at: dict[str, Any] = field(default_factory=dict)

    def write(self, folder: Path) -> None:
        """Train a new run until its checkpoint is saved."""
        self._train(Save(folder, **self.saved_at))

    def restore(self, folder: Path) -> Record:
        """Restore the latest checkpoint and return what it restored."""
        path = find_checkpoint(folder)
        assert path is not None
        load_checkpoint(path).restore(self.state)
        average = self.state.stateful.get("hooks.ema")
        if average is not None:
            # Until then the hook keeps the saved average aside.
            average.on_train_start(self.state)
        return record(self.state)

    def continue_to(self, folder: Path, updates: int) -> tuple[Record, list[float]]:
        """Train further updates and save; return what must be restored, and the losses."""
        save = Save(folder, self.state.step + updates)
        self._train(save)
        return save.record, save.losses

    def _train(self, save: Save) -> None:
        hooks = [*self.state.stateful.values(), *self.hooks, save]
        try:
            self.loop.run(self.state, HookList([hook for hook in hooks if isinstance(hook, Hook)]))
        except InterruptedError:
            assert save.iteration is not None


# What a checkpoint restores.


def record(state: LoopState) -> Record:
    """Return hashes of all tensors, and the plain values, of this rank; every rank must call this.

    Sharded tensors are whole in it.
    """
    tensors, values = dict(_model_entries(state.model.module)), {}
    for label, optimizer in _optimizers(state):
        names = {id(p): name for name, p in state.model.module.named_parameters()}
        for number, group in enumerate(optimizer.param_groups):
            settings = {key: group[key] for key in _SETTINGS if key in group}
            settings["params"] = [names[id(p)] for p in group["params"]]
            values[f"{label}.group {number}"] = settings
            for parameter in group["params"]:
                for key, value in optimizer.state.get(parameter, {}).items():
                    tensors[f"{label}.{names[id(parameter)]}.{key}"] = value
    for name, stateful in state.stateful.items():
        if isinstance(stateful, EMAHook):
            average = stateful.state_dict()["model"]
            tensors |= {f"{name}.{key}": value for key, value in average.items()}
        elif isinstance(stateful, SchedulerHook):
            # Other releases of torch save further entries.
            schedules = stateful.state_dict()["schedulers"]
            values[name] = [(s["last_epoch"], s["base_lrs"], s["_last_lr"]) for s in schedules]
        else:
            values[name] = stateful.state_dict()
    values |= {f"counters.{key}": value for key, value in state.state_dict().items()}
    values |= {f"logs.{key}": value for key, value in state.logs.state_dict().items()}
    values |= {f"streams.{key}": value for key, value in _streams(state).items()}
    reader = state.data.reader
    if state.data.reader_state is not None or reader is None:
        values["loader"] = state.data.reader_state
    else:
        values["loader"] = reader.state_dict()
    values["window"] = [member.window_weight for member in _members(state)]
    scales = [getattr(member, "loss_scaler", None) for member in _members(state)]
    values["loss scales"] = [scale and scale.state_dict() for scale in scales]
    values["generators"] = state.data.generators.state_dict()
    if isinstance(state.model, Carrying):
        values["step"] = state.model.step_state()
    return {
        "tensors": {name: digest(value) for name, value in sorted(tensors.items())},
        "values": {name: describe(value) for name, value in sorted(values.items())},
    }


def _model_entries(model: nn.Module) -> Iterator[tuple[str, Any]]:
    saved = model.state_dict()
    for name, value in saved.items():
        # The settings of an adapter, which other releases of peft extend, are left out.
        if isinstance(value, Tensor) or name.endswith("extra_state"):
            yield f"model.{name}", value
    for name, buffer in model.named_buffers():
        if name not in saved:
            yield f"model.{name}", buffer
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            yield f"gradients.{name}", parameter.grad


def _members(state: LoopState) -> list[Any]:
    optim = state.optim_wrapper
    return list(optim.values()) if isinstance(optim, Mapping) else [optim]


def _optimizers(state: LoopState) -> list[tuple[str, Any]]:
    return [(f"optimizer {n}", member.optimizer) for n, member in enumerate(_members(state))]


def _streams(state: LoopState) -> dict[str, Any]:
    streams = {
        "python": random.getstate(),
        "torch": torch.get_rng_state(),
        "numpy": np.random.get_state(),
    }
    for name, module in state.model.module.named_modules():
        for key, value in vars(module).items():
            if isinstance(value, np.random.Generator):
                streams[f"{name}.{key}"] = value.bit_generator.state
    return {name: describe(value) for name, value in streams.items()}


def digest(value: Any) -> str:
    """Return the SHA-256 of dtype, shape, strides and bytes of a tensor, or of another value."""
    if not isinstance(value, Tensor):
        return hashlib.sha256(describe(value).encode()).hexdigest()
    value = value.full_tensor() if hasattr(value, "full_tensor") else value
    value = value.detach()
    form = [str(value.dtype), str(tuple(value.shape)), str(value.layout)]
    if value.layout is torch.strided:
        form.append(str(value.stride()))
    values = value.to_dense().reshape(-1).contiguous()
    content = bytes(values.view(torch.uint8).tolist()) if values.numel() else b""
    return hashlib.sha256("|".join(form).encode() + content).hexdigest()


def describe(value: Any) -> str:
    """Return a text with the types and values in nested containers; long texts are hashed."""
    text = _describe(value)
    return text if len(text) < 400 else f"sha256 {hashlib.sha256(text.encode()).hexdigest()}"


def _describe(value: Any) -> str:
    kind = type(value).__name__
    if isinstance(value, (Tensor, np.ndarray)):
        return f"tensor {digest(torch.as_tensor(value))}"
    if isinstance(value, Mapping):
        entries = [f"{_describe(key)}: {_describe(entry)}" for key, entry in value.items()]
        return f"{kind}({', '.join(entries)})"
    if isinstance(value, (list, tuple, set)):
        entries = [_describe(entry) for entry in value]
        return f"{kind}({', '.join(sorted(entries) if kind == 'set' else entries)})"
    return repr(value)


# One process: every kind of tensor and of value.

_DTYPES = (
    *("float16", "float64", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32"),
    *("uint64", "bool", "complex128", "float8_e4m3fn", "float8_e5m2"),
)


class Every(nn.Module):
    """A net with every kind of tensor, a random generator and further state."""

    table: Tensor
    rows: Tensor
    seen: Tensor

    def __init__(self, start: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 8)
        self.conv = nn.Conv2d(2, 2, 2).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm1d(8)
        self.dropout = nn.Dropout(0.5)
        self.short = nn.Parameter(torch.randn(8).bfloat16())
        self.wave = nn.Parameter(torch.randn(8, dtype=torch.complex64))
        self.scale = nn.Parameter(torch.tensor(1.0 + start))
        self.empty = nn.Parameter(torch.empty(0, 8))
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
        self.head = nn.Linear(8, 6)
        self.head.weight = self.embed.weight
        for name in _DTYPES:
            numbers = torch.arange(start, start + 4).to(getattr(torch, name))
            self.register_buffer(f"a_{name}", numbers)
        self.register_buffer("special", torch.tensor([-0.0, torch.nan, torch.inf]) * (1 - start))
        self.register_buffer("table", torch.arange(start, start + 6.0).view(2, 3).t())
        self.register_buffer("rows", torch.arange(start, start + 9.0)[5].expand(2, 3))
        self.register_buffer("slice", torch.arange(start, start + 999.0)[2:5])
        self.register_buffer("sparse", torch.eye(3).mul(start + 1).to_sparse())
        self.register_buffer("seen", torch.zeros(2) + start, persistent=False)
        self.noise = np.random.default_rng(5 + start)
        self.words: Any = None

    def forward(self, tokens: Tensor) -> Tensor:
        if self.training:
            self.seen += tokens.shape[0]
            self.words = {"last": int(tokens[0, 0]), 1: ("a", [None])}
        hidden = self.dropout(self.norm(self.embed(tokens).mean(1)))
        hidden = hidden * self.scale + self.short.float() + (self.wave * self.wave.conj()).real
        image = hidden.view(-1, 2, 2, 2).contiguous(memory_format=torch.channels_last)
        noise = self.noise.normal() if self.training else 0.0
        return self.head(hidden) + self.conv(image).mean() + noise + self.empty.sum()

    def get_extra_state(self) -> Any:
        return self.words

    def set_extra_state(self, state: Any) -> None:
        self.words = state


class Tokens(IterableDataset[Any]):
    """A stream of tokens in an order of its own generator, with a position."""

    def __init__(self, start: int) -> None:
        self.orders = np.random.default_rng(start)
        # It has numbers of 128 bits.
        self.first = self.orders.bit_generator.state
        self.at = 0

    def __iter__(self) -> Iterator[Any]:
        self.orders.bit_generator.state = self.first
        order = self.orders.permutation(SAMPLES).tolist()
        while self.at < SAMPLES:
            self.at += 1
            number = order[self.at - 1]
            yield torch.tensor([number, number * 3, number * 5]) % 6, number % 6
        self.at, self.first = 0, self.orders.bit_generator.state

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "first": self.first}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at, self.first = state["at"], state["first"]


class Notes(Hook):
    """A hook with values of every type that checkpoints accept."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {}

    def on_update(self, state: LoopState) -> None:
        base = torch.arange(96.0).view(2, 3, 4, 4)
        self.state = {
            "nested": {"a": {1: [1, 2.5, None, True], (1, "x"): b"\x00bytes"}, 2.5: {}, None: 1},
            "tuple": (1, (2.0, [])),
            "set": {3, 1, state.step},
            "none": None,
            "ordered": OrderedDict([("b", 1), ("a", OrderedDict())]),
            "counter": Counter("abca"),
            "numbers": [float("inf"), float("-inf"), float("nan"), -0.0, 1e-320, 2**70, 1 + 2j],
            "text": "\u00e4 \u2603\n\0",
            "empty": [{}, [], (), set(), ""],
            "others": [torch.bfloat16, torch.device("cpu"), torch.Size([2, 3])],
            "tensors": [
                *(
                    base.to(memory_format=torch.channels_last),
                    base[0, 1:],
                    base.transpose(0, 3),
                ),
                *(torch.tensor(1.5), torch.empty(0, 3), torch.tensor([1 + 2j]), base[0].bfloat16()),
                *(
                    torch.tensor([True]),
                    torch.tensor(3, dtype=torch.int8),
                    torch.eye(2).to_sparse(),
                ),
            ],
            "stepwrap": {"sharded": "no mark", "__tensor__": 0, "": {"": ""}, "a.b/c": 1},
        }

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        self.state = state


def single(seed: int = 0) -> Run:
    """Build a run on one process with everything but gradients.

    It was saved in the middle of a pass over a stream, after a validation of the moving average.
    """
    seed_rng(seed)
    model = SingleDevice(SupervisedModel(Every(seed), nn.CrossEntropyLoss()))
    named = dict(model.module.named_parameters())
    matrices = [p for name, p in named.items() if "weight" in name]
    vectors = [p for name, p in named.items() if "weight" not in name and p.requires_grad]
    optimizer = torch.optim.AdamW(
        [
            {"params": matrices, "name": "matrices"},
            {"params": vectors, "weight_decay": 0.0, "lr": 0.1},
        ],
        lr=0.01 + seed,
    )
    state = LoopState(model, OptimWrapper(optimizer))
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    state.stateful = {
        "hooks.ema": EMAHook(decay=0.5),
        "hooks.scheduler": SchedulerHook([(scheduler, "step")]),
        "hooks.notes": Notes(),
    }
    batch = torch.arange(12).view(4, 3) % 6, torch.arange(4)
    loop = IterTrainLoop(
        build_loader(Tokens(seed), batch_size=4),
        max_steps=20,
        val_loop=ValLoop([batch], {"loss": MeanLoss()}),
        val_interval=2,
        log_every_steps=3,
        # It cannot undo changes of expanded buffers.
        sanity_val=False,
    )
    saved_at = {"step": 4, "is_best": True, "reason": "signal"}
    return Run(state, loop, saved_at=saved_at)


# Several optimizers, and a loss scale, in the middle of an accumulation window.


class Pair(SupervisedModel):
    """A model with two nets, each with its own optimizer."""

    def train_step(self, data: Any, optim_wrapper: Any) -> dict[str, Tensor]:
        inputs, target = data
        loss = nn.functional.cross_entropy(self.net[0](inputs), target)
        optim_wrapper["first"].update_params(loss)
        other = nn.functional.cross_entropy(self.net[1](inputs), target)
        optim_wrapper["second"].update_params(other)
        return {"loss": loss.detach(), "other": other.detach()}


def members(seed: int = 0) -> Run:
    """Build a run on one process with two optimizers, one of them with a loss scale.

    It was saved in the middle of an accumulation window.
    """
    seed_rng(seed)
    model = Pair(nn.ModuleList([nn.Linear(4, 3), nn.Linear(4, 3)]), nn.CrossEntropyLoss())
    sgd = torch.optim.SGD(model.net[0].parameters(), 0.1, momentum=0.9)
    adam = torch.optim.Adam(model.net[1].parameters(), 0.1)
    scale = {"init_scale": 8.0, "growth_interval": 2}
    optim = OptimWrapperDict(
        first=OptimWrapper(sgd, 2),
        second=AmpOptimWrapper(adam, 2, dtype="float16", loss_scale=scale),
    )
    loop = IterTrainLoop(numbered_batches(0), max_steps=20)
    return Run(LoopState(SingleDevice(model), optim), loop, saved_at={"iteration": 5})


# Three processes: what differs between ranks.


def classifier() -> SupervisedModel:
    net = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Dropout(0.3), nn.Linear(5, 3))
    return SupervisedModel(net, nn.CrossEntropyLoss())


def samples() -> TensorDataset:
    """Return inputs `(SAMPLES, 4)`, of which the first is the sample's number, and targets."""
    numbers = torch.arange(SAMPLES)
    inputs = torch.stack([numbers, numbers % 5, numbers % 7, -numbers], 1) / 8.0
    return TensorDataset(inputs, numbers % 3)


def numbered_batches(rank: int) -> list[tuple[Tensor, Tensor]]:
    """Return six batches of three samples, others on each rank."""
    inputs, target = samples().tensors
    return [(inputs[at : at + 3] + rank, target[at : at + 3]) for at in range(0, 18, 3)]


class Carrying(StepDistributedDataParallel):
    """A wrapper whose training step carries a state from batch to batch."""

    carried: Any = None

    def train_step(self, data: Any, optim_wrapper: Any) -> Any:
        self.carried = {"mean": data[0].mean(0), "rank": dist.get_rank(), "shape": data[0].shape}
        return super().train_step(data, optim_wrapper)

    def step_state(self) -> dict[str, Any]:
        return {"carried": self.carried}

    def load_step_state(self, state: dict[str, Any]) -> None:
        self.carried = state["carried"]


class Order(Sampler[int]):
    """A sampler that draws from its own generator."""

    def __init__(self, seed: int) -> None:
        self.orders = np.random.default_rng(seed)
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Note the pass; a sampler with this method is resumed by index."""
        self.epoch = epoch

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[int]:
        return iter(self.orders.permutation(SAMPLES).tolist())


class Noisy(Dataset[Any]):
    """A data set that draws noise from its own generator."""

    def __init__(self, seed: int) -> None:
        self.data, self.noise = samples(), np.random.default_rng(seed)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        inputs, target = self.data[index]
        return inputs + float(self.noise.normal()), target


def ddp(seed: int = 0) -> Run:
    """Build a run on three ranks with own statistics of BatchNorm, generators and step states.

    It was saved in the middle of a pass.
    """
    rank = dist.get_rank()
    seed_rng(seed)
    model = Carrying(classifier(), broadcast_buffers=False)
    seed_rng(seed + rank)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    state = LoopState(model, OptimWrapper(optimizer))
    state.stateful = {"hooks.ema": EMAHook(decay=0.5)}
    loader = DataLoader(Noisy(seed + rank), batch_size=4, sampler=Order(seed + rank))
    loop = EpochTrainLoop(loader, max_epochs=3, per_rank=True)
    return Run(state, loop, saved_at={"step": 3})


# Two processes: sharded tensors, gradients of a window, and a position in an epoch.


def fsdp(seed: int = 0, kind: str = "fsdp") -> Run:
    """Build a run under `kind`; it was saved under FSDP2 on two ranks, which have own buffers."""
    seed_rng(seed)
    net = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 6), nn.Linear(6, 3))
    model, rank = SupervisedModel(net, nn.CrossEntropyLoss()), 0
    if kind == "single":
        wrapped: Any = SingleDevice(model)
    else:
        rank = dist.get_rank()
        options = {"mesh": build_mesh({"data": dist.get_world_size()}), "shard": ["net.2"]}
        wrapped = wrap_model(kind, model, **(options if kind == "fsdp" else {}))
    seed_rng(seed + rank)
    optimizer = torch.optim.AdamW(wrapped.parameters(), 0.01 + seed)
    state = LoopState(wrapped, OptimWrapper(optimizer))
    state.stateful = {"hooks.ema": EMAHook(decay=0.5)}
    loop = IterTrainLoop(numbered_batches(rank), max_steps=20, per_rank=kind != "single")
    return Run(state, loop, saved_at={"step": 3})


def window(seed: int = 0, kind: str = "ddp") -> Run:
    """Build a run that accumulates three batches whose losses have weights.

    It was saved on two ranks after two batches of a window, as after an error.
    """
    seed_rng(seed)
    model, rank = SupervisedModel(nn.Linear(4, 3), nn.CrossEntropyLoss()), 0
    if kind == "ddp":
        rank = dist.get_rank()
    wrapped: Any = StepDistributedDataParallel(model) if kind == "ddp" else SingleDevice(model)
    seed_rng(seed + rank)
    optimizer = torch.optim.SGD(wrapped.parameters(), 0.1 + seed, momentum=0.9)
    optim = OptimWrapper(optimizer, 3, loss_weight="samples")
    # The last batch of each window is smaller on the second rank.
    batches = [
        (inputs[: 3 - rank * (at % 3 == 2)], target[: 3 - rank * (at % 3 == 2)])
        for at, (inputs, target) in enumerate(numbered_batches(rank))
    ]
    loop = IterTrainLoop(batches, max_steps=20, per_rank=kind == "ddp")
    return Run(LoopState(wrapped, optim), loop, saved_at={"iteration": 5})


class Seen(Hook):
    """Keep the numbers of the samples in each update."""

    def __init__(self) -> None:
        self.samples: list[list[int]] = []

    def on_batch_start(self, state: LoopState, batch: Any) -> None:
        if getattr(state.optim_wrapper, "batch_counts", True):
            self.samples += [[] for _ in range(state.step + 1 - len(self.samples))]
            self.samples[state.step] += [round(number * 8) for number in batch[0][:, 0].tolist()]


def elastic(seed: int = 0) -> Run:
    """Build a run whose update has six samples on any number of ranks.

    It was saved on two ranks in the middle of the second epoch.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    seed_rng(seed)
    model = StepDistributedDataParallel(SupervisedModel(nn.Linear(4, 3), nn.CrossEntropyLoss()))
    seed_rng(seed + rank)
    optim = OptimWrapper(torch.optim.Adam(model.parameters(), 0.01), loss_weight="samples")
    loader = build_loader(
        samples(), batch_size=3, train=True, shuffle=True, seed=7, shard=(rank, ranks)
    )
    loop = EpochTrainLoop(loader, max_epochs=3)
    return Run(LoopState(model, optim), loop, [Seen()], saved_at={"step": 5})


# The runner, which saves only the weights of an adapter.


class Words(nn.Sequential):
    """A net for tokens, which a config can build."""

    def __init__(self) -> None:
        super().__init__(nn.Embedding(6, 4), nn.Flatten(), nn.Linear(12, 5), nn.Linear(5, 6))
        # A checkpoint has a hash of these weights, which random ones might not match on another
        # processor.
        for parameter in self.parameters():
            numbers = torch.arange(parameter.numel()).view(parameter.shape)
            parameter.data = (numbers % 7 - 3) / 8


class Sentences(Dataset[Any]):
    """Three tokens and their class."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.tensor([index, index * 3, index * 5]) % 6, index % 6


def adapter_config(run_dir: str, epochs: int, seed: int) -> dict[str, Any]:
    """Return the config of a run that trains an adapter (LoRA) and one whole layer."""
    hooks: dict[str, Any] = dict.fromkeys(("progress", "log", "throughput", "run_info"), False)
    net = {"type": Words}
    return {
        "model": {"type": "SupervisedModel", "net": net, "loss": {"type": "CrossEntropyLoss"}},
        "adapter": {"r": 2, "target_modules": ["net.0", "net.2"], "modules_to_save": ["net.3"]},
        "device": "cpu",
        "seed": seed,
        "optimizer": {"type": "AdamW", "lr": 0.01},
        "data": {"train": {"dataset": {"type": Sentences}, "batch_size": 8}},
        "train": {"type": "EpochTrainLoop", "max_epochs": epochs},
        "hooks": {**hooks, "checkpoint": {"every_steps": 3}, "ema": {"decay": 0.5}},
        "run_dir": run_dir,
    }


@dataclass
class AdapterRun:
    """The run of an adapter through the runner, with the methods of `Run`.

    Attributes:
        seed: the seed of the run.
    """

    seed: int

    def write(self, folder: Path) -> None:
        """Train one epoch; the last update's checkpoint is kept."""
        with tempfile.TemporaryDirectory() as run_dir:
            self._runner(run_dir, 1).train()
            (path,) = Path(run_dir, "checkpoints").glob("step_*")
            (folder / "checkpoints").mkdir(parents=True)
            shutil.move(path, folder / "checkpoints" / path.name)

    def restore(self, folder: Path) -> Record:
        """Restore the latest checkpoint and return what it restored."""
        runner = self._runner(str(folder), 1)
        return Run(runner.state, None).restore(folder)

    def continue_to(self, folder: Path, epochs: int) -> tuple[Record, list[float]]:
        """Resume the run from its latest checkpoint until so many epochs are finished."""
        runner = self._runner(str(folder), epochs)
        return record(runner.train(resume=True)), []

    def _runner(self, run_dir: str, epochs: int) -> Runner:
        return Runner.from_config(adapter_config(run_dir, epochs, self.seed))


def adapter(seed: int = 0) -> AdapterRun:
    """Build a run of the runner that trains an adapter; it was saved after one epoch."""
    return AdapterRun(seed)


# By name: the number of ranks that saved it, and the function that builds it.
CASES: dict[str, tuple[int, Callable[..., Any]]] = {
    "single": (1, single),
    "members": (1, members),
    "ddp": (3, ddp),
    "fsdp": (2, fsdp),
    "window": (2, window),
    "elastic": (2, elastic),
    "adapter": (1, adapter),
}


# The program.


def _write(name: str, folder: str) -> None:
    CASES[name][1]().write(Path(folder, name))


def _restore(name: str, folder: str) -> tuple[Record, list[float], Any]:
    """Restore a checkpoint; return what it restored, and the losses of two further updates."""
    run = CASES[name][1](seed=7)
    restored = run.restore(Path(folder, name))
    if isinstance(run, AdapterRun):
        return restored, [], []
    with tempfile.TemporaryDirectory() as continued:
        target = Path(_from_first_rank(continued))
        losses = run.continue_to(target, 2)[1]
        _from_first_rank(None)
    hooks = [hook for hook in run.hooks if isinstance(hook, Seen)]
    samples = [update for hook in hooks for update in hook.samples[5:]]
    return restored, losses, samples


def pack(folder: Path, archive: Path) -> None:
    """Write the files of a run's folder; the states of random streams shrink to half."""
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as packed:
        for file in sorted(path for path in folder.rglob("*") if path.is_file()):
            # The time is that of the format, which is the same for everyone.
            entry = zipfile.ZipInfo(str(file.relative_to(folder)))
            packed.writestr(entry, file.read_bytes(), zipfile.ZIP_DEFLATED, 9)


def unpack(name: str, folder: Path, archives: Path = HERE) -> Path:
    """Write the checkpoint of a case below `folder`; return the folder of the run."""
    with zipfile.ZipFile(archives / f"{name}.zip") as packed:
        packed.extractall(folder / name)
    return folder / name


def _from_first_rank(value: Any) -> Any:
    entries = [value]
    if dist.is_initialized():
        dist.broadcast_object_list(entries)
    return entries[0]


def _rank(rank: int, ranks: int, function: Any, name: str, folder: str, shared: str) -> None:
    torch.set_num_threads(1)
    if ranks > 1:
        dist.init_process_group(
            "gloo", init_method=f"file://{shared}/store", rank=rank, world_size=ranks
        )
    result = function(name, folder)
    Path(shared, f"{rank}.json").write_text(json.dumps(result))
    if ranks > 1:
        dist.destroy_process_group()


def _fork_ranks(function: Any, name: str, folder: str) -> list[Any]:
    ranks = CASES[name][0]
    with tempfile.TemporaryDirectory() as shared:
        arguments = (ranks, function, name, folder, shared)
        # Forked processes need not import torch again.
        torch.multiprocessing.start_processes(_rank, arguments, nprocs=ranks, start_method="fork")
        return [json.loads(Path(shared, f"{rank}.json").read_text()) for rank in range(ranks)]


def main(folder: str, *names: str) -> None:
    """Write the checkpoints of the named cases, or of all, and what they restore."""
    expected_file = Path(folder, "expected.json")
    expected = json.loads(expected_file.read_text()) if expected_file.exists() else {}
    for name in names or CASES:
        with tempfile.TemporaryDirectory() as runs:
            _fork_ranks(_write, name, runs)
            pack(Path(runs, name), Path(folder, f"{name}.zip"))
        with tempfile.TemporaryDirectory() as runs:
            unpack(name, Path(runs), Path(folder))
            results = _fork_ranks(_restore, name, runs)
        expected[name] = {
            "restored": [restored for restored, _, _ in results],
            "losses": [losses for _, losses, _ in results],
            "samples": [samples for _, _, samples in results],
        }
        expected_file.write_text(json.dumps(expected, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
