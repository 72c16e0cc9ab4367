"""A custom step whose gradients differ between ranks raises at its first update."""

import gc
from typing import Any

import pytest
import torch
import torch.distributed as dist
from on_ranks import assert_near, gathered, on_ranks, raises_with, same_on_ranks
from torch import Tensor, nn

from stepwrap.wrappers import (
    AmpOptimWrapper,
    BaseModel,
    OptimWrapper,
    OptimWrapperDict,
    SeparateDistributedDataParallel,
    StepDistributedDataParallel,
    SupervisedModel,
    with_train_step,
    wrap_model,
)

RANKS = 2
STEPS = 3


def model() -> SupervisedModel:
    torch.manual_seed(0)
    return SupervisedModel(nn.Linear(3, 2).double(), nn.MSELoss())


def batches() -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        [torch.randn(8, n, generator=generator, dtype=torch.float64) for n in (3, 2)]
        for _ in range(STEPS)
    ]


def own_rows(batch: list[Tensor]) -> list[Tensor]:
    return [tensor[dist.get_rank() :: RANKS] for tensor in batch]


def compute_grad(
    wrapper: Any, data: Any, optim_wrapper: Any, average: bool = False
) -> dict[str, Any]:
    """Set gradients by `autograd.grad`, which averages nothing, times two."""
    weights = list(wrapper.parameters())
    with optim_wrapper.optim_context(wrapper):
        loss = wrapper(*data, mode="loss")["loss"]
    slopes = torch.autograd.grad(loss * optim_wrapper.loss_scale, weights)
    for weight, slope in zip(weights, slopes, strict=True):
        weight.grad = 2 * (wrapper.average(slope) if average else slope)
    optim_wrapper.step()
    optim_wrapper.zero_grad()
    return {"loss": loss}


def averaged(wrapper: Any, data: Any, optim_wrapper: Any) -> dict[str, Any]:
    return compute_grad(wrapper, data, optim_wrapper, average=True)


def train_by(step: Any, half: bool = False, **options: Any) -> Tensor:
    wrapper: Any = wrap_model(StepDistributedDataParallel, model(), train_step=step, **options)
    optimizer = torch.optim.SGD(wrapper.parameters(), lr=0.1)
    optim: Any = OptimWrapper(optimizer)
    if half:
        wrapper.module.float()
        scales = {"init_scale": 2.0**40, "backoff_factor": 2.0**-40}
        optim = AmpOptimWrapper(optimizer, dtype="float16", loss_scale=scales)
    for batch in batches():
        wrapper.train_step(
            [tensor.float() if half else tensor for tensor in own_rows(batch)], optim
        )
    return wrapper.module.net.weight.detach()


@on_ranks(RANKS)
def test_gradients_of_autograd_grad_are_not_averaged() -> None:
    texts = (
        "different gradients of 'net.weight'",
        "StepDistributedDataParallel_with_compute_grad.train_step",
        "wrapper.average(gradient)",
    )
    with raises_with(RuntimeError, *texts):
        train_by(compute_grad)


@on_ranks(RANKS)
def test_averaged_gradients_are_accepted() -> None:
    plain = model()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for batch in batches():
        optimizer.zero_grad()
        (2 * plain(*batch, mode="loss")["loss"]).backward()
        optimizer.step()
    assert_near(train_by(averaged), plain.net.weight.detach(), 1e-12)


@on_ranks(RANKS)
def test_infinite_gradients_delay_the_check() -> None:
    """A first update that the loss scaler skips is not checked; the next one is."""
    with pytest.raises(RuntimeError, match="different gradients"):
        train_by(compute_grad, half=True)
    train_by(averaged, half=True)


@pytest.mark.parametrize(
    "options",
    [{"uneven_inputs": True}, {"comm_hook": {"type": "post_localSGD", "start_localSGD_iter": 0}}],
)
@on_ranks(RANKS)
def test_ranks_that_may_differ_are_not_checked(options: dict[str, Any]) -> None:
    rank_0, second = gathered(train_by(compute_grad, **options))
    assert not torch.equal(rank_0, second)


def as_it_comes(wrapper: Any, data: Any, optim_wrapper: Any) -> dict[str, Any]:
    with optim_wrapper.optim_context(wrapper):
        loss = wrapper(*data, mode="loss")["loss"]
    optim_wrapper.update_params(loss)
    return {"loss": loss}


@on_ranks(RANKS)
def test_a_parameter_that_torch_ignores_is_not_checked() -> None:
    bare = model()
    StepDistributedDataParallel._set_params_and_buffers_to_ignore_for_model(bare, ["net.bias"])
    wrapper: Any = with_train_step(StepDistributedDataParallel, as_it_comes)(bare)
    optim = OptimWrapper(torch.optim.SGD(wrapper.parameters(), lr=0.1))
    wrapper.train_step(own_rows(batches()[0]), optim)
    rank_0, second = gathered(bare.net.bias.detach()[0].item())
    assert rank_0 != second


class Pair(BaseModel):
    """An encoder and a decoder, and a second use of the decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(3, 2).double(), nn.Linear(2, 3).double()

    def forward(self, *data: Tensor, mode: str = "tensor") -> Any:
        return self.decoder(self.encoder(data[0]))


class TwoLosses(SeparateDistributedDataParallel):
    """A common step with a backward for each loss, after all forward calls."""

    together = False

    def train_step(self, data: Any, optim_wrapper: Any) -> dict[str, Tensor]:
        rebuilt, invented = self.module(*data), self.module.decoder(data[1])
        near, small = (rebuilt - data[0]).square().mean(), invented.square().mean()
        if self.together:
            (near + small).backward()
        else:
            near.backward()
            small.backward()
        for member in optim_wrapper.values():
            member.step()
            member.zero_grad()
        return {"loss": near.detach()}


class OneLoss(TwoLosses):
    together = True


class SteppingPair(Pair):
    @property
    def module(self) -> "SteppingPair":
        return self

    def train_step(self, data: Any, optim_wrapper: Any) -> dict[str, Tensor]:
        self.together = False
        return TwoLosses.train_step(self, data, optim_wrapper)  # type: ignore[arg-type]


def train_apart(cls: Any, kind: type[Pair] = Pair) -> None:
    torch.manual_seed(0)
    wrapper = cls(kind())
    optims = OptimWrapperDict(
        **{
            name: OptimWrapper(torch.optim.SGD(getattr(wrapper.module, name).parameters(), lr=0.1))
            for name in ("encoder", "decoder")
        }
    )
    optims.initialize_count_status(wrapper, 0, STEPS)
    for batch in batches():
        wrapper.train_step(own_rows(batch), optims)


@on_ranks(RANKS)
def test_a_second_backward_of_a_child_is_not_averaged() -> None:
    train_apart(OneLoss)
    with raises_with(RuntimeError, "different gradients of 'decoder", "TwoLosses.train_step"):
        train_apart(TwoLosses)
    with raises_with(RuntimeError, "different gradients of 'decoder"):
        train_apart(SeparateDistributedDataParallel, SteppingPair)


class Odd(BaseModel):
    """A model with a complex weight and an embedding with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.wave = nn.Parameter(torch.ones(3, dtype=torch.complex128))
        self.table = nn.Embedding(4, 2, sparse=True).double()

    def forward(self, number: Tensor, rows: Tensor, mode: str = "loss") -> Any:
        return {"loss": (number * self.wave.abs()).sum() + self.table(rows).square().sum()}


def step_odd(optimised: str, factor: float) -> None:
    """Multiply the gradients by a number that differs between ranks."""

    def train_step(wrapper: Any, data: Any, optim_wrapper: Any) -> dict[str, Any]:
        loss = wrapper(*data)["loss"]
        loss.backward()
        for param in wrapper.parameters():
            param.grad = param.grad * (1 + factor * dist.get_rank())
        optim_wrapper.step()
        return {"loss": loss}

    wrapper: Any = wrap_model(StepDistributedDataParallel, Odd(), train_step=train_step)
    weights = dict(wrapper.module.named_parameters())
    optim = OptimWrapper(torch.optim.SGD([weights[optimised]], lr=0.1))
    optim.initialize_count_status(wrapper, 0, 1)
    wrapper.train_step([torch.ones(3), torch.tensor([dist.get_rank(), 2])], optim)


@pytest.mark.parametrize("optimised", ["wave", "table.weight"])
@on_ranks(RANKS)
def test_gradients_of_every_kind_are_compared(optimised: str) -> None:
    step_odd(optimised, 0.0)
    with raises_with(RuntimeError, f"different gradients of '{optimised}'"):
        step_odd(optimised, 1.0)


@on_ranks(RANKS)
def test_only_the_first_update_is_compared() -> None:
    wrapper: Any = StepDistributedDataParallel(model())
    optim = OptimWrapper(torch.optim.SGD(wrapper.parameters(), lr=0.1))
    sent = []
    for batch in batches()[:2]:
        with torch.profiler.profile() as profile:
            wrapper.train_step(own_rows(batch), optim)
        sent.append(any("allgather" in one.key for one in profile.key_averages()))
    assert sent == [True, False]


def inner_call(wrapper: Any, data: Any) -> Tensor:
    return nn.functional.mse_loss(wrapper.module.net(data[0]), data[1])


def model_call(wrapper: Any, data: Any) -> Tensor:
    return wrapper.module(*data, mode="loss")["loss"]


def method_call(wrapper: Any, data: Any) -> Tensor:
    inputs, target = data
    return wrapper.module.loss(wrapper.module.net.forward(inputs), target)


def twice(wrapper: Any, data: Any) -> Tensor:
    loss = wrapper(*data, mode="loss")["loss"]
    loss.backward(retain_graph=True)
    return loss


def own_loop(loss_of: Any, enters: bool, every: int = 1, **options: Any) -> Tensor:
    """Train in a loop that calls only the optimizer wrapper, not `train_step`."""
    wrapper = StepDistributedDataParallel(model(), **options)
    optim = OptimWrapper(torch.optim.SGD(wrapper.parameters(), lr=0.1), accumulative_counts=every)
    for batch in batches():
        with optim.optim_context(wrapper if enters else nn.Module()):
            loss = loss_of(wrapper, own_rows(batch))
        optim.update_params(loss)
    return wrapper.module.net.weight.detach()


@pytest.mark.parametrize(
    ("loss_of", "enters", "options"),
    [
        (inner_call, True, {}),
        (inner_call, False, {}),
        (model_call, False, {"every": 3}),
        (method_call, False, {"comm_hook": "fp16_compress"}),
        (inner_call, False, {"uneven_inputs": True}),
        (inner_call, False, {"comm_hook": {"type": "post_localSGD", "start_localSGD_iter": 0}}),
        (twice, True, {}),
    ],
)
@on_ranks(RANKS)
def test_an_own_loop_must_call_the_wrapper(
    loss_of: Any, enters: bool, options: dict[str, Any]
) -> None:
    with raises_with(RuntimeError, "the first update", "wrapper(...)", "wrapper.module"):
        own_loop(loss_of, enters, **options)


def averaged_by_hand(wrapper: Any, data: Any) -> Tensor:
    """Return a loss whose gradients are averaged by a hook of the parameters."""
    for parameter in wrapper.module.parameters():
        if not parameter._backward_hooks:
            parameter.register_hook(wrapper.average)
    return inner_call(wrapper, data)


@on_ranks(RANKS)
def test_an_own_loop_that_averages_is_accepted() -> None:
    by_wrapper = own_loop(lambda wrapper, data: wrapper(*data, mode="loss")["loss"], True)
    assert_near(own_loop(averaged_by_hand, True), by_wrapper, 1e-12)


class Judged(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.maker, self.judge = nn.Linear(3, 2).double(), nn.Linear(2, 1).double()


@on_ranks(RANKS)
def test_an_own_loop_must_call_the_children_of_separate() -> None:
    def train(child_of: Any) -> None:
        torch.manual_seed(0)
        wrapper: Any = SeparateDistributedDataParallel(Judged())
        gan = wrapper.module
        optim = OptimWrapper(torch.optim.SGD(gan.parameters(), lr=0.1))
        optim.update_params(gan.judge(child_of(gan)(own_rows(batches()[0])[0])).mean())

    train(lambda gan: gan.maker)
    with raises_with(RuntimeError, "different gradients of 'weight'", "child"):
        train(lambda gan: gan.maker.module)


@on_ranks(RANKS)
def test_an_own_loop_that_joins_is_not_compared() -> None:
    """Ranks without batches do not update, so a comparison would wait for them."""
    wrapper = StepDistributedDataParallel(model())
    optim = OptimWrapper(torch.optim.SGD(wrapper.parameters(), lr=0.1))
    with wrapper.join():
        for batch in batches()[: dist.get_rank()]:
            optim.update_params(wrapper(*batch, mode="loss")["loss"])
    assert same_on_ranks(wrapper.module.net.weight)


@on_ranks(RANKS)
def test_an_older_wrapper_of_the_model_is_ignored() -> None:
    """It may still exist on one rank only, so a comparison would wait for the others."""
    bare = model()
    older = [StepDistributedDataParallel(bare)]
    if dist.get_rank():
        older.clear()
        gc.collect()
    wrapper = StepDistributedDataParallel(bare)
    optim = OptimWrapper(torch.optim.SGD(bare.parameters(), lr=0.1))
    optim.update_params(wrapper(*own_rows(batches()[0]), mode="loss")["loss"])
    assert same_on_ranks(bare.net.weight)
