"""Match the weights of a file with a model: rename them, leave some out, list mismatches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn

from ...loops import CheckpointError
from ...loops.checkpoints.optimizers import text_table
from ...loops.checkpoints.weights import get_state, saved_parameters, tied_differently
from ...registry import LoadFromSection, did_you_mean
from ...registry.errors import under_key
from ...wrappers.unwrap import plain_name, user_model

_SHOWN = 8
# To propose a map, at most this many beginnings of a name ("", "a.", "a.b.", ...) are tried.
_LEADING = 4


@dataclass
class Fit:
    """The weights of a file, compared with a model's.

    Attributes:
        loaded: weights that fit, by their names in the model.
        missing: names in the model for which the file has no weight.
        unexpected: names in the file for which the model has no weight.
        reshaped: names in the model of weights with another shape in the file.
        untied: names in the model of weights that it shares with another name, and that have other
            values in the file than that name.
        ignored: names, in the model or in the file, that ``load_from.ignore`` leaves out.
        shapes: by name, the shapes in the model and in the file.
    """

    loaded: dict[str, Any] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    reshaped: list[str] = field(default_factory=list)
    untied: list[str] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)
    shapes: dict[str, tuple[str, str]] = field(default_factory=dict)

    @property
    def misfits(self) -> list[str]:
        return [*self.reshaped, *self.untied, *self.missing, *self.unexpected]

    def table(self) -> str:
        """Return a table, at most 80 columns wide, of the weights that are not loaded, or ""."""
        kinds = ("reshaped", "untied", "missing", "unexpected", "ignored")
        rows = [(kind, name, *self.shapes[name]) for kind in kinds for name in getattr(self, kind)]
        titles = ("not loaded", "name", "in the model", "in the file")
        return text_table(titles, rows) if rows else ""


def fit_weights(saved: Mapping[str, Any], model: nn.Module, settings: LoadFromSection) -> Fit:
    """Compare the weights of a file with the weights of ``model``, after renaming.

    Raises:
        CheckpointError: an entry of ``map`` or ``ignore`` fits no name, or two names of the file
            become one.
    """
    target = user_model(model)
    expected = {plain_name(name): value for name, value in get_state(target).items()}
    files = _renamed(saved, settings.map)
    ignored = _ignored(settings.ignore, files, expected)
    fit = Fit()
    for name in dict.fromkeys([*expected, *files]):
        value = saved[files[name]] if name in files else None
        fit.shapes[name] = _shape(expected.get(name)), _shape(value)
        if name in ignored:
            fit.ignored.append(name)
        elif name not in files:
            fit.missing.append(name)
        elif name not in expected:
            fit.unexpected.append(name)
        elif isinstance(expected[name], Tensor) and fit.shapes[name][0] != fit.shapes[name][1]:
            fit.reshaped.append(name)
        else:
            fit.loaded[name] = value
    for name, other in tied_differently(target, fit.loaded).items():
        fit.untied.append(name)
        fit.shapes[name] = f"same as {other}", "other values"
        del fit.loaded[name]
    shared = _shared_with(target, fit.loaded)
    fit.missing = [name for name in fit.missing if name not in shared]
    return fit


def remedies(
    fit: Fit, saved: Mapping[str, Any], model: nn.Module, settings: LoadFromSection
) -> Iterator[str]:
    """Yield settings that would make the file fit; each of them has been tried."""
    if proposal := _proposed_map(fit, saved, model, settings):
        yield proposal
    modules = [*dict.fromkeys(name.rpartition(".")[0] or name for name in fit.misfits)]
    if fit.loaded and len(modules) <= _SHOWN:
        ignore = [*settings.ignore, *modules]
        trial = _tried(saved, model, replace(settings, ignore=ignore))
        if trial is not None and trial.loaded and not trial.misfits:
            yield f"load_from.ignore: [{', '.join(ignore)}] leaves these out"
    if fit.untied:
        yield "or build the model without shared weights, since the file has separate ones"
    if fit.loaded:
        yield "load_from.strict: false loads what fits; the rest keeps its initial values"


def _tried(saved: Mapping[str, Any], model: nn.Module, settings: LoadFromSection) -> Fit | None:
    """Return the fit with other settings; None if they are refused."""
    try:
        return fit_weights(saved, model, settings)
    except CheckpointError:
        return None


def _shape(value: Any) -> str:
    if value is None:
        return "-"
    return str(tuple(value.shape)) if hasattr(value, "shape") else type(value).__name__


def _renamed(saved: Mapping[str, Any], renames: Mapping[str, str]) -> dict[str, str]:
    """Map the names after renaming to the names in the file."""
    for old_prefix, new_prefix in renames.items():
        if not isinstance(new_prefix, str):
            with under_key(f"map.{old_prefix}"):
                raise CheckpointError(
                    f"must be the beginning of names in the model, got {new_prefix!r}"
                )
        if not any(name.startswith(old_prefix) for name in saved):
            near = did_you_mean(old_prefix, {f"{name.partition('.')[0]}." for name in saved})
            with under_key(f"map.{old_prefix}"):
                examples = ", ".join(list(saved)[:3])
                raise CheckpointError(
                    f"no name in the file begins with {old_prefix!r}{near}; its names are "
                    f"{examples}, ..."
                )
    files: dict[str, str] = {}
    # If several entries match a name, the longest one is used.
    pairs = [*sorted(renames.items(), key=lambda pair: len(pair[0]), reverse=True), ("", "")]
    for name in saved:
        start, replacement = next(pair for pair in pairs if name.startswith(pair[0]))
        new_name = plain_name(replacement + name.removeprefix(start))
        if new_name in files:
            with under_key("map"):
                raise CheckpointError(
                    f"{files[new_name]} and {name} of the file both become {new_name}"
                )
        files[new_name] = name
    return files


def _ignored(
    patterns: Collection[str], files: Mapping[str, str], expected: Collection[str]
) -> set[str]:
    """Return the names, in the model or in the file, that a pattern matches."""
    pairs = {name: (name, files.get(name, name)) for name in dict.fromkeys([*expected, *files])}
    ignored: set[str] = set()
    for at, pattern in enumerate(patterns):
        matches = {
            name
            for name, forms in pairs.items()
            if any(fnmatchcase(form, pattern) or form.startswith(f"{pattern}.") for form in forms)
        }
        if not matches:
            parents = {name.rpartition(".")[0] for name in pairs}
            near = did_you_mean(pattern.removesuffix(".*"), [*pairs, *parents])
            with under_key(f"ignore.{at}"):
                raise CheckpointError(
                    f"neither the model nor the file has a weight {pattern!r}{near}"
                )
        ignored |= matches
    return ignored


def _shared_with(model: nn.Module, loaded: Collection[str]) -> set[str]:
    """Return all names of shared parameters that are loaded under one of their names.

    Files of Hugging Face contain a shared parameter under one name only.
    """
    named = [(name, id(param)) for name, param in saved_parameters(model).items()]
    loaded_ids = {param_id for name, param_id in named if name in loaded}
    return {name for name, param_id in named if param_id in loaded_ids}


def _proposed_map(
    fit: Fit, saved: Mapping[str, Any], model: nn.Module, settings: LoadFromSection
) -> str:
    """Return the entry of ``map`` that makes most of the missing weights fit, or ""."""
    if settings.map:
        return ""
    for start, replacement in _proposed_entries(fit, saved):
        trial = _tried(saved, model, replace(settings, map={start: replacement}))
        if trial is None or len(trial.misfits) >= len(fit.misfits):
            continue
        count = len(trial.loaded.keys() & {*fit.missing})
        entry = f'{{"{start}": "{replacement}"}}'
        return f"load_from.map: {entry} makes {count} of the missing weights fit"
    return ""


def _proposed_entries(fit: Fit, saved: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return entries of ``map`` by the number of weights that they seem to fit, the most first."""
    ends: dict[tuple[str, str], str] = {}
    for name in fit.missing:
        for start in _beginnings(name):
            ends.setdefault((name.removeprefix(start), fit.shapes[name][0]), start)
    # An entry must be the beginning of a name as it is in the file.
    names = {plain_name(name): name for name in saved}
    votes: Counter[tuple[str, str]] = Counter()
    for name in fit.unexpected:
        full, shape = names[name], fit.shapes[name][1]
        pairs = (
            (old, ends.get((plain_name(full.removeprefix(old)), shape)))
            for old in _beginnings(full)
        )
        votes.update([(old, new) for old, new in pairs if new is not None][:1])
    return [entry for entry, _ in votes.most_common(_SHOWN)]


def _beginnings(name: str) -> list[str]:
    """Return "", "a.", "a.b." and so on for "a.b.c"."""
    parts = name.split(".")
    count = _LEADING + len(parts) - len(plain_name(name).split("."))
    return ["".join(f"{part}." for part in parts[:end]) for end in range(min(count, len(parts)))]
