"""A fully sharded model that calls itself in its forward."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from fsdp_runs import Block, largest_difference, own_batches, whole
from marks import slow
from ranks import run_ranks
from step_models import sgd
from torch import Tensor, nn

from stepwrap.wrappers import BaseModel, SingleDevice, StepFullyShardedDataParallel

RANKS = 2


class Nested(BaseModel):
    """Its loss takes its own scores, more than once where `way` says so, and may fail."""

    def __init__(self, way: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.way, self.fails = way, False
        self.body, self.head = Block(), nn.Linear(6, 3)
        self.double()

    def forward(self, inputs: Tensor, target: Tensor | None = None, mode: str = "tensor") -> Any:
        if mode != "loss":
            scores: Tensor = self.head(self.body(inputs))
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


def _nested(way: str) -> list[float]:
    by_rank = [own_batches(rank, torch.float64) for rank in range(RANKS)]
    together = [
        [torch.cat(parts) for parts in zip(*pair, strict=True)]
        for pair in zip(*by_rank, strict=True)
    ]
    plain = _trained(SingleDevice(Nested(way)), together).state_dict()
    far = []
    for shard, compiled in ((None, False), ("Block", False), ("Block", True)):
        if way == "sum" and compiled:
            continue
        bare = Nested(way)
        model = StepFullyShardedDataParallel(bare, shard=shard)
        if compiled:
            bare.compile(backend="eager")
        trained = _trained(model, by_rank[dist.get_rank()])
        far.append(largest_difference(whole(trained), plain))
    return far


# What torch itself warns of while it traces.
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize("way", ["once", "error", *slow("twice", "sum", "caught", "interrupt")])
def test_gradients_of_a_window_are_kept(way: str) -> None:
    for far in run_ranks(_nested, RANKS, way):
        assert max(far) <= 1e-12
