"""The cost of the wrappers compared with hand-written PyTorch, in time and in memory.

Perceptrons of 10^4, 10^6 and 10^7 parameters, batches of 32 in memory, SGD, one thread for each
rank. `ddp` and `fsdp` are compared with torch's DistributedDataParallel and fully_shard in the same
processes: blocks of steps take turns within every round, in a shuffled order. `dp` runs two
replicas in one process. Without a GPU torch's DataParallel calls the module once on the whole
batch, so it is shown but not used for the ratio: "by hand" is two replicas in two threads.

Memory is the growth of a fresh process between the start of the group and its last step: the peak
resident size on the CPU, and torch's peak allocation on CUDA.

    python benchmarks/wrappers.py [--ranks 2] [--device cuda] [--rounds 21] [--only ddp fsdp dp]
"""

import argparse
import gc
import resource
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from report import Report, parse_options
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DataParallel, DistributedDataParallel
from turns import process_group, spawn, there_and_back

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


def train_with_wrapper(wrapper: nn.Module, batch: tuple[Tensor, Tensor]) -> Step:
    optim_wrapper = OptimWrapper(torch.optim.SGD(wrapper.parameters(), lr=0.01))
    return lambda: wrapper.train_step(batch, optim_wrapper)


def train_plainly(net: nn.Module, batch: tuple[Tensor, Tensor]) -> Step:
    optimizer, loss_of = torch.optim.SGD(net.parameters(), lr=0.01), nn.CrossEntropyLoss()
    inputs, target = batch

    def step() -> None:
        loss = loss_of(net(inputs), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


class ReplicasByHand(nn.Module):
    """Runs two replicas of a module in two threads, like torch's DataParallel on GPUs."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, inputs: Tensor) -> Tensor:
        chunks = inputs.chunk(2)
        replicas = [make_replica(self.module, index) for index in range(len(chunks))]
        outputs: dict[int, Tensor] = {}

        def run(index: int) -> None:
            outputs[index] = replicas[index](chunks[index])

        threads = [threading.Thread(target=run, args=(i,)) for i in range(len(chunks))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return torch.cat([outputs[i] for i in range(len(chunks))])


def make_replica(module: nn.Module, index: int) -> nn.Module:
    """Copy the modules with views of the parameters; replica 0 shares the buffers."""
    replica = module._replicate_for_data_parallel()
    views = {k: v if v is None else v.view_as(v) for k, v in module._parameters.items()}
    replica._parameters = views
    if index:
        replica._buffers = {k: v if v is None else v.clone() for k, v in module._buffers.items()}
    for name, child in module._modules.items():
        replica._modules[name] = make_replica(child, index)
    return replica


def make_ddp(contestant: str, size: str, device: torch.device) -> Step:
    net, batch = make_net(size, device), make_batch(size, device)
    if contestant == "stepwrap":
        return train_with_wrapper(StepDistributedDataParallel(supervised(net)), batch)
    return train_plainly(
        DistributedDataParallel(net, device_ids=[device] if device.type == "cuda" else None), batch
    )


def make_fsdp(contestant: str, size: str, device: torch.device) -> Step:
    net, batch = make_net(size, device), make_batch(size, device)
    if contestant == "stepwrap":
        return train_with_wrapper(
            StepFullyShardedDataParallel(supervised(net), shard=["Block"]), batch
        )
    mesh = dist.init_device_mesh(device.type, (dist.get_world_size(),))
    for block in net.children():
        if isinstance(block, Block):
            fully_shard(block, mesh=mesh)
    fully_shard(net, mesh=mesh)
    return train_plainly(net, batch)


def make_dp(contestant: str, size: str, device: torch.device) -> Step:
    net, batch = make_net(size, device), make_batch(size, device)
    if contestant == "stepwrap":
        return train_with_wrapper(StepDataParallel(supervised(net), [device, device]), batch)
    return train_plainly(DataParallel(net) if contestant == "torch" else ReplicasByHand(net), batch)


MAKERS: dict[str, Callable[[str, str, torch.device], Step]] = {
    "ddp": make_ddp,
    "fsdp": make_fsdp,
    "dp": make_dp,
}


def contestants(kind: str) -> list[str]:
    return ["stepwrap", "by hand", "torch"] if kind == "dp" else ["stepwrap", "by hand"]


def finish(device: torch.device) -> None:
    """Wait for the device and the other ranks."""
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

    def block(step: Step) -> None:
        for _ in range(count):
            step()

    blocks = {name: partial(block, step) for name, step in steps.items()}
    gc.collect()
    gc.disable()
    times = there_and_back(blocks, settings.rounds, lambda: finish(device))
    gc.enable()
    return {name: [value / count for value in values] for name, values in times.items()}


def repeats(step: Step, seconds: float, device: torch.device) -> int:
    """Return the number of steps in a block, which is the same on all ranks."""
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


def run_speed(rank: int, store: str, settings: argparse.Namespace, kind: str) -> None:
    with device_of_rank(rank, settings, kind, store) as device:
        for size in settings.sizes:
            steps = {
                contestant: MAKERS[kind](contestant, size, device)
                for contestant in contestants(kind)
            }
            times = measure(steps, settings, device)
            if rank == 0:
                report = Report(settings.json)
                report.add(f"{kind}, {size} parameters: a step", "ms", times, "by hand")
            del steps


def run_memory(
    rank: int, settings: argparse.Namespace, kind: str, contestant: str, size: str, folder: str
) -> None:
    with device_of_rank(rank, settings, kind, str(Path(folder, "store"))) as device:
        # Exclude the memory that the libraries allocate on their first use.
        tiny = make_net("10^4", device)
        train_plainly(tiny, make_batch("10^4", device))()
        del tiny
        gc.collect()
        before = reset_peak(device)
        step = MAKERS[kind](contestant, size, device)
        for _ in range(5):
            step()
        finish(device)
        Path(folder, f"{rank}").write_text(str(peak(device) - before))


def reset_peak(device: torch.device) -> int:
    """Reset the peak of used memory and return the current use in bytes."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    # Linux: 5 resets the peak resident size (proc(5)).
    Path("/proc/self/clear_refs").write_text("5")
    return peak(device)


def peak(device: torch.device) -> int:
    """Return the peak of used memory since the last reset, in bytes."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    lines = Path("/proc/self/status").read_text().splitlines()
    peaks = [line.split()[1] for line in lines if line.startswith("VmHWM:")]
    return int(peaks[0]) * 1024 if peaks else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


@contextmanager
def device_of_rank(
    rank: int, settings: argparse.Namespace, kind: str, store: str
) -> Iterator[torch.device]:
    """Join the process group, except for `dp`, and yield the device of this rank."""
    torch.set_num_threads(1)
    device = torch.device(settings.device)
    if device.type == "cuda":
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    is_alone = kind == "dp"
    with nullcontext() if is_alone else process_group(rank, settings.ranks, store, backend):
        yield device


def get_memory(settings: argparse.Namespace, kind: str, contestant: str, size: str) -> float:
    """Return the largest growth of memory of a rank, in bytes."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = 1 if kind == "dp" else settings.ranks
        mp.spawn(run_memory, (settings, kind, contestant, size, folder), nprocs=ranks)
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
    parser.add_argument("--processes", type=int, default=3, help="processes to measure memory")
    sizes, benchmarks = ["10^4", "10^6"], ["speed"]
    quick = {"rounds": 3, "seconds": 0.1, "sizes": sizes, "parts": benchmarks}
    settings = parse_options(parser, quick)
    if settings.ranks is None:
        settings.ranks = torch.cuda.device_count() if settings.device.startswith("cuda") else 2
    for kind in settings.only if "speed" in settings.parts else ():
        spawn(run_speed, 1 if kind == "dp" else settings.ranks, settings, kind)
    if "memory" in settings.parts:
        compare_memory(settings)


def compare_memory(settings: argparse.Namespace) -> None:
    report = Report(settings.json)
    for kind in settings.only:
        for size in settings.sizes:
            runs: dict[str, list[float]] = {contestant: [] for contestant in contestants(kind)}
            for _ in range(settings.processes):
                for contestant, values in runs.items():
                    values.append(max(get_memory(settings, kind, contestant, size), 1.0) / MB)
            report.add(f"{kind}, {size} parameters: memory of a rank", "MB", runs, "by hand")


if __name__ == "__main__":
    main()
