"""Two copies of a model on one CUDA device."""

from typing import Any

import pytest
import torch
from step_models import batches, classifier, flat, sgd
from torch import nn

from stepwrap.wrappers import (
    AmpOptimWrapper,
    ReplicationCallbackDataParallel,
    SingleDevice,
    StepDataParallel,
)

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("devices", [[0, 0], ["cuda:0"], ["cuda:0", "cuda", 0], None])
@pytest.mark.parametrize("size", [5, 1])
def test_training_follows_the_whole_batch(devices: Any, size: int) -> None:
    model = StepDataParallel(classifier(torch.float64).cuda(), devices)
    whole = SingleDevice(classifier(torch.float64).cuda())
    ours, theirs = sgd(model, momentum=0.9), sgd(whole, momentum=0.9)
    for batch in batches(5, size, torch.float64):
        model.train_step(batch, ours)
        whole.train_step(batch, theirs)
    assert (flat(model) - flat(whole)).abs().max() <= 1e-12


def test_buffers_streams_and_autocast() -> None:
    seen: list[Any] = []

    class Look(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(()))

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            self.count += len(inputs)
            seen.append((torch.cuda.current_stream(), torch.is_autocast_enabled("cuda")))
            return inputs + self.count

    module = Look().cuda()
    model = ReplicationCallbackDataParallel(module, [0, 0], "cpu")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream), torch.autocast("cuda", torch.bfloat16):
        outputs = model(torch.zeros(3))
    assert outputs.tolist() == [2, 2, 1]
    assert module.count.item() == 2
    assert seen == [(stream, True)] * 2


def test_mixed_precision() -> None:
    model = StepDataParallel(classifier().cuda(), [0, 0])
    before = flat(model)
    amp = AmpOptimWrapper(torch.optim.SGD(model.parameters(), lr=0.1), dtype="float16")
    logs = model.train_step(batches(1, 5)[0], amp)
    assert logs["loss"].is_cuda
    assert not torch.equal(flat(model), before)


def test_refusals() -> None:
    model = ReplicationCallbackDataParallel(nn.Linear(2, 2).cuda(), [0, 0])
    inputs = torch.zeros(2, 2, device="cuda")
    model(inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        inputs.add_(1)
        with pytest.raises(RuntimeError, match="cannot be captured in a CUDA graph"):
            model(inputs)
    with pytest.raises(RuntimeError, match=r"on device cpu \(device_ids\[0\]\)"):
        ReplicationCallbackDataParallel(nn.Linear(2, 2).cuda(), ["cpu"])(inputs)
