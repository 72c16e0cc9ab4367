"""What the wrappers cost over PyTorch written by hand, in time and in memory.

Perceptrons of 10^4, 10^6 and 10^7 parameters, batches of 32 that lie in memory, SGD, one thread for
each rank. `ddp` and `fsdp` step beside torch's DistributedDataParallel and fully_shard in the same
processes: blocks of steps in turn within every round, in a changing order, and the ratio of a round
is that of its blocks. `dp` runs two replicas in one process. torch's DataParallel without a GPU
calls the module itself, once, on the whole batch, so that it is no peer there, only printed beside
it: "by hand" is two replicas in two threads, written out below.

Memory is what a fresh process grows by between the start of the group and the last of its steps:
its peak resident size on the CPU, what torch has allocated at most on CUDA.

    python benchmarks/wrappers.py [--ranks 2] [--device cuda] [--rounds 21] [--only ddp fsdp dp]
"""

import argparse
import gc
import random
import resource
import tempfile
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from report import Report, parse_options
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DataParallel, DistributedDataParallel

from stepwrap.wrappers import (
    OptimWrapper,
    StepDataParallel,
    StepDistributedDataParallel,
    StepFullyShardedDataParallel,
    SupervisedModel,
)

SIZES = {"10^4": (56, 3), "10^6": (512, 4), "10^7": (1024, 10)}
BATCH = 32
MB = 2**20

Step = Callable[[], None]


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.linear(x))


def make_net(size: str, device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    width, depth = SIZES[size]
    return nn.Sequential(*(Block(width) for _ in range(depth)), nn.Linear(width, 10)).to(device)


def make_batch(size: str, device: torch.device) -> tuple[Tensor, Tensor]:
    inputs = torch.randn(BATCH, SIZES[size][0])
    return inputs.to(device), torch.randint(10, (BATCH,)).to(device)


def supervised(net: nn.Module) -> SupervisedModel:
    return SupervisedModel(net, nn.CrossEntropyLoss())


def by_wrapper(wrapper: nn.Module, batch: tuple[Tensor, Tensor]) -> Step:
    optim_wrapper = OptimWrapper(torch.optim.SGD(wrapper.parameters(), lr=0.01))
    return lambda: wrapper.train_step(batch, optim_wrapper)


def by_hand(net: nn.Module, batch: tuple[Tensor, Tensor]) -> Step:
    optimizer, loss_of = torch.optim.SGD(net.parameters(), lr=0.01), nn.CrossEntropyLoss()
    inputs, target = batch

    def step() -> None:
        loss = loss_of(net(inputs), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


class ReplicasByHand(nn.Module):
    """Two replicas of a module in two threads, as torch's DataParallel has them on GPUs."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, inputs: Tensor) -> Tensor:
        chunks = inputs.chunk(2)
        replicas = [replica_of(self.module, index) for index in range(len(chunks))]
        outputs: dict[int, Tensor] = {}

        def run(index: int) -> None:
            outputs[index] = replicas[index](chunks[index])

        threads = [threading.Thread(target=run, args=(i,)) for i in range(len(chunks))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return torch.cat([outputs[i] for i in range(len(chunks))])


def replica_of(module: nn.Module, index: int) -> nn.Module:
    """Copy the modules; gradients flow back from views, replica 0 has the very buffers."""
    replica = module._replicate_for_data_parallel()
    views = {k: v if v is None else v.view_as(v) for k, v in module._parameters.items()}
    replica._parameters = views
    if index:
        replica._buffers = {k: v if v is None else v.clone() for k, v in module._buffers.items()}
    for name, child in module._modules.items():
        replica._modules[name] = replica_of(child, index)
    return replica


def make_ddp(who: str, size: str, device: torch.device) -> Step:
    net, batch = make_net(size, device), make_batch(size, device)
    if who == "stepwrap":
        return by_wrapper(StepDistributedDataParallel(supervised(net)), batch)
    return by_hand(
        DistributedDataParallel(net, device_ids=[device] if device.type == "cuda" else None), batch
    )


def make_fsdp(who: str, size: str, device: torch.device) -> Step:
    net, batch = make_net(size, device), make_batch(size, device)
    if who == "stepwrap":
        return by_wrapper(StepFullyShardedDataParallel(supervised(net), shard=["Block"]), batch)
    mesh = dist.init_device_mesh(device.type, (dist.get_world_size(),))
    for block in net.children():
        if isinstance(block, Block):
            fully_shard(block, mesh=mesh)
    fully_shard(net, mesh=mesh)
    return by_hand(net, batch)


def make_dp(who: str, size: str, device: torch.device) -> Step:
    net, batch = make_net(size, device), make_batch(size, device)
    if who == "stepwrap":
        return by_wrapper(StepDataParallel(supervised(net), [device, device]), batch)
    return by_hand(DataParallel(net) if who == "torch" else ReplicasByHand(net), batch)


MAKERS: dict[str, Callable[[str, str, torch.device], Step]] = {
    "ddp": make_ddp,
    "fsdp": make_fsdp,
    "dp": make_dp,
}


def contestants(kind: str) -> list[str]:
    return ["stepwrap", "by hand", "torch"] if kind == "dp" else ["stepwrap", "by hand"]


def finish(device: torch.device) -> None:
    """Wait for the device, and for the other ranks."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    if dist.is_initialized():
        dist.barrier()


def measure(
    steps: dict[str, Step], settings: argparse.Namespace, device: torch.device
) -> dict[str, list[float]]:
    """Return the milliseconds of a step by contestant and round."""
    for step in steps.values():
        for _ in range(10):
            step()
    count = repeats(steps["by hand"], settings.seconds, device)
    order = random.Random(0)
    times: dict[str, list[float]] = {name: [] for name in steps}
    gc.collect()
    gc.disable()
    for _ in range(settings.rounds):
        # There and back, so that a machine that slows down meets all of them alike.
        names, seconds = order.sample(list(steps), len(steps)), dict.fromkeys(steps, 0.0)
        for name in [*names, *reversed(names)]:
            finish(device)
            start = time.perf_counter()
            for _ in range(count):
                steps[name]()
            finish(device)
            seconds[name] += time.perf_counter() - start
        for name, value in seconds.items():
            times[name].append(value / (2 * count) * 1000)
    gc.enable()
    return times


def repeats(step: Step, seconds: float, device: torch.device) -> int:
    """How many steps make a block; the same on all ranks."""
    finish(device)
    start = time.perf_counter()
    for _ in range(5):
        step()
    finish(device)
    count = max(2, round(seconds / ((time.perf_counter() - start) / 5)))
    if dist.is_initialized():
        agreed = torch.tensor(count, device=device)
        dist.broadcast(agreed, 0)
        count = int(agreed)
    return count


def run_speed(rank: int, settings: argparse.Namespace, kind: str, store: str) -> None:
    device = start_rank(rank, settings, kind, store)
    try:
        for size in settings.sizes:
            steps = {who: MAKERS[kind](who, size, device) for who in contestants(kind)}
            times = measure(steps, settings, device)
            if rank == 0:
                report = Report(settings.json)
                report.add(f"{kind}, {size} parameters: a step", "ms", times, "by hand")
            del steps
    finally:
        end_rank()


def run_memory(
    rank: int, settings: argparse.Namespace, kind: str, who: str, size: str, folder: str
) -> None:
    device = start_rank(rank, settings, kind, str(Path(folder, "store")))
    try:
        # What the first use of the libraries takes belongs to nobody.
        tiny = make_net("10^4", device)
        by_hand(tiny, make_batch("10^4", device))()
        del tiny
        gc.collect()
        before = reset_peak(device)
        step = MAKERS[kind](who, size, device)
        for _ in range(5):
            step()
        finish(device)
        Path(folder, f"{rank}").write_text(str(peak(device) - before))
    finally:
        end_rank()


def reset_peak(device: torch.device) -> int:
    """Forget the highest use of memory so far; returns the use now, in bytes."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    # Linux: 5 resets the peak resident size (proc(5)).
    Path("/proc/self/clear_refs").write_text("5")
    return peak(device)


def peak(device: torch.device) -> int:
    """Highest use of memory since the last reset, in bytes."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    lines = Path("/proc/self/status").read_text().splitlines()
    found = [line.split()[1] for line in lines if line.startswith("VmHWM:")]
    return int(found[0]) * 1024 if found else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def start_rank(rank: int, settings: argparse.Namespace, kind: str, store: str) -> torch.device:
    torch.set_num_threads(1)
    device = torch.device(settings.device)
    if device.type == "cuda":
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    if kind != "dp":
        ranks = settings.ranks
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=dist.FileStore(store, ranks),
            rank=rank,
            world_size=ranks,
            timeout=timedelta(seconds=300),
        )
    return device


def end_rank() -> None:
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def memory_of(settings: argparse.Namespace, kind: str, who: str, size: str) -> float:
    """Return the largest growth of a rank, in bytes."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = 1 if kind == "dp" else settings.ranks
        mp.spawn(run_memory, (settings, kind, who, size, folder), nprocs=ranks)
        return max(float(Path(folder, str(rank)).read_text()) for rank in range(ranks))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--ranks", type=int, default=None)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--seconds", type=float, default=0.25, help="a block of steps")
    parser.add_argument("--only", nargs="*", default=list(MAKERS), choices=list(MAKERS))
    parser.add_argument("--sizes", nargs="*", default=list(SIZES), choices=list(SIZES))
    parser.add_argument("--parts", nargs="*", default=["speed", "memory"])
    parser.add_argument("--processes", type=int, default=3, help="fresh ones for the memory")
    sizes, parts = ["10^4", "10^6"], ["speed"]
    quick = {"rounds": 3, "seconds": 0.1, "sizes": sizes, "parts": parts}
    settings = parse_options(parser, quick)
    if settings.ranks is None:
        settings.ranks = torch.cuda.device_count() if settings.device.startswith("cuda") else 2
    if "speed" in settings.parts:
        compare_speed(settings)
    if "memory" in settings.parts:
        compare_memory(settings)


def compare_speed(settings: argparse.Namespace) -> None:
    for kind in settings.only:
        with tempfile.TemporaryDirectory() as folder:
            ranks = 1 if kind == "dp" else settings.ranks
            mp.spawn(run_speed, (settings, kind, str(Path(folder, "store"))), nprocs=ranks)


def compare_memory(settings: argparse.Namespace) -> None:
    report = Report(settings.json)
    for kind in settings.only:
        for size in settings.sizes:
            runs: dict[str, list[float]] = {who: [] for who in contestants(kind)}
            for _ in range(settings.processes):
                for who, values in runs.items():
                    values.append(max(memory_of(settings, kind, who, size), 1.0) / MB)
            report.add(f"{kind}, {size} parameters: memory of a rank", "MB", runs, "by hand")


if __name__ == "__main__":
    main()
