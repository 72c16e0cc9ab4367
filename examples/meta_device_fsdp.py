"""A model that is built on the meta device, sharded over two processes and trained.

No process ever holds all parameters at once. Run it on two processes:
python examples/meta_device_fsdp.py
"""

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torchmetrics.classification import MulticlassAccuracy

from stepwrap.collectives import get_rank, get_world_size
from stepwrap.configs.digits import Digits
from stepwrap.loops import ShardedBatchSampler, build_loader
from stepwrap.runner import launch
from stepwrap.wrappers import (
    OptimWrapper,
    StepFullyShardedDataParallel,
    SupervisedModel,
    meta_parameters,
)


class Block(nn.Module):
    """A residual block: (batch, width) -> (batch, width)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        change: Tensor = self.down(torch.relu(self.up(self.norm(x))))
        return x + change


def build(width: int = 128, depth: int = 4) -> nn.Module:
    blocks = [Block(width) for _ in range(depth)]
    return nn.Sequential(nn.Flatten(), nn.Linear(64, width), *blocks, nn.Linear(width, 10))


def main(epochs: int = 4) -> tuple[float, float]:
    """Train, and return the fraction of the parameters on this rank and the test accuracy."""
    torch.manual_seed(0)
    with meta_parameters():
        net = build()
    model = StepFullyShardedDataParallel(
        SupervisedModel(net, nn.CrossEntropyLoss()), shard=["Block"]
    )
    shards = [param.to_local() for param in model.parameters() if isinstance(param, DTensor)]
    local = sum(shard.numel() for shard in shards)
    share = local / sum(param.numel() for param in model.parameters())

    optim = OptimWrapper(torch.optim.AdamW(model.parameters(), lr=2e-3), clip_grad={"max_norm": 1})
    batch_size = 64 // get_world_size()
    train = build_loader(Digits("train"), batch_size=batch_size, shuffle=True, train=True)
    test = build_loader(Digits("test"), batch_size=128)
    order = train.batch_sampler
    assert isinstance(order, ShardedBatchSampler)
    for epoch in range(epochs):
        model.train()
        order.set_position(epoch)
        for batch in train:
            logs = model.train_step(batch, optim)
        if get_rank() == 0:
            print(f"epoch {epoch + 1}: loss {logs['loss']:.4f}")

    model.eval()
    accuracy = MulticlassAccuracy(num_classes=10, average="micro")
    with torch.no_grad():
        for batch in test:
            outputs = model.test_step(batch)
            accuracy.update(outputs["preds"], outputs["target"])
    return share, float(accuracy.compute())


if __name__ == "__main__":
    for rank, (share, accuracy) in launch(main, nproc=2).items():
        print(f"rank {rank}: {share:.0%} of the parameters, test accuracy {accuracy:.4f}")
