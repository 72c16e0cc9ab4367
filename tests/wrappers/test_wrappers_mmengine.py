"""Models and optimizer wrappers of mmengine under every wrapper, if it is installed."""

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from marks import slow
from on_ranks import on_ranks
from parity_cells import BOUNDS, KINDS, make_mesh, train, weights_apart, whole_weights
from parity_models import PLANS, make_parts
from parity_plain import MAX_NORM, OPTIMIZERS, Recipe, train_plain
from step_models import batches, mlp, sgd
from torch.nn import functional as F

from stepwrap.registry import MODEL_WRAPPERS
from stepwrap.wrappers import Preparation, SingleDevice, StepDistributedDataParallel, wrap_model

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    # Its import fails if OpenCV does not find libGL.
    reason = "mmengine, the extra of that name, cannot be imported"
    mmengine_model = pytest.importorskip("mmengine.model", reason=reason, exc_type=ImportError)
    mmengine_optim = pytest.importorskip("mmengine.optim", reason=reason, exc_type=ImportError)


class Model(mmengine_model.BaseModel):
    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def forward(self, inputs: Any, target: Any = None, mode: str = "tensor") -> Any:
        scores = self.net(inputs)
        if mode == "loss":
            return {"loss": F.cross_entropy(scores, target)}
        return list(scores)


class Transformer(mmengine_model.BaseModel):
    """The transformer of the parity matrix as a model of mmengine."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.body, self.head = make_parts("transformer", torch.float64, seed)

    def forward(self, inputs: Any, target: Any = None, mode: str = "tensor") -> Any:
        scores = self.head(self.body(inputs))
        if mode == "loss":
            return {"loss": F.cross_entropy(scores, target.flatten())}
        return list(scores) if mode == "predict" else scores


def test_mmengine_models_and_optimizer_wrappers_run_unchanged() -> None:
    ours, theirs = SingleDevice(Model()), SingleDevice(Model())
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.1)
    wrappers = sgd(ours), mmengine_optim.OptimWrapper(optimizer)
    for batch in batches(3):
        logs = [
            model.train_step(batch, wrapper)
            for model, wrapper in zip((ours, theirs), wrappers, strict=True)
        ]
        assert logs[0]["loss"].item() == logs[1]["loss"].item()
        assert not logs[0]["loss"].requires_grad
    with pytest.raises(ValueError, match="process group"):
        StepDistributedDataParallel(Model())
    assert len(ours.val_step(batches(1)[0])) == 4


# With tensor parallelism their wrapper would clip by the norm of one rank's parts.
@pytest.mark.parametrize(
    ("kind", "world", "clip"),
    [
        ("single", 1, True),
        ("ddp", 2, True),
        ("fsdp", 2, True),
        *slow(("separate", 2, True), ("tp 2", 2, False), ("ddp x tp", 4, False)),
    ],
)
@pytest.mark.parametrize("accumulate", [*slow(1), 3])
@on_ranks("world")
def test_mmengine_models_follow_plain_pytorch(
    kind: str, world: int, clip: bool, accumulate: int
) -> None:
    recipe = Recipe("transformer", "fp64", accumulate, clip, "AdamW", steps=5)
    plain = train_plain(recipe)
    """Train their model by their optimizer wrapper, under one of our wrappers."""
    row, mesh = KINDS[kind], make_mesh(kind, dist.get_world_size())
    options: dict[str, Any] = {"mesh": mesh}
    if row.wrapper == "fsdp":
        options["shard"] = ["Block"]
    if row.is_tensor_parallel:
        options["prepare"] = Preparation(tensor_parallel=PLANS["transformer"])
    model = Transformer(seed=dist.get_rank())
    wrapper = wrap_model(MODEL_WRAPPERS.get(row.wrapper), model, **options)
    make, settings = OPTIMIZERS[recipe.optimizer]
    optimizer = mmengine_optim.OptimWrapper(
        make(wrapper.parameters(), **settings),
        accumulative_counts=recipe.accumulate,
        clip_grad={"max_norm": MAX_NORM} if recipe.clip else None,
    )
    losses = train(wrapper, optimizer, recipe, mesh)
    with torch.no_grad():
        predictions = wrapper.val_step([torch.zeros(2, 8, dtype=torch.long), None])
    assert (losses - plain.losses).abs().max() <= BOUNDS["fp64"]
    assert weights_apart(whole_weights(wrapper), plain.weights) <= BOUNDS["fp64"]
    assert len(predictions) == 16
