"""What a config may hold, as dicts, lists and scalars, and the paths of its values."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

KeyPath: TypeAlias = tuple[str | int, ...]

DELETE = "_delete_"
# Each level takes several frames of Python's stack in whatever walks through a config.
MAX_DEPTH = 50
TOO_DEEP = f"nested more than {MAX_DEPTH} levels deep"
# How many values aliases and interpolations may add by repeating others.
MAX_REPEATED = 10_000


def dotted(path: Sequence[str | int]) -> str:
    """Return "a.list.0.x"."""
    return ".".join(str(part) for part in path)


def below(value: Any) -> Iterable[tuple[Any, Any]]:
    """Return the values in a section or list with their keys or positions; of a scalar nothing."""
    if isinstance(value, dict):
        return value.items()
    return enumerate(value) if isinstance(value, list) else ()


def walk(value: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    """Yield every value with its path, a section before what is in it."""
    yield path, value
    for key, child in below(value):
        yield from walk(child, (*path, key))


def own_key(section: dict[Any, Any], key: str) -> str | int:
    """Return a key of a path as the section has it: "1" may be its 1."""
    number = int(key) if re.fullmatch(r"-?[0-9]{1,30}", key) else key
    return number if key not in section and number in section and str(number) == key else key


def merge(base: Any, over: Any) -> Any:
    """Return `over` merged over `base`: sections are merged, everything else is replaced.

    A section in `over` with `_delete_: true` replaces the one in `base` as a whole.
    """
    # Not OmegaConf.merge, which evaluates interpolations on the way, however long they become.
    if isinstance(over, list):
        return [merge(None, item) for item in over]
    if not isinstance(over, dict):
        return over
    kept = base if isinstance(base, dict) and over.get(DELETE) is not True else {}
    own = {key: merge(kept.get(key), one) for key, one in over.items() if key != DELETE}
    return {**kept, **own}


def plain(value: Any, path: KeyPath = ()) -> Any:
    """Return a copy as dicts, lists and scalars; a class or function becomes its import path.

    Raises:
        TypeError: a value or key that a config cannot hold; the text names its path.
    """
    if len(path) > MAX_DEPTH:
        raise TypeError(f"{dotted(path[:3])}: {TOO_DEEP}")
    if isinstance(value, Mapping):
        for key in value:
            if isinstance(key, bool) or not isinstance(key, str | int):
                raise TypeError(f"{dotted((*path, key))}: a key must be a str or int, got {key!r}")
        return {key: plain(one, (*path, key)) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item, (*path, at)) for at, item in enumerate(value)]
    if value is None or isinstance(value, str | int | float | bool):
        return value
    if isinstance(value, Path):
        return str(value)
    name = f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', '')}"
    if not callable(value) or "<" in name or not name.strip("."):
        raise TypeError(
            f"{dotted(path)}: a config holds numbers, text, true/false, null, lists and dicts, "
            f"got {value!r} of type {type(value).__name__}"
        )
    return name
