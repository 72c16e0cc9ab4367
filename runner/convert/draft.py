"""The config that a conversion writes, and the walk along the rows of the mapping."""

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
NO_TYPE = "is missing: it says what is built"
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
    """The config that is written, and what its rows have to know of each other."""

    lines: Lines
    scope: str | None  # mmengine's default_scope
    epoch_length: int | None  # in batches; None if not given
    keep_order: bool
    sections: dict[str, Any]
    misses: list[Miss] = field(default_factory=list)
    batches: int = 1  # per update
    by_epoch: bool = True
    log_interval: int = 10  # in batches
    # Of each metric's figures in mmengine's records, by its name here.
    prefixes: dict[str, str] = field(default_factory=dict)

    def miss(self, key: str, what: str = NO_COUNTERPART) -> None:
        """Note a setting that is not translated, or not wholly."""
        self.misses.append(Miss(key, what, self.lines.origin(key)))

    def metric(self, wanted: str, key: str) -> str | None:
        """Return the name here of a metric in mmengine's records; None, and noted, if unknown."""
        prefix, _, rest = wanted.partition("/")
        if rest and prefix in self.prefixes:
            return wanted
        without = [name for name, given in self.prefixes.items() if not given]
        if wanted != "auto" and (len(self.prefixes) == 1 or not rest):
            if len(without) == 1:
                return f"{without[0]}/{wanted}"
            if len(self.prefixes) == 1:
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

    def look_up(self, wanted: Any, kind: str, scope: str | None = None) -> Any:
        """Return the class that a type means in mmengine; None if unknown."""
        if callable(wanted):
            return wanted
        if not (wanted and isinstance(wanted, str) and find_spec("mmengine")):
            return None
        theirs = getattr(import_module("mmengine.registry"), kind)
        scope = scope or self.scope
        switched = theirs.switch_scope_and_registry(scope) if scope else nullcontext(theirs)
        with switched as table:
            return table.get(wanted)

    def name_of(self, wanted: Any, kind: str, key: str, scope: str | None = None) -> str:
        """Return the name or import path under which our config finds a type."""
        found = self.look_up(wanted, kind, scope)
        ours = getattr(registry, kind, registry.DATASETS)
        if found is not None:
            bare = getattr(found, "__name__", "")
            return bare if bare and ours.get(bare) is found else _path(found)
        text = str(wanted or "")
        if not text:
            self.miss(key, NO_TYPE)
        # Of bare names only torch's optimizers are the same in both: another Accuracy is another.
        elif "." not in text and not (kind == "OPTIMIZERS" and ours.get(text)):
            why = "write its import path"
            if not find_spec("mmengine"):
                why = f"{why}, or convert where mmengine is installed"
            self.miss(key, f"nothing of the name {text} is registered here: {why}")
        return text

    def known_as(self, wanted: Any, kind: str) -> str:
        """Return the bare name of a class of mmengine's, the import path of one of the user's."""
        found = self.look_up(wanted, kind)
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


class Section(dict[str, Any]):
    """A dict of the old config; what no row takes from it is listed in the end."""

    def __init__(self, draft: Draft, values: Mapping[str, Any], path: str = "") -> None:
        super().__init__(values)
        self.draft = draft
        self.path = path

    def at(self, key: str) -> str:
        """Return the key path of one of the settings."""
        return f"{self.path}.{key}" if self.path else key

    def miss(self, key: str, what: str = NO_COUNTERPART) -> None:
        """Note one of the settings as not translated, or not wholly."""
        self.draft.miss(self.at(key), what)

    def below(self, key: str) -> Section | None:
        """Take a dict as a section of its own; None, and noted, where it is none."""
        value = self.pop(key, None)
        if isinstance(value, Mapping):
            return Section(self.draft, value, self.at(key))
        if value is not None:
            self.miss(key, "is no dict, and only dicts are translated")
        return None

    def each(self, key: str) -> Iterator[Section]:
        """Take the dicts of a list, or one alone, as sections; what is none is noted."""
        above, names = self, [key]
        if isinstance(self.get(key), (list, tuple)):
            items = {str(at): one for at, one in enumerate(self.pop(key))}
            above, names = Section(self.draft, items, self.at(key)), list(items)
        for name in names:
            one = above.below(name)
            if one is not None:
                yield one

    def kind(self, table: str, default: str = "") -> str:
        """Take the type and return what it is known as: see `Draft.known_as`."""
        wanted = self.pop("type", default)
        if not wanted:
            self.miss("type", NO_TYPE)
            return ""
        return self.draft.known_as(wanted, table)

    def part(self, table: str) -> dict[str, Any]:
        """Return a part by its type, with all that is left here as its arguments."""
        wanted, scope = self.pop("type", None), self.pop("_scope_", None)
        name = self.draft.name_of(wanted, table, self.at("type"), scope)
        return {"type": name, **{key: self.draft.plain(self.pop(key)) for key in list(self)}}

    def refuse(self, what: str) -> None:
        """Note all of it as not translated."""
        self.draft.miss(self.path, what)
        self.clear()

    def close(self, refusal: str = NO_COUNTERPART) -> None:
        """List what is left."""
        for key in self:
            self.miss(key, refusal)


# Takes a setting from its section by its key and makes our value of it, or `NOTHING`.
Take: TypeAlias = Callable[[Section, str], Any]


class Row(NamedTuple):
    """One line of the mapping: what becomes of a setting."""

    theirs: str
    # Its key path here; "" where it needs nothing here.
    ours: str = ""
    # Without one the value is taken as it is.
    to: Take | None = None
    # What mmengine has where it is not given; without one the row is skipped then.
    default: Any = NOTHING
    # The only values that need nothing here, and the refusal of others ("": as without a row).
    same: tuple[Any, ...] = ()
    refusal: str = ""


def inside(make: Callable[[Section], Any], refusal: str = NO_COUNTERPART) -> Take:
    """Return the function of a row whose setting is a dict, of which `make` makes our value.

    What `make` leaves in it is listed with the refusal.
    """

    def take(section: Section, key: str) -> Any:
        below = section.below(key)
        if below is None:
            return NOTHING
        made = make(below)
        below.close(refusal)
        return made

    return take


def by_rows(*rows: Row, refusal: str = NO_COUNTERPART) -> Take:
    """Return the function of a row whose setting is a dict, for which there are rows again."""
    return inside(lambda below: walk(below, rows) or NOTHING, refusal)


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
        given = section.get(row.theirs, row.default)
        if given is NOTHING:
            continue
        if given in row.same or not (row.ours or row.to or row.same):
            section.pop(row.theirs, None)
        elif row.to is not None:
            try:
                _write(made, row.ours, row.to(section, row.theirs))
            except (AttributeError, TypeError, ValueError) as error:
                # The rest of the config is translated; mmengine would refuse the value as well.
                section.miss(row.theirs, f"cannot be translated ({error}): is its value right?")
                section.pop(row.theirs, None)
        elif row.ours:
            _write(made, row.ours, section.pop(row.theirs, given))
        elif row.refusal:
            section.miss(row.theirs, row.refusal)
            del section[row.theirs]
    return made


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
