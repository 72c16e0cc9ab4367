"""Traffic and loading when clients of a gradient server push and pull."""

import pickle
from typing import Any

import pytest
import torch
from test_rpc_model_server_traffic import counted
from torch import nn
from worlds import run_group

from stepwrap.rpc import (
    OrderedServerSimple,
    OrderedServerSimpleImpl,
    PushPullGradServerImpl,
    RpcGroup,
    World,
)

LITTLE = 3000


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64))


def _traffic(world: World, group: RpcGroup, kind: str) -> Any:
    rank = world.rank
    results: dict[str, Any] = {}
    with counted() as traffic:
        o_server = None
        if kind == "plain" and rank == 0:
            OrderedServerSimpleImpl("states", group)
            o_server = OrderedServerSimple("states", group)
        secondary = ["w0"] if kind != "apart" else ["w1"]
        server = PushPullGradServerImpl(
            "server", group, "model", "w0", secondary, o_server, reduce_batch_size=2
        )
        if rank == 0:
            managed = make_model()
            server.manage_model(managed, torch.optim.SGD(managed.parameters(), lr=0.1))
        group.barrier()
        server.start()
        if rank == 2:
            client, model = group.get_paired("server").to_here(), make_model()
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            results["early"] = client.push(model)
            for _ in range(3):
                client.push(model)
            while not client.pull(model):
                """The step is on its way."""
            model[0].weight.data.fill_(3)
            model[1].running_mean.fill_(5)
            traffic.take()
            results["again"] = client.pull(model)
            results["received"] = traffic.take()[1]
            results["weight"] = model[0].weight.detach().clone()
            results["buffer"] = model[1].running_mean[0].item()
            model[0].weight.data.fill_(3)
            results["push"] = client.push(model)
            results["by push"] = model[0].weight.detach().clone()
            results["gradient"] = model[0].weight.grad.abs().sum().item()
            results["sent along"] = len(pickle.dumps(client))
        group.barrier()
        server.watch()
        server.stop()
        if rank == 0:
            results["weight"] = managed[0].weight.detach().clone()
    return results


@pytest.mark.parametrize("kind", ["own", "apart", "plain"])
def test_a_pull_of_known_weights_loads_them_and_moves_nothing(kind: str) -> None:
    """`own`: states and reducer in one process; `apart`: in two; `plain`: whole states only."""
    primary, _, client = run_group(_traffic, 3, kind)
    assert client["early"] is False
    assert client["again"] is client["push"] is True
    assert client["weight"].equal(primary["weight"])
    assert client["by push"].equal(primary["weight"])
    assert client["buffer"] == 5
    assert client["gradient"] == 0
    assert client["sent along"] < LITTLE
    assert (client["received"] < LITTLE) is (kind != "plain")
