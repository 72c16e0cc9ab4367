"""Load the weights that a new training starts from into a model."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from ...collectives import get_rank
from ...loops import CheckpointError, load_checkpoint, seed_rng
from ...loops.checkpoints.weights import ADAPTER, get_weights
from ...loops.checkpoints.weights import load_weights as load_into
from ...loops.rng import preserved_rng
from ...registry import (
    ADAPTERS,
    ConfigError,
    LoadFromSection,
    build_tree,
    key_noted_on,
    load_config,
    model_problems,
)
from ...registry.local_paths import local_path, remote_url
from ...wrappers.unwrap import user_model
from ..failure import BuildError, as_mistakes_in, building
from ..run_folder import resolve_checkpoint
from .build import build_user_model

# Imported on first use: most runs need neither an adapter nor other weights.
if TYPE_CHECKING:
    from .adapter import Adapter
    from .fit import Fit

logger = logging.getLogger(__name__)

_WHY = "; checkpoints of an adapter do not have the weights that it adapts"


def load_weights(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    rename: Mapping[str, str] | None = None,
    ignore: Iterable[str] = (),
    strict: bool = True,
) -> list[str]:
    """Load weights of another run or program into ``model``; return the names that it loaded.

    Every rank must call this. A table of the weights that are not loaded is logged.

    Args:
        model: the model, wrapped or not.
        path: a run folder (its best checkpoint) or checkpoint, with the weights that its
            evaluations used; a file with a state dict, read with ``weights_only=True``; a
            ``.safetensors`` file; or a folder with ``model.safetensors``, ``pytorch_model.bin`` or
            the index of several such files. It may be a URL (docs/remote.md).
        rename: maps beginnings of names in the file to beginnings of names in the model; the
            longest match is used. In a config this is ``load_from.map``.
        ignore: names, paths of modules or patterns (fnmatch) that are not loaded.
        strict: whether all names and shapes must fit; otherwise weights that do not fit stay
            unchanged.

    Raises:
        CheckpointError: the file cannot be read, or does not fit; nothing is loaded then.
    """
    settings = LoadFromSection(
        path=os.fspath(path), map=dict(rename or {}), ignore=list(ignore), strict=strict
    )
    return list(_load(model, settings).loaded)


def load_pretrained(
    model: nn.Module, settings: LoadFromSection | str, *, adapted: bool = False
) -> None:
    """Load the weights that the section ``load_from`` names; every rank must call this.

    Args:
        model: the model, wrapped or not.
        settings: the section.
        adapted: whether the model has an adapter. An error then says why the weights are needed
            even for a run that is resumed.

    Raises:
        BuildError: the weights cannot be read, or do not fit; the error names the key.
    """
    if isinstance(settings, str):
        settings = LoadFromSection(path=settings)
    with _naming_the_key(_WHY if adapted else ""):
        _load(model, settings)


def add_configured(
    model: nn.Module,
    settings: Mapping[str, Any] | None,
    load_from: LoadFromSection | str | None,
    seed: int,
) -> Adapter | None:
    """Add the adapter of the section ``adapter``, if any; every rank must call this.

    Its initial weights depend on ``seed`` only.

    Raises:
        BuildError: the adapter cannot be added; the error names the key.
    """
    if settings is None:
        return None
    from .adapter import add_adapter

    with building("adapter"):
        config = build_tree({"type": "LoraConfig", **settings}, ADAPTERS)
        path = load_from.path if isinstance(load_from, LoadFromSection) else load_from
        with preserved_rng():
            seed_rng(seed)
            adapter = add_adapter(model, config, base=path or "")
    trained = sum(param.numel() for param in model.parameters() if param.requires_grad)
    total = sum(param.numel() for param in model.parameters())
    if get_rank() == 0:
        kind = type(config).__name__
        logger.info(
            "adapter: %s, %s of %s parameters are trained (%.3g%%)%s",
            *(kind, f"{trained:,}", f"{total:,}", 100 * trained / total),
            "" if path else "; without load_from it adapts the initial weights of the model",
        )
    return adapter


def load_run_model(
    run_dir: str | os.PathLike[str], which: str | os.PathLike[str] = ""
) -> tuple[nn.Module, Adapter | None]:
    """Build the model of a run, and load its evaluated weights; every rank must call this.

    Args:
        run_dir: the run's folder, or its URL.
        which: as for ``resolve_checkpoint``.

    Raises:
        CheckpointError, ConfigError, FileNotFoundError: as for ``load_model``.
    """
    folder = local_path(run_dir)
    if remote_url(run_dir):
        from ..remote.copies import run_copy

        folder = run_copy(run_dir, which)
    path = resolve_checkpoint(folder, which)
    settings = folder / "config.yaml"
    if not settings.is_file():
        raise FileNotFoundError(
            f"{folder} has no config.yaml to build the model from, because the Runner was built "
            "from objects. Build the model as for that Runner, and load its weights:\n"
            "  from stepwrap.loops import load_checkpoint\n"
            "  model = ...  # the model that the Runner was given\n"
            f"  load_checkpoint({str(path)!r}).load_model(model, evaluated=True)"
        )
    config = load_config(settings)
    if problems := model_problems(config):
        raise ConfigError(problems)
    sections = config.to_dict()
    adapter = None
    with as_mistakes_in(config):
        if sections.get("adapter") is None:
            model = build_user_model(sections["model"])
        else:
            model = build_base(sections)
            load_from, seed = _load_from(sections), sections.get("seed", 0)
            adapter = add_configured(model, sections["adapter"], load_from, seed)
    load_checkpoint(path).load_model(model, evaluated=True)
    return model, adapter


def build_base(sections: Mapping[str, Any]) -> nn.Module:
    """Build a config's model with the base weights of its adapter; every rank must call this."""
    with preserved_rng():
        # A run without load_from adapts the initial weights.
        seed_rng(sections.get("seed", 0))
        model = build_user_model(sections["model"])
    if (load_from := _load_from(sections)) is not None:
        load_pretrained(model, load_from, adapted=True)
    return model


def _load_from(sections: Mapping[str, Any]) -> LoadFromSection | str | None:
    setting: Any = sections.get("load_from")
    return LoadFromSection(**setting) if isinstance(setting, Mapping) else setting


def _read(path: Path) -> Mapping[str, Any]:
    """Return the weights at ``path``; if the run has an adapter, merge it into them."""
    from .files import read_weights

    saved = read_weights(path)
    if ADAPTER not in saved:
        return saved
    checkpoint = resolve_checkpoint(None, path)
    model, adapter = load_run_model(checkpoint.absolute().parent.parent, checkpoint)
    return get_weights(model if adapter is None else adapter.merge())


@contextmanager
def _naming_the_key(remark: str) -> Iterator[None]:
    try:
        yield
    except (CheckpointError, FileNotFoundError) as error:
        key = key_noted_on(error)
        problem = BuildError(f"load_from.{key}" if key else "load_from", error)
        problem.what = f"{error}{remark}"
        raise problem from error


def _load(model: nn.Module, settings: LoadFromSection) -> Fit:
    from .files import together
    from .fit import fit_weights, remedies

    path = local_path(settings.path)
    if url := remote_url(settings.path):
        # Imported here, because most runs have no URL.
        from ..remote.copies import local_copy

        path = local_copy(url)
    saved = _read(path)
    fit = fit_weights(saved, model, settings)
    kind = type(user_model(model)).__name__
    if (settings.strict and fit.misfits) or not fit.loaded:
        lines = [
            f"{path} does not fit {kind}: {len(fit.loaded)} weights fit, {len(fit.misfits)} do not",
            "",
            *fit.table().splitlines(),
            "",
            *remedies(fit, saved, model, settings),
        ]
        raise CheckpointError("\n  ".join(lines).replace("\n  \n", "\n\n"))
    together(path, lambda: load_into(user_model(model), fit.loaded, strict=False))
    if get_rank() == 0:
        level = logging.WARNING if fit.misfits else logging.INFO
        table = fit.table()
        text = f"load_from: {len(fit.loaded)} weights of {kind} are loaded from {path}"
        suffix = "; the rest keeps its initial values" if fit.missing + fit.reshaped else ""
        logger.log(level, "%s", f"{text}{suffix}\n\n{table}\n" if table else text)
    return fit
