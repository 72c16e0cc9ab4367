"""Gradient servers against plain training, and the arithmetic of their reduction."""

import threading
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from marks import slow
from torch import Tensor, nn
from worlds import run_group

from stepwrap.rpc import PushPullGradServerImpl, RpcGroup, World
from stepwrap.rpc.servers.reduction import Level, Push, Receipt, ReduceSettings, Reduction

UPDATES = 8
CLIENTS = 4
OPTIMIZERS: dict[str, Any] = {
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
}


def make_model(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2)).to(dtype)


def compute_loss(model: nn.Module, client: int, update: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * update + client)
    data = torch.randn(6, 5, generator=generator, dtype=torch.float64)
    out: Tensor = model(data.to(next(model.parameters()).dtype))
    return out.square().mean()


def plain_training(optimizer_name: str, dtype: torch.dtype) -> list[Tensor]:
    model = make_model(dtype)
    optimizer = OPTIMIZERS[optimizer_name](model.parameters())
    for update in range(UPDATES):
        optimizer.zero_grad()
        for client in range(CLIENTS):
            (compute_loss(model, client, update) / CLIENTS).backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def _train_in_step(
    world: World, group: RpcGroup, optimizer_name: str, dtype: torch.dtype
) -> list[Tensor]:
    rank = world.rank
    server = PushPullGradServerImpl(
        "server",
        group,
        primary_reducer="w0",
        secondary_reducers=["w1"],
        reduce_method="mean",
        reduce_batch_size=2,
    )
    if rank == 0:
        managed = make_model(dtype)
        server.manage_model(managed, OPTIMIZERS[optimizer_name](managed.parameters()))
    server.start()
    group.barrier()
    client, model = group.get_paired("server").to_here(), make_model(dtype)
    for update in range(UPDATES):
        for number in (2 * rank - 2, 2 * rank - 1) if rank else ():
            model.zero_grad()
            compute_loss(model, number, update).backward()
            # A push also pulls, but newer versions come only after all have pushed.
            client.push(model)
        # Wait for the step that all have pushed for.
        while (client.o_server.pull("model") or (None, 0))[1] <= update:
            server.watch()
        assert client.pull(model)
        group.barrier()
    server.stop()
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize("dtype", [torch.float64, *slow(torch.float32)])
@pytest.mark.parametrize("optimizer_name", list(OPTIMIZERS))
def test_clients_in_step_equal_plain_training(optimizer_name: str, dtype: torch.dtype) -> None:
    expected = plain_training(optimizer_name, dtype)
    limit = 1e-6 if dtype == torch.float32 else 1e-12
    for parameters in run_group(_train_in_step, 3, optimizer_name, dtype):
        for parameter, plain in zip(parameters, expected, strict=True):
            assert (parameter - plain).abs().max() <= limit


@settings(deadline=None, max_examples=40)
@given(
    values=st.lists(st.floats(-10, 10, width=32), min_size=2, max_size=12),
    batch_size=st.integers(2, 5),
    method=st.sampled_from(["sum", "mean"]),
    dtype=st.sampled_from([torch.float16, torch.float32, torch.float64]),
)
def test_running_sum_equals_stacking(
    values: list[float], batch_size: int, method: str, dtype: torch.dtype
) -> None:
    reduction = Reduction(ReduceSettings(method, torch.device("cpu"), batch_size, 64, "block"))
    given_tensors = [torch.full((2,), value, dtype=dtype) for value in values]
    copies = [tensor.clone() for tensor in given_tensors]
    results = [reduction.add({"a": tensor}) for tensor in given_tensors]
    for index, result in enumerate(results):
        if (index + 1) % batch_size:
            assert result is None
            continue
        stacked = torch.stack(copies[index + 1 - batch_size : index + 1]).double()
        expected = stacked.sum(0) if method == "sum" else stacked.mean(0)
        assert result is not None
        torch.testing.assert_close(result["a"].double(), expected, rtol=1e-5, atol=1e-5)
        assert result["a"].dtype == (torch.float32 if dtype == torch.float16 else dtype)
    assert all(map(torch.equal, given_tensors, copies))


@settings(deadline=None, max_examples=60)
@given(
    moves=st.lists(st.sampled_from(["offer", "force", "take"]), max_size=40),
    policy=st.sampled_from(["block", "drop_oldest", "error"]),
)
def test_queue_counts_every_dropped_item(moves: list[str], policy: Any) -> None:
    limits = ReduceSettings("sum", torch.device("cpu"), 2, 3, policy)
    queue = Level[Push]("queue", limits, threading.Condition())
    offered, answers, numbers = 0, [], []
    for move in moves:
        with queue.locked():
            if move == "take" and queue.items:
                numbers.append(queue.take().number)
            elif move != "take":
                answers.append(torch.futures.Future[Receipt]())
                push = Push("client", offered, 0, {})
                queue.offer(push, answers[-1], is_forced=move == "force")
                offered += 1
        assert len(queue.items) <= 3 or "force" in moves
    states = [answer.wait().state for answer in answers if answer.done()]
    assert len(states) == offered - len(queue.waiting)
    refused = states.count("full")
    queued = len(queue.items) + len(queue.waiting)
    assert offered == len(numbers) + queued + refused + queue.dropped
    assert numbers == sorted(numbers) or "force" in moves
    assert refused == 0 or policy == "error"
    assert queue.dropped == 0 or policy == "drop_oldest"
