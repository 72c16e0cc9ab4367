"""The model server: model versions that are pushed by one process and pulled by others."""

import re
from typing import Any

import pytest
import torch
from torch import nn
from worlds import model_client, run_group, run_world

from stepwrap.rpc import (
    OrderedServerBase,
    OrderedServerSimple,
    OrderedServerSimpleImpl,
    PushPullModelServer,
    PushPullModelServerImpl,
    RpcGroup,
    World,
)


class Net(nn.Module):
    """A model whose parameters, buffers and plain numbers all have the same value."""

    def __init__(self, value: float = 0.0) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.norm = nn.BatchNorm1d(2)
        self.fill(value)

    def fill(self, value: float) -> None:
        with torch.no_grad():
            for tensor in [*self.parameters(), *self.buffers()]:
                tensor.fill_(value)

    def value(self) -> float:
        values = {
            number.item()
            for number in torch.cat([v.reshape(-1) for v in self.state_dict().values()])
        }
        assert len(values) == 1
        return values.pop()


@run_world(3)
def test_pull_loads_the_pushed_values(world: World, group: RpcGroup) -> None:
    rank = world.rank
    server = model_client(group)
    model = Net(rank)
    before = set(vars(model))
    if rank == 1:
        assert not server.pull(model)
        assert not hasattr(model, "pp_version")
        assert server.push(model)
        assert model.pp_version == 1
        model.fill(10)
        assert server.push(model)
        assert model.pp_version == 2
    group.barrier()
    model.linear.weight.grad = torch.ones(2, 3)
    addresses = [tensor.data_ptr() for tensor in model.state_dict().values()]
    assert server.pull(model)
    assert addresses == [tensor.data_ptr() for tensor in model.state_dict().values()]
    assert model.linear.weight.grad.eq(1).all()
    assert set(vars(model)) - before == {"pp_version"}
    pulled = model.value(), model.pp_version
    # Only a newer version is loaded.
    model.fill(5)
    assert server.pull(model)
    assert (pulled, model.value(), model.pp_version) == ((10.0, 2), 5.0, 2)


def _refuse(world: World, group: RpcGroup) -> Any:
    rank = world.rank
    server = model_client(group)
    model = Net(rank)
    if rank == 1:
        assert server.push(model)
        assert server.push(model)
    group.barrier()
    not_pulled = None
    if rank == 2:
        model.linear.weight.grad = torch.ones(2, 3)
        assert not server.push(model, pull_on_fail=False)
        not_pulled = model.value(), model.pp_version
        assert not server.push(model)
        assert model.linear.weight.grad.eq(1).all()
        assert (model.value(), model.pp_version) == (1.0, 2)
        model.fill(7)
        assert server.push(model)
        # A version that the user sets is kept.
        model.pp_version = 100
        assert not server.push(model, pull_on_fail=False)
        assert server.pull(model)
        assert model.pp_version == 100
        assert not server.push(model)
    group.barrier()
    server.pull(model)
    return not_pulled, model.value(), model.pp_version


def test_a_refused_push_loads_the_newest_version_unless_disabled() -> None:
    w0, second, third = run_group(_refuse, 3)
    assert w0 == second == (None, 7.0, 3)
    assert third == ((2.0, 0), 7.0, 3)


class Refusing(OrderedServerBase):
    """Refuses every push and is empty."""

    def push(self, key: Any, value: Any, version: Any, prev_version: Any) -> bool:
        return False

    def pull(self, key: Any, version: Any = None) -> None:
        return None


def test_refused_with_nothing_to_pull_is_an_error() -> None:
    server = PushPullModelServer("model", Refusing())
    assert not server.push(Net(), pull_on_fail=False)
    assert not server.pull(Net())
    with pytest.raises(RuntimeError, match="version 1 of 'model' was refused"):
        server.push(Net())
    with pytest.raises(RuntimeError, match="must be created with o_server"):
        PushPullModelServer("model").pull(Net())


@run_world(3)
def test_clients_that_race_lose_no_accepted_push(world: World, group: RpcGroup) -> None:
    rank = world.rank
    server = model_client(group)
    model = Net(0)
    accepted = 0
    while rank and accepted < 20:
        model.fill(model.value() + 1)
        accepted += server.push(model, pull_on_fail=True)
    group.barrier()
    assert server.pull(model)
    assert (model.value(), model.pp_version) == (40.0, 40)


def _restart(world: World, group: RpcGroup, versions: int, pushes_before_clients: bool) -> Any:
    rank = world.rank
    if rank == 0:
        earlier = PushPullModelServerImpl("server", group)
    group.barrier()
    server = group.get_paired("server").to_here()
    model = Net(1)
    while rank == 1 and getattr(model, "pp_version", 0) < versions:
        assert server.push(model)
    group.barrier()
    server.pull(model)
    assert model.pp_version == versions
    group.barrier()
    if rank == 0:
        with pytest.raises(KeyError, match="already"):
            PushPullModelServerImpl("server", group)
        earlier.close()
        earlier.close()
        assert not group.is_paired("server")
        assert not group.is_paired("server_o_server")
        PushPullModelServerImpl("server", group)
        if pushes_before_clients:
            assert server.push(Net(8))
    group.barrier()
    accepted = rank == 1 and server.push(model, pull_on_fail=False)
    group.barrier()
    assert server.pull(model)
    return accepted, model.value(), model.pp_version


def test_a_restarted_server_accepts_the_next_push() -> None:
    results = run_group(_restart, 3, 3, False)
    assert results == [(False, 1.0, 4), (True, 1.0, 4), (False, 1.0, 4)]


@pytest.mark.parametrize("versions", [1, 3])
def test_clients_follow_a_restarted_server_with_any_version(versions: int) -> None:
    assert run_group(_restart, 3, versions, True) == [(False, 8.0, 1)] * 3


def _use_own(world: World, group: RpcGroup) -> Any:
    rank = world.rank
    if rank == 0:
        OrderedServerSimpleImpl("mine", group, version_depth=5)
    server = model_client(group, model_name="net", o_server=OrderedServerSimple("mine", group))
    assert not group.is_paired("server_o_server")
    model = Net(rank)
    assert not server.pull(model)
    group.barrier()
    accepted = server.push(model)
    group.barrier()
    if accepted:
        model.fill(10)
        assert server.push(model)
    group.barrier()
    assert server.pull(model)
    answer = server.o_server.pull("net", 2)
    assert answer is not None
    assert answer[0].keys() == model.state_dict().keys()
    return accepted, model.value(), model.pp_version


def test_any_ordered_server_keeps_models() -> None:
    accepted, values, versions = zip(*run_group(_use_own, 3), strict=True)
    assert sorted(accepted) == [False, False, True]
    assert values == (10.0,) * 3
    assert versions == (2,) * 3


@run_world(3)
def test_another_model_is_an_error_that_leaves_it_unchanged(world: World, group: RpcGroup) -> None:
    rank = world.rank
    server = model_client(group)
    if rank == 0:
        server.push(Net(1))
    group.barrier()
    wide = Net()
    wide.linear = nn.Linear(4, 2)
    texts = []
    for other in [nn.Sequential(nn.Linear(3, 2)), wide]:
        before = {name: value.clone() for name, value in other.state_dict().items()}
        try:
            server.pull(other)
        except (KeyError, ValueError) as error:
            texts.append((type(error).__name__, str(error)))
        assert not hasattr(other, "pp_version")
        after = other.state_dict()
        assert all(after[name].equal(value) for name, value in before.items())
        # A push as the successor of the newest version is refused with the same error.
        other.pp_version = 1
        with pytest.raises((KeyError, ValueError)) as refused:
            server.push(other)
        assert (type(refused.value).__name__, str(refused.value)) == texts[-1]
    model = Net()
    assert server.pull(model)
    linear, model.linear = model.linear, wide.linear
    with pytest.raises(ValueError, match=r"'linear.weight' is \(2, 3\) in the state, \(2, 4\)"):
        server.push(model)
    group.barrier()
    model.linear = linear
    if rank == 1:
        assert server.push(model)
    names, shapes = texts
    assert names[0] == "KeyError"
    assert "model lacks 'linear.bias', 'linear.weight', 'norm.bias'" in names[1]
    assert "and 2 more" in names[1]
    assert "state lacks '0.bias', '0.weight' and" in names[1]
    assert shapes[0] == "ValueError"
    difference = r"'linear\.weight' .*\(2, 3\) .*state, \(2, 4\) .*model"
    assert re.search(f"must .*same model, .*{difference}$", shapes[1])
