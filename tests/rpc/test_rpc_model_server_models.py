"""The model server with models of all kinds: wrapped, sharded, half, with buffers, on devices."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from worlds import Local, model_client, run_group

from stepwrap.rpc import (
    PushPullModelServer,
    RpcGroup,
    World,
)
from stepwrap.wrappers import (
    SingleDevice,
    StepDistributedDataParallel,
    StepFullyShardedDataParallel,
    SupervisedModel,
)


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))


def supervised() -> SupervisedModel:
    return SupervisedModel(net(), nn.functional.cross_entropy)


def values(model: nn.Module) -> dict[str, Any]:
    return {name: value.tolist() for name, value in model.state_dict().items()}


def train(model: nn.Module) -> None:
    model(torch.randn(8, 4)).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()


def test_only_models_are_accepted() -> None:
    server = PushPullModelServer("model", Local())
    for call in (server.push, server.pull):
        with pytest.raises(TypeError, match=r"must .*torch\.nn\.Module, got OrderedDict"):
            call(net().state_dict())  # type: ignore[arg-type]


def test_buffers_and_extra_state_are_sent() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(4)
            self.count = 0

        def get_extra_state(self) -> int:
            return self.count

        def set_extra_state(self, state: int) -> None:
            self.count = state

    server = PushPullModelServer("model", Local())
    model, other = Counting(), Counting()
    model.norm(torch.randn(8, 4))
    model.count = 3
    server.push(model)
    server.pull(other)
    assert other.count == 3
    assert other.norm.num_batches_tracked.item() == 1
    assert torch.equal(model.norm.running_var, other.norm.running_var)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_types_are_kept_and_loaded_into_the_models_own(dtype: torch.dtype) -> None:
    server = PushPullModelServer("model", Local())
    model, same, single = net().to(dtype), net().to(dtype), net()
    server.push(model)
    server.pull(same)
    server.pull(single)
    assert values(same) == values(model)
    assert single[0].weight.dtype == torch.float32
    assert torch.equal(single[0].weight, model[0].weight.float())


@pytest.mark.parametrize(
    "wrap", [DataParallel, lambda model: torch.compile(model, backend="eager"), SingleDevice]
)
def test_names_are_without_the_wrappers_prefix(wrap: Callable[[Any], nn.Module]) -> None:
    server = PushPullModelServer("model", Local())
    model, other = supervised(), supervised()
    wrapped = wrap(model)
    server.push(wrapped)
    assert wrapped.pp_version == model.pp_version == 1
    assert server.pull(other)
    assert values(other) == values(model)
    train(other.net)
    server.push(other)
    server.pull(wrapped)
    assert values(other) == values(model)
    assert wrapped.pp_version == model.pp_version == 2


def test_a_child_named_module_is_not_taken_for_a_wrapper() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = nn.Linear(2, 2)

    o_server = Local()
    PushPullModelServer("model", o_server).push(Outer())
    assert o_server.kept is not None
    assert sorted(o_server.kept[0]) == ["module.bias", "module.weight"]


@pytest.mark.gpu
def test_states_are_kept_on_the_cpu_and_loaded_where_the_model_is() -> None:
    o_server = Local()
    server = PushPullModelServer("model", o_server)
    model, other = net().cuda(), net().cuda()
    server.push(model)
    assert o_server.kept is not None
    assert {value.device.type for value in o_server.kept[0].values()} == {"cpu"}
    server.pull(other)
    assert other[0].weight.is_cuda
    assert values(other) == values(model)


def _trained(world: World, group: RpcGroup, kind: str) -> Any:
    rank = world.rank
    server = model_client(group)
    torch.manual_seed(0)
    model = supervised()
    wrap = {
        "torch": DistributedDataParallel,
        "step": StepDistributedDataParallel,
        "sharded": StepFullyShardedDataParallel,
    }[kind]
    wrapped = wrap(model)
    # Gathering a sharded state needs all ranks.
    accepted = (kind == "sharded" or rank == 1) and server.push(wrapped)
    group.barrier()
    torch.manual_seed(0)
    bare, pulled = supervised(), supervised()
    assert server.pull(pulled)
    is_same = values(pulled) == values(bare)
    group.barrier()
    if rank == 0:
        pulled.net[0].weight.data.fill_(3)
        assert server.push(pulled)
    group.barrier()
    assert server.pull(wrapped)
    weight = model.net[0].weight
    full_weight = weight.full_tensor() if kind == "sharded" else weight
    return accepted, is_same, full_weight.eq(3).all().item(), model.pp_version, wrapped.pp_version


@pytest.mark.parametrize("kind", ["torch", "step", "sharded"])
def test_wrapped_models_are_pushed_and_pulled(kind: str) -> None:
    accepted, *results = zip(*run_group(_trained, 3, kind), strict=True)
    assert sorted(accepted) == [False, False, True]
    assert results == [(True,) * 3, (True,) * 3, (2,) * 3, (2,) * 3]
