"""Configs of mmengine as configs of ours."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

from ...registry import RunSections, format_config
from .draft import Draft, Miss, Row, Section, walk
from .mapping import MAPPING
from .source import read_source

_FIRST = ("name", "imports", "seed", "deterministic", "run_dir")
# Where mmengine has what a section here holds, if under another name.
_THERE = {
    "data.test": "test_dataloader",
    "data.train": "train_dataloader",
    "data.val": "val_dataloader",
    "launch": "env_cfg.dist_cfg",
    "metrics": "val_evaluator",
    "name": "experiment_name",
    "optimizer": "optim_wrapper.optimizer",
    "run_dir": "work_dir",
    "schedulers": "param_scheduler",
    "wrapper": "model_wrapper_cfg",
}


class Conversion(NamedTuple):
    """A translated config.

    Attributes:
        config: our settings.
        misses: what has no counterpart, or another meaning.
    """

    config: dict[str, Any]
    misses: list[Miss]

    def text(self) -> str:
        """Return it as YAML, what is missing as comments at the end."""
        lines = [format_config(self.config)]
        if self.misses:
            lines.append("\n# Without a counterpart, or with another meaning:\n")
            lines += [f"#   {miss}\n" for miss in self.misses]
        return "".join(lines)


def convert_config(
    path: str | os.PathLike[str], *, epoch_length: int | None = None, keep_order: bool = False
) -> Conversion:
    """Translate a config file of mmengine, which is executed for that.

    Args:
        path: A .py file.
        epoch_length: Batches in an epoch of training, for schedules that mmengine converts from
            epochs to batches.
        keep_order: Read the data by mmengine's own loaders and samplers, in the same order.

    Raises:
        ConfigError: It cannot be read.
    """
    source = read_source(Path(path))
    draft = Draft(
        source,
        scope=source.settings.get("default_scope"),
        epoch_length=epoch_length,
        keep_order=keep_order,
        sections={"name": Path(path).stem},
    )
    top = Section(draft, source.settings)
    # Variables that other settings are made of are no settings.
    walk(top, (*MAPPING, *map(Row, source.read), Row("_base_")), draft.sections)
    top.close("no setting of this name is known")
    order = dict.fromkeys((*_FIRST, *(one.name for one in fields(RunSections))))
    config = {key: _held(draft, draft.sections[key], key) for key in order if key in draft.sections}
    return Conversion(config, draft.misses)


def _held(draft: Draft, value: Any, key: str) -> Any:
    """Return a value as YAML holds it, and note what it cannot hold."""
    if isinstance(value, Mapping):
        return {_key(draft, n, key): _held(draft, one, f"{key}.{n}") for n, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_held(draft, one, f"{key}.{at}") for at, one in enumerate(value)]
    if value is None or isinstance(value, (str, int, float)):
        return value
    draft.miss(_there(key), f"YAML cannot hold a {type(value).__name__}: here is its text")
    return str(value)


def _key(draft: Draft, name: Any, above: str) -> str | int:
    if isinstance(name, (str, int)) and not isinstance(name, bool):
        return name
    draft.miss(
        _there(f"{above}.{name}"), f"a key must be a str or int, not {name!r}: here is its text"
    )
    return str(name)


def _there(key: str) -> str:
    """Return the key path that a setting has in mmengine's config, or that of its section."""
    for ours, theirs in _THERE.items():
        if key == ours or key.startswith(f"{ours}."):
            return theirs + key.removeprefix(ours)
    return key
