"""A fully sharded model that calls itself in its forward."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from fsdp_runs import Block, own_batches, whole, whole_batches
from marks import slow
from on_ranks import assert_near, on_ranks
from step_models import sgd
from torch import Tensor, nn

from stepwrap.wrappers import BaseModel, SingleDevice, StepFullyShardedDataParallel


class Nested(BaseModel):
    """A model whose loss calls the model itself, in one of several ways, and may fail."""

    def __init__(self, way: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.way, self.fails = way, False
        self.body, self.head = Block(), nn.Linear(6, 3)
        self.double()

    def forward(self, inputs: Tensor, target: Tensor | None = None, mode: str = "tensor") -> Any:
        if mode != "loss":
            scores = self.head(self.body(inputs))
            if mode == "raise":
                raise KeyboardInterrupt if self.way == "interrupt" else KeyError(mode)
            return scores
        if self.way == "caught":
            with pytest.raises(KeyError):
                self(inputs, mode="raise")
        if self.fails:
            self(inputs, mode="raise")
        loss = nn.functional.cross_entropy(self(inputs), target)
        if self.way == "twice":
            loss = loss + self(2 * inputs).square().mean()
        if self.way == "sum":
            loss = loss + 0.1 * self.head.weight.square().sum() + self._sum()
        return {"loss": loss}

    def _sum(self) -> Any:
        own = dict(self.named_parameters())
        return 0.1 * own["head.bias"].square().sum()


def _trained(model: Any, data: list[Any]) -> Any:
    optim = sgd(model, momentum=0.9, accumulative_counts=3)
    optim.initialize_count_status(nn.Module(), 0, 6)
    for at, batch in enumerate(data[:6]):
        if at == 3 and model.module.way in ("error", "interrupt"):
            _fail(model, batch, optim)
        model.train_step(batch, optim)
        if at == 1:
            with torch.no_grad():
                model(*batch, mode="loss")
    return model.module


def _fail(model: Any, batch: Any, optim: Any) -> None:
    """Fail in an inner forward: of a step, without one, in an evaluation; then in a backward."""
    model.module.fails = True
    for run in (
        lambda: model.train_step(batch, optim),
        lambda: model(*batch, mode="loss"),
        lambda: torch.no_grad()(model)(*batch, mode="loss"),
    ):
        with pytest.raises((KeyError, KeyboardInterrupt)):
            run()
        model.zero_grad()
    model.module.fails = False
    handle = model.module.body.register_forward_hook(_break_backward)
    with pytest.raises(KeyError, match="fails"):
        model.train_step(batch, optim)
    handle.remove()
    model.zero_grad()


def _break_backward(body: nn.Module, inputs: Any, output: Tensor) -> None:
    output.register_hook(_raise)


def _raise(gradient: Tensor) -> None:
    raise KeyError("this backward fails")


# What torch itself warns of while it traces.
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize("way", ["once", "error", *slow("twice", "sum", "caught", "interrupt")])
@on_ranks(2)
def test_gradients_of_a_window_are_kept(way: str) -> None:
    single = _trained(SingleDevice(Nested(way)), whole_batches())
    for shard, compiled in ((None, False), ("Block", False), ("Block", True)):
        if way == "sum" and compiled:
            continue
        bare = Nested(way)
        model = StepFullyShardedDataParallel(bare, shard=shard)
        if compiled:
            bare.compile(backend="eager")
        sharded = _trained(model, own_batches(dist.get_rank(), torch.float64))
        assert_near(whole(sharded), dict(single.state_dict()), 1e-12)
