"""The config that a conversion writes, and the rows by which settings are converted."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple, TypeAlias

from ... import registry
from .source import Lines

RULES = {"greater": "max", "less": "min"}
NO_COUNTERPART = "has no counterpart here"
NO_EFFECT = "is not needed here"
NO_TYPE = "is missing: it names the class to build"
# Marks a setting that is not given, or a result that is not written.
NOTHING: Any = object()


class Miss(NamedTuple):
    """A setting without a counterpart, or with another meaning.

    Attributes:
        changes_result: whether the converted run may differ in weights, metrics or files.
    """

    key: str
    what: str
    origin: str = ""
    changes_result: bool = True

    def __str__(self) -> str:
        return ": ".join(text for text in (self.origin, self.key, self.what) if text)


@dataclass
class Draft:
    """The config that is written, and the values that its rows share."""

    lines: Lines
    scope: str | None  # mmengine's default_scope
    epoch_length: int | None  # in batches; None if not given
    keep_order: bool
    sections: dict[str, Any]
    misses: list[Miss] = field(default_factory=list)
    batches: int = 1  # per update
    by_epoch: bool = True
    log_interval: int = 10  # in batches
    loop_length: int | None = None  # in epochs or batches; None without training
    # Our name of a metric -> the prefix of its values in mmengine's logs.
    prefixes: dict[str, str] = field(default_factory=dict)
    # A library that cannot be imported -> the types that it should register.
    absent: dict[str, dict[str, None]] = field(default_factory=dict)

    def miss(self, key: str, message: str = NO_COUNTERPART) -> None:
        """List a setting as not converted, or not completely."""
        self.misses.append(Miss(key, message, self.lines.origin(key)))

    def note(self, key: str, text: str = NO_EFFECT) -> None:
        """List a setting that is dropped without an effect on the results."""
        self.misses.append(Miss(key, text, self.lines.origin(key), changes_result=False))

    def list_absent_libraries(self) -> None:
        """List each library that cannot be imported in one line."""
        for library, types in self.absent.items():
            names = ", ".join(types)
            where = "default_scope" if library == self.scope else ""
            self.miss(where, f"install {library} for the conversion; it registers {names}")

    def metric(self, metric_name: str, key: str) -> str | None:
        """Convert a metric's name in mmengine's logs; if ambiguous, list a miss and return None."""
        prefix, _, tail = metric_name.partition("/")
        if tail and prefix in self.prefixes:
            return metric_name
        without = [name for name, metric_prefix in self.prefixes.items() if not metric_prefix]
        if metric_name != "auto" and (len(self.prefixes) == 1 or not tail):
            if len(without) == 1:
                return f"{without[0]}/{metric_name}"
            if len(self.prefixes) == 1:
                return metric_name
        self.miss(key, f"{metric_name!r} does not name its metric; write it as METRIC/VALUE")
        return None

    def mode(self, rule: Any, metric: str, key: str) -> str:
        """Return "min" or "max" by mmengine's rule, or by the metric's name."""
        if rule is not None and rule not in RULES:
            self.miss(key, f"must be greater or less, got {rule!r}")
        return RULES.get(rule) or ("min" if "loss" in metric.lower() else "max")

    def updates(self, batches: Any, key: str) -> int | None:
        """Convert a number of batches to a number of updates."""
        if not isinstance(batches, int):
            self.miss(key, f"must be a number of batches, got {batches!r}")
            return None
        if batches % self.batches:
            message = (
                f"{batches} batches are not a multiple of the {self.batches} batches of an update"
            )
            self.miss(key, f"{message}: rounded up")
        return -(-batches // self.batches)

    def look_up(self, type_name: Any, kind: str, scope: str | None = None) -> Any:
        """Return the class that mmengine builds for a type; None if unknown."""
        if callable(type_name):
            return type_name
        if not (type_name and isinstance(type_name, str) and find_spec("mmengine")):
            return None
        table = getattr(import_module("mmengine.registry"), kind)
        scope = scope or self.scope
        # mmengine warns at each search in a scope that does not exist.
        exists = scope and (scope in table.children or _is_importable(scope))
        switched = table.switch_scope_and_registry(scope) if exists else nullcontext(table)
        with switched as scoped:
            return scoped.get(type_name)

    def get_name(self, type_name: Any, kind: str, key: str, scope: str | None = None) -> str:
        """Return the name or import path under which our config finds a type."""
        target = self.look_up(type_name, kind, scope)
        registered = getattr(registry, kind, registry.DATASETS)
        if target is not None:
            bare = getattr(target, "__name__", "")
            return bare if bare and registered.get(bare) is target else _path(target)
        text = str(type_name or "")
        library = text.rpartition(".")[0].partition(".")[0] or scope or self.scope or "mmengine"
        if not text:
            self.miss(key, NO_TYPE)
        # A bare name is safe only for torch's optimizers. Others, such as Accuracy, may differ.
        elif "." not in text and kind == "OPTIMIZERS" and registered.get(text):
            pass
        elif not _is_importable(library):
            self.absent.setdefault(library, {})[text] = None
        elif "." not in text:
            self.miss(key, f"{text} is not registered here: write its import path")
        return text

    def known_as(self, type_name: Any, kind: str) -> str:
        """Return the bare name of a class from mmengine or torch, otherwise its import path."""
        target = self.look_up(type_name, kind)
        module = str(getattr(target, "__module__", ""))
        is_own = target is not None and module.partition(".")[0] not in ("mmengine", "torch")
        return _path(target) if is_own else bare_name(type_name)

    def plain(self, value: Any) -> Any:
        """Convert an argument of an mmengine class, which builds dicts with a type itself."""
        if isinstance(value, Mapping):
            if "type" not in value:
                return {key: self.plain(entry) for key, entry in value.items()}
            scope = {} if self.scope in (None, "mmengine") else {"_scope_": self.scope}
            return {"_raw_": True, **scope, **as_yaml(value)}
        if isinstance(value, (list, tuple)):
            return [self.plain(entry) for entry in value]
        return {"_ref_": _path(value)} if callable(value) else value


class Section(dict[str, Any]):
    """A dict of the mmengine config.

    Rows remove the keys that they convert. ``close`` lists those that remain as misses.
    """

    def __init__(self, draft: Draft, values: Mapping[str, Any], path: str = "") -> None:
        super().__init__(values)
        self.draft = draft
        self.path = path

    def at(self, key: str) -> str:
        """Return the key path of a setting in this section."""
        return f"{self.path}.{key}" if self.path else key

    def miss(self, key: str, message: str = NO_COUNTERPART) -> None:
        """List a setting of this section as not converted, or not completely."""
        self.draft.miss(self.at(key), message)

    def note(self, key: str, text: str = NO_EFFECT) -> None:
        """List a setting of this section that is dropped without an effect on the results."""
        self.draft.note(self.at(key), text)

    def below(self, key: str) -> Section | None:
        """Remove a dict and return it as a section; list any other value as a miss."""
        value = self.pop(key, None)
        if isinstance(value, Mapping):
            return Section(self.draft, value, self.at(key))
        if value is not None:
            self.miss(key, f"must be a dict to be converted, got {type(value).__name__}")
        return None

    def each(self, key: str) -> Iterator[Section]:
        """Remove a dict or a list of dicts and yield sections; list other values as misses."""
        above, names = self, [key]
        if isinstance(self.get(key), (list, tuple)):
            entries = {str(at): entry for at, entry in enumerate(self.pop(key))}
            above, names = Section(self.draft, entries, self.at(key)), list(entries)
        for name in names:
            child = above.below(name)
            if child is not None:
                yield child

    def kind(self, table: str, default: str = "") -> str:
        """Remove the type and return its name; see ``Draft.known_as``."""
        type_name = self.pop("type", default)
        if not type_name:
            self.miss("type", NO_TYPE)
            return ""
        return self.draft.known_as(type_name, table)

    def part(self, table: str) -> dict[str, Any]:
        """Return the config of an object: its type, and all remaining settings as arguments."""
        kind, scope = self.pop("type", None), self.pop("_scope_", None)
        name = self.draft.get_name(kind, table, self.at("type"), scope)
        return {"type": name, **{key: self.draft.plain(self.pop(key)) for key in list(self)}}

    def refuse(self, message: str) -> None:
        """List the whole section as not converted."""
        self.draft.miss(self.path, message)
        self.clear()

    def drop(self, text: str) -> None:
        """Drop the whole section with a note."""
        self.draft.note(self.path, text)
        self.clear()

    def close(self, refusal: str = NO_COUNTERPART) -> None:
        """List every remaining setting as not converted."""
        for key in self:
            self.miss(key, refusal)


# Removes the setting of a key from its section and returns our value, or `NOTHING`.
Take: TypeAlias = Callable[[Section, str], Any]


class Row(NamedTuple):
    """One row of the table: how a setting is converted."""

    # mmengine's key.
    source: str
    # Our key path; "" if the setting needs no counterpart.
    target: str = ""
    # By default the value is copied.
    convert: Take | None = None
    # mmengine's default; without one the row is skipped if the setting is not given.
    default: Any = NOTHING
    # Values that mean the same as our default: the setting is dropped.
    same: tuple[Any, ...] = ()
    # For a row without target and convert: the text of the miss if the value is not in `same`.
    # With "" such a value stays in the section.
    refusal: str = ""
    # Whether the refusal is a note: the setting has no effect on the results.
    is_harmless: bool = False


def inside(make: Callable[[Section], Any], refusal: str = NO_COUNTERPART) -> Take:
    """Return the function of a row whose setting is a dict that ``make`` converts.

    Settings that ``make`` leaves in the dict are listed as misses with the text ``refusal``.
    """

    def take(section: Section, key: str) -> Any:
        below = section.below(key)
        if below is None:
            return NOTHING
        converted = make(below)
        below.close(refusal)
        return converted

    return take


def convert_by_rows(*rows: Row, refusal: str = NO_COUNTERPART) -> Take:
    """Return the function of a row whose setting is a dict that is converted by ``rows``."""
    return inside(lambda below: walk(below, rows) or NOTHING, refusal)


def kept(*keys: str, **defaults: Any) -> tuple[Row, ...]:
    """Return rows of settings that are copied; ``defaults`` are mmengine's defaults."""
    with_default = (Row(key, key, default=setting) for key, setting in defaults.items())
    return (*(Row(key, key) for key in keys), *with_default)


def drop_if(**values: Any) -> tuple[Row, ...]:
    """Return rows of settings that are dropped if they have the given value.

    Other values stay in the section, whose ``close`` lists them as misses.
    """
    return tuple(Row(key, same=(value,)) for key, value in values.items())


def note_unless(refusal: str = NO_EFFECT, **values: Any) -> tuple[Row, ...]:
    """Return rows of settings without effect on the results, noted unless they have the value."""
    return tuple(
        Row(key, same=(value,), refusal=refusal, is_harmless=True) for key, value in values.items()
    )


def dropped(*keys: str) -> tuple[Row, ...]:
    """Return rows of settings that are dropped whatever their value."""
    return tuple(map(Row, keys))


def walk(
    section: Section, rows: Iterable[Row], result: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Convert the settings of a section by rows, and add the results to ``result``."""
    result = {} if result is None else result
    for row in rows:
        value = section.get(row.source, row.default)
        if value is NOTHING:
            continue
        if value in row.same or not (row.target or row.convert or row.same):
            section.pop(row.source, None)
        elif row.convert is not None:
            try:
                _write(result, row.target, row.convert(section, row.source))
            except (AttributeError, TypeError, ValueError) as error:
                # Convert the rest; mmengine would reject this value as well.
                section.miss(row.source, f"cannot be converted ({error}): is its value right?")
                section.pop(row.source, None)
        elif row.target:
            _write(result, row.target, section.pop(row.source, value))
        elif row.refusal:
            (section.note if row.is_harmless else section.miss)(row.source, row.refusal)
            section.pop(row.source, None)
    return result


def _write(result: dict[str, Any], path: str, value: Any) -> None:
    """Write a value at a key path; if the path is "", merge the items of a dict."""
    if value is NOTHING:
        return
    above, _, key = path.rpartition(".")
    if above:
        result = result.setdefault(above, {})
    if key and not isinstance(result.get(key), dict):
        result[key] = value
    else:
        (result[key] if key else result).update(value)


def bare_name(target: Any) -> str:
    """Return the name of a class or type without its module."""
    name = target if isinstance(target, str) else str(getattr(target, "__name__", target))
    return name.rpartition(".")[2]


def _is_importable(library: str) -> bool:
    try:
        return find_spec(library) is not None
    except ValueError:
        # A module without a specification, such as a script.
        return library in sys.modules


def _path(target: Any) -> str:
    """Return the shortest import path of a class or function."""
    name = str(target.__qualname__)
    modules = str(target.__module__).split(".")
    for length in range(1, len(modules)):
        module = sys.modules.get(".".join(modules[:length]))
        if module is not None and getattr(module, name, None) is target:
            return f"{module.__name__}.{name}"
    return f"{target.__module__}.{name}"


def as_yaml(value: Any) -> Any:
    """Return a value with lists instead of tuples, and import paths instead of classes."""
    if isinstance(value, Mapping):
        return {key: as_yaml(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_yaml(entry) for entry in value]
    return _path(value) if callable(value) else value
