"""Write docs/parity.md from the results of the parity matrix."""

from collections.abc import Callable, Iterable

import torch
from parity_cells import BOUNDS, KINDS, LOAD_BOUNDS, VALIDATION, WORLDS, Load, Outcome, empty, worst
from parity_models import BATCH, RAGGED, SAMPLES
from parity_plain import DTYPES, MAX_NORM, OPTIMIZERS

MODELS = {"transformer": "Transformer", "cnn": "CNN with BatchNorm"}
_COLUMNS: list[tuple[str, str, Callable[[Outcome], float]]] = [
    ("fp64 parameters", "fp64", lambda cell: cell.parameters),
    ("fp64 loss", "fp64", lambda cell: cell.losses),
    ("fp32 parameters", "fp32", lambda cell: cell.parameters),
    ("fp32 loss", "fp32", lambda cell: cell.losses),
    ("bf16 loss, relative", "bf16", lambda cell: cell.losses),
]

_HEAD = """# Parity

This page shows how closely each [wrapper](wrappers.md) follows plain PyTorch. It compares every
training with the same training written by hand: with `torch.nn` and `torch.optim`, on the whole
batch, in one process, without any code of this project. `make parity` wrote the page (torch
{torch}, gloo, CPU, {minutes:.0f} minutes); the tests run a part of the comparison. The following
command compares one wrapper, in a minute, and writes the same page about it:

```
python tests/wrappers/parity_report.py --rows single --output /tmp/single.md
```

- **Cell**: a combination of wrapper, number of ranks, model, dtype, accumulation (1 or 3), clipping
  by norm (with or without), optimizer, and weight of the losses. Of {cells} cells,
  {within} are within the bounds.
- **Training**: {steps} updates. Each micro-batch has {batch} of the {samples} samples. Each rank
  gets a part of it; tensor-parallel ranks share a part. The ranks start with different weights, and
  the wrapper must use rank 0's.
- **Parameters**: the largest absolute difference from the hand-written training, of any parameter
  or running statistic after the last update, on any rank. The bounds are {fp64} in fp64 and {fp32}
  in fp32; bf16 has none.
- **Loss**: the largest absolute difference of any micro-batch's loss (mean over the ranks), with
  the same bounds. In bf16 the difference is relative, with a bound of {bf16}.
- **bf16** means autocast with fp32 weights, in both trainings.
- **Weighted** cells have a `loss_weight`: samples, or tokens for the transformer, whose sequences
  then have different lengths. Their micro-batches have {ragged} samples in turn, and the ranks have
  different numbers of them. The hand-written training takes one mean over all micro-batches of an
  update.
- **BatchNorm** layers are synchronised (`sync_batchnorm: true`) if ranks or replicas see different
  samples. Each micro-batch has its own statistics, in both trainings.
- **Optimizers**: SGD ({sgd}) and AdamW ({adamw}). Gradients are clipped to a norm of {norm}.
- **Wrappers**: `hsdp` is `fsdp` with copies: one copy on 1 rank, two copies on 2 ranks, and two
  copies on 4 ranks, each sharded over two. `tp 2` splits layers over two ranks. `separate` has one
  optimizer, and one norm, for each of the two parts of a model, in both trainings.

The models have no parameter whose gradient is zero except for rounding, such as the bias before a
BatchNorm layer or the bias of attention keys. AdamW divides by the size of the gradient. For such a
parameter it would take full steps in the direction of rounding errors, and two equally correct
programs would diverge. For the same reason eps is {eps} instead of torch's 1e-8: with 1e-8, an
element whose gradient is as small as its rounding error would move as fast as any other."""


def page(cells: list[Outcome], loads: list[Load], failures: list[str], *, minutes: float) -> str:
    sections = [_head(cells, minutes)]
    if failures:
        sections.append("## Not run\n\n" + "\n".join(f"- {line}" for line in failures))
    sections += [_model(name, cells) for name in MODELS]
    sections += [_settings(cells), _empty(), _checkpoints(loads)]
    return "\n\n".join(sections) + "\n"


def _head(cells: list[Outcome], minutes: float) -> str:
    sgd, adamw = (OPTIMIZERS[name][1] for name in ("SGD", "AdamW"))
    return _HEAD.format(
        torch=torch.__version__,
        minutes=minutes,
        cells=len(cells),
        within=sum(cell.is_within for cell in cells),
        steps=max((cell.recipe.steps for cell in cells), default=0),
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
        "The largest differences over accumulation, clipping, optimizers and loss weights.\n",
        "| Wrapper | Ranks | " + " | ".join(title for title, _, _ in _COLUMNS) + " |",
        "|---|---|" + "---|" * len(_COLUMNS),
    ]
    for kind, row in KINDS.items():
        for world in row.axes:
            mine = [
                cell
                for cell in cells
                if (cell.kind, cell.world, cell.recipe.model) == (kind, world, name)
            ]
            if mine:
                figures = " | ".join(_figures(mine))
                lines.append(f"| {kind} | {world} | {figures} |")
    return "\n".join(lines)


def _figures(cells: Iterable[Outcome]) -> list[str]:
    cells = list(cells)
    return [
        _figure(worst(of(cell) for cell in cells if cell.recipe.dtype == dtype), BOUNDS[dtype])
        for _, dtype, of in _COLUMNS
    ]


def _figure(value: float, bound: float) -> str:
    return f"{value:.1e}" if value <= bound else f"**{value:.1e}**"


def _settings(cells: list[Outcome]) -> str:
    kinds: dict[str, Callable[[Outcome], bool]] = {
        "accumulation 1": lambda cell: cell.recipe.accumulate == 1,
        "accumulation 3": lambda cell: cell.recipe.accumulate == 3,
        "not clipped": lambda cell: not cell.recipe.clip,
        "clipped by norm": lambda cell: cell.recipe.clip,
        "SGD, momentum": lambda cell: cell.recipe.optimizer == "SGD",
        "AdamW": lambda cell: cell.recipe.optimizer == "AdamW",
        "unweighted, equal sizes": lambda cell: not cell.recipe.weight,
        "by samples, ragged": lambda cell: cell.recipe.weight == "samples",
        "by tokens, ragged": lambda cell: cell.recipe.weight == "tokens",
        **{
            f"{world} rank{'s'[: world > 1]}": lambda cell, world=world: cell.world == world
            for world in WORLDS
        },
    }
    lines = [
        "## By setting\n",
        "The largest differences over all wrappers and both models.\n",
        "| Setting | Cells | " + " | ".join(title for title, _, _ in _COLUMNS) + " |",
        "|---|---|" + "---|" * len(_COLUMNS),
    ]
    for title, belongs in kinds.items():
        mine = [cell for cell in cells if belongs(cell)]
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
    return "\n".join(lines)


def _checkpoints(loads: list[Load]) -> str:
    sources = {id(load.source) for load in loads}
    elsewhere = sum(load.is_elsewhere for load in loads)
    within = sum(load.is_within for load in loads)
    bounds = ", ".join(
        f"{dtype} {bound:.0e}" for dtype, bound in LOAD_BOUNDS.items() if dtype in DTYPES
    )
    lines = [
        "## Checkpoints\n",
        "Every unweighted cell saves a checkpoint, and every wrapper loads its weights, with every",
        f"number of ranks. Of {len(loads)} loads of {len(sources)} checkpoints, {elsewhere} are",
        "under another wrapper or number of ranks than the training, and",
        f"{within} are within the bounds ({bounds}).\n",
        "The figures are the largest relative differences from the loss in the run that saved the",
        f"checkpoint, on {VALIDATION} validation samples. Weights trained in bf16 are in fp32 and",
        "are evaluated in fp32.\n",
        "| Loaded under | Ranks | Loads | " + " | ".join(DTYPES) + " |",
        "|---|---|---|" + "---|" * len(DTYPES),
    ]
    for kind, row in KINDS.items():
        for world in row.axes:
            mine = [load for load in loads if (load.kind, load.world) == (kind, world)]
            if mine:
                figures = [
                    _figure(
                        worst(
                            load.difference for load in mine if load.source.recipe.dtype == dtype
                        ),
                        LOAD_BOUNDS[dtype],
                    )
                    for dtype in DTYPES
                ]
                lines.append(f"| {kind} | {world} | {len(mine)} | " + " | ".join(figures) + " |")
    return "\n".join(lines)
