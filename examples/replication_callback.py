"""A custom layer whose replicas share a running statistic.

python examples/replication_callback.py
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from stepwrap.configs.digits import Digits
from stepwrap.wrappers import OptimWrapper, StepDataParallel, SupervisedModel


class Centred(nn.Module):
    """Subtract a running mean of the features, computed over the batches of all replicas."""

    mean: Tensor

    def __init__(self, features: int, momentum: float = 0.1) -> None:
        super().__init__()
        self.momentum = momentum
        self.register_buffer("mean", torch.zeros(features))
        self.meet: Callable[..., Tensor] | None = None

    def __data_parallel_replicate__(self, ctx: Any, copy_id: int) -> None:
        # Called for every copy before each forward; ctx is the same for all copies of this layer.
        self.meet = partial(ctx.session.rendezvous, ctx.layer, copy_id)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            mine = (x.detach().sum(0), len(x))
            mean = self.meet(mine, pool) if self.meet else pool([mine])[0]
            # Copy 0 shares the model's buffer; the other copies are discarded after the forward.
            self.mean.lerp_(mean, self.momentum)
        return x - self.mean


def pool(messages: list[tuple[Tensor, int]]) -> list[Tensor]:
    """Receive the messages of all copies and return a reply for each."""
    totals, counts = zip(*messages, strict=True)
    mean = torch.stack(totals).sum(0) / sum(counts)
    return [mean] * len(messages)


def train(device_ids: list[str], steps: int = 150) -> tuple[Tensor, float]:
    """Return the running mean and the accuracy on the test images."""
    torch.manual_seed(0)
    centred = Centred(64)
    net = nn.Sequential(nn.Flatten(), centred, nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    wrapper = StepDataParallel(SupervisedModel(net, nn.CrossEntropyLoss()), device_ids)
    optim = OptimWrapper(torch.optim.AdamW(net.parameters(), lr=0.01))
    data, test = Digits("train"), Digits("test")
    for _ in range(steps):
        rows = torch.randint(len(data), (65,))
        wrapper.train_step((data.images[rows], data.labels[rows]), optim)
    hits = net.eval()(test.images).argmax(1) == test.labels
    return centred.mean, hits.float().mean().item()


if __name__ == "__main__":
    (two, accuracy), (single, _) = train(["cpu", "cpu"]), train(["cpu"])
    print(f"accuracy {accuracy:.3f}; {(two - single).abs().max():.0e} from the mean of one copy")
