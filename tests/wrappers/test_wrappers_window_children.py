"""Children that only earlier micro-batches of an accumulation window use."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from marks import slow
from on_ranks import assert_near, gathered, on_ranks, raises_with, same_on_ranks
from torch import Tensor, nn

from stepwrap.loops import LoopState, load_checkpoint, save_checkpoint
from stepwrap.wrappers import (
    AmpOptimWrapper,
    BaseModel,
    OptimWrapper,
    OptimWrapperDict,
    StepDistributedDataParallel,
    build_mesh,
    wrap_model,
)
from stepwrap.wrappers.layout import unreduced

# By update and micro-batch: whether child `b` is used.
USES = ((True, True), (True, False), (False, False), (True, False))
WINDOW = 2


class TwoChildren(BaseModel):
    """The sum of two networks, of which a batch may leave out the second one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
        self.b = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()

    def train_step(self, data: Any, optim_wrapper: Any) -> dict[str, Tensor]:
        inputs, targets, uses_b = data
        optim = optim_wrapper["both"]
        with optim.optim_context(self.a), optim.optim_context(self.b):
            outputs = self.a(inputs)
            outputs = outputs + self.b(inputs) if uses_b else outputs
            loss = nn.functional.mse_loss(outputs, targets)
        optim.weigh([inputs])
        optim.update_params(loss)
        return {"loss": loss.detach()}


def make_batch(update: int, at: int, rank: int) -> list[Any]:
    generator = torch.Generator().manual_seed(100 * update + 10 * at + rank)
    options: Any = {"generator": generator, "dtype": torch.float64}
    return [torch.randn(4, 3, **options), torch.randn(4, 1, **options), USES[update][at]]


def train_plainly(model: TwoChildren) -> dict[str, Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1)
    for update in range(len(USES)):
        optimizer.zero_grad()
        for at in range(WINDOW):
            for rank in range(2):
                inputs, targets, uses_b = make_batch(update, at, rank)
                outputs = model.a(inputs)
                outputs = outputs + model.b(inputs) if uses_b else outputs
                (nn.functional.mse_loss(outputs, targets) / 4).backward()
        optimizer.step()
    return model.state_dict()


def whole_state(wrapper: Any) -> dict[str, Tensor]:
    state = wrapper.module.state_dict()
    return {n: v.full_tensor() if hasattr(v, "full_tensor") else v for n, v in state.items()}


def make_optims(wrapper: nn.Module, kind: Any = OptimWrapper, **options: Any) -> OptimWrapperDict:
    optimizer = torch.optim.SGD(wrapper.parameters(), lr=0.1, weight_decay=0.1)
    return OptimWrapperDict(both=kind(optimizer, WINDOW, **options))


def has_unreduced(wrapper: nn.Module) -> bool:
    """Return whether modules of this wrapper have gradients that are not reduced yet.

    Wrappers of earlier tests in this process may have some, too.
    """
    return any(module in unreduced for module in wrapper.modules())


@pytest.mark.parametrize(
    ("kind", "options", "optim"),
    [
        ("separate", {}, {}),
        ("fsdp", {"shard": ["a", "b"]}, {}),
        ("separate", {"gradient_as_bucket_view": True}, {"loss_weight": "samples"}),
        ("fsdp", {}, {"loss_weight": "samples"}),
        *slow(
            ("separate", {"comm_hook": "allreduce"}, {}),
            ("separate", {"find_unused_parameters": True}, {}),
            ("fsdp", {"shard": ["Linear"]}, {}),
            ("fsdp", {"mesh": {"replicate": 2, "shard": 1}}, {}),
        ),
    ],
)
@on_ranks(2)
def test_weights_equal_plain_training(
    kind: str, options: dict[str, Any], optim: dict[str, Any]
) -> None:
    model = TwoChildren()
    expected = train_plainly(copy.deepcopy(model))
    if "mesh" in options:
        options = {"mesh": build_mesh(options["mesh"])}
    wrapper = wrap_model(kind, model, **options)
    optims = make_optims(wrapper, **optim)
    for update in range(len(USES)):
        for at in range(WINDOW):
            wrapper.train_step(make_batch(update, at, dist.get_rank()), optims)
        assert not has_unreduced(wrapper)
    assert_near(whole_state(wrapper), expected, 1e-12)


@pytest.mark.parametrize("kind", ["separate", "fsdp"])
@on_ranks(2)
def test_a_loss_scale(kind: str) -> None:
    """In float16 the pending gradients are scaled like the others."""
    model = TwoChildren().float()
    expected = train_plainly(copy.deepcopy(model).double())
    wrapper = wrap_model(kind, model)
    optims = make_optims(wrapper, AmpOptimWrapper, dtype="float16", loss_scale=256.0)
    for update in range(len(USES)):
        for at in range(WINDOW):
            inputs, targets, uses_b = make_batch(update, at, dist.get_rank())
            wrapper.train_step([inputs.float(), targets.float(), uses_b], optims)
    assert_near({n: v.double() for n, v in whole_state(wrapper).items()}, expected, 5e-3)


@on_ranks(2)
def test_a_window_that_is_resumed_from_a_checkpoint(tmp_path: Any) -> None:
    model = TwoChildren()
    expected = train_plainly(copy.deepcopy(model))
    wrapper = wrap_model("separate", model)
    optims = make_optims(wrapper)
    for update in range(len(USES)):
        wrapper.train_step(make_batch(update, 0, dist.get_rank()), optims)
        state = LoopState(wrapper, optims, iteration=2 * update + 1, batch=2 * update + 1)
        path = save_checkpoint(tmp_path, state)
        wrapper = wrap_model("separate", TwoChildren())
        optims = make_optims(wrapper)
        load_checkpoint(path).restore(LoopState(wrapper, optims))
        optims["both"].resumed_at = 0
        wrapper.train_step(make_batch(update, 1, dist.get_rank()), optims)
    assert_near(whole_state(wrapper), expected, 1e-12)


@on_ranks(2)
def test_a_hook_that_does_more_than_average_is_refused() -> None:
    options = {"type": "powerSGD", "start_powerSGD_iter": 2}
    wrapper = wrap_model("separate", TwoChildren(), comm_hook=options)
    optims = make_optims(wrapper)
    wrapper.train_step(make_batch(1, 0, dist.get_rank()), optims)
    texts = "did not use b.0.weight", "or a comm_hook that averages"
    with raises_with(RuntimeError, *texts):
        wrapper.train_step(make_batch(1, 1, dist.get_rank()), optims)


class Alone(StepDistributedDataParallel):
    """Trains with the wrapper in the first micro-batch of a window only."""

    def train_step(self, data: Any, optim_wrapper: Any) -> dict[str, Tensor]:
        inputs, _, _ = data
        with optim_wrapper.optim_context(self):
            loss = self(inputs).mean() if optim_wrapper.inner_count % 2 == 0 else torch.zeros(())
        optim_wrapper.update_params(loss.requires_grad_())
        return {}


@on_ranks(2)
def test_ddp_with_sparse_and_missing_gradients() -> None:
    """Ranks may have used different parameters of the module."""
    rank = dist.get_rank()
    net = nn.ModuleList([nn.Embedding(4, 2, sparse=True), nn.Linear(2, 2), nn.Linear(2, 2)])

    def forward(inputs: Tensor) -> Any:
        return net[1 + rank](net[0](torch.tensor([rank, 3])))

    net.forward = forward  # type: ignore[assignment]
    wrapper = Alone(net, find_unused_parameters=True)
    optim_wrapper = OptimWrapper(torch.optim.SGD(wrapper.parameters(), lr=1.0), WINDOW)
    before = [parameter.detach().clone() for parameter in net.parameters()]
    for at in range(WINDOW):
        wrapper.train_step(make_batch(0, at, rank), optim_wrapper)
    for parameter, value in zip(net.parameters(), before, strict=True):
        assert same_on_ranks(parameter)
        assert not torch.equal(parameter, value)
    changes = (net[0].weight - before[0])[:, 0]
    assert changes.ne(0).tolist() == [True, True, False, True]
    assert gathered(has_unreduced(wrapper)) == [False, False]
