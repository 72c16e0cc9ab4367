"""The cost of groups and servers compared with plain `torch.distributed.rpc`.

A server and two clients, one thread each. Contestants take turns in the same processes in blocks
within every round, in a shuffled order and in reverse; ratios are taken within a round.

- call: an empty registered service, compared with `rpc_sync` of an empty function
- model: a push and a pull of 40 MB, all of it changed, compared with 40 MB sent each way by
  `rpc_sync`; with the same loaded into a model (the least that torch's RPC can do, since it
  receives into new memory); and with a copy before it is sent. Then a pull of an unchanged version
- ordered: small pushes by both clients, compared with a dictionary that is set by `rpc_sync`
- gradients: pushes of ready gradients by both clients, four per update, compared with a
  hand-written parameter server: one function under a lock, called by `rpc_sync`, that returns the
  weights

    python benchmarks/rpc.py [--rounds 15] [--only call model ordered gradients]
"""

import argparse
import threading
import time
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
import torch.distributed.rpc as rpc
from report import Report, parse_options
from torch import Tensor, nn
from turns import spawn, there_and_back

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
    """Measures milliseconds by contestant and round."""

    def __init__(self, group: RpcGroup, options: argparse.Namespace) -> None:
        self.group = group
        self.options = options
        self.rank = dist.get_rank()

    def of(self, blocks: dict[str, Block], repeats: int) -> dict[str, list[float]]:
        """Time blocks of `repeats` calls each; all ranks must call this."""
        for block in blocks.values():
            block()
            dist.barrier()
        times = there_and_back(blocks, self.options.rounds, dist.barrier)
        return {name: [value / repeats for value in values] for name, values in times.items()}

    def report(
        self,
        title: str,
        times: dict[str, list[float]],
        ratio_to: Mapping[str, str] | None = None,
    ) -> None:
        """Report the times, by default with ratios to the first contestant."""
        if self.rank == 0:
            Report(self.options.json).add(title, "ms", times, ratio_to or next(iter(times)))


def repeated(work: Block, repeats: int, *, on: tuple[int, ...]) -> Block:
    """Return a block that repeats some work on the given ranks, and does nothing on others."""

    def block() -> None:
        if dist.get_rank() in on:
            for _ in range(repeats):
                work()

    return block


def nothing() -> None:
    """Do nothing."""


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

    def train_with_server() -> None:
        change()
        server.push(pushed)
        server.pull(pulled)

    contestants = {
        "rpc_sync, both ways": move,
        "rpc_sync, loaded": move_and_load,
        "rpc_sync, copied and loaded": move_copies,
        "stepwrap push and pull": train_with_server,
    }
    blocks = {name: repeated(work, 2, on=(1,)) for name, work in contestants.items()}
    timing.report(f"40 MB to the server and back, {size}", timing.of(blocks, 2))
    contestants = {
        "rpc_sync of nothing": lambda: rpc.rpc_sync("server", nothing),
        "stepwrap pull of an unchanged version": lambda: server.pull(pulled),
        "stepwrap push of an unchanged model": lambda: server.push(pushed),
    }
    blocks = {name: repeated(work, 20, on=(1,)) for name, work in contestants.items()}
    # There is no equivalent of a push that compares all tensors with those sent before.
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
    """A hand-written parameter server: the mean of `PER_UPDATE` gradients, then a step."""

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

    def train_plainly() -> None:
        weights = list(net.parameters())
        gradients = [weight.grad for weight in weights]
        newest = rpc.rpc_sync("server", push_by_hand, args=(gradients,))
        net.zero_grad(set_to_none=False)
        with torch.no_grad():
            torch._foreach_copy_(weights, newest)

    def train_with_server() -> None:
        nonlocal expected
        if timing.rank != 0:
            return repeated(lambda: accessor.push(net), count, on=(1, 2))()
        # A push may return before its gradients are applied.
        expected += 2 * count // PER_UPDATE
        while net.pp_version < expected:
            time.sleep(0.0005)
        return None

    blocks = {
        "by hand": repeated(train_plainly, count, on=(1, 2)),
        "stepwrap gradient server": train_with_server,
    }
    times = timing.of(blocks, 2 * count // PER_UPDATE)
    timing.report(f"updates by two clients, {size} parameters", times)
    if host is not None:
        host.close()
    dist.barrier()


PARTS = {
    "call": compare_calls,
    "model": compare_models,
    "ordered": compare_ordered,
    "gradients": lambda timing: [compare_updates(timing, size) for size in NETS],
}


def run_rank(rank: int, store: str, settings: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    with World(NAMES[rank], rank, len(NAMES), dist_init_method=f"file://{store}") as world:
        group = world.create_rpc_group("all", NAMES)
        for name in settings.only:
            PARTS[name](Timing(group, settings))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", nargs="*", default=list(PARTS), choices=list(PARTS))
    settings = parse_options(parser, {"rounds": 3})
    spawn(run_rank, len(NAMES), settings)


if __name__ == "__main__":
    main()
