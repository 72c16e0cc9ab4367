"""Write, list and describe checkpoints: folders that are either complete or absent."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import re
import reprlib
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import NoneType
from typing import Any

import torch

from ...collectives import all_gather_object
from ...wrappers.features import model_features
from ...wrappers.layout import reshard
from ...wrappers.steps.preprocess import get_device
from ...wrappers.unwrap import num_data_ranks, user_model
from ..rng import capture_rng, get_states, module_generators
from ..state import LoopState, WeightSource
from . import files as disk
from . import weights
from .buffers import (
    Digests,
    buffer_digests,
    changed_transient_buffers,
    differing_buffers,
)
from .files import CheckpointError, own_rank, run_on_all_ranks, world_size
from .optimizers import add_parameter_names
from .tensor_files import (
    SUFFIX,
    LocalShards,
    TensorFile,
    assign_shards,
    divide,
    index_text,
    pack,
)

logger = logging.getLogger(__name__)

# Formats 1 and 2 have files of torch.save (format_1.py).
FORMAT = 3
META = "checkpoint.json"
_COUNTERS = ("step", "epoch", "batch", "iteration")
_REASONS = ("interval", "signal", "exception", "end")


def save_checkpoint(
    folder: Path | str, state: LoopState, *, reason: str = "interval", is_best: bool = False
) -> Path:
    """Write a checkpoint into ``folder`` and return its path; every rank must call this.

    docs/checkpoints.md lists its contents, which include the wrapper's ``step_state``. An earlier
    checkpoint of the same step is replaced. After a run has been resumed from an older checkpoint,
    the first save renames later ones to ``abandoned_step_...``. If the model is sharded, each rank
    writes its parts, and no rank gathers whole tensors.

    Args:
        folder: ``state.run_dir / "checkpoints"``; the same folder on every rank.
        state: the state to save. Its counters must be up to date, as they are in
            ``on_save_point``.
        reason: "interval", "signal", "exception" or "end".
        is_best: whether the metrics in ``state`` are the best so far.

    Raises:
        CheckpointError: saving failed on some rank. Raised on every rank; the unfinished folder is
            removed.
        ValueError: ``reason`` is unknown.
    """
    folder = Path(folder)
    reshard(state.model)
    saved = weights.state_to_save(state)
    # If `saved` has been moved back to the start of the window, leave out what belongs to later
    # batches: gradients, step state, loader position and later logs.
    at_current_batch = saved.iteration == state.iteration
    path = _save(folder, saved, reason, is_best=is_best, at_current_batch=at_current_batch)
    state.restored_from = None
    return path


def save_alone(folder: Path, state: LoopState, *, reason: str = "exception") -> Path | None:
    """Write a checkpoint on rank 0 without any communication, and return its path.

    Use this after an error, when the other ranks may be gone. The checkpoint is complete if a
    single process failed between two batches. Otherwise it is saved as ``incomplete_step_...``
    (docs/checkpoints.md), with the counters of the start of the current accumulation window, but
    with the random streams that rank 0 has now. Returns None on other ranks. Also returns None, and
    logs a warning, if the weights may be ahead of the counters or if the state is sharded.

    Raises:
        CheckpointError: saving failed; the unfinished folder is removed.
        ValueError: ``reason`` is unknown.
    """
    if own_rank() != 0:
        return None
    exact = world_size() == 1 and not state.in_step
    problem = "" if exact else _why_unsafe(state)
    if weights.has_sharded_state(state):
        problem = "its state is sharded over the ranks, and the other ranks may be gone"
    if problem:
        logger.warning("no checkpoint of step %d is saved: %s", state.step, problem)
        return None

    if exact:
        path = _save(folder, state, reason, gather=lambda mine: [mine])
        state.restored_from = None
        logger.info("saved checkpoint %s (after the error)", path)
        return path
    assert state.updated_at is not None
    epoch, batch, iteration = state.updated_at
    saved = replace(state, epoch=epoch, batch=batch, iteration=iteration)
    path = _save(
        folder, saved, reason, gather=lambda mine: [mine], at_current_batch=False, incomplete=True
    )
    logger.info("saved %s after the error; a run resumed from it draws other random numbers", path)
    return path


def _why_unsafe(state: LoopState) -> str:
    """Explain why a checkpoint with the counters of the last update is unsafe; "" if it is safe.

    It is unsafe if its counters might not match the weights, or if no run could resume from it.
    """
    if state.updated_at is None:
        return "it is unknown where the running accumulation window began"
    if state.updated_at[0] != state.epoch:
        return "the running accumulation window began in the epoch before"
    if not state.in_step:
        return ""
    if not isinstance(sys.exc_info()[1], (Exception, NoneType)):
        return "the training step was interrupted, possibly while it changed the weights"
    optim = state.optim_wrapper
    if isinstance(optim, Mapping):
        return "a step of several optimizers failed, and some may have changed the weights"
    # Wrappers count a micro-batch after its backward and before they change the weights.
    count = getattr(optim, "inner_count", getattr(optim, "_inner_count", None))
    unchanged = count == state.iteration
    accumulated = count == state.iteration + 1 and not optim.should_update()
    if unchanged or accumulated:
        return ""
    return "the error came after the weights had changed and before the step was counted"


def prune_checkpoints(folder: Path, keep_last: int | None, keep: Iterable[Path] = ()) -> list[Path]:
    """Remove checkpoints, except for the latest ``keep_last`` ones and those in ``keep``.

    Only rank 0 removes checkpoints, without communication. ``keep_last=None`` keeps all. Returns
    the removed folders.
    """
    if keep_last is None or own_rank() != 0:
        return []
    kept_paths = {path.resolve() for path in keep}
    olds = [path for path, _ in list_checkpoints(folder)][keep_last:]
    removed = [path for path in olds if path.resolve() not in kept_paths]
    disk.remove_folders(removed)
    return removed


def list_checkpoints(
    folder: Path, problems: dict[Path, str] | None = None
) -> list[tuple[Path, dict[str, Any]]]:
    """Return the checkpoints in ``folder`` with their descriptions, the latest first.

    Checkpoints without a readable description are skipped with a warning, and the error is added to
    ``problems``. Links to other checkpoints in ``folder`` are left out. Does not communicate.
    """
    links = set(links_in(folder))
    return _read_metas((path for path in folder.glob("step_*") if path not in links), problems)


def links_in(folder: Path) -> list[Path]:
    """Return the symbolic links in ``folder`` to checkpoints in the same folder."""
    return [
        path
        for path in folder.glob("step_*")
        if path.is_symlink() and path.exists() and path.resolve().parent == folder.resolve()
    ]


def _read_metas(
    paths: Iterable[Path], problems: dict[Path, str] | None = None
) -> list[tuple[Path, dict[str, Any]]]:
    readable = []
    for path in paths:
        try:
            readable.append((path, read_meta(path)))
        except CheckpointError as error:
            logger.warning("%s; skipped", error)
            if problems is not None:
                problems[path] = str(error)
    return sorted(readable, key=lambda entry: entry[1]["serial"], reverse=True)


def read_meta(path: Path) -> dict[str, Any]:
    """Return a checkpoint's description, the content of its checkpoint.json.

    Raises:
        CheckpointError: the description is missing, damaged, or of a later format.
    """
    try:
        text = disk.read_text(path / META)
        meta = json.loads(text)
        _check(meta, text)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CheckpointError(f"{path} is not a checkpoint: it has no {META}") from error
    except (ValueError, OSError, RecursionError) as error:
        raise CheckpointError(f"checkpoint {path} is damaged: {META}: {error}") from error
    if meta["format"] > FORMAT:
        raise CheckpointError(
            f"checkpoint {path} has format {meta['format']}; this version reads up to {FORMAT}"
        )
    return dict(meta)


def _check(meta: Any, text: str) -> None:
    """Raise ValueError if ``text`` does not describe a checkpoint or was changed.

    Descriptions of later formats are not checked.
    """
    if not isinstance(meta, dict):
        raise ValueError(f"must be a table, got {reprlib.repr(meta)}")
    format_number = meta.get("format")
    if type(format_number) is int and format_number > FORMAT:
        return
    if meta.get("sha256") != _digest(meta) or text != _meta_text(meta):
        raise ValueError("checksum mismatch")
    for name in meta["files"]:
        # A path could lead outside of the folder.
        if not re.fullmatch(r"\w[\w.-]*", name):
            raise ValueError(f"files: {name!r} is not the name of a file of a checkpoint")


def _digest(meta: Mapping[str, Any]) -> str:
    text = json.dumps({k: v for k, v in meta.items() if k != "sha256"}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _meta_text(meta: Mapping[str, Any]) -> str:
    return json.dumps(meta, indent=2)


def rank_stem(rank: int) -> str:
    return f"rank_{rank:05d}"


def _describe(state: LoopState, reason: str, is_best: bool = False) -> dict[str, Any]:
    if reason not in _REASONS:
        raise ValueError(f"reason must be one of {', '.join(_REASONS)}, got {reason!r}")
    # Results of an older evaluation belong to other weights.
    metrics = state.metrics if state.evaluated_at == state.step else {}
    counters = {name: getattr(state, name) for name in _COUNTERS}
    return {
        "format": FORMAT,
        **counters,
        "metrics": {k: v if math.isfinite(v) else None for k, v in metrics.items()},
        "best": is_best,
        "reason": reason,
        "evaluated": _evaluated(state),
        "world_size": world_size(),
        # The number of ranks that see different batches.
        "data_size": num_data_ranks(state.model),
        "torch": torch.__version__,
    }


def _evaluated(state: LoopState) -> list[str]:
    """Return the place of the weights that evaluations use: a file, then keys in its content."""
    for name, source in state.stateful.items():
        if isinstance(source, WeightSource) and source.evaluated_entry:
            return [f"state{SUFFIX}", "stateful", name, source.evaluated_entry]
    return [f"model{SUFFIX}"]


def _save(
    folder: Path,
    state: LoopState,
    reason: str,
    *,
    is_best: bool = False,
    gather: Callable[[Any], list[Any]] = all_gather_object,
    at_current_batch: bool = True,
    incomplete: bool = False,
) -> Path:
    run = partial(
        run_on_all_ranks, f"saving the checkpoint of step {state.step} in {folder}", gather=gather
    )
    rank, meta = own_rank(), _describe(state, reason, is_best)
    shared: list[TensorFile] = []
    # By rank: the parts of sharded tensors in each file, and the hashes of the buffers.
    collected: list[tuple[dict[str, LocalShards], Digests]] = []

    def collect() -> tuple[dict[str, LocalShards], Digests]:
        # If the state is sharded, each rank has parts of the contents.
        if rank == 0 or weights.has_sharded_state(state):
            shared.extend(_shared_files(state))
        return {file.name: file.shards for file in shared}, buffer_digests(state.model)

    def write() -> tuple[dict[str, Any], dict[str, dict[str, int]]]:
        contents = _own_contents(state, at_current_batch)
        contents |= differing_buffers(state.model, [digests for _, digests in collected])
        contents |= changed_transient_buffers(state)
        own_file = pack(rank_stem(rank), contents)
        if rank != 0:
            return _write(draft, [own_file], {}), {}
        positions = {file.name: file.positions for file in shared}
        return _write(draft, [own_file, *shared], _texts(state, shared)), positions

    def write_shards() -> None:
        with disk.explaining_full_disks(draft, lambda: sum(file.num_bytes for file in shared)):
            for file in shared:
                ranks = [shards.get(file.name, {}) for shards, _ in collected]
                names = assign_shards(file, ranks, rank)
                file.write_shards(draft, names, outcomes[0][1].get(file.name, {}))

    draft = run(lambda: disk.make_draft(folder) if rank == 0 else folder)[0]
    try:
        collected = run(collect)
        outcomes = run(write)
        written = {name: about for files, _ in outcomes for name, about in files.items()}
        with_gaps = sorted(name for name, about in written.items() if about is None)
        if with_gaps:
            run(write_shards)
            # Each rank reads some of the files.
            names = with_gaps[rank :: world_size()]
            hashed = run(lambda: {name: disk.fingerprint(draft / name) for name in names})
            written |= {name: about for files in hashed for name, about in files.items()}
        meta["files"] = written
        return run(lambda: _finish(draft, meta, state, incomplete) if rank == 0 else draft)[0]
    except CheckpointError:
        if rank == 0:
            shutil.rmtree(draft, ignore_errors=True)
        raise


def _write(
    draft: Path, files: Sequence[TensorFile], texts: Mapping[str, str]
) -> dict[str, dict[str, Any] | None]:
    """Write files, and return size and SHA-256 of each one that no other rank writes to."""
    with disk.explaining_full_disks(draft, lambda: sum(file.num_bytes for file in files)):
        return {
            **{file.name: file.write(draft) for file in files},
            **{name: disk.write_text(draft / name, text) for name, text in texts.items()},
        }


def _shared_files(state: LoopState) -> list[TensorFile]:
    """Return the files of all ranks together."""
    model, *states = (pack(stem, content) for stem, content in _contents(state).items())
    return [*divide(model), *states]


def _texts(state: LoopState, files: Sequence[TensorFile]) -> dict[str, str]:
    """Return the files with which other libraries open the model: by name, their texts."""
    texts = dict(filter(None, [index_text(files)]))
    config: Any = getattr(user_model(state.model), "config", None)
    if callable(getattr(config, "to_json_string", None)):
        # The settings of a model of transformers, from which it can be built.
        try:
            texts["config.json"] = str(config.to_json_string())
        except Exception:
            logger.warning("the model's config cannot be saved as config.json", exc_info=True)
    return texts


def _contents(state: LoopState) -> dict[str, Any]:
    """Return the contents that do not differ by rank, except for parts of sharded tensors."""
    optim = state.optim_wrapper
    # First, since it may communicate: an error before it would leave other ranks waiting.
    optim_state = {} if optim is None else optim.state_dict()
    optim_state = add_parameter_names(optim_state, state.model, optim)
    stateful = {name: source.state_dict() for name, source in state.stateful.items()}
    return {
        "model": weights.get_weights(user_model(state.model)),
        "optim": optim_state,
        "state": {"counters": state.state_dict(), "stateful": stateful},
    }


def _own_contents(state: LoopState, at_current_batch: bool) -> dict[str, Any]:
    model = user_model(state.model)
    contents: dict[str, Any] = {
        "rng": capture_rng(get_device(model)),
        "gradients": weights.get_gradients(model, state.optim_wrapper) if at_current_batch else {},
        "logs": state.logs.state_dict(None if at_current_batch else state.step),
    }
    if contents["gradients"]:
        contents["window_weights"] = weights.window_weights(state)
        if isinstance(state.optim_wrapper, Mapping):
            contents["window_members"] = list(state.optim_wrapper)
    if at_current_batch and (carried := model_features(state.model).step_state()):
        contents["step"] = carried
    # A checkpoint of the window's start must not have the loader's position, which is later.
    reader_state = state.data.reader_state
    if reader_state is None and state.data.reader is not None:
        reader_state = state.data.reader.state_dict()
    if reader_state is not None and at_current_batch:
        contents["loader"] = reader_state
    generators = {
        "generators": state.data.generators.state_dict(),
        "model_generators": get_states(module_generators(model)),
    }
    contents |= {name: states for name, states in generators.items() if states}
    layouts = weights.gradient_places(model)
    return {**contents, "places": layouts} if layouts else contents


def _finish(draft: Path, meta: dict[str, Any], state: LoopState, incomplete: bool) -> Path:
    """Write the description of the draft, publish it, and remove older checkpoints of this step.

    An ``incomplete`` checkpoint replaces only an earlier incomplete one, and ``find_checkpoint``
    does not find it.
    """
    folder, name = draft.parent, f"step_{meta['step']:08d}"
    gone_back = state.restored_from
    if gone_back is not None and gone_back[0] == folder.resolve() and not incomplete:
        _abandon(folder, after=gone_back[1])
    existing = list_checkpoints(folder)
    replaced = [
        (path, old_meta)
        for path, old_meta in existing
        if old_meta["step"] == meta["step"] and not incomplete
    ]
    # A run may also be resumed from an incomplete or an abandoned checkpoint, and then abandons
    # those with a higher serial number.
    every = existing + _read_metas(folder.glob("?*_step_*"))
    meta["serial"] = 1 + max((old_meta["serial"] for _, old_meta in every), default=0)
    meta["best"] = meta["best"] or any(old_meta["best"] for _, old_meta in replaced)
    final = folder / name
    if incomplete:
        disk.remove_folders(folder.glob("incomplete_*"))
        final = folder / f"incomplete_{name}"
    while final.exists():
        # The old checkpoint is removed after the new one is published, so that one always exists.
        final = final.with_name(f"{name}-{meta['serial']}")
        meta["serial"] += 1
    meta["sha256"] = _digest(meta)
    text = _meta_text(meta)
    with disk.explaining_full_disks(draft, lambda: len(text)):
        disk.write_text(draft / META, text)
    disk.publish(draft, final)
    disk.remove_folders(path for path, _ in replaced)
    return final


def _abandon(folder: Path, *, after: int) -> None:
    """Rename the checkpoints that were saved after the one from which the run continues.

    ``after`` is its serial number.
    """
    for path, meta in list_checkpoints(folder):
        if meta["serial"] <= after:
            continue
        target = path.with_name(f"abandoned_{path.name}")
        number = 1
        while target.exists():
            target = path.with_name(f"abandoned_{path.name}-{number}")
            number += 1
        path.rename(target)
        logger.warning(
            "%s belongs to an abandoned branch of the run; renamed to %s", path, target.name
        )
