"""A custom training loop around a wrapper's `train_step`.

Run it with python, or on two processes: torchrun --nproc-per-node 2 examples/own_loop.py
"""

import torch
from torchmetrics.classification import MulticlassAccuracy

from stepwrap.collectives import get_rank, get_world_size
from stepwrap.configs.digits import Digits, SmallCNN
from stepwrap.loops import ShardedBatchSampler, build_loader
from stepwrap.runner import launch
from stepwrap.wrappers import OptimWrapper, SupervisedModel, wrap_model


def main(epochs: int = 8) -> float:
    torch.manual_seed(0)
    model = wrap_model(None, SupervisedModel(SmallCNN(), torch.nn.CrossEntropyLoss()))
    optim = OptimWrapper(torch.optim.AdamW(model.parameters(), lr=3e-3))
    batch_size = 64 // get_world_size()
    train = build_loader(Digits("train"), batch_size=batch_size, shuffle=True, train=True)
    test = build_loader(Digits("test"), batch_size=128)
    accuracy = MulticlassAccuracy(num_classes=10, average="micro")

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
    with torch.no_grad():
        for batch in test:
            outputs = model.test_step(batch)
            accuracy.update(outputs["preds"], outputs["target"])
    return float(accuracy.compute())


if __name__ == "__main__":
    # `launch` joins torchrun's processes, if any, and destroys the process group at the end.
    for rank, accuracy in launch(main).items():
        if rank == 0:
            print(f"test accuracy {accuracy:.4f}")
