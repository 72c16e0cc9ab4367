"""DistributedDataParallel with the three steps, over real processes."""

import copy
import inspect
import pickle
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from on_ranks import assert_near, on_ranks, raises_with, same_on_ranks
from step_models import (
    HalfUsed,
    OwnStep,
    PlainModel,
    batches,
    classifier,
    flat,
    gather_ranks,
    mlp,
    sgd,
    train,
    train_plainly,
)
from test_wrappers_single import ORDER, Recording, RecordingSGD, RecordingWrapper
from torch import Tensor, nn

from stepwrap.wrappers import (
    AmpOptimWrapper,
    OptimWrapper,
    StepDistributedDataParallel,
    SupervisedModel,
)

MICRO_STEPS = 8


def rank_batches(rank: int, dtype: torch.dtype = torch.float32) -> list[list[Tensor]]:
    return batches(MICRO_STEPS, dtype=dtype, seed=10 + rank)


@pytest.mark.parametrize(
    ("dtype", "bound", "accumulate", "updates", "options"),
    [
        (torch.float32, 1e-6, 1, 8, {}),
        (torch.float32, 1e-6, 3, 3, {}),
        (torch.float64, 1e-12, 1, 8, {}),
        (torch.float64, 1e-12, 3, 3, {}),
        (torch.float64, 1e-12, 3, 3, {"static_graph": True}),
    ],
)
@on_ranks(2)
def test_equals_plain_pytorch(
    dtype: torch.dtype, bound: float, accumulate: int, updates: int, options: dict[str, Any]
) -> None:
    model = StepDistributedDataParallel(classifier(dtype, seed=dist.get_rank()), **options)
    optim = sgd(model, momentum=0.9, accumulative_counts=accumulate, clip_grad={"max_norm": 0.5})
    optim.initialize_count_status(model, 0, MICRO_STEPS)
    done = 0
    for batch in rank_batches(dist.get_rank(), dtype):
        model.train_step(batch, optim)
        done += optim.should_update()
    assert done == updates
    plain = mlp(dtype)
    data = gather_ranks([rank_batches(rank, dtype) for rank in range(2)], accumulate)
    train_plainly(plain, data, momentum=0.9, max_norm=0.5)
    assert_near(flat(model), flat(plain), bound)


@on_ranks(2)
def test_gradients_are_averaged_only_at_the_end_of_a_window() -> None:
    model = StepDistributedDataParallel(classifier())
    at_steps: list[bool] = []

    def are_averaged() -> bool:
        gradients = [parameter.grad.flatten() for parameter in model.parameters()]
        return same_on_ranks(torch.cat(gradients))

    class Looking(OptimWrapper):
        def step(self, **kwargs: Any) -> None:
            at_steps.append(are_averaged())
            super().step(**kwargs)

    optim = Looking(torch.optim.SGD(model.parameters(), lr=0.1), accumulative_counts=2)
    for index, batch in enumerate(rank_batches(dist.get_rank())[:6]):
        model.train_step(batch, optim)
        assert index % 2 == 1 or not are_averaged()
    assert at_steps == [True] * 3


@on_ranks(2)
def test_order_of_a_step() -> None:
    calls: list[Any] = []
    model = StepDistributedDataParallel(Recording(calls))
    optimizer = RecordingSGD(model.parameters(), lr=0.1)
    optimizer.calls = calls
    model.train_step(batches(1)[0], RecordingWrapper(optimizer))
    assert calls == ORDER


@on_ranks(2)
def test_anomalous_parameters() -> None:
    half = StepDistributedDataParallel(
        HalfUsed(), detect_anomalous_params=True, find_unused_parameters=True
    )
    for _ in range(2):
        train(half, batches(1, seed=dist.get_rank()))
    assert half._anomalies_seen == {("module.spare.weight", "module.spare.bias")}


@on_ranks(2)
def test_options_names_evaluation_and_copies() -> None:
    data = batches(1, seed=dist.get_rank())
    model = StepDistributedDataParallel(
        classifier(), broadcast_buffers=False, gradient_as_bucket_view=True
    )
    assert not model.forward_sync_buffers
    assert model.gradient_as_bucket_view
    assert model.device_ids is None
    names = ["net.0.weight", "net.0.bias", "net.2.weight", "net.2.bias"]
    assert list(model.module.state_dict()) == names
    for step in (model.val_step, model.test_step):
        assert set(step(data[0])) == {"preds", "target", "loss", "num_samples"}
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        train(again, data)
        assert same_on_ranks(flat(again))
        assert not torch.equal(flat(again), flat(model))


@on_ranks(2)
def test_a_model_with_nothing_but_forward() -> None:
    data = batches(1, seed=dist.get_rank())
    model = StepDistributedDataParallel(PlainModel())
    train(model, data)
    assert same_on_ranks(flat(model))
    assert len(model.val_step(data[0])) == 4


@on_ranks(2)
def test_a_static_graph_in_bfloat16() -> None:
    model = StepDistributedDataParallel(classifier(), static_graph=True)
    optim = AmpOptimWrapper(torch.optim.SGD(model.parameters(), lr=0.1), 2)
    train(model, batches(1, seed=dist.get_rank()) * 4, optim)
    assert same_on_ranks(flat(model))


@on_ranks(2)
def test_buffers_are_equal_for_evaluation() -> None:
    net = nn.Sequential(nn.BatchNorm1d(6), mlp())
    model = StepDistributedDataParallel(SupervisedModel(net, nn.CrossEntropyLoss()))
    train(model, batches(1, seed=dist.get_rank()))
    means = net[0].running_mean
    assert not same_on_ranks(means)
    expected = means.clone()
    dist.broadcast(expected, 0)
    model.sync_buffers()
    assert torch.equal(means, expected)


class Penalised(StepDistributedDataParallel):
    """A wrapper with a custom step for a model that may also have one."""

    def train_step(self, data: Any, optim_wrapper: Any) -> dict[str, Tensor]:
        with optim_wrapper.optim_context(self):
            loss = self(*data, mode="loss")["loss"]
        loss = loss + 0.1 * sum(parameter.square().sum() for parameter in self.parameters())
        optim_wrapper.update_params(loss)
        return {"loss": loss.detach()}


@on_ranks(2)
def test_models_with_a_training_step_need_a_subclass() -> None:
    texts = ("OwnStep overrides train_step", "subclass of StepDistributedDataParallel")
    with raises_with(TypeError, *texts):
        StepDistributedDataParallel(OwnStep())
    model = Penalised(OwnStep())
    train(model, batches(1, seed=dist.get_rank()))
    assert same_on_ranks(flat(model))


@on_ranks(2)
def test_frozen_models_are_refused() -> None:
    with pytest.raises(RuntimeError, match="parameter that requires a gradient"):
        StepDistributedDataParallel(classifier().requires_grad_(False))


def test_options_are_checked_by_name() -> None:
    with pytest.raises(TypeError, match="'find_unused'; did you mean find_unused_parameters"):
        StepDistributedDataParallel(classifier(), find_unused=True)
    with pytest.raises(TypeError, match="no argument 'zzz'; .*detect_anomalous_params, "):
        StepDistributedDataParallel(classifier(), zzz=True)


def test_signature_for_configs() -> None:
    names = list(StepDistributedDataParallel.config_signature().parameters)
    assert names[:2] == ["module", "detect_anomalous_params"]
    torch_names = set(inspect.signature(nn.parallel.DistributedDataParallel).parameters)
    assert torch_names < set(names)

    class Narrow(StepDistributedDataParallel):
        def __init__(self, module: nn.Module, weight: float) -> None:
            super().__init__(module)

    assert list(Narrow.config_signature().parameters) == ["module", "weight"]


COUNTS = (5, 2, 3)


def _plain(by_all: bool, ranks: int) -> Tensor:
    net = mlp(torch.float64)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    data = [batches(COUNTS[rank], dtype=torch.float64, seed=rank) for rank in range(ranks)]
    for index in range(max(COUNTS)):
        present = [batches_[index] for batches_ in data if index < len(batches_)]
        losses = [nn.functional.cross_entropy(net(x), y) for x, y in present]
        optimizer.zero_grad()
        (torch.stack(losses).sum() / (ranks if by_all else len(present))).backward()
        optimizer.step()
    return flat(net)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(
    ("by_all", "options"),
    [(True, {}), (False, {}), (True, {"find_unused_parameters": True})]
    + [(True, {"comm_hook": "allreduce"}), (True, {"gradient_as_bucket_view": True})],
)
@on_ranks("ranks")
def test_numbers(ranks: int, by_all: bool, options: dict[str, Any]) -> None:
    rank = dist.get_rank()
    model = StepDistributedDataParallel(classifier(torch.float64), **options)
    optim = sgd(model)
    data = batches(COUNTS[rank], dtype=torch.float64, seed=rank)
    filters = list(warnings.filters)
    with model.join(divide_by_initial_world_size=by_all):
        train(model, data, optim)
    assert list(warnings.filters) == filters
    if rank == 0:
        # Outside a step a forward does not wait for other ranks.
        model(*data[-1], mode="loss")
    assert optim.inner_count == COUNTS[rank]
    assert_near(flat(model), _plain(by_all, ranks), 1e-12)


@on_ranks(2)
def test_ending_all_with_the_first() -> None:
    rank = dist.get_rank()
    model = StepDistributedDataParallel(classifier())
    optim = sgd(model)
    text = ("at least one rank that exhausted inputs", "Rank 1 exhausted all inputs")
    with pytest.raises(RuntimeError, match=text[rank]), model.join(throw_on_early_termination=True):
        train(model, batches(COUNTS[rank], seed=rank), optim)
    assert optim.inner_count == 2


@on_ranks(2)
def test_an_error_inside_passes_through() -> None:
    model = StepDistributedDataParallel(classifier())
    with pytest.raises(KeyError), model.join():
        raise KeyError("inside")
    train(model, batches(1))


def test_uneven_inputs_takes_the_arguments_of_join_but_its_switch() -> None:
    names = ("divide_by_initial_world_size", "throw_on_early_termination")
    for name in names:
        StepDistributedDataParallel.check_options({"uneven_inputs": {name: False}})
    text = f"uneven_inputs has no argument 'enable'; it takes {', '.join(names)}"
    with pytest.raises(TypeError, match=text):
        StepDistributedDataParallel.check_options({"uneven_inputs": {"enable": False}})
