"""CUDA graphs of the compiled step: the memory they share, and the optimizer's state after them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from stepwrap.wrappers import OptimWrapper, SingleDevice, SupervisedModel, compile_step

pytestmark = pytest.mark.pretend


class Net(nn.Linear):
    """A layer that a graph cannot contain once ``reads`` is set, because it reads a value."""

    reads = False

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = super().forward(inputs)
        return outputs * 2 if self.reads and outputs.sum().item() else outputs


def test_variants_share_memory_and_give_numbers_back() -> None:
    import pretend_runtime as runtime

    net = Net(3, 2).cuda()
    wrapper = compile_step(
        SingleDevice(SupervisedModel(net, nn.CrossEntropyLoss())), backend="eager", min_steps=0
    )
    optimizer = torch.optim.Adam(net.parameters(), foreach=True)
    optim_wrapper = OptimWrapper(optimizer)

    def train(sizes: list[int]) -> None:
        for size in sizes:
            batch = torch.randn(size, 3), torch.zeros(size, dtype=torch.long)
            wrapper.train_step(batch, optim_wrapper)

    def counts() -> list[str]:
        return [state["step"].device.type for state in optimizer.state.values()]

    train([4, 4, 4])
    assert counts() == ["cpu", "cpu"]
    runtime.pools.clear()
    train([4, 4, 5, 6, 4])
    assert len(runtime.pools) == 3
    assert len({id(memory) for memory in runtime.pools}) == 1
    assert counts() == ["cuda", "cuda"]
    # The programs no longer fit, and no other one can be compiled.
    net.reads = True
    train([4] * 110)
    assert counts() == ["cpu", "cpu"]
