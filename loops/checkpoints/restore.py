"""Find checkpoints and restore a run from them."""

from __future__ import annotations

import logging
import re
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torch import Tensor, nn

from ...collectives import get_rank
from ...primitives.suggestions import nearest
from ...registry.local_paths import require_local
from ...wrappers.features import model_features
from ...wrappers.layout import is_sharded, reshard, unreduced
from ...wrappers.steps.preprocess import get_device
from ...wrappers.unwrap import num_data_ranks, plain_name, user_model
from ..hook import note_run
from ..logs import mean_logs
from ..rng import mix_seed, module_generators, restore_rng, seed_rng, set_states
from ..state import LoopState, PartReader
from . import format_1, weights
from .buffers import load_differing_buffers, load_transient_buffers
from .checkpoint import links_in, list_checkpoints, rank_stem, read_meta
from .files import (
    CheckpointError,
    find_damage,
    own_rank,
    reading,
    run_on_all_ranks,
    save_lock,
    world_size,
)
from .optimizers import NameOrders, fit_to_run
from .saved_tensors import load_whole_tensors
from .tensor_files import Reader, get_stem

logger = logging.getLogger(__name__)

_SHOWN = 8


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint's folder and its description; files are checked when they are read.

    Attributes:
        path: the folder of the checkpoint.
        meta: the content of its checkpoint.json.
    """

    path: Path
    meta: dict[str, Any]

    def read(self, name: str, *, by_parts: bool = False) -> Any:
        """Return the content of a file, on the CPU; does not communicate.

        Args:
            name: one of ``stems``, such as "model"; a suffix is ignored.
            by_parts: return larger tensors as ``SavedTensor``, which are read when they are
                indexed.

        Raises:
            CheckpointError: the file does not exist, or is damaged.
        """
        files = self._reader(by_parts=by_parts)
        if get_stem(name) not in files.stems:
            raise CheckpointError(
                f"the file to read in {self.path} must be one of {', '.join(files.stems)}, got "
                f"{name}"
            )
        return files.tree(get_stem(name))

    @property
    def stems(self) -> list[str]:
        """The names of the contents: "model", "optim", "state", and "rank_00000" and so on."""
        return self._reader(by_parts=False).stems

    @property
    def evaluated(self) -> tuple[str, ...]:
        """The place of the weights that evaluations used: a file, then keys in its content."""
        return tuple(self.meta.get("evaluated", ("model",)))

    def load_model(self, model: nn.Module, *, evaluated: bool = False) -> None:
        """Load the weights into a model or its wrapper; every rank must call this.

        Args:
            model: the model, or its wrapper.
            evaluated: load the weights that the run's evaluations used, such as the average of an
                ``EMAHook``.

        Raises:
            CheckpointError: names or shapes differ, or a file is damaged; nothing is loaded then.
        """
        reshard(model)
        files = self._files(by_parts=any(map(is_sharded, model.parameters())))

        def load() -> None:
            self._load_model(model, self._weights(files, evaluated))

        run_on_all_ranks(f"loading the model of {self.path}", load)

    def read_model(self, *, evaluated: bool = False, by_parts: bool = False) -> dict[str, Any]:
        """Return the weights by the model's names, on the CPU; every rank must call this.

        Args:
            evaluated: as for ``load_model``.
            by_parts: as for ``read``.

        Raises:
            CheckpointError: a file is damaged.
        """
        files = self._reader(by_parts=by_parts)
        weights: list[dict[str, Any]] = []
        run_on_all_ranks(
            f"reading the model of {self.path}",
            lambda: weights.append(self._weights(files, evaluated)),
        )
        return dict(weights[0])

    def _weights(self, files: Reader, evaluated: bool) -> Any:
        saved = files.tree("model")
        name, *keys = self.evaluated
        if evaluated and keys:
            with reading(self.path, name, ".".join(keys)):
                saved.update(files.tree(get_stem(name), *keys))
        return saved

    def load_states(self, state: LoopState) -> None:
        """Load counters, hooks and other parts without the weights; every rank must call this.

        Raises:
            CheckpointError: a part does not fit the run, or the file is damaged, on any rank.
        """
        files = self._files(by_parts=weights.has_sharded_state(state))
        run_on_all_ranks(f"restoring {self.path}", lambda: self._load_states(state, files))

    def restore(self, state: LoopState) -> None:
        """Restore a run to the state at the checkpoint; every rank must call this.

        Works across wrappers and numbers of ranks. If the number has changed, log lines list what
        will differ.

        Raises:
            CheckpointError: a part does not fit the run, or a file is damaged, on any rank.
        """
        reshard(state.model)
        files = self._files(by_parts=weights.has_sharded_state(state))
        run_on_all_ranks(f"restoring {self.path}", lambda: self._restore(state, files))

    def _reader(self, *, by_parts: bool) -> Reader:
        return self._kind(self.path, self.meta["files"], by_parts=by_parts)

    @property
    def _kind(self) -> type[Reader]:
        return format_1.Reader if self.meta["format"] <= format_1.LAST else Reader

    def _file(self, stem: str) -> str:
        return f"{stem}{self._kind.suffix}"

    def _files(self, *, by_parts: bool) -> Reader:
        reader = self._reader(by_parts=by_parts)
        if by_parts:
            # Each rank checks some of the files, since a check reads whole files.
            names = sorted(self.meta["files"])[own_rank() :: world_size()]
            run_on_all_ranks(f"loading {self.path}", lambda: reader.check(*names))
            reader.checked.update(self.meta["files"])
        return reader

    def _restore(self, state: LoopState, files: Reader) -> None:
        orders = self._load_model(state.model, files.tree("model"))
        missing, surplus = self._load_states(state, files)
        for name in missing:
            logger.warning("%s has no state for %s, which keeps its initial state", self.path, name)
        for name in surplus:
            logger.warning("%s has a state for %s, which this run does not have", self.path, name)
        if state.optim_wrapper is not None:
            self._load_optimizer(state, files, orders)
        self._restore_rank(state, files)
        state.restored_from = (self.path.parent.resolve(), int(self.meta["serial"]))

    def _load_states(self, state: LoopState, files: Reader) -> tuple[set[str], set[str]]:
        """Load counters and ``state.stateful``.

        Returns the names that only this run has, and the names that only the checkpoint has.
        """
        content = files.tree("state")
        with reading(self.path, self._file("state"), "counters"):
            state.load_state_dict(content["counters"])
        with reading(self.path, self._file("state"), "stateful"):
            saved = dict(content["stateful"])
        for name in state.stateful.keys() & saved.keys():
            stateful = state.stateful[name]
            with reading(self.path, self._file("state"), f"stateful.{name}"):
                stateful.load_state_dict(_accepted_by(stateful, saved[name]))
            note_run(stateful, state)
        return state.stateful.keys() - saved.keys(), saved.keys() - state.stateful.keys()

    def _load_model(self, model: nn.Module, saved: Mapping[str, Any]) -> NameOrders:
        target = user_model(model)
        wanted = {plain_name(n): value for n, value in weights.get_state(target).items()}
        with reading(self.path, self._file("model"), "the table of weights"):
            problems = _adapter_problems(saved, wanted) or _mismatches(saved, wanted)
            tied = {} if problems else weights.tied_differently(target, saved)
        problems += [
            f"{name}: is the same weight as {other} in the model, and has other values than it in "
            "the checkpoint"
            for name, other in tied.items()
        ]
        if problems:
            more = len(problems) - _SHOWN
            lines = problems[:_SHOWN] + ([f"and {more} more"] if more > 0 else [])
            text, kind = "\n  ".join(lines), type(target).__name__
            raise CheckpointError(
                f"{self._file('model')} in {self.path} does not fit {kind}:\n  {text}"
            )
        with reading(self.path, self._file("model"), "the table of weights"):
            weights.load_weights(target, saved)
        return NameOrders(list(saved), list(wanted))

    def _load_optimizer(self, state: LoopState, files: Reader, orders: NameOrders) -> None:
        optim = state.optim_wrapper
        try:
            content = fit_to_run(files.tree("optim"), state.model, optim, orders, self.path)
            optim.load_state_dict(_accepted_by(optim, content))
        except CheckpointError:
            raise
        except Exception as error:
            raise CheckpointError(
                "the optimizer's state, "
                f"{self._file('optim')} in {self.path}, does not fit this run's "
                f"optimizer: {type(error).__name__}: {error}"
            ) from error

    def _restore_rank(self, state: LoopState, files: Reader) -> None:
        """Restore this rank's state, or an approximation if the number of ranks has changed."""
        saved, now = int(self.meta["world_size"]), world_size()
        if saved != now:
            logger.warning(
                "%s was saved at world size %d, this run has %d: random numbers will differ",
                *(self.path, saved, now),
            )
        # The number of ranks that see different batches. Tensor-parallel ranks see the same ones.
        saved_data_ranks = int(self.meta.get("data_size", saved))
        data_ranks = num_data_ranks(state.model)
        state.data.layout.setdefault("ranks", saved_data_ranks)
        model = user_model(state.model)
        as_saved = (saved, saved_data_ranks) == (now, data_ranks)
        group = model_features(state.model).data_group
        data_rank = own_rank() if as_saved or group is None else get_rank(group)
        # In the saved run, each block of `spacing` consecutive ranks saw the same batches. If the
        # number of ranks has changed, data rank d reads the file of the first rank of block d.
        spacing = 1 if as_saved else saved // saved_data_ranks
        content = self._restore_rng(model, data_rank, spacing)
        with reading(self.path, self._file(rank_stem(data_rank)), "transient_buffers"):
            load_transient_buffers(state.model, content)
        if as_saved and content:
            with reading(self.path, self._file(rank_stem(data_rank)), "buffers"):
                load_differing_buffers(state.model, content)
        with reading(self.path, self._file(rank_stem(data_rank)), "step"):
            if as_saved and content.get("step"):
                model_wrapper: Any = state.model
                model_wrapper.load_step_state(content["step"])
            elif content.get("step") or model_features(state.model).step_state():
                logger.warning(
                    "%s has no state of the training step that fits rank %d of this run: the rank "
                    "starts with its initial state",
                    *(self.path, own_rank()),
                )
        state.data.generators.load_state_dict(content.get("generators", {}))
        state.data.reader, state.data.reader_state = None, content.get("loader")
        if state.data.reader_state is not None and saved_data_ranks != data_ranks:
            state.data.reader_state = None
            logger.warning(
                "the position of the loader in %s cannot be converted from %d to %d ranks that see "
                "different batches: in the rest of this pass, samples may be repeated or missing",
                *(self.path, saved_data_ranks, data_ranks),
            )
        rank_ratio = saved_data_ranks / data_ranks
        self._restore_sums(state, content if as_saved else {}, files, rank_ratio)

    def _restore_sums(
        self, state: LoopState, rank_content: Mapping[str, Any], files: Reader, rank_ratio: float
    ) -> None:
        """Restore gradients and logs from this rank's file, or as means over all files.

        ``rank_content`` is the content of this rank's file, or {} to use all files. ``rank_ratio``
        is the number of data ranks when saving divided by the current number.
        """
        model, every = user_model(state.model), "rank_*"

        def ranks() -> list[Any]:
            # In the order of the ranks, since sums depend on it.
            stems = sorted(stem for stem in files.stems if stem.startswith("rank_"))
            return [files.whole(stem) for stem in stems]

        with reading(self.path, every, "gradients"):
            layouts = weights.gradient_places(model)
            fits = bool(rank_content) and rank_content.get("places", {}) == layouts
            sources = [rank_content] if fits else ranks()
            gradients = (
                rank_content["gradients"] if fits else weights.mean_gradients(model, sources)
            )
            weights.set_gradients(model, gradients)
            if gradients:
                unreduced.note_restored(state.model)
            weights.restore_window_weights(state, sources, rank_ratio)
        with reading(self.path, every, "logs"):
            # Older checkpoints have no logs.
            nothing: dict[str, Any] = {"sums": {}, "values": {}}
            contents = [rank_content] if rank_content else ranks()
            logs = [content.get("logs", nothing) for content in contents]
            merged = logs[0] if rank_content else mean_logs(logs, rank_ratio)
            state.logs.load_state_dict(merged, get_device(model))

    def _restore_rng(self, model: nn.Module, data_rank: int, spacing: int) -> dict[str, Any]:
        """Restore the random streams from the file of a data rank, and return its content.

        If the file is missing, derive the streams from rank 0's, and return {}.
        """
        name = rank_stem(data_rank * spacing)
        if name not in self.stems:
            logger.warning(
                "%s has no random state for rank %d: it is derived from rank 0's",
                *(self.path, own_rank()),
            )
            with reading(self.path, self._file(rank_stem(0)), "rng"):
                words = self.read(rank_stem(0))["rng"]["torch"].tolist()
                seed_rng(mix_seed(data_rank, *words))
            return {}
        content: dict[str, Any] = self.read(name)
        with reading(self.path, self._file(name), "rng"):
            restore_rng(content["rng"], get_device(model))
            set_states(module_generators(model), content.get("model_generators", {}))
        return content


def _accepted_by(stateful: Any, content: Any) -> Any:
    """Return ``content``, with whole tensors unless ``stateful`` can read slices of them."""
    return (
        content
        if isinstance(stateful, PartReader) and stateful.reads_parts
        else load_whole_tensors(content)
    )


def load_checkpoint(path: Path | str) -> Checkpoint:
    """Open a checkpoint; every rank must call this.

    Raises:
        CheckpointError: the checkpoint's description cannot be read.
    """
    require_local(path, "a checkpoint")
    folder = Path(path)
    meta = run_on_all_ranks(f"loading {folder}", lambda: read_meta(folder))[own_rank()]
    return Checkpoint(folder, meta)


def find_checkpoint(
    run_dir: Path | str, which: Literal["latest", "best"] = "latest", *, before: int | None = None
) -> Path | None:
    """Return the latest or best undamaged checkpoint of a run; every rank must call this.

    A damaged checkpoint is logged and skipped. Returns None if the run has no checkpoint, or if
    ``which`` is "best" and no undamaged checkpoint is marked as best.

    Args:
        run_dir: the run's folder, or its folder of checkpoints.
        which: "latest" or "best".
        before: consider only checkpoints of earlier steps than this.

    Raises:
        CheckpointError: there are checkpoints (before step ``before``, if it is given), and all
            are damaged (not for "best").
        ValueError: ``which`` is unknown.
    """
    if which not in ("latest", "best"):
        raise ValueError(f'which must be "latest" or "best", got {which!r}')
    require_local(run_dir, "run_dir")
    with save_lock:
        # A save in the background ends first, whatever its speed: the result is the same.
        pass
    root = Path(run_dir) if own_rank() == 0 else None
    return run_on_all_ranks(f"searching {run_dir}", lambda: root and _search(root, which, before))[
        0
    ]


def _search(root: Path, which: str, before: int | None) -> Path | None:
    folder = root / "checkpoints" if (root / "checkpoints").is_dir() else root
    unreadable: dict[Path, str] = {}
    checkpoints = list_checkpoints(folder, unreadable)
    for link in links_in(folder):
        logger.warning(
            "%s is a link to %s and does not count as a checkpoint; to use it, give its name",
            *(link, link.resolve().name),
        )
    for path, meta in checkpoints:
        if _step_in_name(path) not in (0, meta["step"]):
            logger.warning("%s is a checkpoint of step %d, whatever its name", path, meta["step"])
    problems = [
        text for path, text in unreadable.items() if before is None or _step_in_name(path) < before
    ]
    for path, meta in checkpoints:
        is_late = before is not None and meta["step"] >= before
        if is_late or (which == "best" and not meta["best"]):
            continue
        damage = find_damage(path, meta["files"])
        if not damage:
            return path
        logger.warning("checkpoint %s is damaged (%s); trying the one before it", path, damage)
        problems.append(f"checkpoint {path} is damaged: {damage}")
    if problems and which == "latest":
        raise CheckpointError("none of the checkpoints can be read: " + "; ".join(problems))
    return None


def _step_in_name(path: Path) -> int:
    """Return the step in the name of a checkpoint's folder; 0 if the name has none."""
    match = re.match(r"step_(\d+)", path.name)
    return int(match[1]) if match else 0


def _adapter_problems(saved: Mapping[str, Any], expected: Mapping[str, Any]) -> list[str]:
    name = weights.ADAPTER
    if isinstance(saved, Mapping) and (name in saved) != (name in expected):
        holds, has = ("only an adapter", "none") if name in saved else ("no adapter", "one")
        return [
            f"it holds {holds}, and the model has {has}: set `adapter` as in the config of the run "
            "that saved it, or start a new run with that run's folder as load_from"
        ]
    return []


def _mismatches(saved: Mapping[str, Any], expected: Mapping[str, Any]) -> list[str]:
    if not isinstance(saved, Mapping):
        return [f"the model must be a table of weights, got {type(saved).__name__}"]
    surplus = [name for name in saved if name not in expected]
    lines: list[str] = []
    for name, value in expected.items():
        if name not in saved:
            # Only for the lines that are shown: each search compares with all surplus names.
            near = nearest(name, surplus, 1) if len(lines) < _SHOWN else []
            hint = f" (the checkpoint has {near[0]})" if near else ""
            lines.append(f"{name}: missing in the checkpoint{hint}")
        elif isinstance(value, Tensor) and not hasattr(saved[name], "shape"):
            lines.append(f"{name}: a tensor in the model, got {reprlib.repr(saved[name])}")
        elif isinstance(value, Tensor) and value.shape != saved[name].shape:
            lines.append(
                f"{name}: shape {tuple(saved[name].shape)} in the checkpoint, "
                f"{tuple(value.shape)} in the model"
            )
    return lines + [f"{name}: not in the model" for name in surplus]
