"""Uses of a fully sharded model other than training steps."""

import copy
import logging
import pickle
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fsdp_runs import (
    Block,
    CallsChild,
    largest_difference,
    network,
    own_batches,
    supervised,
    train,
    whole,
)
from on_ranks import assert_near, on_ranks, raises_with, same_on_ranks
from step_models import HalfUsed, OwnStep, PlainModel, batches, classifier, gather_ranks, sgd
from step_models import train as train_on
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

from stepwrap.wrappers import (
    BaseModel,
    OptimWrapper,
    SingleDevice,
    StepFullyShardedDataParallel,
    SupervisedModel,
)


def _wrapped(kind: str = "Net", dtype: torch.dtype = torch.float64, **options: Any) -> Any:
    return StepFullyShardedDataParallel(supervised(kind, dtype), **{"shard": ["Block"], **options})


@pytest.mark.parametrize("kind", [SupervisedModel, CallsChild])
@on_ranks(2)
def test_gradients_are_reduced_only_at_the_end_of_a_window(kind: Any) -> None:
    """Three units (two blocks and the head) reduce once per window."""
    bare = kind(network("Net", torch.float64), nn.CrossEntropyLoss())
    model = StepFullyShardedDataParallel(bare, shard=["Block"])
    # The number of reductions and of gradients after each micro-step.
    states: list[tuple[int, int]] = []

    class Looking(OptimWrapper):
        def backward(self, loss: Tensor, **kwargs: Any) -> None:
            with CommDebugMode() as mode:
                super().backward(loss, **kwargs)
            counts = {str(op): count for op, count in mode.get_comm_counts().items()}
            reduced = sum(count for op, count in counts.items() if "reduce_scatter" in op)
            states.append((reduced, sum(param.grad is not None for param in model.parameters())))

    optim = Looking(torch.optim.SGD(model.parameters(), lr=0.1), accumulative_counts=3)
    train_on(model, own_batches(dist.get_rank(), torch.float64)[:6], optim)
    assert states == [(0, 0), (0, 0), (4, 14)] * 2


@on_ranks(2)
def test_a_model_with_a_training_step() -> None:
    by_rank = [batches(6, seed=10 + rank) for rank in range(2)]
    single = SingleDevice(OwnStep())
    train_on(single, gather_ranks(by_rank), sgd(single, accumulative_counts=3))
    torch.manual_seed(dist.get_rank())
    model = StepFullyShardedDataParallel(OwnStep())
    optim = sgd(model, accumulative_counts=3)
    for batch in by_rank[dist.get_rank()]:
        assert list(model.train_step(batch, optim)) == ["doubled"]
    assert_near(whole(model.module), dict(single.module.state_dict()), 2e-6)


class Peeking(BaseModel):
    """A model whose evaluation uses a layer's weight, the layer and the model itself."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = Block(), nn.Linear(6, 3)

    def forward(self, inputs: Tensor, target: Tensor | None = None, mode: str = "tensor") -> Any:
        scores = self.head(self.body(inputs))
        if mode == "loss":
            return {"loss": nn.functional.cross_entropy(scores, target)}
        return list(scores) if mode == "predict" else scores

    def test_step(self, data: Any) -> Any:
        scores = self(data[0])
        again = nn.functional.linear(self.body(data[0]), self.head.weight, self.head.bias)
        return scores, again


@contextmanager
def _nothing() -> Iterator[None]:
    """Keep gradients enabled; torch warns that lists of predictions are views."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
        yield


@pytest.mark.parametrize("free", [True, False])
@on_ranks(2)
def test_evaluation_gathers_as_needed(free: bool) -> None:
    """Evaluate before, between and after training steps in every autograd mode."""
    batch = batches(1)[0]
    for model, shard in ((Peeking(), "Block"), (classifier(), "Linear"), (PlainModel(), "Linear")):
        wrapped = StepFullyShardedDataParallel(
            copy.deepcopy(model), shard=shard, reshard_after_forward=free
        )
        single, optim, plain = SingleDevice(model), sgd(wrapped), sgd(model)
        for context in (torch.inference_mode, torch.no_grad, _nothing, torch.inference_mode):
            with context():
                for step in ("val_step", "test_step"):
                    _assert_same(getattr(wrapped, step)(batch), getattr(single, step)(batch))
                _assert_same(wrapped(batch[0]), single(batch[0]))
            if context is not _nothing:
                assert all(isinstance(param, DTensor) for param in wrapped.parameters())
            wrapped.train_step(batch, optim)
            single.train_step(batch, plain)
        expected = {name: value.detach() for name, value in model.state_dict().items()}
        assert largest_difference(whole(wrapped.module), expected) <= 2e-6


def _assert_same(actual: Any, other: Any) -> None:
    if isinstance(actual, dict):
        actual, other = actual["preds"], other["preds"]
    for prediction, target in zip(actual, other, strict=True):
        assert torch.allclose(prediction, target, atol=2e-6)


@on_ranks(2)
def test_names_kinds_and_buffers() -> None:
    model = _wrapped("Normed")
    state = model.module.state_dict()
    assert list(state)[:2] == ["net.blocks.0.up.weight", "net.blocks.0.up.bias"]
    assert {type(value) for value in state.values()} == {DTensor, Tensor}
    assert isinstance(model.module.net.blocks[0], Block)
    assert model.data_group is None
    assert model.collective_eval
    train_on(model, own_batches(dist.get_rank(), torch.float64)[:1])
    mean = model.module.net.norm.running_mean
    assert not same_on_ranks(mean)
    model.sync_buffers()
    assert same_on_ranks(mean)
    texts = "neither copied nor pickled", "copy the bare model before it is wrapped"
    for use in (copy.deepcopy, pickle.dumps):
        with raises_with(TypeError, *texts):
            use(model)


# Warnings that torch's own tracing raises.
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@on_ranks(2)
def test_anomalous_parameters_are_named() -> None:
    for shard, compiled in ((None, False), ("Linear", False), ("Linear", True)):
        bare = HalfUsed()
        if compiled:
            bare.compile(backend="eager")
        model = StepFullyShardedDataParallel(bare, shard=shard, detect_anomalous_params=True)
        for _ in range(2):
            train_on(model, batches(1, seed=dist.get_rank()))
        assert model._anomalies_seen == {("module.spare.weight", "module.spare.bias")}
    with pytest.raises(ValueError, match="detect_anomalous_params needs the default"):
        StepFullyShardedDataParallel(OwnStep(), detect_anomalous_params=True)


@on_ranks(2)
def test_mixed_precision() -> None:
    """Checks the dtypes in the layers and of the weights, and that the loss falls."""
    model = _wrapped("Normed", torch.float32, mixed_precision={"param_dtype": "bfloat16"})
    net = model.module.net
    dtypes: dict[str, Any] = {}
    net.head.register_forward_hook(
        lambda head, args, output: dtypes.update(args=args[0].dtype, weight=head.weight.dtype)
    )
    net.norm.register_forward_hook(lambda norm, args, output: dtypes.update(norm=norm.weight.dtype))
    optim = sgd(model)
    batch = own_batches(dist.get_rank(), torch.float32)[0]
    losses = [model.train_step(batch, optim)["loss"].item() for _ in range(20)]
    assert dtypes == {"args": torch.bfloat16, "weight": torch.bfloat16, "norm": torch.float32}
    assert {param.dtype for param in model.parameters()} == {torch.float32}
    assert losses[-1] < 0.9 * losses[0]
    assert model(batch[0], mode="tensor").dtype is torch.bfloat16
    policy = {"param_dtype": "bfloat16", "output_dtype": "float32", "reduce_dtype": "float32"}
    full = _wrapped("Net", torch.float32, mixed_precision=policy)
    assert full(batch[0], mode="tensor").dtype is torch.float32


class _ScaledLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return (self.scale * (output - target).square()).mean()


@pytest.mark.parametrize("loss", [nn.MSELoss, _ScaledLoss])
@on_ranks(2)
def test_mixed_precision_does_not_round_targets(loss: Any) -> None:
    """The target 257 is 256 in bfloat16, and so is the output."""
    net = nn.Linear(2, 1)
    nn.init.zeros_(net.weight)
    nn.init.constant_(net.bias, 256.0)
    dtypes = []
    net.register_forward_hook(lambda net, inputs, output: dtypes.append(inputs[0].dtype))
    precision = {"param_dtype": "bfloat16", "reduce_dtype": "float32"}
    model = StepFullyShardedDataParallel(SupervisedModel(net, loss()), mixed_precision=precision)
    batch = torch.zeros(4, 2), torch.full((4, 1), 257.0)
    evaluated = model.val_step(batch)
    assert evaluated["loss"].item() == 1.0
    assert torch.equal(evaluated["target"], batch[1])
    assert model.train_step(batch, sgd(model, lr=0.5))["loss"].item() == 1.0
    assert whole(model)["module.net.bias"].item() == 257.0
    assert set(dtypes) == {torch.bfloat16}


@contextmanager
def _messages_of_units() -> Iterator[list[str]]:
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("stepwrap.wrappers.fsdp.units")
    logger.addHandler(handler)
    try:
        yield messages
    finally:
        logger.removeHandler(handler)


@on_ranks(2)
def test_ignored_parameters_stay_whole() -> None:
    with _messages_of_units() as messages:
        for option in (
            {"ignored_modules": ["net.head"]},
            {"ignored_parameters": ["net.head.*"]},
            {"ignored_states": ["net.head.weight", "net.head.bias"]},
        ):
            model = _wrapped("Net", **option)
            train_on(model, own_batches(dist.get_rank(), torch.float64)[:1])
            head = model.module.net.head
            assert not any(isinstance(param, DTensor) for param in head.parameters())
    assert messages[0].endswith("own copy of net.head.weight, net.head.bias")
    bare = supervised("Net", torch.float64)
    model = StepFullyShardedDataParallel(bare, ignored_parameters=bare.net.head.parameters())
    assert not any(isinstance(param, DTensor) for param in model.module.net.head.parameters())
    with pytest.raises(ValueError, match=r"'net\.heat'; did you mean net\.head"):
        _wrapped("Net", ignored_parameters=["net.heat"])


def _scalar() -> nn.Module:
    model = classifier()
    model.net.temperature = nn.Parameter(torch.tensor(1.0))
    return model


def _mixed() -> nn.Module:
    model = classifier()
    model.net[2].bias = nn.Parameter(torch.zeros(3, dtype=torch.float64))
    return model


def _build_meta() -> nn.Module:
    with torch.device("meta"):
        return SupervisedModel(nn.BatchNorm1d(6), nn.CrossEntropyLoss())


@on_ranks(2)
def test_models_that_cannot_be_sharded() -> None:
    world = {"sharding_strategy": "HYBRID_SHARD", "process_group": dist.group.WORLD}
    rank_model = classifier() if dist.get_rank() else HalfUsed()
    differs = "the same on all ranks, but 'used.weight' is ((1, 6), 'torch.float32') on rank 0"
    for model, options, texts in (
        (_scalar(), {}, ["at least one dimension to be sharded, but net.temperature has none"]),
        (_mixed(), {}, ["must have one dtype, but net.2 (Linear) has"]),
        (_wrapped().module, {}, ["sharded already"]),
        (rank_model, {}, [differs, "and absent on rank 1"]),
        (_build_meta(), {}, ["but net.running_mean is on the meta device", "meta_parameters()"]),
        (classifier(), world, ["needs two process groups"]),
    ):
        with raises_with(ValueError, *texts):
            StepFullyShardedDataParallel(model, **options)


@on_ranks(2)
def test_initial_weights_need_not_be_synchronised() -> None:
    """The gathered weights are equal on all ranks; their shards come from different models."""
    assert same_on_ranks(train(sync_module_states=False)["head.weight"])
