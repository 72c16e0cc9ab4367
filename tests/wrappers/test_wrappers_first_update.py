"""A step of one's own whose gradients are not the same on all ranks stops at its first update."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from ranks import run_ranks
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
    return [one[dist.get_rank() :: RANKS] for one in batch]


def by_grad(wrapper: Any, data: Any, optim_wrapper: Any, average: bool = False) -> dict[str, Any]:
    """Gradients that no backward has averaged, times two, as a method of one's own makes them."""
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
    return by_grad(wrapper, data, optim_wrapper, average=True)


def trained(step: Any, half: bool = False, **options: Any) -> Tensor | str:
    """The weights after some steps, or the error."""
    wrapper: Any = wrap_model(StepDistributedDataParallel, model(), train_step=step, **options)
    optimizer = torch.optim.SGD(wrapper.parameters(), lr=0.1)
    optim: Any = OptimWrapper(optimizer)
    if half:
        wrapper.module.float()
        scales = {"init_scale": 2.0**40, "backoff_factor": 2.0**-40}
        optim = AmpOptimWrapper(optimizer, dtype="float16", loss_scale=scales)
    try:
        for batch in batches():
            wrapper.train_step([one.float() if half else one for one in own_rows(batch)], optim)
    except RuntimeError as error:
        return str(error)
    return wrapper.module.net.weight.detach()


def test_gradients_of_autograd_grad_are_those_of_one_rank() -> None:
    for found in run_ranks(trained, RANKS, by_grad):
        assert isinstance(found, str)
        assert "different gradients of 'net.weight'" in found
        assert "StepDistributedDataParallel_with_by_grad.train_step" in found
        assert "self.average(gradient)" in found


def test_they_may_be_averaged() -> None:
    plain = model()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for batch in batches():
        optimizer.zero_grad()
        (2 * plain(*batch, mode="loss")["loss"]).backward()
        optimizer.step()
    for found in run_ranks(trained, RANKS, averaged):
        assert isinstance(found, Tensor)
        assert (found - plain.net.weight).abs().max() <= 1e-12


def test_infinite_gradients_put_the_look_off() -> None:
    """A first update that the loss scale leaves out says nothing about the next."""
    for found in run_ranks(trained, RANKS, by_grad, half=True):
        assert isinstance(found, str)
        assert "different gradients" in found
    assert all(isinstance(one, Tensor) for one in run_ranks(trained, RANKS, averaged, half=True))


@pytest.mark.parametrize(
    "options",
    [{"uneven_inputs": True}, {"comm_hook": {"type": "post_localSGD", "start_localSGD_iter": 0}}],
)
def test_ranks_that_may_differ_are_let_be(options: dict[str, Any]) -> None:
    first, second = run_ranks(trained, RANKS, by_grad, **options)
    assert isinstance(first, Tensor)
    assert not torch.equal(first, second)


def trained_in_part() -> float:
    """Torch is told to leave the bias apart."""
    bare = model()
    StepDistributedDataParallel._set_params_and_buffers_to_ignore_for_model(bare, ["net.bias"])
    wrapper: Any = with_train_step(StepDistributedDataParallel, as_it_comes)(bare)
    optim = OptimWrapper(torch.optim.SGD(wrapper.parameters(), lr=0.1))
    wrapper.train_step(own_rows(batches()[0]), optim)
    return bare.net.bias.detach()[0].item()


def as_it_comes(wrapper: Any, data: Any, optim_wrapper: Any) -> dict[str, Any]:
    with optim_wrapper.optim_context(wrapper):
        loss = wrapper(*data, mode="loss")["loss"]
    optim_wrapper.update_params(loss)
    return {"loss": loss}


def test_a_parameter_may_be_left_apart() -> None:
    first, second = run_ranks(trained_in_part, RANKS)
    assert first != second


class Pair(BaseModel):
    """An encoder and a decoder, and a second use of the decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(3, 2).double(), nn.Linear(2, 3).double()

    def forward(self, *data: Tensor, mode: str = "tensor") -> Any:
        return self.decoder(self.encoder(data[0]))


class TwoLosses(SeparateDistributedDataParallel):
    """As many write it: a backward for each loss, after all calls."""

    together = False

    def train_step(self, data: Any, optim_wrapper: Any) -> dict[str, Tensor]:
        rebuilt, invented = self.module(*data), self.module.decoder(data[1])
        near, small = (rebuilt - data[0]).square().mean(), invented.square().mean()
        if self.together:
            (near + small).backward()
        else:
            near.backward()
            small.backward()
        for one in optim_wrapper.values():
            one.step()
            one.zero_grad()
        return {"loss": near.detach()}


class OneLoss(TwoLosses):
    together = True


class SteppingPair(Pair):
    """The same as the model's own step."""

    @property
    def module(self) -> "SteppingPair":
        return self

    def train_step(self, data: Any, optim_wrapper: Any) -> dict[str, Tensor]:
        self.together = False
        return TwoLosses.train_step(self, data, optim_wrapper)  # type: ignore[arg-type]


def trained_apart(cls: Any, kind: type[Pair] = Pair) -> str:
    torch.manual_seed(0)
    wrapper = cls(kind())
    optims = OptimWrapperDict(
        **{
            name: OptimWrapper(torch.optim.SGD(getattr(wrapper.module, name).parameters(), lr=0.1))
            for name in ("encoder", "decoder")
        }
    )
    optims.initialize_count_status(wrapper, 0, STEPS)
    try:
        for batch in batches():
            wrapper.train_step(own_rows(batch), optims)
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_second_backward_of_a_childs_calls_averages_nothing() -> None:
    assert run_ranks(trained_apart, RANKS, OneLoss) == ["", ""]
    for found in run_ranks(trained_apart, RANKS, TwoLosses):
        assert "different gradients of 'decoder" in found
        assert "TwoLosses.train_step" in found
    for found in run_ranks(trained_apart, RANKS, SeparateDistributedDataParallel, SteppingPair):
        assert "different gradients of 'decoder" in found


class Odd(BaseModel):
    """A complex weight, and rows of a table that have sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.wave = nn.Parameter(torch.ones(3, dtype=torch.complex128))
        self.table = nn.Embedding(4, 2, sparse=True).double()

    def forward(self, number: Tensor, rows: Tensor, mode: str = "loss") -> Any:
        return {"loss": (number * self.wave.abs()).sum() + self.table(rows).square().sum()}


def stepped_odd(optimised: str, factor: float) -> str:
    """A step that multiplies this rank's gradients by a number of its own."""

    def train_step(wrapper: Any, data: Any, optim_wrapper: Any) -> dict[str, Any]:
        loss = wrapper(*data)["loss"]
        loss.backward()
        for one in wrapper.parameters():
            one.grad = one.grad * (1 + factor * dist.get_rank())
        optim_wrapper.step()
        return {"loss": loss}

    wrapper: Any = wrap_model(StepDistributedDataParallel, Odd(), train_step=train_step)
    weights = dict(wrapper.module.named_parameters())
    optim = OptimWrapper(torch.optim.SGD([weights[optimised]], lr=0.1))
    optim.initialize_count_status(wrapper, 0, 1)
    try:
        wrapper.train_step([torch.ones(3), torch.tensor([dist.get_rank(), 2])], optim)
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("optimised", ["wave", "table.weight"])
def test_gradients_of_every_kind_are_compared(optimised: str) -> None:
    assert run_ranks(stepped_odd, RANKS, optimised, 0.0) == ["", ""]
    for found in run_ranks(stepped_odd, RANKS, optimised, 1.0):
        assert f"different gradients of '{optimised}'" in found


@on_ranks(RANKS)
def test_the_usual_step_sends_nothing_more() -> None:
    """Only a step of one's own can go wrong in this way."""
    usual: Any = StepDistributedDataParallel(model())
    same: Any = with_train_step(StepDistributedDataParallel, averaged)(model())
    sent = []
    for wrapper in (usual, same):
        optim = OptimWrapper(torch.optim.SGD(wrapper.parameters(), lr=0.1))
        with torch.profiler.profile() as profile:
            wrapper.train_step(own_rows(batches()[0]), optim)
        sent.append(any("allgather" in one.key for one in profile.key_averages()))
    assert sent == [False, True]
