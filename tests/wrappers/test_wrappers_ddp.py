"""DistributedDataParallel with the three steps, over real processes."""

import copy
import inspect
import io
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from step_models import (
    HalfUsed,
    OwnStep,
    PlainModel,
    batches,
    classifier,
    flat,
    mlp,
    sgd,
)
from test_wrappers_single import ORDER, Recording, RecordingSGD, RecordingWrapper
from torch import Tensor, nn

from stepwrap.registry import MODEL_WRAPPERS
from stepwrap.wrappers import (
    AmpOptimWrapper,
    OptimWrapper,
    StepDistributedDataParallel,
    SupervisedModel,
)

MICRO_STEPS = 8
RANKS = 2


def _own_batches(dtype: torch.dtype) -> list[list[Tensor]]:
    return batches(MICRO_STEPS, dtype=dtype, seed=10 + dist.get_rank())


def _train(dtype: torch.dtype, accumulate: int, **options: Any) -> tuple[Tensor, int]:
    model = StepDistributedDataParallel(classifier(dtype, seed=dist.get_rank()), **options)
    updates = 0
    wrapper = sgd(model, momentum=0.9, accumulative_counts=accumulate, clip_grad={"max_norm": 0.5})
    wrapper.initialize_count_status(model, 0, MICRO_STEPS)
    for batch in _own_batches(dtype):
        model.train_step(batch, wrapper)
        updates += wrapper.should_update()
    return flat(model), updates


def _plain(dtype: torch.dtype, accumulate: int) -> Tensor:
    """Return what plain PyTorch gives for the batches of all ranks and micro-steps together."""
    net = mlp(dtype)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    by_rank = [batches(MICRO_STEPS, dtype=dtype, seed=10 + rank) for rank in range(RANKS)]
    for start in range(0, MICRO_STEPS, accumulate):
        window = [batch for data in by_rank for batch in data[start : start + accumulate]]
        inputs, target = (torch.cat(parts) for parts in zip(*window, strict=True))
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(inputs), target).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()
    return flat(net)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.float64, 1e-12)])
@pytest.mark.parametrize(("accumulate", "updates"), [(1, 8), (3, 3)])
def test_equals_plain_pytorch(
    dtype: torch.dtype, bound: float, accumulate: int, updates: int
) -> None:
    """C-5, C-16, C-19."""
    expected = _plain(dtype, accumulate)
    for parameters, done in run_ranks(_train, RANKS, dtype, accumulate):
        assert done == updates
        assert (parameters - expected).abs().max().item() <= bound


def test_a_static_graph_may_accumulate() -> None:
    expected = _plain(torch.float64, 3)
    for parameters, _ in run_ranks(_train, RANKS, torch.float64, 3, static_graph=True):
        assert (parameters - expected).abs().max().item() <= 1e-12


def _gradients() -> list[tuple[bool, bool]]:
    """Return for three windows whether the ranks' gradients agree, before and at its end."""
    model = StepDistributedDataParallel(classifier())
    seen: list[Tensor] = []

    class Looking(OptimWrapper):
        def step(self, **kwargs: Any) -> None:
            seen.append(gradients())
            super().step(**kwargs)

    def gradients() -> Tensor:
        return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])

    wrapper = Looking(torch.optim.SGD(model.parameters(), lr=0.1), accumulative_counts=2)
    results = []
    for index, batch in enumerate(_own_batches(torch.float32)[:6]):
        model.train_step(batch, wrapper)
        if index % 2 == 0:
            before = _same(gradients())
        else:
            results.append((before, _same(seen[-1])))
    return results


def _same(tensor: Tensor) -> bool:
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor)
    return all(torch.equal(part, parts[0]) for part in parts)


def test_gradients_meet_only_at_the_end_of_a_window() -> None:
    """C-7."""
    for results in run_ranks(_gradients, 2):
        assert results == [(False, True)] * 3


def _order() -> list[Any]:
    calls: list[Any] = []
    model = StepDistributedDataParallel(Recording(calls))
    optimizer = RecordingSGD(model.parameters(), lr=0.1)
    optimizer.calls = calls
    model.train_step(batches(1)[0], RecordingWrapper(optimizer))
    return calls


def test_order_of_a_step() -> None:
    """C-6."""
    assert run_ranks(_order, 2) == [ORDER, ORDER]


def _many_uses() -> dict[str, Any]:
    """Return what one group of processes shows about everything that needs no second one."""
    batch = batches(1, seed=dist.get_rank())[0]
    seen: dict[str, Any] = {}

    half = StepDistributedDataParallel(
        HalfUsed(), detect_anomalous_params=True, find_unused_parameters=True
    )
    for _ in range(2):
        half.train_step(batch, sgd(half))
    seen["anomalies"] = half._anomalies_seen

    model = StepDistributedDataParallel(
        classifier(), broadcast_buffers=False, gradient_as_bucket_view=True
    )
    seen["flags"] = (model.forward_sync_buffers, model.gradient_as_bucket_view, model.device_ids)
    seen["names"] = list(model.module.state_dict())
    seen["val"] = set(model.val_step(batch))
    seen["test"] = set(model.test_step(batch))

    plain = StepDistributedDataParallel(PlainModel())
    plain.train_step(batch, sgd(plain))
    seen["plain"] = (_same(flat(plain)), len(plain.val_step(batch)))

    static = StepDistributedDataParallel(classifier(), static_graph=True)
    half_precision = AmpOptimWrapper(torch.optim.SGD(static.parameters(), lr=0.1), 2)
    for _ in range(4):
        static.train_step(batch, half_precision)
    seen["bfloat16"] = _same(flat(static))

    for name, again in (
        ("deepcopy", copy.deepcopy(model)),
        ("pickle", pickle.load(io.BytesIO(pickle.dumps(model)))),
    ):
        again.train_step(batch, sgd(again))
        seen[name] = (_same(flat(again)), torch.equal(flat(again), flat(model)))
    return seen


def test_many_uses() -> None:
    for seen in run_ranks(_many_uses, 2):
        assert seen == {
            "anomalies": {("module.spare.weight", "module.spare.bias")},
            "flags": (False, True, None),
            "names": ["net.0.weight", "net.0.bias", "net.2.weight", "net.2.bias"],
            "val": {"preds", "target", "loss", "num_samples"},
            "test": {"preds", "target", "loss", "num_samples"},
            "plain": (True, 4),
            "bfloat16": True,
            "deepcopy": (True, False),
            "pickle": (True, False),
        }


class Penalised(StepDistributedDataParallel):
    """A step of its own, for a model that may or may not have one."""

    def train_step(self, data: Any, optim_wrapper: Any) -> dict[str, Tensor]:
        with optim_wrapper.optim_context(self):
            loss = self(*data, mode="loss")["loss"]
        loss = loss + 0.1 * sum(parameter.square().sum() for parameter in self.parameters())
        optim_wrapper.update_params(loss)
        return {"loss": loss.detach()}


def _refusals_and_own_steps() -> tuple[str, str, bool]:
    with pytest.raises(TypeError) as own_step:
        StepDistributedDataParallel(OwnStep())
    with pytest.raises(RuntimeError) as frozen:
        StepDistributedDataParallel(classifier().requires_grad_(False))
    model = Penalised(OwnStep())
    model.train_step(batches(1, seed=dist.get_rank())[0], sgd(model))
    return str(own_step.value), str(frozen.value), _same(flat(model))


def _running_means() -> list[bool]:
    model = StepDistributedDataParallel(SupervisedModel(WithBatchNorm(), nn.CrossEntropyLoss()))
    model.train_step(batches(1, seed=dist.get_rank())[0], sgd(model))
    means = model.module.net.norm.running_mean
    before = _same(means)
    expected = means.clone()
    dist.broadcast(expected, 0)
    model.sync_buffers()
    return [before, _same(means), torch.equal(means, expected)]


class WithBatchNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.net = nn.BatchNorm1d(6), mlp()

    def forward(self, inputs: Tensor) -> Tensor:
        scores: Tensor = self.net(self.norm(inputs))
        return scores


def test_buffers_are_equal_for_evaluation() -> None:
    assert run_ranks(_running_means, 2) == [[False, True, True]] * 2


def test_own_training_steps() -> None:
    for own_step, frozen, same in run_ranks(_refusals_and_own_steps, 2):
        assert "OwnStep overrides train_step" in own_step
        assert "subclass of StepDistributedDataParallel" in own_step
        assert "any parameter that requires a gradient" in frozen
        assert same


def test_options_are_checked_by_name() -> None:
    with pytest.raises(TypeError, match=r"no argument 'find_unused'; did you mean find_unused_p"):
        StepDistributedDataParallel(classifier(), find_unused=True)
    with pytest.raises(TypeError, match=r"no argument 'zzz'; it takes detect_anomalous_params, "):
        StepDistributedDataParallel(classifier(), zzz=True)


def test_without_a_group() -> None:
    with pytest.raises(ValueError, match="process group"):
        StepDistributedDataParallel(classifier())


def test_signature_for_configs() -> None:
    names = list(StepDistributedDataParallel.config_signature().parameters)
    assert names[:2] == ["module", "detect_anomalous_params"]
    torch_names = set(inspect.signature(nn.parallel.DistributedDataParallel).parameters)
    assert torch_names < set(names)

    class Narrow(StepDistributedDataParallel):
        def __init__(self, module: nn.Module, weight: float) -> None:
            super().__init__(module)

    assert list(Narrow.config_signature().parameters) == ["module", "weight"]


@pytest.mark.parametrize("name", ["ddp", "MMDistributedDataParallel", "DistributedDataParallel"])
def test_registered_names(name: str) -> None:
    assert MODEL_WRAPPERS.get(name) is StepDistributedDataParallel
