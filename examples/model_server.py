"""A model server: one process trains and pushes a model, two others pull and evaluate it.

Run it with python, or with torchrun on three processes:
torchrun --nproc-per-node 3 examples/model_server.py
"""

import time

import torch
from torch import nn
from torch.utils.data import DataLoader

from stepwrap.collectives import get_rank
from stepwrap.configs.digits import Digits, SmallCNN
from stepwrap.rpc import PushPullModelServerImpl, RpcGroup, World
from stepwrap.runner import launch

NAMES = ["trainer", "validator", "tester"]


def main(epochs: int = 8) -> list[tuple[int, float]]:
    with World(NAMES[get_rank()]) as world:
        group = world.create_rpc_group("all", NAMES)
        if world.name == "trainer":
            return train(group, epochs)
        return evaluate(group, {"validator": "val", "tester": "test"}[world.name], epochs)


def train(group: RpcGroup, epochs: int) -> list[tuple[int, float]]:
    """Push the model after each epoch, as version 1, 2, ..."""
    host = PushPullModelServerImpl("models", group)
    server = group.get_paired("models").to_here()
    torch.manual_seed(0)
    net = SmallCNN()
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
    loader = DataLoader(Digits("train"), batch_size=64, shuffle=True)
    group.barrier()
    for _ in range(epochs):
        for images, labels in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(images), labels).backward()
            optimizer.step()
        server.push(net)
    group.barrier()
    host.close()
    return []


def evaluate(group: RpcGroup, split: str, epochs: int) -> list[tuple[int, float]]:
    """Evaluate each new version; a pull of an unchanged version transfers a few bytes."""
    data, net, accuracies = Digits(split), SmallCNN().eval(), []
    group.barrier()
    server = group.get_paired("models").to_here()
    version = 0
    while version < epochs:
        server.pull(net)
        newest = getattr(net, "pp_version", 0)
        if newest == version:
            time.sleep(0.05)
            continue
        version = newest
        with torch.inference_mode():
            correct = net(data.images).argmax(1) == data.labels
        accuracies.append((version, float(correct.float().mean())))
    group.barrier()
    return accuracies


if __name__ == "__main__":
    for rank, accuracies in launch(main, nproc=3).items():
        for version, accuracy in accuracies:
            print(f"{NAMES[rank]}: version {version}, accuracy {accuracy:.3f}")
