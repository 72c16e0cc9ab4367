"""What a conversion has made so far, and the walk along the rows of the mapping."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

from ...registry import Registry
from .source import Source

RULES = {"greater": "max", "less": "min"}
_NO_DICT = "is no dict, and only dicts are translated"
NO_COUNTERPART = "has no counterpart here"
# No value: neither given, nor to be written.
NOTHING: Any = object()


class Miss(NamedTuple):
    """A setting that has no counterpart, or another meaning."""

    key: str
    what: str
    origin: str = ""

    def __str__(self) -> str:
        return ": ".join(part for part in (self.origin, self.key, self.what) if part)


@dataclass
class Draft:
    """The config that is being written.

    Attributes:
        scope: mmengine's default_scope.
        epoch_length: batches in an epoch, where the user has said so.
        keep_order: the data come in mmengine's own order.
        sections: the new config.
        batches: batches per update.
        by_epoch: whether training counts epochs.
        log_interval: batches between two records.
        metric_names: by name here, the prefix that mmengine gives the metric's figures.
    """

    source: Source
    scope: str | None = None
    epoch_length: int | None = None
    keep_order: bool = False
    sections: dict[str, Any] = field(default_factory=dict)
    misses: list[Miss] = field(default_factory=list)
    batches: int = 1
    by_epoch: bool = True
    log_interval: int = 10
    metric_names: dict[str, str] = field(default_factory=dict)

    def miss(self, key: str, what: str = NO_COUNTERPART) -> None:
        """Note a setting that is not translated, or not wholly."""
        self.misses.append(Miss(key, what, self.source.origin(key)))

    def prefix_of(self, wanted: Any) -> Any:
        """Return the prefix that a metric's class gives to its figures, if any."""
        return getattr(_look_up(wanted, "METRICS", self.scope), "default_prefix", None)

    def metric(self, wanted: str, key: str) -> str | None:
        """Return the name here of a metric in mmengine's records; None, and noted, if unknown."""
        prefix, _, rest = wanted.partition("/")
        if rest and prefix in self.sections.get("metrics", {}):
            return wanted
        without = [name for name, given in self.metric_names.items() if not given]
        if wanted != "auto" and (len(self.metric_names) == 1 or not rest):
            if len(without) == 1:
                return f"{without[0]}/{wanted}"
            if len(self.metric_names) == 1:
                return wanted
        self.miss(key, f"which metric {wanted!r} is cannot be told; name one as metric/part")
        return None

    def mode(self, rule: Any, metric: str, key: str) -> str:
        """Return which values of a metric are better, by mmengine's rule or by the name."""
        if rule is not None and rule not in RULES:
            self.miss(key, f"must be greater or less, got {rule!r}")
        return RULES.get(rule) or ("min" if "loss" in metric.lower() else "max")

    def updates(self, batches: Any, key: str) -> int | None:
        """Return a number of batches as one of updates."""
        if not isinstance(batches, int):
            self.miss(key, f"must be a number of batches, got {batches!r}")
            return None
        if batches % self.batches:
            told = f"{batches} batches are no whole number of updates of {self.batches} batches"
            self.miss(key, f"{told}: rounded up")
        return -(-batches // self.batches)

    def name_of(
        self, wanted: Any, kind: str, ours: Registry, key: str, scope: str | None = None
    ) -> str:
        """Return the name or import path under which our config finds a type."""
        found = _look_up(wanted, kind, scope or self.scope)
        if found is not None:
            return _name(found, ours)
        text = str(wanted)
        # Of bare names only torch's optimizers are the same in both: another Accuracy is another.
        if "." not in text and not (kind == "OPTIMIZERS" and ours.get(text)):
            why = "write its import path"
            if not find_spec("mmengine"):
                why = f"{why}, or convert where mmengine is installed"
            self.miss(key, f"nothing of the name {text} is registered here: {why}")
        return text

    def known_as(self, wanted: Any, kind: str) -> str:
        """Return the bare name of a class of mmengine's, the import path of one of the user's.

        A class of one's own may bear the name of one of mmengine's.
        """
        found = _look_up(wanted, kind, self.scope)
        module = str(getattr(found, "__module__", ""))
        is_own = found is not None and module.partition(".")[0] not in ("mmengine", "torch")
        return _path(found) if is_own else bare_name(wanted)

    def plain(self, value: Any) -> Any:
        """Return a value for an argument that gets dicts as they are, as mmengine's classes do."""
        if isinstance(value, Mapping):
            if "type" not in value:
                return {key: self.plain(one) for key, one in value.items()}
            scope = {} if self.scope in (None, "mmengine") else {"_scope_": self.scope}
            return {"_raw_": True, **scope, **as_yaml(value)}
        if isinstance(value, (list, tuple)):
            return [self.plain(one) for one in value]
        return {"_ref_": _path(value)} if callable(value) else value

    def part(self, section: Section, kind: str, ours: Registry) -> dict[str, Any]:
        """Return a part by its type, with all that is left of its section as arguments."""
        wanted, scope = section.pop("type", None), section.pop("_scope_", None)
        name = self.name_of(wanted, kind, ours, section.at("type"), scope)
        return {"type": name, **{key: self.plain(value) for key, value in section.items()}}


class Section(dict[str, Any]):
    """A dict of the old config; what no row takes from it is listed in the end."""

    def __init__(self, draft: Draft, values: Mapping[str, Any], path: str = "") -> None:
        super().__init__(values)
        self.draft = draft
        self.path = path

    def at(self, key: str) -> str:
        """Return the key path of one of the settings."""
        return f"{self.path}.{key}" if self.path else key

    def below(self, key: str) -> Section | None:
        """Take a dict as a section of its own; None, and noted, where it is none."""
        value = self.pop(key, None)
        if value is not None and not isinstance(value, Mapping):
            self.draft.miss(self.at(key), _NO_DICT)
        return Section(self.draft, value, self.at(key)) if isinstance(value, Mapping) else None

    def kind(self, table: str, default: str = "") -> str:
        """Take the type and return what it is known as: see `Draft.known_as`."""
        return self.draft.known_as(self.pop("type", default), table)

    def close(self, refusal: str = NO_COUNTERPART) -> None:
        """List what is left."""
        for key in self:
            self.draft.miss(self.at(key), refusal)


class Row(NamedTuple):
    """One line of the mapping: what becomes of a setting.

    Attributes:
        theirs: its key.
        ours: its key path here; "" where it needs nothing here.
        to: makes our value of it, else it is taken as it is: the rows of the section that it is,
            or a function that takes it from its section by its key, and returns `NOTHING` where
            nothing is to be written.
        default: what mmengine has where it is not given; without one the row is skipped then.
        same: the only values that need nothing here.
        refusal: what is said of others; "" lists them with what has no row.
    """

    theirs: str
    ours: str = ""
    to: Callable[[Section, str], Any] | tuple[Row, ...] | None = None
    default: Any = NOTHING
    same: tuple[Any, ...] = ()
    refusal: str = ""


def kept(*keys: str, **defaults: Any) -> tuple[Row, ...]:
    """Return rows of settings that are the same here, and of those with mmengine's defaults."""
    with_default = (Row(key, key, default=one) for key, one in defaults.items())
    return (*(Row(key, key) for key in keys), *with_default)


def only(**values: Any) -> tuple[Row, ...]:
    """Return rows of settings of which one value alone needs nothing here."""
    return tuple(Row(key, same=(value,)) for key, value in values.items())


def dropped(*keys: str) -> tuple[Row, ...]:
    """Return rows of settings that need nothing here whatever they are."""
    return tuple(map(Row, keys))


def walk(
    section: Section, rows: Iterable[Row], made: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Take from a section what the rows say, and return what they make of it, added to `made`."""
    made = {} if made is None else made
    for row in rows:
        value = section.get(row.theirs, row.default)
        if value is NOTHING:
            continue
        if value in row.same:
            section.pop(row.theirs, None)
        elif row.to is not None:
            _write(made, row.ours, _made(section, row))
        elif row.ours or not row.same:
            section.pop(row.theirs, None)
            _write(made, row.ours, value if row.ours else NOTHING)
        elif row.refusal:
            del section[row.theirs]
            section.draft.miss(section.at(row.theirs), row.refusal)
    return made


def _made(section: Section, row: Row) -> Any:
    if callable(row.to):
        return row.to(section, row.theirs)
    below = section.below(row.theirs)
    if below is None:
        return NOTHING
    made = walk(below, row.to or ())
    below.close(row.refusal or NO_COUNTERPART)
    return made or NOTHING


def _write(made: dict[str, Any], path: str, value: Any) -> None:
    """Write a value by its key path, or the keys of one with no path."""
    if value is NOTHING:
        return
    above, _, key = path.rpartition(".")
    if above:
        made = made.setdefault(above, {})
    if key and not isinstance(made.get(key), dict):
        made[key] = value
    else:
        (made[key] if key else made).update(value)


def bare_name(wanted: Any) -> str:
    """Return the name of a class, or that of a type, without its module."""
    name = wanted if isinstance(wanted, str) else str(getattr(wanted, "__name__", wanted))
    return name.rpartition(".")[2]


def sections(draft: Draft, given: Any, path: str) -> Iterator[Section]:
    """Yield the dicts of a list, or one alone, as sections, and note what is none."""
    listed = isinstance(given, (list, tuple))
    for at, one in enumerate(given if listed else [given]):
        where = f"{path}.{at}" if listed else path
        if isinstance(one, Mapping):
            yield Section(draft, one, where)
        elif one is not None:
            draft.miss(where, _NO_DICT)


def _look_up(wanted: Any, kind: str, scope: str | None) -> Any:
    """Return the class that a type means in mmengine; None where that cannot be told."""
    if callable(wanted):
        return wanted
    if not isinstance(wanted, str) or not kind or not find_spec("mmengine"):
        return None
    registry = getattr(import_module("mmengine.registry"), kind)
    switched = registry.switch_scope_and_registry(scope) if scope else nullcontext(registry)
    with switched as table:
        return table.get(wanted)


def _name(found: Any, ours: Registry) -> str:
    bare = getattr(found, "__name__", "")
    return bare if bare and ours.get(bare) is found else _path(found)


def _path(found: Any) -> str:
    """Return the shortest import path of a class or function."""
    name = str(found.__qualname__)
    parts = str(found.__module__).split(".")
    for length in range(1, len(parts)):
        module = sys.modules.get(".".join(parts[:length]))
        if module is not None and getattr(module, name, None) is found:
            return f"{module.__name__}.{name}"
    return f"{found.__module__}.{name}"


def as_yaml(value: Any) -> Any:
    """Return what stays a plain dict with lists for tuples, and import paths for classes."""
    if isinstance(value, Mapping):
        return {key: as_yaml(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_yaml(one) for one in value]
    return _path(value) if callable(value) else value
