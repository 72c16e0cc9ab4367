"""The cells of the parity matrix: the possible ones, reasons for the others, and how to run one."""

import itertools
import math
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from parity_models import BLOCKS, PLANS, SeparateParts, TwoParts, make_data, make_parts, micro_batch
from parity_plain import (
    DTYPES,
    HALVES,
    MAX_NORM,
    OPTIMIZERS,
    SCALE,
    Recipe,
    Reference,
    get_weight,
    train_plain,
)
from ranks import RanksError, run_ranks
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from stepwrap.loops import LoopState, load_checkpoint, save_checkpoint
from stepwrap.registry import MODEL_WRAPPERS
from stepwrap.wrappers import (
    AmpOptimWrapper,
    Mesh,
    OptimWrapper,
    OptimWrapperDict,
    Preparation,
    build_mesh,
    wrap_model,
)
from stepwrap.wrappers.layout import as_global
from stepwrap.wrappers.optimizers.optimizer_fit import build_optimizer
from stepwrap.wrappers.unwrap import user_model

WORLDS = (1, 2, 4)
BOUNDS = {"fp64": 1e-12, "fp32": 2e-6, "bf16": 2e-2, "fp16": 2e-2}
VALIDATION = 64
WEIGHTS = {"transformer": ("samples", "tokens"), "cnn": ("samples",)}


@dataclass(frozen=True)
class Kind:
    """A row of the matrix.

    Attributes:
        wrapper: its registered name.
        axes: the mesh for every possible number of ranks; {} for no mesh.
        why_not: the reason for each other number of ranks.
    """

    wrapper: str
    axes: dict[int, dict[str, int]]
    why_not: dict[int, str] = field(default_factory=dict)

    @property
    def is_tensor_parallel(self) -> bool:
        return any("tensor" in axes for axes in self.axes.values())


_ONE_AXIS = "an axis would have a single rank, so the cell would equal one of {} or tp 2"
_OWN_BATCHES = "the wrapper does not communicate: each rank would train a different model"
_ONE_PROCESS = "the replicas are in one process: several ranks are an error"


def _every_world(*axes: str) -> dict[int, dict[str, int]]:
    if len(axes) == 1:
        return {world: {axes[0]: world} for world in WORLDS}
    return {1: {axes[0]: 1, axes[1]: 1}, 2: {axes[0]: 2, axes[1]: 1}, 4: {axes[0]: 2, axes[1]: 2}}


KINDS = {
    "single": Kind("single", {1: {}}, dict.fromkeys((2, 4), _OWN_BATCHES)),
    "dp, 2 replicas": Kind("dp", {1: {}}, dict.fromkeys((2, 4), _ONE_PROCESS)),
    "ddp": Kind("ddp", _every_world("data")),
    "fsdp": Kind("fsdp", _every_world("data")),
    "hsdp": Kind("fsdp", _every_world("replicate", "shard")),
    "tp 2": Kind(
        "single",
        {2: {"tensor": 2}},
        {
            1: "each layer is split over two ranks",
            4: "two pairs of ranks train on different samples: see ddp x tp",
        },
    ),
    "ddp x tp": Kind(
        "ddp", {4: {"data": 2, "tensor": 2}}, dict.fromkeys((1, 2), _ONE_AXIS.format("ddp"))
    ),
    "fsdp x tp": Kind(
        "fsdp", {4: {"data": 2, "tensor": 2}}, dict.fromkeys((1, 2), _ONE_AXIS.format("fsdp"))
    ),
    "separate": Kind("separate", _every_world("data")),
}


@dataclass(frozen=True)
class Outcome:
    """The result of a cell.

    Attributes:
        parameters: largest difference of a parameter or buffer from plain PyTorch, on this rank.
        losses: largest difference of a micro-batch's loss; relative under autocast.
        validation: loss on the validation data at the end, without autocast.
        checkpoint: path of the checkpoint; None for weighted losses, which save none.
        seconds: duration.
    """

    kind: str
    world: int
    recipe: Recipe
    parameters: float
    losses: float
    validation: float
    checkpoint: Path | None
    seconds: float

    @property
    def is_within(self) -> bool:
        """Return whether it is within the bound of its dtype; a NaN is not."""
        bound = BOUNDS[self.recipe.dtype]
        return self.losses <= bound and (self.recipe.is_half or self.parameters <= bound)


def get_recipes(kind: str, model: str, dtypes: Iterable[str] = DTYPES) -> list[Recipe]:
    """Yield every recipe of a row and model; recipes with weighted losses come last."""
    separate = KINDS[kind].wrapper == "separate"
    choices = itertools.product(dtypes, (1, 3), (False, True), OPTIMIZERS)
    equal = [Recipe(model, *choice, separate=separate) for choice in choices]
    how = ((1, False, "SGD"), (3, True, "AdamW"))
    return equal + [
        Recipe(model, dtype, *choice, separate=separate, weight=weight)
        for weight, dtype, choice in itertools.product(WEIGHTS[model], dtypes, how)
    ]


def make_mesh(kind: str, world: int, device: str = "cpu") -> Mesh:
    """Build the mesh of a cell, also for one rank without a process group."""
    axes = KINDS[kind].axes[world]
    return build_mesh(axes or {"data": world}, torch.device(device).type)


def make_wrapper(
    kind: str, model: str, dtype: torch.dtype, *, mesh: Mesh, device: str = "cpu", **options: Any
) -> Any:
    """Wrap the model of a cell; ranks start with different weights, and rank 0's are used."""
    row = KINDS[kind]
    modules = make_parts(model, dtype, seed=dist.get_rank() if dist.is_initialized() else 0)
    user = SeparateParts(*modules) if row.wrapper == "separate" else TwoParts(*modules)
    if row.wrapper == "dp":
        options.setdefault("device_ids", [device, device])
    if row.wrapper == "fsdp":
        options.setdefault("shard", BLOCKS[model])
    if model == "cnn" and row.wrapper != "single":
        options["sync_batchnorm"] = True
    if row.wrapper == "fsdp" or row.is_tensor_parallel:
        options["mesh"] = mesh
    if row.is_tensor_parallel:
        options["prepare"] = Preparation(tensor_parallel=PLANS[model])
    return wrap_model(MODEL_WRAPPERS.get(row.wrapper), user, device=device, **options)


def make_optimizer(recipe: Recipe, wrapper: Any) -> Any:
    """Build the optimizer wrapper of a recipe; one per part under the separate wrapper."""
    make, settings = OPTIMIZERS[recipe.optimizer]
    options: dict[str, Any] = {}

    def wrapped(parameters: Iterable[nn.Parameter]) -> OptimWrapper:
        clip = {"max_norm": MAX_NORM} if recipe.clip else None
        kind: Any = OptimWrapper
        if recipe.is_half:
            kind = AmpOptimWrapper
            options.update(dtype=HALVES[recipe.dtype], loss_scale={"init_scale": SCALE})
        optimizer = build_optimizer(make, parameters, **settings)
        return kind(
            optimizer, recipe.accumulate, clip, loss_weight=recipe.weight or None, **options
        )

    if not recipe.separate:
        return wrapped(wrapper.parameters())
    model = wrapper.module
    return OptimWrapperDict(
        body=wrapped(model.body.parameters()), head=wrapped(model.head.parameters())
    )


def run_cells(
    kind: str,
    recipes: list[Recipe],
    references: Path,
    checkpoints: Path | None = None,
    device: str = "cpu",
    **options: Any,
) -> list[Outcome]:
    """Train one cell after the other on this rank; every rank must call this.

    Args:
        options: further options of the wrapper.
    """
    world = dist.get_world_size() if dist.is_initialized() else 1
    mesh = make_mesh(kind, world, device)
    plain: dict[Recipe, Reference] = torch.load(references, weights_only=False)
    outcomes = []
    for index, recipe in enumerate(recipes):
        started = time.perf_counter()
        wrapper = make_wrapper(
            kind, recipe.model, recipe.weights_dtype, mesh=mesh, device=device, **options
        )
        optimizer = make_optimizer(recipe, wrapper)
        losses = train(wrapper, optimizer, recipe, mesh, device)
        parameters = weights_apart(whole_weights(wrapper), plain[recipe].weights)
        path = None
        if checkpoints is not None and not recipe.weight:
            state = LoopState(wrapper, optimizer, iteration=recipe.micro_steps)
            folder = checkpoints / f"{kind}_{world}_{recipe.model}_{index}".replace(" ", "_")
            path = save_checkpoint(folder, state)
        outcomes.append(
            Outcome(
                kind,
                world,
                recipe,
                parameters,
                losses_apart(losses, plain[recipe].losses, relative=recipe.is_half),
                validation_loss(wrapper, recipe.model, recipe.weights_dtype, mesh, device),
                path,
                time.perf_counter() - started,
            )
        )
    return outcomes


def train(wrapper: Any, optimizer: Any, recipe: Recipe, mesh: Mesh, device: str = "cpu") -> Tensor:
    """Train; return each micro-batch's loss, averaged over the ranks, in fp64 on the CPU."""
    data = make_data(recipe.model, recipe.weights_dtype, padded=recipe.weight == "tokens")
    ragged = bool(recipe.weight)
    wrapper.train()
    losses, weights = [], []
    for index in range(recipe.micro_steps):
        batch = micro_batch(data, index, mesh.data_rank, mesh.data_size, ragged=ragged)
        losses.append(wrapper.train_step(batch, optimizer)["loss"])
        weights.append(get_weight(recipe, batch[1]))
    counts = torch.tensor(weights, dtype=torch.float64, device=device)
    means = _mean_over_ranks(torch.stack(losses).double() * counts)
    return (means / _mean_over_ranks(counts)).cpu()


def validation_loss(
    wrapper: Any, model: str, dtype: torch.dtype, mesh: Mesh, device: str = "cpu"
) -> float:
    """Return the loss on the validation data, split over the ranks; every rank must call this."""
    inputs, target = make_data(model, dtype, seed=2)
    rows = slice(
        mesh.data_rank * VALIDATION // mesh.data_size,
        (mesh.data_rank + 1) * VALIDATION // mesh.data_size,
    )
    wrapper.eval()
    wrapper.sync_buffers()
    with torch.inference_mode():
        loss = wrapper.val_step([inputs[rows].to(device), target[rows].to(device)])["loss"]
    return float(_mean_over_ranks(loss.double()))


def whole_weights(wrapper: Any) -> dict[str, Tensor]:
    """Return the whole parameters and buffers under the names of the user's model.

    Every rank must call this.
    """
    model = user_model(wrapper)
    named = {name: as_global(tensor.detach(), tensor) for name, tensor in model.named_parameters()}
    named.update(model.named_buffers())
    return {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).cpu()
        for name, value in named.items()
    }


def weights_apart(weights: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Return the largest difference, or infinity if the names differ."""
    if weights.keys() != expected.keys():
        return float("inf")
    differences = [
        (weights[name].double() - value.double()).abs().max() for name, value in expected.items()
    ]
    return float(torch.stack(differences).max())


def losses_apart(losses: Tensor, expected: Tensor, *, relative: bool) -> float:
    difference = (losses - expected).abs()
    return float((difference / expected.abs() if relative else difference).max())


def _mean_over_ranks(value: Tensor) -> Tensor:
    if not dist.is_initialized():
        return value
    value = value.clone()
    dist.all_reduce(value)
    return value / dist.get_world_size()


# Relative bounds of the validation loss; weights trained under autocast are stored in fp32.
LOAD_BOUNDS = {"fp64": 1e-12, "fp32": 2e-6, "bf16": 2e-6, "fp16": 2e-6}


@dataclass(frozen=True)
class Load:
    """A checkpoint of `source` that is loaded under a row and number of ranks.

    Attributes:
        difference: relative difference of the validation loss from the run that saved it.
    """

    kind: str
    world: int
    source: Outcome
    difference: float

    @property
    def is_elsewhere(self) -> bool:
        """Return whether it was saved by another row or number of ranks."""
        return (self.kind, self.world) != (self.source.kind, self.source.world)

    @property
    def is_within(self) -> bool:
        """Return whether it is within the bound of its dtype; a NaN is not."""
        return self.difference <= LOAD_BOUNDS[self.source.recipe.dtype]


def load_all(kind: str, world: int, sources: list[Outcome], timeout_s: float = 300.0) -> list[Load]:
    """Load all saved checkpoints under one row and number of ranks.

    Raises:
        RanksError: a rank failed.
    """
    groups: dict[tuple[str, torch.dtype], list[Outcome]] = defaultdict(list)
    for cell in (cell for cell in sources if cell.checkpoint is not None):
        groups[cell.recipe.model, cell.recipe.weights_dtype].append(cell)
    loads = []
    for (model, dtype), group in groups.items():
        paths = [cell.checkpoint for cell in group]
        by_rank = run_ranks(evaluate, world, kind, model, dtype, paths, timeout_s=timeout_s)
        for source, *losses in zip(group, *by_rank, strict=True):
            apart = max(abs(loss - source.validation) for loss in losses)
            loads.append(Load(kind, world, source, apart / abs(source.validation)))
    return loads


def evaluate(
    kind: str, model: str, dtype: torch.dtype, paths: list[Path], device: str = "cpu"
) -> list[float]:
    """Load the checkpoints one after the other into one wrapper; every rank must call this."""
    mesh = make_mesh(kind, dist.get_world_size() if dist.is_initialized() else 1, device)
    wrapper = make_wrapper(kind, model, dtype, mesh=mesh, device=device)
    losses = []
    for path in paths:
        load_checkpoint(path).load_model(wrapper)
        losses.append(validation_loss(wrapper, model, dtype, mesh, device))
    return losses


def write_references(path: Path, recipes: Iterable[Recipe], device: str = "cpu") -> None:
    """Train the references in plain PyTorch once for all rows, and write them for the ranks."""
    torch.save({recipe: train_plain(recipe, device) for recipe in dict.fromkeys(recipes)}, path)


def run_row(
    kind: str,
    world: int,
    recipes: list[Recipe],
    references: Path,
    checkpoints: Path | None = None,
    timeout_s: float = 300.0,
) -> list[Outcome]:
    """Run the cells of a row at a number of ranks; return the worst result of the ranks.

    Raises:
        RanksError: a rank failed.
    """
    by_rank = run_ranks(
        run_cells, world, kind, recipes, references, checkpoints, timeout_s=timeout_s
    )
    return [
        replace(cells[0], parameters=worst(cell.parameters for cell in cells))
        for cells in zip(*by_rank, strict=True)
    ]


def worst(differences: Iterable[float]) -> float:
    """Return the largest difference; a NaN counts as infinite."""
    return max(
        (math.inf if math.isnan(difference) else difference for difference in differences),
        default=0.0,
    )


def filled() -> Iterator[tuple[str, int]]:
    """Yield the possible rows and numbers of ranks."""
    for kind, row in KINDS.items():
        for world in row.axes:
            yield kind, world


def empty() -> Iterator[tuple[str, int, str]]:
    """Yield the impossible rows and numbers of ranks with the reason."""
    for kind, row in KINDS.items():
        for world, reason in row.why_not.items():
            yield kind, world, reason


def first_line(error: RanksError) -> str:
    """Return the last line of an error."""
    text = next(iter(error.reports.values())).rstrip()
    return text.splitlines()[-1]
