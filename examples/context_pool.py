"""A data pipeline: each worker turns images into features with its copy of a model.

A small network is trained on one half of the digits and then frozen. Each worker of the pool gets
a copy of it as its context. The workers process batches of the other half while the main process
trains a classifier on the features. At most `lookahead` batches are in flight, so the data may be
larger than the memory.

    python examples/context_pool.py [--workers 2] [--epochs 10]
"""

import argparse
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from stepwrap.configs.digits import Digits
from stepwrap.parallel import CtxPool

Batch = tuple[Tensor, Tensor]


def make_network() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(576, 10))


def extract(network: nn.Sequential, batch: Batch) -> Batch:
    """Run all layers but the last of the worker's network."""
    images, labels = batch
    with torch.no_grad():
        return network[:-1](images), labels


def use_one_thread() -> None:
    """Keep the workers from competing for the cores."""
    torch.set_num_threads(1)


def batches(images: Tensor, labels: Tensor, size: int = 50) -> Iterator[Batch]:
    for rows in torch.randperm(len(images)).split(size):
        yield images[rows], labels[rows]


def train(model: nn.Module, data: Iterator[Batch], optimizer: torch.optim.Optimizer) -> None:
    for images, labels in data:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()


def main(workers: int = 2, epochs: int = 10) -> float:
    """Return the accuracy of the classifier on the test digits."""
    torch.manual_seed(0)
    data, test = Digits("train"), Digits("test")
    half = len(data.images) // 2
    network = make_network()
    optimizer = torch.optim.Adam(network.parameters(), lr=0.01)
    for _ in range(3):
        train(network, batches(data.images[:half], data.labels[:half]), optimizer)

    classifier = nn.Linear(576, 10)
    optimizer = torch.optim.Adam(classifier.parameters(), lr=0.01)
    contexts = [network.eval()] * workers
    with CtxPool(workers, use_one_thread, worker_contexts=contexts) as pool:
        for _ in range(epochs):
            pairs = batches(data.images[half:], data.labels[half:])
            train(classifier, pool.imap(extract, pairs), optimizer)
        features, labels = pool.apply(extract, ((test.images, test.labels),))
    predictions = classifier(features).argmax(1)
    return float((predictions == labels).float().mean())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train on features that workers make.")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=10)
    options = parser.parse_args()
    print(f"accuracy {main(options.workers, options.epochs):.3f}")
