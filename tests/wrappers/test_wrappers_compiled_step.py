"""The compiled training step equals the usual one; steps that are not compiled."""

import copy
import logging
import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from compiled_runs import Change, assert_same, at, train
from marks import nightly, slow
from on_ranks import assert_near, on_ranks, same_on_ranks
from torch import Tensor, distributed, nn

from stepwrap.wrappers import (
    AmpOptimWrapper,
    OptimWrapper,
    Preparation,
    SingleDevice,
    SupervisedModel,
    compile_step,
    wrap_model,
)
from stepwrap.wrappers.compiled.cuda_graph import CudaGraph

Batch = tuple[Tensor, Tensor]
FLOAT32: dict[str, Any] = {"dtype": torch.float32, "backend": "inductor"}
Make = Callable[[nn.Module], OptimWrapper]


class ConvNet(nn.Module):
    """A net with running statistics, random draws, a changing buffer and a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(4)
        self.drop, self.drop_all = nn.Dropout(0.3), nn.Dropout2d(0.2)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.head = nn.Linear(4, 3)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.drop_all(torch.relu(self.norm(self.conv(x)))).mean((2, 3))
        self.mean.mul_(0.9).add_(hidden.detach().mean(0), alpha=0.1)
        hidden = self.second(torch.tanh(self.first(hidden - self.mean)))
        return self.head(self.drop(hidden))


def batches(count: int, size: int = 8, dtype: torch.dtype = torch.float32) -> list[Batch]:
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(count, size, 1, 6, 6, generator=generator, dtype=dtype)
    targets = torch.randint(3, (count, size), generator=generator)
    return list(zip(inputs, targets, strict=True))


def assert_equal(make: Make, data: list[Batch], tolerance: float, **options: Any) -> Any:
    """Train both ways with inductor; return the wrapper with the compiled step."""
    options = {"net": ConvNet, "dtype": data[0][0].dtype, "backend": "inductor", **options}
    wrapper = assert_same(tolerance, make=make, data=data, **options)
    assert wrapper.batch_runner.programs, "nothing was compiled"
    return wrapper


def sgd(model: nn.Module) -> OptimWrapper:
    return OptimWrapper(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))


def adamw(model: nn.Module, **options: Any) -> OptimWrapper:
    return OptimWrapper(torch.optim.AdamW(model.parameters(), lr=1e-3), **options)


@pytest.mark.slow
def test_200_steps_in_double_precision() -> None:
    data = batches(200, dtype=torch.float64)
    make = lambda model: adamw(model, clip_grad={"max_norm": 0.5})  # noqa: E731
    wrapper = assert_equal(make, data, 1e-12)
    assert len(wrapper.batch_runner.programs) == 1


@pytest.mark.parametrize("make", [*slow(sgd), *nightly(adamw)])
def test_200_steps_in_single_precision(make: Make) -> None:
    assert_equal(make, batches(200), 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["RMSprop", "Adagrad", "Rprop", "Adamax", "Adadelta", "ASGD"])
def test_other_optimizers(kind: str) -> None:
    def make(model: nn.Module) -> OptimWrapper:
        return OptimWrapper(getattr(torch.optim, kind)(model.parameters(), lr=1e-3))

    assert_equal(make, batches(30, dtype=torch.float64), 1e-10)


@pytest.mark.slow
def test_accumulation_with_a_short_last_window() -> None:
    def make(model: nn.Module) -> OptimWrapper:
        optim = adamw(model, accumulative_counts=3)
        optim.initialize_count_status(model, 0, 20)
        return optim

    data = batches(20, dtype=torch.float64)
    wrapper = assert_equal(make, data, 1e-12)
    # Programs for the first, middle and last batch of a window; the last window has two batches.
    assert len(wrapper.batch_runner.programs) >= 3


@pytest.mark.slow
@pytest.mark.parametrize("counts", [1, 3])
def test_loss_weights(counts: int) -> None:
    """Also for windows and micro-batches without a target, whose loss is NaN."""
    weights: list[Any] = []

    def make(model: nn.Module) -> OptimWrapper:
        optim = adamw(model, accumulative_counts=counts, loss_weight="tokens")
        optim.initialize_count_status(model, 0, 20)
        return optim

    def note(index: int, model: Any, optim: OptimWrapper) -> None:
        weights.append(optim.last_weight)

    data = batches(20, dtype=torch.float64)
    for index, (_, targets) in enumerate(data):
        targets[: index % 4] = -100
        if index in (10, 12, 13, 14):
            targets[:] = -100
    data[-1] = data[-1][0][:5], data[-1][1][:5]
    assert_equal(make, data, 1e-12, before_step=note)
    assert weights[:20] == weights[20:]
    assert weights[11] == 0


@pytest.mark.slow
def test_rates_change_without_a_new_program() -> None:
    def change(index: int, model: Any, optim: OptimWrapper) -> None:
        optim.optimizer.param_groups[0]["lr"] = 0.05 / (1 + index)

    wrapper = assert_equal(sgd, batches(20), 1e-5, before_step=change)
    assert len(wrapper.batch_runner.programs) == 1


class TwoTables(nn.Module):
    """A model in which two parameters share a gradient, and one gradient is an expanded number."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Parameter(torch.ones(36)), nn.Parameter(torch.zeros(36))
        self.shift, self.head = nn.Parameter(torch.zeros(4)), nn.Linear(36, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x.flatten(1) * (self.one + self.other)) + self.shift.sum()


@pytest.mark.slow
@pytest.mark.parametrize("counts", [1, 3])
def test_parameters_that_share_a_gradient_are_clipped_once(counts: int) -> None:
    def make(model: nn.Module) -> OptimWrapper:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        optim = OptimWrapper(optimizer, accumulative_counts=counts, clip_grad={"max_norm": 0.1})
        optim.initialize_count_status(model, 0, 24)
        return optim

    assert_equal(make, batches(24, dtype=torch.float64), 1e-12, net=TwoTables)


@pytest.mark.slow
def test_other_settings_shapes_and_attributes_get_separate_programs() -> None:
    changes: dict[int, Change] = {
        6: lambda _, optim: optim.optimizer.param_groups[0].update(momentum=0.5),
        8: lambda model, _: setattr(model.net.drop, "p", 0.0),
        10: lambda model, _: model.net.conv.requires_grad_(False),
    }
    data = batches(12)
    data[4] = data[4][0][:5], data[4][1][:5]
    wrapper = assert_equal(sgd, data, 1e-5, before_step=at(changes))
    assert len(wrapper.batch_runner.programs) == 5


@pytest.mark.slow
def test_settings_that_change_at_each_step_are_not_followed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def change(index: int, model: Any, optim: OptimWrapper) -> None:
        optim.optimizer.param_groups[0]["momentum"] = 0.9 - index / 100

    wrapper = assert_equal(sgd, batches(12), 1e-5, before_step=change)
    assert len(wrapper.batch_runner.programs) == 2
    assert caplog.text.count("OneCycleLR") == 1


@pytest.mark.slow
def test_bfloat16(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def make(model: nn.Module) -> OptimWrapper:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        return AmpOptimWrapper(optimizer, dtype="bfloat16", clip_grad={"clip_value": 0.1})

    caplog.set_level(logging.INFO)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    assert_equal(make, batches(30), 2e-3)
    begins, ends = caplog.text.split("compiling the training step takes about 1")
    assert "was compiled in" not in begins
    assert "it pays off after" in ends
    assert "step was compiled in" in ends


@pytest.mark.gpu
@pytest.mark.triton
@pytest.mark.parametrize("counts", [1, 3])
@pytest.mark.parametrize("kind", ["SGD", "AdamW"])
def test_200_steps_as_cuda_graphs(kind: str, counts: int) -> None:
    """With AdamW's step counts on the CPU, changing rates and a smaller last batch."""

    def make(model: nn.Module) -> OptimWrapper:
        optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.01, foreach=True)
        optim = OptimWrapper(
            optimizer, accumulative_counts=counts, clip_grad={"max_norm": 0.5}, loss_weight="tokens"
        )
        optim.initialize_count_status(model, 0, 200)
        return optim

    def change(index: int, model: Any, optim: OptimWrapper) -> None:
        optim.optimizer.param_groups[0]["lr"] = 0.01 / (1 + index)

    data = batches(200, dtype=torch.float64)
    data[-1] = data[-1][0][:5], data[-1][1][:5]
    # Some sums on GPUs do not have a fixed order.
    wrapper = assert_equal(make, data, 1e-9, device="cuda", before_step=change)
    assert all(type(program._run) is CudaGraph for program in wrapper.batch_runner.programs)


@pytest.mark.gpu
@pytest.mark.triton
def test_weights_that_move_get_another_cuda_graph() -> None:
    def move(model: Any, optim: OptimWrapper) -> None:
        for param in model.parameters():
            param.data = param.data.clone()

    wrapper = assert_equal(sgd, batches(20), 1e-4, device="cuda", before_step=at({8: move}))
    assert len(wrapper.batch_runner.programs) == 2


@pytest.mark.gpu
def test_steps_that_a_cuda_graph_cannot_hold_run_as_usual(caplog: pytest.LogCaptureFixture) -> None:
    states = []
    for compiled in (False, True):
        state, _, _ = train(
            compiled, lambda: Odd("draws"), make=adamw, data=batches(8), device="cuda", **FLOAT32
        )
        states.append({name: value.device for name, value in state.items()})
    assert states[0] == states[1]
    assert caplog.text.count("cannot be traced") == 1


@pytest.mark.gpu
@pytest.mark.triton
def test_bfloat16_as_a_cuda_graph() -> None:
    def make(model: nn.Module) -> OptimWrapper:
        return AmpOptimWrapper(torch.optim.SGD(model.parameters(), lr=0.05), dtype="bfloat16")

    assert_equal(make, batches(30), 5e-3, device="cuda")


class Odd(nn.Module):
    def __init__(self, oddity: str) -> None:
        super().__init__()
        self.linear, self.what, self.calls = nn.Linear(36, 3), oddity, 0
        self.shift = torch.zeros(3)
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        out = self.linear(x.flatten(1))
        if self.what == "reads a value" and out.sum() > 0:
            out = out * 2
        if self.what == "counts":
            self.calls += 1
        if self.what == "assigns a buffer":
            self.mean = self.mean + 1
        if self.what == "draws":
            out = out * random.random()
        if self.what == "keeps a tensor":
            self.shift += 0.1
            out = out + self.shift
        return out


@pytest.mark.parametrize(
    ("oddity", "reason"),
    [
        ("reads a value", "depends on the values of tensors"),
        ("counts", "changes attributes of model.net"),
        ("assigns a buffer", "only buffers may change, and in place"),
        ("draws", "cannot be traced"),
        ("keeps a tensor", "register_buffer"),
    ],
)
def test_steps_that_cannot_be_compiled_run_as_usual(
    oddity: str, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    usual, compiled = (
        train(flag, lambda: Odd(oddity), make=sgd, data=batches(8), **FLOAT32)
        for flag in (False, True)
    )
    assert usual[1] == compiled[1]
    # The attempt does not change the model.
    assert compiled[2].module.net.calls == usual[2].module.net.calls
    lines = [
        record.getMessage() for record in caplog.records if "not compiled" in record.getMessage()
    ]
    assert len(lines) == 1
    assert reason in lines[0]


def test_options_are_checked() -> None:
    model = SupervisedModel(ConvNet(), nn.CrossEntropyLoss())
    wrong = [{"backend": "aot_eager"}, {"max_programs": 0}, {"min_steps": -1}, {"dynamic": True}]
    for spec in (*({"step": True, **option} for option in wrong), "stepp"):
        with pytest.raises(TypeError, match="compile"):
            wrap_model(None, model, prepare=Preparation(compile=spec))


def test_copies_compile_again() -> None:
    wrapper = compile_step(SingleDevice(SupervisedModel(ConvNet(), nn.CrossEntropyLoss())), 3)
    for copied in (copy.deepcopy(wrapper), pickle.loads(pickle.dumps(wrapper))):
        assert copied.batch_runner.max_programs == 3
        assert copied.batch_runner is not wrapper.batch_runner


def test_programs_that_other_users_can_write_are_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "stepwrap").mkdir()
    (tmp_path / "stepwrap").chmod(0o777)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    usual, compiled = (
        train(flag, ConvNet, make=sgd, data=batches(6), **FLOAT32)[1] for flag in (False, True)
    )
    assert usual == compiled
    assert "others can write to" in caplog.text


@pytest.mark.slow
def test_hooks_that_come_later_are_called() -> None:
    calls = []

    def listen(model: Any, optim: OptimWrapper) -> None:
        optim.optimizer.register_step_pre_hook(lambda *_: calls.append(1))

    train(True, ConvNet, make=sgd, data=batches(9), before_step=at({6: listen}), **FLOAT32)
    assert len(calls) == 3


class Net(nn.Module):
    """A net with running statistics, which DistributedDataParallel broadcasts.

    The gradient of one layer is so large that it has a separate bucket.
    """

    def __init__(self, fails: bool = False) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8)
        self.wide, self.head = nn.Linear(8, 2**16, bias=False), nn.Linear(8, 3)
        self.fails = fails

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.norm(self.first(x)))
        if self.fails and hidden.sum() < 0:
            hidden = hidden * 2
        return self.head(hidden + self.wide(hidden).mean(1, keepdim=True))


def _train(compiled: bool, counts: int, weight: str | None, fails_on: int) -> Any:
    rank = distributed.get_rank()
    torch.manual_seed(0)
    model = SupervisedModel(Net(fails=rank == fails_on).double(), nn.CrossEntropyLoss())
    prepare = Preparation(compile={"step": True, "min_steps": 0} if compiled else False)
    wrapper: Any = wrap_model(None, model, prepare=prepare)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    optim = OptimWrapper(optimizer, counts, clip_grad={"max_norm": 0.5}, loss_weight=weight)
    optim.initialize_count_status(model, 0, 24)
    wrapper.train()
    generator = torch.Generator().manual_seed(rank)
    for index in range(24):
        # One rank has a shape without a program while the other runs its program.
        size = 4 if index == 20 and rank == 1 else 5
        inputs = torch.randn(size, 6, generator=generator, dtype=torch.float64)
        targets = torch.arange(size) % 3
        if weight is not None:
            targets[: index % 3 + rank] = -100
            # No targets on one rank, or on both.
            targets[:] = -100 if index == 15 or (index == 13 and rank) else targets
        wrapper.train_step((inputs, targets), optim)
    return wrapper


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
@pytest.mark.parametrize(
    ("ranks", "counts", "weight", "fails_on"),
    [
        (2, 1, None, -1),
        (2, 3, None, -1),
        (2, 1, "tokens", -1),
        (2, 3, "tokens", -1),
        (3, 1, None, -1),
        (3, 3, "tokens", -1),
        # A rank that cannot compile steps with one that can.
        (2, 1, None, 1),
    ],
)
@on_ranks("ranks")
def test_ranks_train_as_under_ddp(
    ranks: int, counts: int, weight: str | None, fails_on: int
) -> None:
    expected = _train(False, counts, weight, fails_on).module.state_dict()
    wrapper = _train(True, counts, weight, fails_on)
    state = wrapper.module.state_dict()
    assert_near(dict(state), dict(expected), 1e-12)
    if fails_on < 0:
        assert all(same_on_ranks(value) for name, value in state.items() if "norm" not in name)
    assert bool(wrapper.batch_runner.programs) == (distributed.get_rank() != fails_on)
    assert fails_on < 0 or len(wrapper.batch_runner.programs) <= 1
