"""Finding checkpoints and going on from them."""

from __future__ import annotations

import difflib
import hashlib
import io
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from .checkpoint import (
    CheckpointError,
    list_checkpoints,
    own_rank,
    rank_file,
    read_meta,
    together,
    world_size,
)
from .folder import fingerprint
from .rng import mix_seed, restore_rng, seed_rng
from .state import LoopState
from .weights import load_weights, plain_name, set_gradients, user_model

logger = logging.getLogger(__name__)

_SHOWN = 8


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint's folder and its description; files are checked as they are read."""

    path: Path
    meta: dict[str, Any]

    def read(self, name: str) -> Any:
        """Return the content of one file, on the CPU.

        Raises:
            CheckpointError: It is missing, or not as it was written.
        """
        try:
            content = (self.path / name).read_bytes()
        except OSError as error:
            raise CheckpointError(f"checkpoint {self.path} is damaged: {name}: {error}") from error
        if hashlib.sha256(content).hexdigest() != self.meta["files"][name]["sha256"]:
            raise CheckpointError(
                f"checkpoint {self.path} is damaged: {name} is not as it was written"
            )
        return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)

    def load_model(self, model: nn.Module) -> None:
        """Load the weights into a model or its wrapper; every rank must call this.

        Raises:
            CheckpointError: Names or shapes differ; nothing is loaded then.
        """
        together(f"loading the model of {self.path}", lambda: self._load_model(model))

    def restore(self, state: LoopState) -> None:
        """Put a run back to where the checkpoint was saved; every rank must call this.

        Works across wrappers and numbers of ranks; where the number has changed,
        log lines say what cannot be the same.

        Raises:
            CheckpointError: Something does not fit the run, on any rank.
        """
        together(f"restoring {self.path}", lambda: self._restore(state))

    def _restore(self, state: LoopState) -> None:
        self._load_model(state.model)
        content = self.read("state.pt")
        state.load_state_dict(content["counters"])
        for name, part in state.stateful.items():
            if name in content["stateful"]:
                part.load_state_dict(content["stateful"][name])
            else:
                logger.warning("%s has no state of %s, which starts anew", self.path, name)
        for name in content["stateful"].keys() - state.stateful.keys():
            logger.warning("%s has a state of %s, which this run has not", self.path, name)
        if state.optim_wrapper is not None:
            self._load_optimizer(state)
        self._restore_rank(state)
        state.restored_from = (self.path.parent.resolve(), int(self.meta["serial"]))

    def _load_model(self, model: nn.Module) -> None:
        target = user_model(model)
        weights = self.read("model.pt")
        wanted = {plain_name(name): value for name, value in target.state_dict().items()}
        problems = _mismatches(weights, wanted)
        if problems:
            more = len(problems) - _SHOWN
            lines = problems[:_SHOWN] + ([f"and {more} more"] if more > 0 else [])
            raise CheckpointError(
                f"{self.path} does not fit {type(target).__name__}:\n  " + "\n  ".join(lines)
            )
        load_weights(target, weights)

    def _load_optimizer(self, state: LoopState) -> None:
        try:
            if state.optim_wrapper is not None:
                state.optim_wrapper.load_state_dict(self.read("optim.pt"))
        except (ValueError, KeyError, AssertionError) as error:
            raise CheckpointError(
                f"the optimizer's state in {self.path} does not fit this run's optimizer: {error}"
            ) from error

    def _restore_rank(self, state: LoopState) -> None:
        """Restore what only this rank knew, or the nearest thing to it."""
        saved, now = int(self.meta["world_size"]), world_size()
        if saved != now:
            if state.batch:
                logger.warning(
                    "%s was saved by %d rank(s), this run has %d: the running epoch goes on at "
                    "the same share of its samples",
                    self.path,
                    saved,
                    now,
                )
            state.batch = state.batch * saved // now
        own = rank_file(own_rank())
        if own in self.meta["files"]:
            content = self.read(own)
            model = user_model(state.model)
            restore_rng(content["rng"], next((p.device for p in model.parameters()), None))
        else:
            content = {}
            logger.warning("%s has no random state of rank %d: derived", self.path, own_rank())
            words = self.read(rank_file(0))["rng"]["torch"].tolist()
            seed_rng(mix_seed(own_rank(), *words))
        complete = saved == now and content
        gradients = content["gradients"] if complete else self._mean_gradients()
        set_gradients(user_model(state.model), gradients)

    def _mean_gradients(self) -> dict[str, Tensor]:
        """Return the mean of all ranks' unfinished gradients: the update sees the same."""
        names = [name for name in self.meta["files"] if name.startswith("rank_")]
        by_rank = [self.read(name)["gradients"] for name in sorted(names)]
        keys = dict.fromkeys(key for gradients in by_rank for key in gradients)
        return {
            key: torch.stack([g[key] for g in by_rank if key in g]).sum(0) / len(by_rank)
            for key in keys
        }


def load_checkpoint(path: Path | str) -> Checkpoint:
    """Open a checkpoint; every rank must call this.

    Raises:
        CheckpointError: `path` is not a readable checkpoint, on any rank.
    """
    folder = Path(path)
    meta = together(f"loading {folder}", lambda: read_meta(folder))[own_rank()]
    return Checkpoint(folder, meta)


def find_checkpoint(
    run_dir: Path | str, which: Literal["latest", "best"] = "latest"
) -> Path | None:
    """Return the latest or best undamaged checkpoint of a run; every rank must call this.

    It is found from the folders themselves. A damaged one is named in the log
    and the one before it taken. None where there is none.

    Raises:
        CheckpointError: There are checkpoints, and each is damaged; not for "best".
    """
    if which not in ("latest", "best"):
        raise ValueError(f'which must be "latest" or "best", got {which!r}')
    root = Path(run_dir)
    folder = root / "checkpoints" if (root / "checkpoints").is_dir() else root
    first = own_rank() == 0
    search = together(f"searching {folder}", lambda: _search(folder, which) if first else None)
    return search[0]


def _search(folder: Path, which: str) -> Path | None:
    problems: list[str] = []
    for path, meta in list_checkpoints(folder, problems):
        if which == "best" and not meta["best"]:
            continue
        damage = _damage(path, meta)
        if not damage:
            return path
        logger.warning("checkpoint %s is damaged (%s); taking the one before it", path, damage)
        problems.append(f"checkpoint {path} is damaged: {damage}")
    if problems and which == "latest":
        raise CheckpointError("none of the checkpoints can be read: " + "; ".join(problems))
    return None


def _damage(path: Path, meta: Mapping[str, Any]) -> str:
    for name, written in meta["files"].items():
        try:
            if fingerprint(path / name) != written:
                return f"{name} is not as it was written"
        except OSError as error:
            return f"{name}: {error.strerror}"
    return ""


def _mismatches(saved: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """Return one line for each name or shape that differs."""
    surplus = [name for name in saved if name not in wanted]
    lines = []
    for name, value in wanted.items():
        if name not in saved:
            near = difflib.get_close_matches(name, surplus, n=1)
            hint = f" (the checkpoint has {near[0]})" if near else ""
            lines.append(f"{name}: missing in the checkpoint{hint}")
        elif isinstance(value, Tensor) and value.shape != saved[name].shape:
            lines.append(
                f"{name}: shape {tuple(saved[name].shape)} in the checkpoint, "
                f"{tuple(value.shape)} in the model"
            )
    return lines + [f"{name}: not in the model" for name in surplus]
