"""The growth of costs with the size of the input.

Every curve has sizes from small to large and one cost for each: the minimum of some repetitions, in
processor time unless something is waited for. The exponent of a curve is the slope of a line
through its upper half on logarithmic axes, where constant costs no longer matter: 0 is constant, 1
linear; exponents above 1.2 are marked.

- parameters: an update (`plain` is the hand-written loop), and saving and loading a checkpoint, for
  sums of layers of 256 x 256
- tensors: layers of 2 x 2, all in one list, to measure the cost per tensor
- samples: from the construction of a loader to its first batch: in order, shuffled, and resumed in
  the middle of an epoch
- registry: registering entries, finding one, and missing one (which searches for similar names)
- config: reading keys from YAML, checking, writing; overrides; interpolations; only mistakes
- log values: a step that returns many values, and a record of them
- ranks: gloo processes on this machine; an update under DDP, compared with torch's, and a
  checkpoint. More ranks than cores take turns, so this grows with the ranks per core
- fake world: wrapping on rank 0 of torch's fake process group, in time and memory

    python benchmarks/scale.py [--quick] [--only config registry] [--plot scale.png]
"""

import argparse
import gc
import json
import math
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import linear_regression
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from report import Report, parse_options
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from stepwrap.loops import (
    EpochTrainLoop,
    HookList,
    LogHook,
    LoopState,
    build_loader,
    load_checkpoint,
    save_checkpoint,
)
from stepwrap.registry import (
    Registry,
    config_from_dict,
    examine_names,
    format_config,
    load_config,
)
from stepwrap.runner import launch
from stepwrap.wrappers import (
    OptimWrapper,
    Preparation,
    SingleDevice,
    StepDistributedDataParallel,
    SupervisedModel,
    build_mesh,
    param_groups,
    wrap_model,
)
from stepwrap.wrappers.optimizers.param_groups import named_parameters as own_parameters

STEEP = 1.2
BLOCK = 256


class Curve(NamedTuple):
    name: str
    unit: str
    points: list[tuple[int, float]]

    @property
    def slope(self) -> float:
        """The exponent of growth over the upper half of the sizes; 0 for a single size."""
        upper = self.points[min(len(self.points) // 2, len(self.points) - 2) :]
        if len(upper) < 2:
            return 0.0
        costs = [math.log(max(cost, 1e-9)) for _, cost in upper]
        return linear_regression([math.log(size) for size, _ in upper], costs).slope


def sizes(least: int, most: int, per_decade: int = 1) -> list[int]:
    decades = round(math.log10(most / least))
    return [round(least * 10 ** (at / per_decade)) for at in range(decades * per_decade + 1)]


def cost(
    call: Callable[[], object],
    least_s: float = 0.02,
    clock: Callable[[], float] = time.process_time,
) -> float:
    """Return the minimum seconds of up to 5 calls, or fewer if they are slow."""
    durations, begun = [], clock()
    while len(durations) < 2 or (len(durations) < 5 and clock() - begun < 5 * least_s):
        start = clock()
        call()
        durations.append(clock() - start)
        if durations[-1] > 0.5:
            break
    return min(durations)


def curves(costs: dict[str, Callable[[int], float]], at: list[int], unit: str = "s") -> list[Curve]:
    return [Curve(name, unit, [(size, run(size)) for size in at]) for name, run in costs.items()]


# Parameters.


class Sum(nn.ModuleList):
    """The sum of square layers; the activations of a long chain would become too small."""

    def __init__(self, parameters: int, width: int) -> None:
        count = max(1, round(parameters / (width * width)))
        super().__init__(nn.Linear(width, width, bias=False) for _ in range(count))

    def forward(self, inputs: Tensor) -> Tensor:
        total = torch.zeros_like(inputs)
        for layer in self:
            total = total + layer(inputs)
        return total


def make_run(parameters: int, width: int) -> tuple[LoopState, tuple[Tensor, Tensor]]:
    model = SingleDevice(SupervisedModel(Sum(parameters, width), nn.MSELoss()))
    optim = OptimWrapper(torch.optim.SGD(model.parameters(), lr=1e-6))
    optim.initialize_count_status(model, 0, 10**9)
    return LoopState(model, optim), (torch.randn(8, width), torch.randn(8, width))


def measure_parameters(size: int) -> dict[str, float]:
    width = min(BLOCK, round(math.sqrt(size)))
    state, batch = make_run(size, width)
    plain = Sum(size, width)
    by_hand = torch.optim.SGD(plain.parameters(), lr=1e-6)

    def step_by_hand() -> None:
        nn.functional.mse_loss(plain(batch[0]), batch[1]).backward()
        by_hand.step()
        by_hand.zero_grad()

    with tempfile.TemporaryDirectory() as folder:
        save = partial(save_checkpoint, Path(folder), state)
        step = partial(state.model.train_step, batch, state.optim_wrapper)
        return {
            "plain step": cost(step_by_hand, 0.1),
            "step": cost(step, 0.1),
            "save": cost(save),
            "load": cost(partial(load_checkpoint(save()).restore, state)),
        }


def scale_parameters(quick: bool) -> Iterator[Curve]:
    torch.set_num_threads(1)
    at = sizes(10_000, 10**7 if quick else 10**8)
    by_parameter_count: dict[str, list[tuple[int, float]]] = {}
    for size in at:
        for name, seconds in measure_parameters(size).items():
            by_parameter_count.setdefault(name, []).append((size, seconds))
        gc.collect()
    yield from (
        Curve(f"parameters: {name}", "s", points) for name, points in by_parameter_count.items()
    )


def by_tensors(quick: bool) -> Iterator[Curve]:
    at = sizes(10, 1_000 if quick else 10_000)

    def wrap(size: int) -> float:
        net = nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(size)))
        return cost(lambda: SingleDevice(SupervisedModel(net, nn.MSELoss())))

    def groups(size: int) -> float:
        model = make_run(4 * size, 2)[0].model
        paramwise = {"custom_keys": {"net.1": {"lr_mult": 0.1}, "net.2": {"decay_mult": 0.0}}}
        return cost(
            lambda: param_groups(
                own_parameters(model), lr=0.1, weight_decay=0.1, paramwise=paramwise
            )
        )

    def first_update(size: int) -> float:
        state, batch = make_run(4 * size, 2)
        return cost(lambda: state.model.train_step(batch, state.optim_wrapper))

    def save(size: int) -> float:
        state, _ = make_run(4 * size, 2)
        with tempfile.TemporaryDirectory() as folder:
            return cost(lambda: save_checkpoint(Path(folder), state))

    def mismatch(size: int) -> float:
        saved, expected_state = make_run(4 * size, 2)[0], LoopState(SingleDevice(Renamed(size)))
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = load_checkpoint(save_checkpoint(Path(folder), saved))
            return cost(lambda: must_raise(lambda: checkpoint.load_model(expected_state.model)))

    def load(size: int) -> float:
        state, _ = make_run(4 * size, 2)
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = load_checkpoint(save_checkpoint(Path(folder), state))
            return cost(lambda: checkpoint.load_model(state.model))

    def load_by_torch(size: int) -> float:
        model = make_run(4 * size, 2)[0].model.module
        weights = model.state_dict()
        return cost(lambda: model.load_state_dict(weights))

    costs = {
        "wrap": wrap,
        "paramwise groups": groups,
        "step": first_update,
        "save": save,
        "load the model": load,
        "torch's load_state_dict alone": load_by_torch,
        "weights of another model refused": mismatch,
    }
    yield from curves({f"tensors: {name}": run for name, run in costs.items()}, at)


class Renamed(nn.Module):
    """A model whose parameters have other names than in `make_run`."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(size)))

    def forward(self, inputs: Tensor, targets: Tensor, mode: str = "loss") -> dict[str, Tensor]:
        return {"loss": nn.functional.mse_loss(self.blocks(inputs), targets)}


def must_raise(call: Callable[[], object]) -> None:
    try:
        call()
    except Exception:
        return
    raise AssertionError("the call did not raise")


# Samples.


class Numbers:
    """A dataset of its indices."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        return index


def scale_samples(quick: bool) -> Iterator[Curve]:
    def first_batch(size: int, shuffle: bool, resumed: bool = False) -> float:
        def call() -> None:
            loader = build_loader(Numbers(size), batch_size=32, train=True, shuffle=shuffle, seed=0)
            if resumed:
                loader.batch_sampler.set_position(1, len(loader) // 2)
            next(iter(loader))

        return cost(call)

    costs = {
        "samples: torch.randperm alone": lambda size: cost(partial(torch.randperm, size)),
        "samples: start in order": partial(first_batch, shuffle=False),
        "samples: start shuffled": partial(first_batch, shuffle=True),
        "samples: resume within an epoch": partial(first_batch, shuffle=True, resumed=True),
    }
    yield from curves(costs, sizes(1_000, 10**6 if quick else 10**7))


# Registry.


def run_entries(quick: bool) -> Iterator[Curve]:
    def filled(size: int) -> Registry:
        registry = Registry("THINGS", scope="scale")
        for index in range(size):
            registry.register_module(f"Thing{index}", module=Numbers)
        return registry

    def get_last(size: int) -> float:
        registry, calls = filled(size), range(1000)
        return cost(lambda: [registry.get(f"Thing{size - 1}") for _ in calls]) / len(calls)

    def missed(size: int) -> float:
        registry = filled(size)
        return cost(lambda: must_raise(lambda: registry.resolve("Thng1")))

    def scopes(size: int) -> float:
        root = Registry("THINGS", scope="root")
        children = [Registry("THINGS", parent=root, scope=f"s{index}") for index in range(size)]
        return cost(lambda: children[0].at_scope(f"s{size - 1}"))

    costs = {
        "registry: all registered": lambda size: cost(lambda: filled(size)),
        "registry: one found": get_last,
        "registry: one missed": missed,
        "registry: a scope found": scopes,
    }
    with tempfile.TemporaryDirectory() as folder, working_in(folder):
        yield from curves(costs, sizes(10, 10_000))


@contextmanager
def working_in(folder: str) -> Iterator[None]:
    before = os.getcwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


# Config.


def run_config(table: dict[str, object]) -> dict[str, object]:
    return {
        "model": {"type": "torch.nn.Linear", "in_features": 2, "out_features": 2},
        "hooks": {"log": {"type": "LogHook", **table}},
    }


def run_keys(quick: bool) -> Iterator[Curve]:
    def get_file(size: int, value: Callable[[int], object], **more: object) -> Path:
        table = {f"key{index}": value(index) for index in range(size)}
        path = Path(f"keys{size}.json.yaml")
        path.write_text(json.dumps(run_config({**more, **table})))
        return path

    def read(size: int) -> float:
        path = get_file(size, int)
        return cost(lambda: load_config(path))

    def checked(size: int) -> float:
        config = load_config(get_file(size, int))
        return cost(lambda: examine_names(config))

    def written(size: int) -> float:
        config = load_config(get_file(size, int))
        return cost(lambda: format_config(config, origins=True))

    def overridden(size: int) -> float:
        path = get_file(size, lambda index: {"a": index})
        overrides = [f"hooks.log.key{index}.a=-1" for index in range(size)]
        return cost(lambda: load_config(path, overrides))

    def listed(size: int) -> float:
        path = get_file(1, lambda _: [{"a": 0}] * size)
        overrides = [f"hooks.log.key0.{index}.a=-1" for index in range(size)]
        return cost(lambda: load_config(path, overrides))

    def interpolated(size: int) -> float:
        path = get_file(size // 2, lambda _: "${hooks.log.one}", one=1)
        return cost(lambda: load_config(path))

    def wrong(size: int) -> float:
        path = get_file(size, lambda index: f"${{hooks.log.ke{index}}}")
        return cost(lambda: must_raise(lambda: load_config(path)))

    def unknown(size: int) -> float:
        named = {f"key{index}": {"a": 1} for index in range(size)}
        config = config_from_dict({**run_config({}), "hooks": named})
        return cost(lambda: examine_names(config))

    costs = {
        "read": read,
        "checked": checked,
        "written": written,
        "overrides": overridden,
        "overrides in a list": listed,
        "interpolations": interpolated,
        "wrong interpolations": wrong,
        "unknown hooks": unknown,
    }
    with tempfile.TemporaryDirectory() as folder, working_in(folder):
        named = {f"config keys: {name}": run for name, run in costs.items()}
        yield from curves(named, sizes(10, 1_000 if quick else 10_000))


# Log values.


class Chatty(nn.Module):
    """A model that logs `values` numbers for each batch."""

    def __init__(self, values: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))
        self.logged = {f"value{index}": torch.ones(()) for index in range(values - 1)}

    def train_step(self, batch: Tensor, optim_wrapper: OptimWrapper) -> dict[str, Tensor]:
        loss = (self.weight * batch).sum()
        optim_wrapper.update_params(loss)
        return {"loss": loss.detach(), **self.logged}


def by_log_values(quick: bool) -> Iterator[Curve]:
    steps = 50

    def per_step(size: int, log_every_steps: int) -> float:
        model = Chatty(size)
        optim = OptimWrapper(torch.optim.SGD(model.parameters(), lr=1e-6))

        def run() -> None:
            with tempfile.TemporaryDirectory() as folder:
                state = LoopState(model, optim, run_dir=Path(folder))
                loop = EpochTrainLoop(
                    [torch.ones(1)] * steps, max_epochs=1, log_every_steps=log_every_steps
                )
                loop.run(state, HookList([LogHook()]))

        return cost(run) / steps

    costs = {
        "log values: a step, a record every 50": partial(per_step, log_every_steps=50),
        "log values: a step, a record each": partial(per_step, log_every_steps=1),
    }
    yield from curves(costs, sizes(1, 1_000))


# Ranks.


def run_rank(parameters: int, folder: str) -> dict[str, float]:
    torch.set_num_threads(1)
    model = StepDistributedDataParallel(SupervisedModel(Sum(parameters, BLOCK), nn.MSELoss()))
    optim = OptimWrapper(torch.optim.SGD(model.parameters(), lr=1e-6))
    optim.initialize_count_status(model, 0, 10**9)
    batch = (torch.randn(8, BLOCK), torch.randn(8, BLOCK))
    by_hand = DistributedDataParallel(Sum(parameters, BLOCK))
    optimizer = torch.optim.SGD(by_hand.parameters(), lr=1e-6)

    def update_by_hand() -> None:
        nn.functional.mse_loss(by_hand(batch[0]), batch[1]).backward()
        optimizer.step()
        optimizer.zero_grad()

    calls: dict[str, Callable[[], object]] = {
        "torch's DDP by hand": update_by_hand,
        "update": lambda: model.train_step(batch, optim),
        "save": lambda: save_checkpoint(Path(folder), LoopState(model, optim)),
    }
    best: dict[str, float] = dict.fromkeys(calls, math.inf)
    for _ in range(10):
        for name, call in calls.items():
            dist.barrier()
            start = time.perf_counter()
            call()
            dist.barrier()
            best[name] = min(best[name], time.perf_counter() - start)
    return best


def scale_ranks(quick: bool) -> Iterator[Curve]:
    by_rank_count: dict[str, list[tuple[int, float]]] = {}
    for ranks in (1, 2) if quick else (1, 2, 4):
        with tempfile.TemporaryDirectory() as folder:
            if ranks == 1:
                dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
                costs = run_rank(1_000_000, folder)
                dist.destroy_process_group()
            else:
                costs = launch(run_rank, (1_000_000, folder), nproc=ranks, backend="gloo")[0]
        for name, seconds in costs.items():
            by_rank_count.setdefault(name, []).append((ranks, seconds))
    yield from (Curve(f"ranks: {name}", "s", points) for name, points in by_rank_count.items())


# A world of which only rank 0 exists.


class Net(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(8))

    def forward(self, inputs: Tensor) -> Tensor:
        for block in self.blocks:
            inputs = block(inputs)
        return inputs


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(inputs)))


def run_fake_worlds(kind: str, world_sizes: list[int]) -> None:
    """Print the seconds and the growth in MB of wrapping 16.8 million parameters."""
    torch_broadcast = dist.broadcast
    sent: dict[int, Tensor] = {}

    def broadcast(tensor: Tensor, src: int, group: Any = None, **options: Any) -> Any:
        # Pretend that every rank sends the same as rank 0.
        if src == 0:
            sent[tensor.numel()] = tensor.clone()
        elif tensor.numel() in sent:
            tensor.copy_(sent[tensor.numel()])
        return torch_broadcast(tensor, src, group, **options)

    dist.broadcast = broadcast
    # One thread, so that the process may fork.
    torch.set_num_threads(1)
    # Exclude the imports of the first wrapping.
    run_fake_world(kind, world_sizes[0], width=8)
    for world_size in world_sizes:
        # Fork for each size: freed memory of an earlier one would be reused, which hides growth.
        child = os.fork()
        if child == 0:
            sent.clear()
            print(json.dumps(run_fake_world(kind, world_size)), flush=True)
            os._exit(0)
        os.waitpid(child, 0)


def run_fake_world(kind: str, world_size: int, width: int = 1024) -> tuple[float, float]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    gc.collect()
    before, start = resident_mb(), time.process_time()
    wrapped = wrap_in_fake_world(kind, world_size, width)
    costs = time.process_time() - start, resident_mb() - before
    del wrapped
    dist.destroy_process_group()
    return costs


def wrap_in_fake_world(kind: str, world_size: int, width: int) -> nn.Module:
    model = SupervisedModel(Net(width), nn.MSELoss())
    if kind == "fsdp":
        from stepwrap.wrappers import StepFullyShardedDataParallel

        return StepFullyShardedDataParallel(model)
    if kind == "ddp":
        return StepDistributedDataParallel(model)
    mesh = build_mesh({"data": world_size // 8, "tensor": 8}, "cpu")
    plan = {"net.blocks.*.up": "colwise", "net.blocks.*.down": "rowwise"}
    prepare = Preparation(tensor_parallel=plan)
    return wrap_model(StepDistributedDataParallel, model, mesh=mesh, prepare=prepare)


def resident_mb() -> float:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize() / 2**20


def simulate_ranks(quick: bool) -> Iterator[Curve]:
    at = [8, 1024] if quick else [8, 64, 256, 1024]
    for kind in ("ddp", "fsdp", "ddp + tensor 8"):
        command = [sys.executable, __file__, "--fake-worlds", kind, *map(str, at)]
        ended = subprocess.run(command, capture_output=True, text=True, check=True)
        costs = [json.loads(line) for line in ended.stdout.splitlines()]
        for unit, values in zip(("s", "MB"), zip(*costs, strict=True), strict=True):
            points = list(zip(at, values, strict=True))
            yield Curve(f"fake world: {kind}, {'time' if unit == 's' else 'memory'}", unit, points)


GROUPS: dict[str, Callable[[bool], Iterator[Curve]]] = {
    "parameters": scale_parameters,
    "tensors": by_tensors,
    "samples": scale_samples,
    "registry": run_entries,
    "config": run_keys,
    "log": by_log_values,
    "ranks": scale_ranks,
    "fake": simulate_ranks,
}


def measure(quick: bool, only: list[str] | None = None) -> Iterator[Curve]:
    for name in only or GROUPS:
        yield from GROUPS[name](quick)


def report_curve(curve: Curve, report: Report) -> None:
    points = {f"{size:,}": [max(value, 1e-9)] for size, value in curve.points}
    mark = ", steep" if curve.slope > STEEP else ""
    notes = {[*points][-1]: f"exponent {curve.slope:.2f}{mark}"}
    report.add(curve.name, curve.unit, points, {}, notes=notes)


def plot(curves: list[Curve], path: str) -> None:
    from matplotlib.figure import Figure

    kinds = list(dict.fromkeys(curve.name.partition(":")[0] for curve in curves))
    figure = Figure(figsize=(14, 4.5 * math.ceil(len(kinds) / 2)), layout="constrained")
    for at, kind in enumerate(kinds, 1):
        axes = figure.add_subplot(math.ceil(len(kinds) / 2), 2, at)
        for curve in curves:
            group, _, name = curve.name.partition(": ")
            if group == kind:
                label = f"{name} ({curve.unit}): {curve.slope:.2f}"
                axes.loglog(*zip(*curve.points, strict=True), marker="o", label=label)
        axes.set(xlabel=kind, ylabel="seconds, or MB")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=list(GROUPS))
    parser.add_argument("--plot", metavar="FILE")
    parser.add_argument("--fake-worlds", nargs="+", help=argparse.SUPPRESS)
    options = parse_options(parser, {})
    if options.fake_worlds:
        kind, *world_sizes = options.fake_worlds
        run_fake_worlds(kind, [*map(int, world_sizes)])
        return
    curves, report = list[Curve](), Report(options.json)
    for curve in measure(options.quick, options.only):
        report_curve(curve, report)
        curves.append(curve)
    if options.plot:
        plot(curves, options.plot)


if __name__ == "__main__":
    main()
