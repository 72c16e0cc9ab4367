"""Everything beside training steps that a fully sharded model is used for."""

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
from fsdp_runs import Block, largest_difference, network, own_batches, train, whole
from ranks import run_ranks
from step_models import HalfUsed, OwnStep, PlainModel, batches, classifier, sgd
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

from stepwrap.registry import MODEL_WRAPPERS
from stepwrap.wrappers import (
    BaseModel,
    OptimWrapper,
    SingleDevice,
    StepFullyShardedDataParallel,
    SupervisedModel,
)


def _wrapped(kind: str = "Net", dtype: torch.dtype = torch.float64, **options: Any) -> Any:
    model = SupervisedModel(network(kind, dtype), nn.CrossEntropyLoss())
    return StepFullyShardedDataParallel(model, **{"shard": ["Block"], **options})


class CallsChild(SupervisedModel):
    """Steps itself."""

    def train_step(self, data: Any, optim_wrapper: OptimWrapper) -> dict[str, Tensor]:
        with optim_wrapper.optim_context(self):
            loss = self.loss(self.net(data[0]), data[1])
        optim_wrapper.update_params(loss)
        return {"loss": loss.detach()}


def _communication(kind: Any) -> list[tuple[int, int]]:
    """Return by micro-step how often gradients were reduced, and how many are there."""
    bare = kind(network("Net", torch.float64), nn.CrossEntropyLoss())
    model = StepFullyShardedDataParallel(bare, shard=["Block"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen: list[tuple[int, int]] = []

    class Looking(OptimWrapper):
        def backward(self, loss: Tensor, **kwargs: Any) -> None:
            with CommDebugMode() as mode:
                super().backward(loss, **kwargs)
            counts = {str(op): count for op, count in mode.get_comm_counts().items()}
            reduced = sum(count for op, count in counts.items() if "reduce_scatter" in op)
            seen.append((reduced, sum(one.grad is not None for one in model.parameters())))

    optim = Looking(optimizer, accumulative_counts=3)
    for batch in own_batches(dist.get_rank(), torch.float64)[:6]:
        model.train_step(batch, optim)
    return seen


@pytest.mark.parametrize("kind", [SupervisedModel, CallsChild])
def test_gradients_meet_only_at_the_end_of_a_window(kind: Any) -> None:
    """C-7: three units (two blocks and the head) reduce once in a window."""
    window = [(0, 0), (0, 0), (4, 14)]
    for seen in run_ranks(_communication, 2, kind):
        assert seen == window * 2


def _own_step(accumulate: int) -> dict[str, Tensor]:
    torch.manual_seed(dist.get_rank())
    model = StepFullyShardedDataParallel(OwnStep())
    optim = sgd(model, accumulative_counts=accumulate)
    for batch in batches(6, seed=10 + dist.get_rank()):
        assert list(model.train_step(batch, optim)) == ["doubled"]
    return whole(model.module)


def test_a_model_with_its_own_step() -> None:
    single = SingleDevice(OwnStep())
    optim = sgd(single, accumulative_counts=3)
    by_rank = [batches(6, seed=10 + rank) for rank in range(2)]
    for pair in zip(*by_rank, strict=True):
        single.train_step([torch.cat(parts) for parts in zip(*pair, strict=True)], optim)
    for weights in run_ranks(_own_step, 2, 3):
        assert largest_difference(weights, single.module.state_dict()) <= 2e-6


class Peeking(BaseModel):
    """Its evaluation uses a layer's weight, the layer and the model itself."""

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
    """Gradients are on; torch warns that lists of predictions are views."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
        yield


def _evaluation(free: bool) -> None:
    """Evaluate before, between and after training steps, in every mode of autograd."""
    batch = batches(1)[0]
    for model, shard in ((Peeking(), "Block"), (classifier(), "Linear"), (PlainModel(), "Linear")):
        wrapped = StepFullyShardedDataParallel(
            copy.deepcopy(model), shard=shard, reshard_after_forward=free
        )
        single, optim, plain = SingleDevice(model), sgd(wrapped), sgd(model)
        for context in (torch.inference_mode, torch.no_grad, _nothing, torch.inference_mode):
            with context():
                for step in ("val_step", "test_step"):
                    _same(getattr(wrapped, step)(batch), getattr(single, step)(batch))
                _same(wrapped(batch[0]), single(batch[0]))
            if context is not _nothing:
                assert all(isinstance(one, DTensor) for one in wrapped.parameters())
            wrapped.train_step(batch, optim)
            single.train_step(batch, plain)
        expected = {name: one.detach() for name, one in model.state_dict().items()}
        assert largest_difference(whole(wrapped.module), expected) <= 2e-6


def _same(one: Any, other: Any) -> None:
    if isinstance(one, dict):
        one, other = one["preds"], other["preds"]
    for left, right in zip(one, other, strict=True):
        assert torch.allclose(left, right, atol=2e-6)


@pytest.mark.parametrize("free", [True, False])
def test_evaluation_gathers_as_needed(free: bool) -> None:
    run_ranks(_evaluation, 2, free)


def _many_uses() -> dict[str, Any]:
    seen: dict[str, Any] = {}
    model = _wrapped("Normed")
    seen["names"] = list(model.module.state_dict())[:2]
    seen["kinds"] = {type(one) for one in model.module.state_dict().values()}
    seen["class"] = isinstance(model.module.net.blocks[0], Block)
    seen["group"] = (model.data_group, model.collective_eval)
    model.train_step(own_batches(dist.get_rank(), torch.float64)[0], sgd(model))
    mean = model.module.net.norm.running_mean
    seen["apart"] = _spread(mean)
    model.sync_buffers()
    seen["synced"] = _spread(mean)
    refused = []
    for use in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError) as error:
            use(model)
        refused.append(str(error.value))
    seen["refused"] = refused
    return seen


def _spread(tensor: Tensor) -> bool:
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor)
    return any(not torch.equal(part, parts[0]) for part in parts)


def test_many_uses() -> None:
    for seen in run_ranks(_many_uses, 2):
        for text in seen.pop("refused"):
            assert "neither copied nor pickled" in text
            assert "copy the bare model before it is wrapped" in text
        assert seen == {
            "names": ["net.blocks.0.up.weight", "net.blocks.0.up.bias"],
            "kinds": {DTensor, Tensor},
            "class": True,
            "group": (None, True),
            "apart": True,
            "synced": False,
        }


class Checkpointed(HalfUsed):
    """The used layer runs under re-entrant checkpointing."""

    def forward(self, inputs: Tensor, target: Tensor | None = None, mode: str = "loss") -> Any:
        inputs = inputs.detach().requires_grad_()
        hidden = torch.utils.checkpoint.checkpoint(self.used, inputs, use_reentrant=True)
        return {"loss": hidden.pow(2).mean()}


def _anomalies() -> list[Any]:
    found = []
    for shard, compiled in ((None, False), ("Linear", False), ("Linear", True)):
        bare = HalfUsed()
        if compiled:
            bare.compile(backend="eager")
        model = StepFullyShardedDataParallel(bare, shard=shard, detect_anomalous_params=True)
        for _ in range(2):
            model.train_step(batches(1, seed=dist.get_rank())[0], sgd(model))
        found.append(model._anomalies_seen)
    with pytest.raises(ValueError, match="detect_anomalous_params needs the wrapper's own"):
        StepFullyShardedDataParallel(OwnStep(), detect_anomalous_params=True)
    return found


# What torch itself warns of while it traces.
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_anomalous_parameters_are_named() -> None:
    expected = {("module.spare.weight", "module.spare.bias")}
    for found in run_ranks(_anomalies, 2):
        assert found == [expected] * 3


def _half_precision() -> dict[str, Any]:
    """Mixed precision: what the layers see, what is kept, and that it learns."""
    model = _wrapped("Normed", torch.float32, mixed_precision={"param_dtype": "bfloat16"})
    net = model.module.net
    seen: dict[str, Any] = {}
    net.head.register_forward_hook(
        lambda head, args, output: seen.update(args=args[0].dtype, weight=head.weight.dtype)
    )
    net.norm.register_forward_hook(lambda norm, args, output: seen.update(norm=norm.weight.dtype))
    optim = sgd(model)
    batch = own_batches(dist.get_rank(), torch.float32)[0]
    losses = [model.train_step(batch, optim)["loss"].item() for _ in range(20)]
    seen["kept"] = {one.dtype for one in model.parameters()}
    seen["learns"] = losses[-1] < 0.9 * losses[0]
    seen["output"] = model(batch[0], mode="tensor").dtype
    policy = {"param_dtype": "bfloat16", "output_dtype": "float32", "reduce_dtype": "float32"}
    full = _wrapped("Net", torch.float32, mixed_precision=policy)
    seen["cast"] = full(batch[0], mode="tensor").dtype
    return seen


def test_mixed_precision() -> None:
    for seen in run_ranks(_half_precision, 2):
        assert seen == {
            "args": torch.bfloat16,
            "weight": torch.bfloat16,
            "norm": torch.float32,
            "kept": {torch.float32},
            "learns": True,
            "output": torch.bfloat16,
            "cast": torch.float32,
        }


def _ignored() -> list[Any]:
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("stepwrap.wrappers.fsdp.units").addHandler(handler)
    kinds = []
    for option in (
        {"ignored_modules": ["net.head"]},
        {"ignored_parameters": ["net.head.*"]},
        {"ignored_states": ["net.head.weight", "net.head.bias"]},
    ):
        model = _wrapped("Net", **option)
        model.train_step(own_batches(dist.get_rank(), torch.float64)[0], sgd(model))
        kinds.append({isinstance(one, DTensor) for one in model.module.net.head.parameters()})
    with pytest.raises(ValueError, match="name or path 'net.heat'; did you mean net.head"):
        _wrapped("Net", ignored_parameters=["net.heat"])
    logging.getLogger("stepwrap.wrappers.fsdp.units").removeHandler(handler)
    return [kinds, "net.head.weight, net.head.bias: ignored" in records[0]]


def test_ignored_parameters_stay_whole() -> None:
    assert run_ranks(_ignored, 2) == [[[{False}] * 3, True]] * 2


def _refusals() -> list[str]:
    """Return what is said about models that cannot be sharded."""
    told = []

    def told_by(error: type[Exception], model: nn.Module, **options: Any) -> None:
        with pytest.raises(error) as caught:
            StepFullyShardedDataParallel(model, **options)
        told.append(str(caught.value))

    scalar = classifier()
    scalar.net.temperature = nn.Parameter(torch.tensor(1.0))
    told_by(ValueError, scalar)
    mixed = classifier()
    mixed.net[2].bias = nn.Parameter(torch.zeros(3, dtype=torch.float64))
    told_by(ValueError, mixed)
    told_by(ValueError, _wrapped().module)
    told_by(ValueError, classifier() if dist.get_rank() else HalfUsed())
    with torch.device("meta"):
        buffered = SupervisedModel(nn.BatchNorm1d(6), nn.CrossEntropyLoss())
    told_by(ValueError, buffered)
    told_by(
        ValueError, classifier(), sharding_strategy="HYBRID_SHARD", process_group=dist.group.WORLD
    )
    return told


def test_models_that_cannot_be_sharded() -> None:
    for scalar, mixed, twice, other, meta, hybrid in run_ranks(_refusals, 2):
        assert "net.temperature is a parameter without dimensions" in scalar
        assert "must have one dtype, but net.2 (Linear) has" in mixed
        assert "sharded already" in twice
        assert (
            "the same on all ranks, but 'used.weight' is ((1, 6), 'torch.float32') on rank 0"
            in other
        )
        assert "and absent on rank 1" in other
        assert "the buffer net.running_mean is on the meta device" in meta
        assert "meta_parameters()" in meta
        assert "needs two process groups" in hybrid


def test_without_a_group() -> None:
    told = r"needs a process group.*call torch\.distributed\.init_process_group\(\) before"
    with pytest.raises(ValueError, match=told):
        StepFullyShardedDataParallel(classifier())


NAMES = ["fsdp", "MMFullyShardedDataParallel", "FullyShardedDataParallel"]


@pytest.mark.parametrize("name", NAMES)
def test_registered_names(name: str) -> None:
    assert MODEL_WRAPPERS.get(name) is StepFullyShardedDataParallel


def _in_rank_order() -> bool:
    """Without the first rank's weights, where that is asked for, the ranks differ."""
    weights = train(sync_module_states=False)
    return _spread(weights["head.weight"])


def test_weights_may_stay_as_they_are() -> None:
    results = run_ranks(_in_rank_order, 2)
    # Every rank sees the same shards put together; they come from different models.
    assert results == [False, False]
