"""Load the weights that a new training starts from into a model."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from torch import nn

from ...collectives import get_rank
from ...loops import CheckpointError
from ...loops.checkpoints.weights import load_weights as load_into
from ...loops.checkpoints.weights import user_model
from ...registry import LoadFromSection, key_noted_on
from ..failure import BuildError
from .files import read_weights, together
from .fit import Fit, fit_weights, remedies

logger = logging.getLogger(__name__)


def load_weights(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    rename: Mapping[str, str] | None = None,
    ignore: Iterable[str] = (),
    strict: bool = True,
) -> list[str]:
    """Load weights of another run or program into ``model``; return the names that it loaded.

    Every rank must call this. The log gets a table of the weights that are not loaded.

    Args:
        model: the model, wrapped or not.
        path: a run folder (its best checkpoint) or checkpoint, with the weights that its
            evaluations used; a file with a state dict, read with ``weights_only=True``; a
            ``.safetensors`` file; or a folder with ``model.safetensors``, ``pytorch_model.bin`` or
            the index of several such files.
        rename: maps beginnings of names in the file to beginnings of names in the model; the
            longest match is used. In a config this is ``load_from.map``.
        ignore: names, paths of modules or patterns (fnmatch) that are not loaded.
        strict: whether all names and shapes must fit; otherwise the rest of the model stays as it
            is.

    Raises:
        CheckpointError: the file cannot be read, or does not fit; nothing is loaded then.
    """
    settings = LoadFromSection(
        path=os.fspath(path), map=dict(rename or {}), ignore=list(ignore), strict=strict
    )
    return list(_load(model, settings).loaded)


def load_pretrained(model: nn.Module, settings: LoadFromSection | str) -> None:
    """Load the weights that the section ``load_from`` names; every rank must call this.

    Raises:
        BuildError: the weights cannot be read, or do not fit; the error names the key.
    """
    if isinstance(settings, str):
        settings = LoadFromSection(path=settings)
    with _naming_the_key():
        _load(model, settings)


@contextmanager
def _naming_the_key() -> Iterator[None]:
    try:
        yield
    except CheckpointError as error:
        key = key_noted_on(error)
        problem = BuildError(f"load_from.{key}" if key else "load_from", error)
        problem.what = str(error)
        raise problem from error


def _load(model: nn.Module, settings: LoadFromSection) -> Fit:
    path = Path(settings.path)
    saved = read_weights(path)
    fit = fit_weights(saved, model, settings)
    kind = type(user_model(model)).__name__
    if (settings.strict and fit.misfits) or not fit.loaded:
        lines = [
            f"{path} does not fit {kind}: {len(fit.loaded)} weights fit, {len(fit.misfits)} do not",
            "",
            *fit.table().splitlines(),
            "",
            *remedies(fit, saved, settings),
        ]
        raise CheckpointError("\n  ".join(lines).replace("\n  \n", "\n\n"))
    together(path, lambda: load_into(user_model(model), fit.loaded, strict=False))
    if get_rank() == 0:
        level = logging.WARNING if fit.misfits else logging.INFO
        table = fit.table()
        text = f"load_from: {len(fit.loaded)} weights of {kind} are loaded from {path}"
        rest = "; the rest keeps its initial values" if fit.missing + fit.reshaped else ""
        logger.log(level, "%s", f"{text}{rest}\n\n{table}\n" if table else text)
    return fit
