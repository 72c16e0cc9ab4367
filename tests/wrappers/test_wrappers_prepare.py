"""Frozen, checkpointed and compiled models are otherwise unchanged."""

import copy
import logging
import pickle
import re
from typing import Any

import pytest
import torch
from marks import slow
from on_ranks import on_ranks
from ranks import run_ranks
from torch import Tensor, nn

from stepwrap.parallel import free_memory
from stepwrap.wrappers import (
    Preparation,
    SingleDevice,
    StepDataParallel,
    StepDistributedDataParallel,
    SupervisedModel,
    auto,
    build_mesh,
    wrap_model,
)
from stepwrap.wrappers.blocks import checkpoint_activations, compile_model
from stepwrap.wrappers.prepare import freeze_parameters, prepare_model

pytestmark = [
    pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
]


class Block(nn.Module):
    """A block that is hard to recompute: statistics, random numbers, keywords."""

    def __init__(self, dropout: float = 0.2) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm, self.count_norm = nn.BatchNorm1d(4), nn.BatchNorm1d(4, momentum=None)
        self.dropout = nn.Dropout(dropout)
        self.calls = 0

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        self.calls += 1
        return x + scale * self.dropout(torch.tanh(self.count_norm(self.linear(self.norm(x)))))


class Net(nn.Module):
    def __init__(self, dropout: float = 0.2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(2))
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, scale=0.5)
        return self.head(x)


def batch(seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(8, 4, generator=generator), torch.arange(8) % 3


def train(model: Any, steps: int = 3) -> dict[str, Tensor]:
    torch.manual_seed(3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        x, y = batch(step)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return {name: value.clone() for name, value in model.state_dict().items()}


def seeded(dropout: float = 0.2) -> Net:
    torch.manual_seed(0)
    return Net(dropout)


def test_checkpointed_blocks_train_as_before() -> None:
    net = checkpoint_activations(seeded(), ["Block"])
    expected, weights = train(seeded()), train(net)
    assert list(weights) == list(expected)
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    assert net.blocks[0].calls == 2 * 3
    net.eval()
    with torch.no_grad():
        net(batch()[0])
    assert net.blocks[0].calls == 2 * 3 + 1


def test_checkpointed_blocks_keep_their_class_and_can_be_copied() -> None:
    net = checkpoint_activations(seeded(), {"blocks": "blocks.*", "preserve_rng_state": False})
    block: Any = net.blocks[0]
    assert isinstance(block, Block)
    assert (type(block).__name__, block.calls) == ("Block", 0)
    for other in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert type(other.blocks[1]) is type(block)
        assert train(other).keys() == net.state_dict().keys()
        assert other.blocks[1].calls == 6
    assert checkpoint_activations(net, Block).blocks[0] is block


@pytest.mark.parametrize(
    ("spec", "error", "text"),
    [
        (["Blok"], ValueError, "'Blok'; did you mean Block"),
        ({"blocks": ["Block"], "preserve_rng": True}, TypeError, "did you mean preserve_rng_state"),
        ({"preserve_rng_state": True}, TypeError, "must name blocks"),
        ({"blocks": ["Block"], "preserve_rng_state": 1}, TypeError, "must be true or false"),
    ],
)
def test_wrong_checkpointing(spec: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        checkpoint_activations(seeded(), spec)


def test_a_forward_of_the_instance_is_refused() -> None:
    net = seeded()
    net.blocks[0].forward = net.head.forward  # type: ignore[method-assign]
    with pytest.raises(ValueError, match=r"the forward of 'blocks.0' was replaced"):
        checkpoint_activations(net, "Block")


def test_checkpointed_copies() -> None:
    net = checkpoint_activations(seeded(dropout=0.0), "Block")
    expected = train(StepDataParallel(seeded(dropout=0.0), ["cpu", "cpu"]))
    weights = train(StepDataParallel(net, ["cpu", "cpu"]))
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    synced = StepDataParallel(net, ["cpu", "cpu"], sync_batchnorm=True)
    with pytest.raises(RuntimeError, match="cannot be checkpointed under dp"):
        train(synced)
    with pytest.raises(TypeError, match="must not be compiled, because compiled code"):
        StepDataParallel(compile_model(seeded(), {"backend": "eager"}))


@on_ranks(2)
def test_checkpointed_blocks_with_synchronised_batchnorm() -> None:
    rank = torch.distributed.get_rank()
    net = checkpoint_activations(seeded(dropout=0.0).double(), "Block")
    model = StepDistributedDataParallel(net, sync_batchnorm=True)
    plain = seeded(dropout=0.0).double()
    x, y = batch()
    half = slice(4 * rank, 4 * rank + 4)
    nn.functional.cross_entropy(plain(x.double()), y).backward()
    nn.functional.cross_entropy(model(x.double()[half]), y[half]).backward()
    pairs = zip(net.parameters(), plain.parameters(), strict=True)
    assert max((param.grad - other.grad).abs().max().item() for param, other in pairs) <= 1e-12


@pytest.mark.parametrize(
    ("blocks", "checkpointed"),
    [(["Block"], True), *slow((None, False), (None, True), (["Block"], False))],
)
def test_compiled_models_train_as_before(checkpointed: bool, blocks: Any) -> None:
    checkpointing = ["Block"] if checkpointed else None
    compiled = {"backend": "aot_eager", "blocks": blocks}
    net = prepare_model(
        seeded(dropout=0.0), Preparation(activation_checkpointing=checkpointing, compile=compiled)
    )
    expected, weights = train(seeded(dropout=0.0)), train(net)
    assert list(weights) == list(expected)
    assert all(torch.allclose(weights[name], expected[name], atol=1e-6) for name in expected)


@pytest.mark.parametrize(
    ("spec", "error", "text"),
    [
        ({"backend": "inducter"}, ValueError, "got 'inducter'; did you mean inductor"),
        ({"mode": "max-autotun"}, ValueError, "got 'max-autotun'.*did you mean max-autotune"),
        ({"mode": "default", "backend": "eager"}, ValueError, "mode is an option of inductor"),
        ({"fullgraf": True}, TypeError, "no argument 'fullgraf'; did you mean fullgraph"),
        ({"dynamic": 1}, TypeError, "dynamic must be true or false, got 1"),
        ({"blocks": ["Blok"]}, ValueError, "did you mean Block"),
        ("eager", TypeError, "must be true, false, step or options"),
    ],
)
def test_wrong_compiling(spec: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        compile_model(seeded(), spec)


def test_not_compiled() -> None:
    assert compile_model(seeded(), False)._compiled_call_impl is None


def test_freezing() -> None:
    net = seeded()
    names = freeze_parameters(net, ["blocks.0", "*.norm.bias", "head.weight"])
    frozen = {name for name, param in net.named_parameters() if not param.requires_grad}
    inside = {f"blocks.0.{name}" for name, _ in net.blocks[0].named_parameters()}
    assert frozen == set(names) == {*inside, "blocks.1.norm.bias", "head.weight"}
    with pytest.raises(ValueError, match=r"'block.0'; did you mean blocks.0"):
        freeze_parameters(net, "block.0")


def test_a_row_split_table_is_not_compiled() -> None:
    net = nn.Sequential(nn.Embedding(4, 4), nn.Linear(4, 4))
    preparation = Preparation(tensor_parallel={"0": "rowwise"}, compile=True)
    with pytest.raises(ValueError, match="torch cannot compile the embedding '0'"):
        prepare_model(net, preparation, build_mesh({"tensor": 1}))


def test_auto_checks_the_tables_of_all() -> None:
    model = SupervisedModel(seeded(), nn.CrossEntropyLoss())
    with pytest.raises(TypeError, match="did you mean find_unused_parameters"):
        wrap_model(auto, model, ddp={"find_unused": True})
    with pytest.raises(TypeError, match="auto has no argument 'memory'; did you mean memory_gib"):
        wrap_model(auto, model, memory=1)


def test_auto_logs_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "stepwrap"):
        wrapped = wrap_model(auto, SupervisedModel(seeded(), nn.CrossEntropyLoss()))
    assert type(wrapped) is SingleDevice
    assert caplog.messages == ["wrapper: single, because there is one data rank"]


class Records(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def _choose_by_memory() -> tuple[str, list[str]]:
    records, logger = Records(), logging.getLogger("stepwrap")
    logger.addHandler(records)
    logger.setLevel("INFO")
    try:
        wrapped = wrap_model(auto, SupervisedModel(seeded(), nn.CrossEntropyLoss()))
    finally:
        logger.removeHandler(records)
    return type(wrapped).__name__, records.texts


def test_auto_divides_the_free_memory_of_a_machine_among_its_ranks() -> None:
    free = free_memory("cpu") / 2**30
    rank_0, second = run_ranks(_choose_by_memory, 2)
    assert rank_0[0] == second[0] == "StepDistributedDataParallel"
    (text,), none = rank_0[1], second[1]
    assert none == []
    (limit,) = re.findall(r"each of 2 data ranks has (\S+) GiB \(70% of the free memory\)", text)
    # Other processes use memory in the meantime, but not half of it.
    assert 0.5 < float(limit) / (0.7 * free / 2) < 1.5
