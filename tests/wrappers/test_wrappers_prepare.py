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
    OptimWrapper,
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
    with pytest.raises(ValueError, match=r"forward of 'blocks\.0' was replaced"):
        checkpoint_activations(net, "Block")


def test_checkpointed_copies() -> None:
    net = checkpoint_activations(seeded(dropout=0.0), "Block")
    expected = train(StepDataParallel(seeded(dropout=0.0), ["cpu", "cpu"]))
    weights = train(StepDataParallel(net, ["cpu", "cpu"]))
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    synced = StepDataParallel(net, ["cpu", "cpu"], sync_batchnorm=True)
    with pytest.raises(RuntimeError, match="cannot be checkpointed under dp"):
        train(synced)
    with pytest.raises(TypeError, match="must not be compiled"):
        StepDataParallel(compile_model(seeded(), {"backend": "eager"}))


class Centre(nn.Module):
    """Subtract a running mean, also in training; ``replaces``: assign a new buffer each time."""

    def __init__(self, *, replaces: bool = False) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))
        self.replaces = replaces

    def forward(self, x: Tensor) -> Tensor:
        if self.training and self.replaces:
            self.mean = (0.9 * self.mean + 0.1 * x.mean(0)).detach()
        elif self.training:
            with torch.no_grad():
                self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
        # The backward needs the mean itself.
        return (x - self.mean) * (1 + self.mean)


class Stateful(nn.Sequential):
    """A block whose forward changes buffers that its output depends on."""


STATEFUL = {
    "mean": lambda: Stateful(nn.Linear(4, 4), Centre(), nn.Tanh()),
    "new_mean": lambda: Stateful(nn.Linear(4, 4), Centre(replaces=True), nn.BatchNorm1d(4)),
    "hook": lambda: Stateful(nn.utils.spectral_norm(nn.Linear(4, 4)), nn.Tanh()),
    "parametrization": lambda: Stateful(
        nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)), nn.Tanh()
    ),
}


def _train_stateful(kind: str, wrapper: str, *, checkpointed: bool) -> dict[str, Tensor]:
    """Train by steps of a wrapper, or by hand if ``wrapper`` is empty; return the state dict."""
    torch.manual_seed(1)
    blocks = ["Stateful"] if checkpointed else None
    net = nn.Sequential(STATEFUL[kind](), STATEFUL[kind](), nn.Linear(4, 3))
    steps = [batch(step) for step in range(4)]
    if not wrapper:
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for x, y in steps:
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(x), y).backward()
            optimizer.step()
        return net.state_dict()
    model = SupervisedModel(net, nn.CrossEntropyLoss())
    options = {"device_ids": ["cpu", "cpu"]} if wrapper == "dp" else {}
    prepare = Preparation(activation_checkpointing=blocks)
    model = wrap_model(wrapper, model, prepare=prepare, device="cpu", **options)
    optim_wrapper = OptimWrapper(torch.optim.SGD(model.parameters(), lr=0.1))
    for step in steps:
        model.train_step(step, optim_wrapper)
    return {name: as_whole(value).clone() for name, value in net.state_dict().items()}


def as_whole(value: Any) -> Tensor:
    return value.full_tensor() if hasattr(value, "full_tensor") else value


@pytest.mark.parametrize("kind", [*STATEFUL])
def test_the_second_forward_sees_the_buffers_of_the_first(kind: str) -> None:
    expected = _train_stateful(kind, "", checkpointed=False)
    weights = _train_stateful(kind, "single", checkpointed=True)
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


def test_the_buffers_of_checkpointed_copies() -> None:
    expected = _train_stateful("mean", "dp", checkpointed=False)
    weights = _train_stateful("mean", "dp", checkpointed=True)
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


@on_ranks(2)
def _check_stateful_on_ranks(wrapper: str) -> None:
    for kind in ("mean", "hook"):
        expected = _train_stateful(kind, "", checkpointed=False)
        weights = _train_stateful(kind, wrapper, checkpointed=True)
        for name, value in expected.items():
            torch.testing.assert_close(weights[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp"])
def test_the_buffers_of_checkpointed_blocks_on_ranks(wrapper: str) -> None:
    _check_stateful_on_ranks(wrapper=wrapper)


def test_buffers_of_several_forwards_before_a_backward() -> None:
    """The backward runs twice, and last for the first forward."""
    gradients, buffers = [], []
    for checkpointed in (False, True):
        torch.manual_seed(1)
        net = nn.Sequential(STATEFUL["mean"](), nn.Linear(4, 3))
        if checkpointed:
            checkpoint_activations(net, ["Stateful"])
        losses = [nn.functional.cross_entropy(net(x), y) for x, y in map(batch, range(3))]
        for loss in reversed(losses):
            loss.backward(retain_graph=True)
            loss.backward()
        gradients.append([param.grad for param in net.parameters()])
        buffers.append([*net.buffers()])
    assert all(map(torch.equal, *gradients))
    assert all(map(torch.equal, *buffers))


@pytest.mark.parametrize("blocks", [None, *slow(["Stateful"])])
def test_buffers_of_checkpointed_blocks_in_compiled_models(blocks: Any) -> None:
    expected = _train_stateful("mean", "", checkpointed=False)
    torch.manual_seed(1)
    net = nn.Sequential(STATEFUL["mean"](), STATEFUL["mean"](), nn.Linear(4, 3))
    compiled = {"backend": "aot_eager", "blocks": blocks}
    prepare_model(net, Preparation(activation_checkpointing=["Stateful"], compile=compiled))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for x, y in map(batch, range(4)):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()
    for name, value in net.state_dict().items():
        torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_buffers_of_checkpointed_blocks_in_a_compiled_step(
    caplog: pytest.LogCaptureFixture,
) -> None:
    expected = _train_stateful("mean", "", checkpointed=False)
    torch.manual_seed(1)
    net = nn.Sequential(STATEFUL["mean"](), STATEFUL["mean"](), nn.Linear(4, 3))
    compiled = {"step": True, "min_steps": 0, "backend": "eager"}
    prepare = Preparation(activation_checkpointing=["Stateful"], compile=compiled)
    supervised = SupervisedModel(net, nn.CrossEntropyLoss())
    model = wrap_model("single", supervised, prepare=prepare, device="cpu")
    optim_wrapper = OptimWrapper(torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(4):
        model.train_step(batch(step), optim_wrapper)
    assert "not compiled" not in caplog.text
    for name, value in net.state_dict().items():
        torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-6)


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
    with pytest.raises(TypeError, match="auto .*'memory'; .*you mean memory_gib"):
        wrap_model(auto, model, memory=1)


def test_auto_logs_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "stepwrap"):
        wrapped = wrap_model(auto, SupervisedModel(seeded(), nn.CrossEntropyLoss()))
    assert type(wrapped) is SingleDevice
    (message,) = caplog.messages
    assert re.match("wrapper: single, .*one data rank", message)


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
