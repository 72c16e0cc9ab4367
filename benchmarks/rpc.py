"""What groups and servers cost over plain `torch.distributed.rpc`, in the same processes.

A server and two clients, one thread each. Contestants take turns in blocks within every round,
there and back, in a changing order; ratios are taken within a round, and their median is printed.

- call: an empty registered service, beside `rpc_sync` of an empty function
- model: a push and a pull of 40 MB, all of it changed, beside 40 MB sent each way by `rpc_sync`,
  the same loaded into a model (the least that torch's RPC can do, since it receives into memory of
  its own), and beside that with a copy taken before; then a pull of what is there already
- ordered: small pushes by both clients, beside a dictionary that is set by `rpc_sync`
- gradients: pushes of ready gradients by both clients, four to an update, beside a parameter server
  by hand: one function under a lock, called by `rpc_sync`, that answers with the weights

    python benchmarks/rpc.py [--rounds 15] [--only call model ordered gradients]
"""

import argparse
import random
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp
from report import Report, parse_options
from torch import Tensor, nn

from stepwrap.rpc import (
    OrderedServerSimpleImpl,
    PushPullGradServerImpl,
    PushPullModelServerImpl,
    RpcGroup,
    World,
)

NAMES = ["server", "client0", "client1"]
LARGE = {"10 x 4 MB": (1024, 10), "640 x 64 KB": (128, 640)}
NETS = {"10^4": (56, 3), "10^6": (512, 4)}
PER_UPDATE = 4

Block = Callable[[], None]


class Timing:
    """Milliseconds of one piece of work, by contestant and round."""

    def __init__(self, group: RpcGroup, options: argparse.Namespace) -> None:
        self.group = group
        self.options = options
        self.rank = dist.get_rank()

    def of(self, blocks: dict[str, Block], repeats: int) -> dict[str, list[float]]:
        """Time blocks of `repeats` pieces; all ranks must call this."""
        for block in blocks.values():
            block()
            dist.barrier()
        order = random.Random(0)
        times: dict[str, list[float]] = {name: [] for name in blocks}
        for _ in range(self.options.rounds):
            names, seconds = order.sample(list(blocks), len(blocks)), dict.fromkeys(blocks, 0.0)
            for name in [*names, *reversed(names)]:
                dist.barrier()
                start = time.perf_counter()
                blocks[name]()
                dist.barrier()
                seconds[name] += time.perf_counter() - start
            for name, value in seconds.items():
                times[name].append(value / (2 * repeats) * 1000)
        return times

    def report(
        self,
        title: str,
        times: dict[str, list[float]],
        ratio_to: Mapping[str, str] | None = None,
    ) -> None:
        """Report the times, with their ratios to the first contestant's by default."""
        if self.rank == 0:
            Report(self.options.json).add(title, "ms", times, ratio_to or next(iter(times)))


def repeated(work: Block, repeats: int, *, on: tuple[int, ...]) -> Block:
    """Return a block that does work so many times on some ranks, and nothing on the others."""

    def block() -> None:
        if dist.get_rank() in on:
            for _ in range(repeats):
                work()

    return block


def nothing() -> None:
    """Be called."""


def compare_calls(timing: Timing) -> None:
    group = timing.group
    if timing.rank == 0:
        group.register("nothing", nothing)
    dist.barrier()
    contestants: dict[str, Block] = {
        "rpc_sync": lambda: rpc.rpc_sync("server", nothing),
        "stepwrap group.rpc_sync": lambda: group.rpc_sync("server", nothing),
        "stepwrap group.registered_sync": lambda: group.registered_sync("nothing"),
    }
    blocks = {name: repeated(work, 300, on=(1,)) for name, work in contestants.items()}
    timing.report("an empty call", timing.of(blocks, 300))


kept: dict[str, object] = {}


def put(key: str, value: object) -> None:
    kept[key] = value


def get(key: str) -> object:
    return kept[key]


def make_net(width: int, depth: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(depth)))


def compare_models(timing: Timing) -> None:
    for size, (width, depth) in LARGE.items():
        host = None
        if timing.rank == 0:
            host = PushPullModelServerImpl("models", timing.group)
        dist.barrier()
        compare_model(timing, size, make_net(width, depth))
        dist.barrier()
        if host is not None:
            host.close()
        dist.barrier()


def compare_model(timing: Timing, size: str, pushed: nn.Module) -> None:
    server = timing.group.get_paired("models").to_here()
    pulled = make_net(*LARGE[size])
    weights = list(pushed.parameters())

    def change() -> None:
        with torch.no_grad():
            torch._foreach_add_(weights, 1e-3)

    def move() -> None:
        change()
        rpc.rpc_sync("server", put, args=("state", pushed.state_dict()))
        rpc.rpc_sync("server", get, args=("state",))

    def move_and_load() -> None:
        change()
        rpc.rpc_sync("server", put, args=("state", pushed.state_dict()))
        pulled.load_state_dict(rpc.rpc_sync("server", get, args=("state",)))

    def move_copies() -> None:
        change()
        state = {name: value.clone() for name, value in pushed.state_dict().items()}
        rpc.rpc_sync("server", put, args=("state", state))
        pulled.load_state_dict(rpc.rpc_sync("server", get, args=("state",)))

    def by_server() -> None:
        change()
        server.push(pushed)
        server.pull(pulled)

    contestants = {
        "rpc_sync, both ways": move,
        "rpc_sync, loaded": move_and_load,
        "rpc_sync, copied and loaded": move_copies,
        "stepwrap push and pull": by_server,
    }
    blocks = {name: repeated(work, 2, on=(1,)) for name, work in contestants.items()}
    timing.report(f"40 MB to the server and back, {size}", timing.of(blocks, 2))
    contestants = {
        "rpc_sync of nothing": lambda: rpc.rpc_sync("server", nothing),
        "stepwrap pull of an unchanged version": lambda: server.pull(pulled),
        "stepwrap push of an unchanged model": lambda: server.push(pushed),
    }
    blocks = {name: repeated(work, 20, on=(1,)) for name, work in contestants.items()}
    # A push compares all tensors with those that were sent before: it has no peer.
    peers = {"stepwrap pull of an unchanged version": "rpc_sync of nothing"}
    timing.report(f"40 MB that did not change, {size}", timing.of(blocks, 20), peers)


def compare_ordered(timing: Timing) -> None:
    host = OrderedServerSimpleImpl("table", timing.group) if timing.rank == 0 else None
    dist.barrier()
    server, key, version = timing.group.get_paired("table").to_here(), f"{timing.rank}", 0

    def push() -> None:
        nonlocal version
        version += 1
        assert server.push(key, version, version, version - 1)

    contestants: dict[str, Block] = {
        "rpc_sync": lambda: rpc.rpc_sync("server", put, args=(key, 1)),
        "stepwrap ordered server": push,
    }
    blocks = {name: repeated(work, 300, on=(1, 2)) for name, work in contestants.items()}
    timing.report("small pushes by two clients", timing.of(blocks, 600))
    if host is not None:
        host.close()


class ByHand:
    """A parameter server as one would write it: mean of so many gradients, then a step."""

    def __init__(self, net: nn.Module) -> None:
        self.weights = list(net.parameters())
        self.optimizer = torch.optim.SGD(self.weights, lr=1e-3)
        self.sums = [torch.zeros_like(weight) for weight in self.weights]
        self.count = 0
        self.lock = threading.Lock()

    def push(self, gradients: list[Tensor]) -> list[Tensor]:
        with self.lock:
            torch._foreach_add_(self.sums, gradients)
            self.count += 1
            if self.count == PER_UPDATE:
                torch._foreach_div_(self.sums, PER_UPDATE)
                for weight, total in zip(self.weights, self.sums, strict=True):
                    weight.grad = total
                self.optimizer.step()
                torch._foreach_zero_(self.sums)
                self.count = 0
            return [weight.detach().clone() for weight in self.weights]


def push_by_hand(gradients: list[Tensor]) -> list[Tensor]:
    server = kept["by hand"]
    assert isinstance(server, ByHand)
    return server.push(gradients)


def compare_gradients(timing: Timing) -> None:
    for size in NETS:
        compare_updates(timing, size)


def compare_updates(timing: Timing, size: str) -> None:
    count = 100 if size == "10^4" else 20
    net = make_net(*NETS[size])
    for parameter in net.parameters():
        parameter.grad = torch.zeros_like(parameter)
    host, expected = None, 0
    if timing.rank == 0:
        kept["by hand"] = ByHand(make_net(*NETS[size]))
        host = PushPullGradServerImpl(
            "grads", timing.group, "model", "server", ["server"], None, "mean", "cpu", 2
        )
        host.manage_model(net, torch.optim.SGD(net.parameters(), lr=1e-3))
        host.start()
    dist.barrier()
    accessor = timing.group.get_paired("grads").to_here()

    def by_hand() -> None:
        weights = list(net.parameters())
        gradients = [weight.grad for weight in weights]
        newest = rpc.rpc_sync("server", push_by_hand, args=(gradients,))
        net.zero_grad(set_to_none=False)
        with torch.no_grad():
            torch._foreach_copy_(weights, newest)

    def by_server() -> None:
        nonlocal expected
        if timing.rank != 0:
            return repeated(lambda: accessor.push(net), count, on=(1, 2))()
        # A push may return before the step that it belongs to.
        expected += 2 * count // PER_UPDATE
        while net.pp_version < expected:
            time.sleep(0.0005)
        return None

    blocks = {"by hand": repeated(by_hand, count, on=(1, 2)), "stepwrap gradient server": by_server}
    times = timing.of(blocks, 2 * count // PER_UPDATE)
    timing.report(f"updates by two clients, {size} parameters", times)
    if host is not None:
        host.close()
    dist.barrier()


PARTS = {
    "call": compare_calls,
    "model": compare_models,
    "ordered": compare_ordered,
    "gradients": compare_gradients,
}


def run_rank(rank: int, settings: argparse.Namespace, store: str) -> None:
    torch.set_num_threads(1)
    with World(NAMES[rank], rank, len(NAMES), dist_init_method=f"file://{store}") as world:
        group = world.create_rpc_group("all", NAMES)
        for part in settings.only:
            PARTS[part](Timing(group, settings))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", nargs="*", default=list(PARTS), choices=list(PARTS))
    settings = parse_options(parser, {"rounds": 3})
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run_rank, (settings, str(Path(folder, "store"))), nprocs=len(NAMES))


if __name__ == "__main__":
    main()
