"""docs/parity.md, from what the parity matrix came to."""

from collections.abc import Callable, Iterable

import torch
from parity_cells import BOUNDS, KINDS, LOAD_BOUNDS, VALIDATION, WORLDS, Load, Outcome, empty, worst
from parity_models import BATCH, RAGGED, SAMPLES
from parity_plain import DTYPES, MAX_NORM, OPTIMIZERS

MODELS = {"transformer": "Transformer", "cnn": "CNN with BatchNorm"}
_COLUMNS: list[tuple[str, str, Callable[[Outcome], float]]] = [
    ("fp64 parameters", "fp64", lambda one: one.parameters),
    ("fp64 loss", "fp64", lambda one: one.losses),
    ("fp32 parameters", "fp32", lambda one: one.parameters),
    ("fp32 loss", "fp32", lambda one: one.losses),
    ("bf16 loss, relative", "bf16", lambda one: one.losses),
]

_HEAD = """# Parity

This page compares every wrapper with the same models trained by hand with `torch.nn` and
`torch.optim`, on the whole batch, in one process, without any code of this project. `make parity`
wrote it (torch {torch}, gloo, CPU, {minutes:.0f} minutes); the tests run a part of the comparison.

- **Cell**: a wrapper, a number of ranks, a model, a dtype, accumulation 1 or 3, with or without
  clipping by norm, an optimizer, and the elements over which losses are averaged. Of {cells} cells,
  {within} are within the bounds.
- **Training**: {steps} steps each. Micro-batches of {batch} of the {samples} samples are split over
  the ranks that see different data. The ranks start with different weights, and the wrapper must
  use rank 0's.
- **Parameters**: the largest difference of any parameter or running statistic at the end, on any
  rank. Bounds: {fp64} in fp64, {fp32} in fp32.
- **Loss**: the largest difference of the loss of any micro-batch (mean over the ranks). The bounds
  are the same; in bf16 {bf16} of the loss. bf16 means autocast with fp32 weights, on both sides.
- **Weighted** cells have `loss_weight`: by samples, and for the transformer by tokens of sequences
  with different lengths. Their micro-batches have {ragged} samples in turn, and the ranks have
  different numbers of them. The hand-written side takes one mean over the whole window.
- **BatchNorm** layers are synchronised (`sync_batchnorm: true`) if ranks or replicas see different
  samples. With accumulation, their statistics come from one micro-batch, on both sides.
- **Optimizers**: SGD ({sgd}) and AdamW ({adamw}). Gradients are clipped to a norm of {norm}.
- **separate** has one optimizer, and one norm, for each of the two parts of a model; the
  hand-written side does the same.

The models have no parameter whose gradient is zero except for rounding, such as the bias before a
BatchNorm layer or the bias of attention keys. AdamW divides by the size of the gradient. For such a
parameter it would take full steps in the direction of rounding errors, and two equally correct
programs would diverge. For the same reason eps is {eps} instead of torch's 1e-8: with 1e-8, an
element whose gradient is as small as its rounding error would move as fast as any other."""


def page(cells: list[Outcome], loads: list[Load], failures: list[str], *, minutes: float) -> str:
    parts = [_head(cells, minutes)]
    if failures:
        parts.append("## Not run\n\n" + "\n".join(f"- {line}" for line in failures))
    parts += [_model(name, cells) for name in MODELS]
    parts += [_settings(cells), _empty(), _checkpoints(loads)]
    return "\n\n".join(parts) + "\n"


def _head(cells: list[Outcome], minutes: float) -> str:
    sgd, adamw = (OPTIMIZERS[name][1] for name in ("SGD", "AdamW"))
    return _HEAD.format(
        torch=torch.__version__,
        minutes=minutes,
        cells=len(cells),
        within=sum(one.is_within for one in cells),
        steps=max((one.recipe.steps for one in cells), default=0),
        batch=BATCH,
        samples=SAMPLES,
        ragged=", ".join(map(str, RAGGED)),
        norm=MAX_NORM,
        sgd=f"lr {sgd['lr']}, momentum {sgd['momentum']}",
        adamw=f"lr {adamw['lr']}, weight decay {adamw['weight_decay']}, eps {adamw['eps']:.0e}",
        eps=f"{adamw['eps']:.0e}",
        **{dtype: f"{bound:.0e}" for dtype, bound in BOUNDS.items()},
    )


def _model(name: str, cells: list[Outcome]) -> str:
    lines = [
        f"## {MODELS[name]}\n",
        "The largest differences over accumulation, clipping and optimizers.\n",
        "| Wrapper | Ranks | " + " | ".join(title for title, _, _ in _COLUMNS) + " |",
        "|---|---|" + "---|" * len(_COLUMNS),
    ]
    for kind, row in KINDS.items():
        for world in row.axes:
            mine = [
                one
                for one in cells
                if (one.kind, one.world, one.recipe.model) == (kind, world, name)
            ]
            if mine:
                figures = " | ".join(_figures(mine))
                lines.append(f"| {kind} | {world} | {figures} |")
    return "\n".join(lines)


def _figures(cells: Iterable[Outcome]) -> list[str]:
    cells = list(cells)
    return [
        _figure(worst(of(one) for one in cells if one.recipe.dtype == dtype), BOUNDS[dtype])
        for _, dtype, of in _COLUMNS
    ]


def _figure(value: float, bound: float) -> str:
    return f"{value:.1e}" if value <= bound else f"**{value:.1e}**"


def _settings(cells: list[Outcome]) -> str:
    kinds: dict[str, Callable[[Outcome], bool]] = {
        "accumulation 1": lambda one: one.recipe.accumulate == 1,
        "accumulation 3": lambda one: one.recipe.accumulate == 3,
        "not clipped": lambda one: not one.recipe.clip,
        "clipped by norm": lambda one: one.recipe.clip,
        "SGD, momentum": lambda one: one.recipe.optimizer == "SGD",
        "AdamW": lambda one: one.recipe.optimizer == "AdamW",
        "unweighted, equal sizes": lambda one: not one.recipe.weight,
        "by samples, ragged": lambda one: one.recipe.weight == "samples",
        "by tokens, ragged": lambda one: one.recipe.weight == "tokens",
        **{
            f"{world} rank{'s'[: world > 1]}": lambda one, world=world: one.world == world
            for world in WORLDS
        },
    }
    lines = [
        "## By setting\n",
        "The largest differences over all wrappers and both models.\n",
        "| | Cells | " + " | ".join(title for title, _, _ in _COLUMNS) + " |",
        "|---|---|" + "---|" * len(_COLUMNS),
    ]
    for title, belongs in kinds.items():
        mine = [one for one in cells if belongs(one)]
        if mine:
            lines.append(f"| {title} | {len(mine)} | " + " | ".join(_figures(mine)) + " |")
    return "\n".join(lines)


def _empty() -> str:
    lines = ["## Impossible cells\n", "| Wrapper | Ranks | Why |", "|---|---|---|"]
    grouped: dict[tuple[str, str], list[int]] = {}
    for kind, world, reason in empty():
        grouped.setdefault((kind, reason), []).append(world)
    for (kind, reason), worlds in grouped.items():
        lines.append(f"| {kind} | {', '.join(map(str, worlds))} | {reason} |")
    lines.append("")
    lines.append("hsdp: one copy of one shard on one rank, two copies of one shard on two ranks,")
    lines.append("two copies of two shards on four.")
    return "\n".join(lines)


def _checkpoints(loads: list[Load]) -> str:
    sources = {id(one.source) for one in loads}
    elsewhere = sum(one.is_elsewhere for one in loads)
    within = sum(one.is_within for one in loads)
    bounds = ", ".join(
        f"{dtype} {bound:.0e}" for dtype, bound in LOAD_BOUNDS.items() if dtype in DTYPES
    )
    loaded = (
        f"{len(sources)} checkpoints, {len(loads)} loads, {elsewhere} of them under another "
        f"setup,\n{within} of them within the bounds ({bounds})"
    )
    lines = [
        "## Checkpoints\n",
        "Every unweighted cell saves a checkpoint, and every wrapper and number of ranks loads it:",
        f"{loaded}.",
        "The figures are relative differences of the loss on validation data",
        f"({VALIDATION} samples) from the loss in the run that saved the checkpoint.",
        "Weights trained under bf16 are fp32, and are evaluated in fp32.\n",
        "| Loaded under | Ranks | Loads | " + " | ".join(DTYPES) + " |",
        "|---|---|---|" + "---|" * len(DTYPES),
    ]
    for kind, row in KINDS.items():
        for world in row.axes:
            mine = [one for one in loads if (one.kind, one.world) == (kind, world)]
            if mine:
                figures = [
                    _figure(
                        worst(one.difference for one in mine if one.source.recipe.dtype == dtype),
                        LOAD_BOUNDS[dtype],
                    )
                    for dtype in DTYPES
                ]
                lines.append(f"| {kind} | {world} | {len(mine)} | " + " | ".join(figures) + " |")
    return "\n".join(lines)
