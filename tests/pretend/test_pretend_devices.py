"""The pretend devices behave as CUDA devices where programs can see it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

pytestmark = pytest.mark.pretend


def test_a_training_step_equals_the_host() -> None:
    losses = []
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 2))
        model.to(device)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        inputs = torch.randn(3, 4).to(device)
        for _ in range(3):
            loss = model(inputs).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        assert loss.device.type == device
        losses.append(loss.item())
    assert losses[1] == pytest.approx(losses[0], abs=1e-6)


def test_an_empty_tensor_keeps_its_shape() -> None:
    value = torch.zeros(0, 16, device="cuda")
    assert value.clone().add_(1).shape == (0, 16)
    assert torch.add(value, 1, out=torch.empty(0, device="cuda")).shape == (0, 16)


@pytest.mark.parametrize("other", ["cpu", "cuda:1"])
def test_tensors_of_two_devices_raise(other: str) -> None:
    with pytest.raises(RuntimeError, match=f"two devices, cuda:0 and {other}"):
        torch.ones(2, device="cuda:0") + torch.ones(2, device=other)


def test_waits_are_recorded_with_their_line() -> None:
    from pretend_devices import recording_work

    value = torch.ones(2, device="cuda")
    with recording_work() as work:
        value.sum()
    assert work.waits == []
    with recording_work() as work:
        value.sum().item()
    (wait,) = work.waits
    assert "_local_scalar_dense" in wait
    assert "test_pretend_devices.py" in wait


def test_a_late_copy_arrives_at_a_wait() -> None:
    value = torch.arange(3.0, device="cuda")
    host = torch.zeros(3).pin_memory()
    host.copy_(value, non_blocking=True)
    assert host.isnan().all()
    value += 1
    torch.cuda.synchronize()
    assert host.tolist() == [0.0, 1.0, 2.0]


def test_a_late_copy_to_the_device_reads_the_source_later() -> None:
    host = torch.zeros(3).pin_memory()
    value = host.to("cuda", non_blocking=True)
    host.fill_(7)
    assert value.tolist() == [7.0, 7.0, 7.0]


def test_memory_is_counted_and_runs_out() -> None:
    from pretend_devices import limited_memory

    before = torch.cuda.memory_allocated()
    value = torch.ones(1000, device="cuda")
    assert torch.cuda.memory_allocated() - before == 4000
    with (
        limited_memory(torch.cuda.memory_allocated() + 3999),
        pytest.raises(torch.cuda.OutOfMemoryError, match="4000 bytes"),
    ):
        value.clone()
    value.clone()
    assert torch.cuda.max_memory_allocated() - before >= 8000
    del value
    assert torch.cuda.memory_allocated() == before


def test_each_device_has_its_random_stream() -> None:
    torch.cuda.manual_seed_all(3)
    on_host = torch.get_rng_state()
    drawn, on_second = (torch.rand(4, device=f"cuda:{index}") for index in (0, 1))
    assert drawn.tolist() == on_second.tolist()
    assert torch.equal(torch.get_rng_state(), on_host)
    assert not torch.equal(torch.rand(4, device="cuda:0"), drawn)


def test_a_graph_repeats_its_operations() -> None:
    value = torch.zeros(2, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        value += 1
    assert value.tolist() == [0.0, 0.0]
    graph.replay()
    graph.replay()
    assert value.tolist() == [2.0, 2.0]
    with pytest.raises(RuntimeError, match="capturing"), torch.cuda.graph(graph):
        value.sum().item()
