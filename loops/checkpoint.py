"""Checkpoints: one folder each, written whole or not at all, checked when read."""

from __future__ import annotations

import json
import logging
import math
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from ..collectives import all_gather_object, distributed_available, get_rank, get_world_size
from . import folder as folders
from .plain import plain
from .rng import capture_rng
from .state import LoopState

logger = logging.getLogger(__name__)

T = TypeVar("T")
Gather = Callable[[Any], list[Any]]

FORMAT = 1
META = "checkpoint.json"
REASONS = ("interval", "signal", "exception", "end")


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or read; the same on every rank."""


def save_checkpoint(
    folder: Path, state: LoopState, *, reason: str = "interval", is_best: bool = False
) -> Path:
    """Write a checkpoint into `folder` and return its path; every rank must call this.

    It holds the user's model under the user's names, the optimizer wrapper, the
    counters, everything in `state.stateful`, the random streams of every rank
    and, inside an accumulation window, the gradients gathered so far. An
    earlier checkpoint of the same step is replaced.

    Args:
        folder: Holds the run's checkpoints, `state.run_dir / "checkpoints"`;
            the same place for all ranks.
        state: Where the counters are up to date, as in `on_save_point`.
        reason: "interval", "signal", "exception" or "end".
        is_best: Its metrics are the best so far.

    Raises:
        CheckpointError: A rank failed; nothing of the checkpoint is left.
    """
    return _save(folder, state, _about(state, reason, is_best), all_gather_object)


def save_alone(folder: Path, state: LoopState, *, reason: str = "exception") -> Path | None:
    """Write what rank 0 knows, without any communication; None on other ranks.

    For the moment after an error, when the other ranks may be gone: their random
    streams and unfinished gradients are missing from the checkpoint.
    """
    if own_rank() != 0:
        return None
    return _save(folder, state, _about(state, reason, is_best=False), lambda mine: [mine])


def prune_checkpoints(folder: Path, keep_last: int | None, keep: Iterable[Path] = ()) -> list[Path]:
    """Remove all but the latest `keep_last` checkpoints and those in `keep`.

    Only rank 0 removes anything; None keeps all. Returns what was removed.
    """
    if keep_last is None or own_rank() != 0:
        return []
    spared = {path.resolve() for path in keep}
    olds = [path for path, _ in list_checkpoints(folder)][keep_last:]
    doomed = [path for path in olds if path.resolve() not in spared]
    folders.remove_folders(doomed)
    return doomed


def list_checkpoints(folder: Path) -> list[tuple[Path, dict[str, Any]]]:
    """Return the checkpoints in `folder` with their descriptions, the latest first.

    One without a readable description is named in the log and left out.
    """
    found = []
    for path in folder.glob("step_*"):
        try:
            found.append((path, read_meta(path)))
        except CheckpointError as error:
            logger.warning("%s; passed over", error)
    return sorted(found, key=lambda item: item[1]["serial"], reverse=True)


def read_meta(path: Path) -> dict[str, Any]:
    """Return the description in a checkpoint's folder.

    Raises:
        CheckpointError: There is none, it is damaged, or of a later format.
    """
    try:
        meta = json.loads((path / META).read_text(encoding="utf-8"))
        number = meta["format"]
        if not isinstance(meta["files"], dict):
            raise TypeError("files must be a table")
        if number > FORMAT:
            raise CheckpointError(
                f"checkpoint {path} has format {number}; this version reads up to {FORMAT}"
            )
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is not a checkpoint: it has no {META}") from error
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise CheckpointError(f"checkpoint {path} is damaged: {META}: {error}") from error
    return dict(meta)


def together(what: str, action: Callable[[], T], gather: Gather = all_gather_object) -> list[T]:
    """Run `action` on every rank and return all results; if one fails, all fail.

    Raises:
        CheckpointError: With the text of every rank that failed.
    """
    result, cause = None, None
    try:
        result = action()
    except Exception as error:  # noqa: BLE001 - whatever it is, the other ranks must hear of it
        cause = error
    told = f"{cause}" if isinstance(cause, CheckpointError) else f"{type(cause).__name__}: {cause}"
    reports = gather((None if cause is None else told, result))
    failed = [f"rank {rank}: {text}" for rank, (text, _) in enumerate(reports) if text is not None]
    if failed:
        texts = failed if len(reports) > 1 else [told]
        raise CheckpointError(f"{what} failed: {'; '.join(texts)}") from cause
    return [result for _, result in reports]


def user_model(wrapper: nn.Module) -> nn.Module:
    """Return the model inside a wrapper; a bare model itself."""
    inner = getattr(wrapper, "module", None)
    return inner if isinstance(inner, nn.Module) else wrapper


def rank_file(rank: int) -> str:
    """Return the name of the file with what only one rank knows."""
    return f"rank_{rank:05d}.pt"


def own_rank() -> int:
    """Return this process's rank in the group, 0 without one, whatever the environment says."""
    return get_rank() if distributed_available() else 0


def world_size() -> int:
    """Return the number of ranks in the group, 1 without one, whatever the environment says."""
    return get_world_size() if distributed_available() else 1


def _about(state: LoopState, reason: str, is_best: bool) -> dict[str, Any]:
    if reason not in REASONS:
        raise ValueError(f"reason must be one of {', '.join(REASONS)}, got {reason!r}")
    # Results of an older evaluation are not those of these weights.
    metrics = state.metrics if state.evaluated_at == state.step else {}
    return {
        "format": FORMAT,
        "step": state.step,
        "epoch": state.epoch,
        "batch": state.batch,
        "iteration": state.iteration,
        "metrics": {k: v if math.isfinite(v) else None for k, v in metrics.items()},
        "best": is_best,
        "reason": reason,
        "world_size": world_size(),
        "torch": torch.__version__,
    }


def _save(folder: Path, state: LoopState, meta: dict[str, Any], gather: Gather) -> Path:
    what = f"saving the checkpoint of step {state.step} in {folder}"
    first = own_rank() == 0
    draft = together(what, lambda: folders.make_draft(folder) if first else None, gather)[0]
    if draft is None:
        raise AssertionError("rank 0 makes the draft")
    try:
        written = together(what, lambda: _write(draft, state), gather)
        meta["files"] = {name: about for files in written for name, about in files.items()}
        finals = together(what, lambda: _finish(draft, meta) if first else draft, gather)
    except CheckpointError:
        if first:
            shutil.rmtree(draft, ignore_errors=True)
        raise
    return finals[0]


def _write(draft: Path, state: LoopState) -> dict[str, dict[str, Any]]:
    """Write this rank's files into the draft; return their fingerprints."""
    model = user_model(state.model)
    contents: dict[str, Any] = {}
    if own_rank() == 0:
        optim = state.optim_wrapper
        stateful = {name: plain(part.state_dict(), name) for name, part in state.stateful.items()}
        contents["model.pt"] = model.state_dict()
        contents["optim.pt"] = {} if optim is None else plain(optim.state_dict(), "optimizer")
        contents["state.pt"] = {"counters": state.state_dict(), "stateful": stateful}
    # Copied: under DDP a gradient may be a view that would be written with its whole bucket.
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    contents[rank_file(own_rank())] = {"rng": capture_rng(), "gradients": gradients}
    for name, content in contents.items():
        folders.write_tensors(draft / name, content)
    return {name: folders.fingerprint(draft / name) for name in contents}


def _finish(draft: Path, meta: dict[str, Any]) -> Path:
    """Describe the draft and publish it in place of older ones of the same step."""
    others = list_checkpoints(draft.parent)
    replaced = [(path, old) for path, old in others if old["step"] == meta["step"]]
    meta["serial"] = 1 + max((old["serial"] for _, old in others), default=0)
    meta["best"] = meta["best"] or any(old["best"] for _, old in replaced)
    name = f"step_{meta['step']:08d}"
    final = draft.parent / name
    while final.exists():
        # Both exist for a moment, so that a kill here loses neither.
        final = final.with_name(f"{name}-{meta['serial']}")
        meta["serial"] += 1
    folders.write_text(draft / META, json.dumps(meta, indent=2))
    folders.publish(draft, final)
    folders.remove_folders(path for path, _ in replaced)
    return final
