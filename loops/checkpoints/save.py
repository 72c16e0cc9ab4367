"""Save checkpoints: collect the content on every rank, write it, and publish it as a whole."""

from __future__ import annotations

import logging
import math
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import NoneType
from typing import Any, TypeAlias

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
from .buffers import buffer_digests, changed_transient_buffers, differing_buffers
from .checkpoint import FORMAT, META, list_checkpoints, rank_stem, read_metas, sealed_text
from .files import CheckpointError, own_rank, run_on_all_ranks, world_size
from .optimizers import add_parameter_names
from .tensor_files import SUFFIX, LocalShards, TensorFile, assign_shards, divide, index_text, pack

logger = logging.getLogger(__name__)

_COUNTERS = ("step", "epoch", "batch", "iteration")
_REASONS = ("interval", "signal", "exception", "end")
# Returns the objects of all ranks, given this rank's object.
Gather: TypeAlias = Callable[[Any], list[Any]]


def save_checkpoint(
    folder: Path | str, state: LoopState, *, reason: str = "interval", is_best: bool = False
) -> Path:
    """Write a checkpoint into ``folder`` and return its path; every rank must call this.

    docs/checkpoints.md lists its contents, which include the wrapper's ``step_state``. An earlier
    checkpoint of the same step is replaced. After a run has been resumed from an older checkpoint,
    the first save renames later ones to ``abandoned_step_...``. If the model is sharded, each rank
    writes its parts, and no rank gathers whole tensors. A save in the background ends first.

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
    snapshot = collect(folder, state, reason=reason, is_best=is_best)
    with disk.save_lock:
        path = snapshot.write()
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
        path = _write_alone(_collect(folder, state, reason, gather=_only_own))
        state.restored_from = None
        logger.info("saved checkpoint %s (after the error)", path)
        return path
    assert state.updated_at is not None
    epoch, batch, iteration = state.updated_at
    saved = replace(state, epoch=epoch, batch=batch, iteration=iteration)
    snapshot = _collect(folder, saved, reason, gather=_only_own, at_current_batch=False)
    snapshot.incomplete = True
    path = _write_alone(snapshot)
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


def collect(
    folder: Path | str, state: LoopState, *, reason: str = "interval", is_best: bool = False
) -> Snapshot:
    """Return what ``save_checkpoint`` saves, with this rank's tensors; every rank must call this.

    Raises:
        CheckpointError: on every rank, if something cannot be saved.
        ValueError: ``reason`` is unknown.
    """
    reshard(state.model)
    saved = weights.state_to_save(state)
    # If `saved` has been moved back to the start of the window, leave out what belongs to later
    # batches: gradients, step state, loader position and later logs.
    at_current_batch = saved.iteration == state.iteration
    return _collect(folder, saved, reason, is_best=is_best, at_current_batch=at_current_batch)


@dataclass
class Snapshot:
    """The content of a checkpoint.

    Attributes:
        folder: the folder for checkpoints.
        meta: the description, without the files.
        own_file: the file of this rank.
        shared_files: the files of all ranks together; on each rank if the state is sharded, else
            only on rank 0.
        further_files: the contents of further files, by name.
        shards: the parts that each rank has of the tensors in each file.
        restored_from: ``LoopState.restored_from``.
        incomplete: whether to save it as ``incomplete_step_...``.
    """

    folder: Path
    meta: dict[str, Any]
    own_file: TensorFile
    shared_files: list[TensorFile]
    further_files: dict[str, bytes]
    restored_from: tuple[Path, int] | None
    shards: list[dict[str, LocalShards]] = field(default_factory=list)
    incomplete: bool = False

    def files(self) -> list[TensorFile]:
        """Return the files that have tensors of this rank."""
        return [self.own_file, *self.shared_files]

    def write(self, gather: Gather = all_gather_object) -> Path:
        """Write and publish the checkpoint, and return its path; every rank must call this.

        Args:
            gather: exchanges objects between the ranks.

        Raises:
            CheckpointError: on every rank, if writing failed; the unfinished folder is removed.
        """
        run = partial(run_on_all_ranks, _title(self.folder, self.meta), gather=gather)
        is_first = own_rank() == 0
        draft = run(lambda: disk.make_draft(self.folder) if is_first else self.folder)[0]
        try:
            outcomes = run(lambda: self._write_files(draft))
            written = {name: about for files, _ in outcomes for name, about in files.items()}
            with_gaps = sorted(name for name, about in written.items() if about is None)
            if with_gaps:
                run(lambda: self._write_shards(draft, outcomes[0][1]))
                # Each rank reads some of the files.
                names = with_gaps[own_rank() :: len(outcomes)]
                hashed = run(lambda: {name: disk.fingerprint(draft / name) for name in names})
                written |= {name: about for files in hashed for name, about in files.items()}
            self.meta["files"] = written
            return run(lambda: self._publish(draft) if is_first else draft)[0]
        except CheckpointError:
            if is_first:
                shutil.rmtree(draft, ignore_errors=True)
            raise

    def _write_files(self, draft: Path) -> tuple[dict[str, Any], dict[str, dict[str, int]]]:
        """Write the files, with gaps for sharded tensors.

        Returns:
            Size and SHA-256 of each file, None if it has gaps; and the positions of the gaps.
        """
        if own_rank() != 0:
            return _write(draft, [self.own_file], {}), {}
        positions = {file.name: file.positions for file in self.shared_files}
        return _write(draft, self.files(), self.further_files), positions

    def _write_shards(self, draft: Path, positions: Mapping[str, Mapping[str, int]]) -> None:
        """Write this rank's parts of sharded tensors into the gaps."""
        with disk.explaining_full_disks(draft, lambda: sum(f.num_bytes for f in self.shared_files)):
            for file in self.shared_files:
                ranks = [shards.get(file.name, {}) for shards in self.shards]
                names = assign_shards(file, ranks, own_rank())
                file.write_shards(draft, names, positions.get(file.name, {}))

    def _publish(self, draft: Path) -> Path:
        """Write the description, publish the draft, and remove older checkpoints of this step.

        An ``incomplete`` checkpoint replaces only an earlier incomplete one, and
        ``find_checkpoint`` does not find it.
        """
        folder, meta, incomplete = self.folder, self.meta, self.incomplete
        name = f"step_{meta['step']:08d}"
        gone_back = self.restored_from
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
        every = existing + read_metas(folder.glob("?*_step_*"))
        meta["serial"] = 1 + max((old_meta["serial"] for _, old_meta in every), default=0)
        meta["best"] = meta["best"] or any(old_meta["best"] for _, old_meta in replaced)
        final = folder / name
        if incomplete:
            disk.remove_folders(folder.glob("incomplete_*"))
            final = folder / f"incomplete_{name}"
        while final.exists():
            # The old checkpoint is removed after the new one is published: one always exists.
            final = final.with_name(f"{name}-{meta['serial']}")
            meta["serial"] += 1
        text = sealed_text(meta)
        with disk.explaining_full_disks(draft, lambda: len(text)):
            disk.write_bytes(draft / META, text.encode())
        disk.publish(draft, final)
        disk.remove_folders(path for path, _ in replaced)
        return final


def _collect(
    folder: Path | str,
    state: LoopState,
    reason: str,
    *,
    is_best: bool = False,
    gather: Gather = all_gather_object,
    at_current_batch: bool = True,
) -> Snapshot:
    folder, meta = Path(folder), _describe(state, reason, is_best)
    run = partial(run_on_all_ranks, _title(folder, meta), gather=gather)
    digests = run(lambda: buffer_digests(state.model))
    snapshots: list[Snapshot] = []

    def pack_all() -> dict[str, LocalShards]:
        # If the state is sharded, each rank has parts of the contents.
        has_shared = own_rank() == 0 or weights.has_sharded_state(state)
        shared = _shared_files(state) if has_shared else []
        contents = _own_contents(state, at_current_batch)
        contents |= differing_buffers(state.model, digests)
        contents |= changed_transient_buffers(state)
        own_file = pack(rank_stem(own_rank()), contents)
        further = _further_files(state, shared) if own_rank() == 0 else {}
        snapshots.append(Snapshot(folder, meta, own_file, shared, further, state.restored_from))
        return {file.name: file.shards for file in shared}

    shards = run(pack_all)
    (snapshot,) = snapshots
    snapshot.shards = shards
    return snapshot


def _title(folder: Path, meta: Mapping[str, Any]) -> str:
    return f"saving the checkpoint of step {meta['step']} in {folder}"


def _only_own(reported: Any) -> list[Any]:
    return [reported]


def _write_alone(snapshot: Snapshot) -> Path:
    with disk.save_lock:
        return snapshot.write(_only_own)


def _write(
    draft: Path, files: Sequence[TensorFile], further_files: Mapping[str, bytes]
) -> dict[str, dict[str, Any] | None]:
    """Write files, and return size and SHA-256 of each one that no other rank writes to."""
    with disk.explaining_full_disks(draft, lambda: sum(file.num_bytes for file in files)):
        return {
            **{file.name: file.write(draft) for file in files},
            **{name: disk.write_bytes(draft / name, data) for name, data in further_files.items()},
        }


def _shared_files(state: LoopState) -> list[TensorFile]:
    """Return the files of all ranks together."""
    model, *states = (pack(stem, content) for stem, content in _contents(state).items())
    return [*divide(model), *states]


def _further_files(state: LoopState, files: Sequence[TensorFile]) -> dict[str, bytes]:
    """Return the files with which other libraries open the model: by name, their contents."""
    contents = {name: text.encode() for name, text in filter(None, [index_text(files)])}
    config: Any = getattr(user_model(state.model), "config", None)
    if callable(getattr(config, "to_json_string", None)):
        # The settings of a model of transformers, from which it can be built.
        try:
            contents["config.json"] = str(config.to_json_string()).encode()
            contents |= _tokenizer_files(_find_tokenizer(state.dataloader))
        except Exception:
            logger.warning("config.json or the tokenizer cannot be saved", exc_info=True)
    return contents


def _find_tokenizer(loader: Any) -> Any:
    collate = getattr(loader, "collate_fn", None)
    # Our loaders wrap the user's function.
    return getattr(getattr(collate, "collate", collate), "tokenizer", None)


@lru_cache(maxsize=1)
def _tokenizer_files(tokenizer: Any) -> dict[str, bytes]:
    if not hasattr(tokenizer, "save_pretrained"):
        return {}
    with TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        return {path.name: path.read_bytes() for path in Path(folder).iterdir() if path.is_file()}


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
