"""Plans for splitting layers, and the split layers."""

from typing import Any

import pytest
import torch
from on_ranks import on_ranks
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from stepwrap.wrappers import Preparation, build_mesh, parallelize
from stepwrap.wrappers.prepare import prepare_model
from stepwrap.wrappers.sharding.tensor_parallel import check_plan


class Net(nn.Module):
    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.table = nn.Embedding(6, 4)
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 4)
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 6, bias=False)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.second(torch.tanh(self.first(self.table(ids))))
        return self.head(self.norm(hidden))


PLAN = {"table": "rowwise", "first": "colwise", "second": "rowwise"}
HEAD = {"head": "colwise_replicate_output"}


@pytest.mark.parametrize(
    ("plan", "text"),
    [
        ({"frist": "colwise"}, "no module of the model has the path 'frist'; did you mean first"),
        ({"norm": "colwise"}, "'norm' is a LayerNorm; colwise can split only Linear and Em"),
        ({"first": "colwise"}, "'first' is a Linear with out_features=8, which 3 ranks cannot"),
        ({"table": "colwise"}, "Embedding with embedding_dim=4, which 3 ranks"),
        ({"first": "rowwise", "fir*": "rowwise"}, "'first' is matched by 'first' and by 'fir\\*'"),
        ({"first": "columnwise"}, "one of colwise, .*got 'columnwise'; did you mean colwise"),
        ({"first": {"type": "colwise", "output": "split"}}, "replicate or shard.dimension., got"),
        ({"": "sequence"}, "'' is a Net that contains layers"),
        ({"none.*": "colwise", "norm": "rowwise"}, "'none.\\*'; 'norm' is a LayerNorm"),
    ],
)
def test_wrong_plans(plan: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        check_plan(Net(), plan, 3)


@pytest.mark.parametrize(
    ("style", "text"),
    [
        ({"type": "colwise", "outputs": "replicate"}, "no argument 'outputs'; did you mean output"),
        ({"type": "rowwise", "local_output": 1}, "local_output must be true or false, got 1"),
        (3, "first: a style must be a name or a mapping with a type, got 3"),
    ],
)
def test_wrong_styles(style: Any, text: str) -> None:
    with pytest.raises(TypeError, match=text):
        check_plan(Net(), {"first": style}, 2)


def test_tied_weights_stay_tied_or_are_refused() -> None:
    # Split one of the two layers, or both over different dimensions.
    for plan in (PLAN, {**PLAN, **HEAD, "table": "colwise"}):
        with pytest.raises(ValueError, match=r"table\.weight and head\.weight are one"):
            check_plan(Net(tied=True), plan, 2)
    assert list(check_plan(Net(tied=True), {"first": "colwise"}, 2)) == ["first"]
    assert list(check_plan(Net(tied=True), {**PLAN, **HEAD}, 2)) == [
        "table",
        "first",
        "second",
        "head",
    ]


def test_without_a_tensor_axis() -> None:
    with pytest.raises(ValueError, match="needs .*tensor axis, got data"):
        parallelize(Net(), build_mesh({"data": 1}), PLAN)
    with pytest.raises(ValueError, match="tensor_parallel needs a mesh"):
        prepare_model(Net(), Preparation(tensor_parallel=PLAN))
    net = Net()
    assert parallelize(net, build_mesh({"tensor": 1}), PLAN) is net
    assert type(net.first.weight) is nn.Parameter


def _seeded(tied: bool = False) -> Net:
    torch.manual_seed(0)
    return Net(tied).double()


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    "plan",
    [{**PLAN, **HEAD}, {"table": RowwiseParallel(input_layouts=None), **HEAD}],
    ids=["names", "objects"],
)
@on_ranks(2)
def test_weights_and_gradients_are_parts_of_the_whole(plan: dict[str, Any], tied: bool) -> None:
    plan = {**plan, "table": "rowwise", "first": ColwiseParallel()} if tied else {**plan, **PLAN}
    plan["second"] = "rowwise"
    plain, net = _seeded(tied), _seeded(tied)
    for network in (plain, net):
        network.first.bias.requires_grad_(False)
    net.norm.weight.mark = "kept"
    parallelize(net, build_mesh({"tensor": 2}), plan)
    assert [name for name, _ in net.named_parameters()] == [n for n, _ in plain.named_parameters()]
    assert all(type(param) is nn.Parameter for param in net.parameters())
    assert not net.first.bias.requires_grad
    assert net.norm.weight.mark == "kept"
    ids = torch.arange(6)
    worst = []
    for net_ in (plain, net):
        net_(ids).pow(2).mean().backward()
    for local, full in zip(net.parameters(), plain.parameters(), strict=True):
        layout = getattr(local, "tensor_layout", None)
        cut = (slice(None),) if layout is None else layout.slices
        assert torch.equal(local, full[cut])
        if local.requires_grad:
            worst.append((local.grad - full.grad[cut]).abs().max().item())
    with torch.inference_mode():
        worst.append((net(ids) - plain(ids)).abs().max().item())
    assert max(worst) <= 1e-14


@on_ranks(2)
def test_as_dtensors_and_twice() -> None:
    net = _seeded()
    parallelize(net, build_mesh({"tensor": 2}), PLAN, localise=False)
    assert isinstance(net.first.weight, DTensor)
    with pytest.raises(ValueError, match="'first' is split already"):
        parallelize(net, build_mesh({"tensor": 2}), PLAN)


@on_ranks(2)
def test_low_precision() -> None:
    net = parallelize(_seeded().float(), build_mesh({"tensor": 2}), {**PLAN, **HEAD})
    ids = torch.arange(6)
    with torch.autocast("cpu", torch.bfloat16):
        autocast = net(ids)
    autocast.sum().backward()
    half = net.bfloat16()(ids)
    half.sum().backward()
    assert autocast.dtype is half.dtype is net.first.weight.grad.dtype is torch.bfloat16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + self.second(torch.tanh(self.first(inputs)))


def _compiled_blocks(count: int) -> int:
    # Imported here because it loads the compiler.
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    net = nn.Sequential(*(Block() for _ in range(count)))
    parallelize(net, build_mesh({"tensor": 2}), {"*.first": "colwise", "*.second": "rowwise"})
    for block in net:
        block.compile(backend="eager")
    net(torch.ones(3, 4)).sum().backward()
    return counters["frames"]["total"]


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.slow
@on_ranks(2)
def test_equal_blocks_are_compiled_once() -> None:
    """Otherwise torch would stop after eight blocks and run the others uncompiled."""
    assert _compiled_blocks(2) == _compiled_blocks(12) > 0


@on_ranks(2)
def test_outputs_can_be_changed_in_place() -> None:
    plain, net = Block().double(), Block().double()
    net.load_state_dict(plain.state_dict())
    parallelize(net, build_mesh({"tensor": 2}), {"first": "colwise", "second": "rowwise"})
    for network in (plain, net):
        outputs = network.second(torch.tanh(network.first(torch.ones(3, 4, dtype=torch.float64))))
        outputs += 1
        outputs.square().sum().backward()
    assert (plain.second.bias.grad - net.second.bias.grad).abs().max().item() <= 1e-14


@on_ranks(2)
def test_a_gradient_of_a_gradient_is_refused() -> None:
    net = Block()
    parallelize(net, build_mesh({"tensor": 2}), {"first": "colwise", "second": "rowwise"})
    inputs = torch.ones(3, 4, requires_grad=True)
    output = net.second(torch.tanh(net.first(inputs))).sum()
    with pytest.raises(RuntimeError, match="create_graph=True.* over a tensor axis"):
        torch.autograd.grad(output, inputs, create_graph=True)
