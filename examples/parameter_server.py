"""Asynchronous SGD: two clients push gradients, reducers average them, and one model is trained.

Run it with python, or with torchrun on four processes:
torchrun --nproc-per-node 4 examples/parameter_server.py
"""

import torch
from torch import nn
from torch.utils.data import DataLoader

from stepwrap.collectives import get_rank
from stepwrap.configs.digits import Digits, SmallCNN
from stepwrap.rpc import PushPullGradServerImpl, RpcGroup, World
from stepwrap.runner import launch

NAMES = ["primary", "reducer", "client0", "client1"]


def main(epochs: int = 6) -> float | None:
    with World(NAMES[get_rank()]) as world:
        group = world.create_rpc_group("all", NAMES)
        if world.name in ("primary", "reducer"):
            return serve(group)
        work(group, world.rank, epochs)
        return None


def serve(group: RpcGroup) -> float | None:
    """Run a reducer: it averages 2 gradients, and the primary 2 such averages, so 4 for a step."""
    server = PushPullGradServerImpl(
        "digits",
        group,
        primary_reducer="primary",
        secondary_reducers=["reducer"],
        reduce_method="mean",
        reduce_batch_size=2,
    )
    net = SmallCNN(dropout=0.0)
    if group.get_cur_name() == "primary":
        torch.manual_seed(0)
        net = SmallCNN(dropout=0.0)
        server.manage_model(net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9))
    server.start()
    group.barrier()
    # This process serves the clients until they reach the next barrier.
    group.barrier(timeout=600)
    # Uses the pushes that have not been reduced yet.
    server.close()
    server.watch()
    return measure_accuracy(net) if group.get_cur_name() == "primary" else None


def work(group: RpcGroup, rank: int, epochs: int) -> None:
    torch.manual_seed(0)
    net = SmallCNN(dropout=0.0)
    torch.manual_seed(rank)
    loader = DataLoader(Digits("train"), batch_size=32, shuffle=True)
    group.barrier()
    server = group.get_paired("digits").to_here()
    for _ in range(epochs):
        for images, labels in loader:
            nn.functional.cross_entropy(net(images), labels).backward()
            # Sends the gradients and receives the newest weights.
            server.push(net)
    group.barrier(timeout=600)


def measure_accuracy(net: nn.Module) -> float:
    test = Digits("test")
    with torch.inference_mode():
        return float((net(test.images).argmax(1) == test.labels).float().mean())


if __name__ == "__main__":
    accuracy = launch(main, nproc=4).get(0)
    if accuracy is not None:
        print(f"test accuracy {accuracy:.3f}")
