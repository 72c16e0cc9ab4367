"""Which modules of a model are its blocks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any, TypeAlias

from torch import nn

from ...registry import nearest
from ..torch_functions import check_options

BlockSpec: TypeAlias = str | type[nn.Module] | Iterable["str | type[nn.Module]"] | Mapping[str, Any]


def find_blocks(model: nn.Module, spec: BlockSpec | None) -> dict[str, nn.Module]:
    """Modules that ``spec`` names, by path and in module order.

    Args:
        spec: one of these, or a list of them: a class or its name (subclasses count), the path
            of a module, or a pattern of ``fnmatch`` for paths, of whose matches the outermost
            count, so that ``net.blocks.*`` are the blocks and not what is in them. Or a mapping
            with ``classes`` (such a list) and ``min_params``: then the smallest modules are
            taken that have at least so many parameters outside of those already taken.

    Raises:
        ValueError: something matches nothing, or is a container without a ``forward``.
        TypeError: ``spec`` is of another kind.
    """
    modules = dict(model.named_modules())
    names, min_params = _read(spec)
    chosen: set[str] = set()
    for name in names:
        chosen.update(_matches(modules, name))
    for path in chosen:
        if not _can_run(modules[path]):
            raise ValueError(
                f"{path!r} is a {type(modules[path]).__name__}, which has no forward of its own "
                f"and can be no block; its children are {path}.*"
            )
    if min_params is not None:
        chosen.update(_by_size(modules, chosen, min_params))
    return {path: module for path, module in modules.items() if path in chosen}


def _read(spec: Any) -> tuple[list[str | type[nn.Module]], float | None]:
    """What is named, and the size threshold."""
    if spec is None:
        return [], None
    if not isinstance(spec, Mapping):
        return _name_list(spec), None
    check_options("a choice of blocks", spec, ["classes", "min_params"])
    size = spec.get("min_params")
    if size is not None and (
        isinstance(size, bool) or not isinstance(size, (int, float)) or not size > 0
    ):
        raise TypeError(f"min_params must be a positive number of parameters, got {size!r}")
    return _name_list(spec.get("classes") or []), size


def _name_list(names: Any) -> list[str | type[nn.Module]]:
    if isinstance(names, (str, type)):
        names = [names]
    if not isinstance(names, Iterable) or isinstance(names, nn.Module):
        raise TypeError(
            "blocks must be class names, module paths or patterns, or a mapping with classes "
            f"or min_params; got {names!r}"
        )
    found = list(names)
    for one in found:
        if not isinstance(one, str) and not (isinstance(one, type) and issubclass(one, nn.Module)):
            raise TypeError(f"a block must be named by a string or a module class, got {one!r}")
    return found


def _matches(modules: Mapping[str, nn.Module], name: str | type[nn.Module]) -> list[str]:
    if isinstance(name, type):
        found = [path for path, module in modules.items() if isinstance(module, name)]
    elif name and name in modules:
        found = [name]
    else:
        found = [path for path, module in modules.items() if name in _class_names(module)]
        if not found:
            fitting = [path for path in modules if path and fnmatchcase(path, name)]
            found = [one for one in fitting if not _is_inside(one, fitting)]
    if not found:
        raise ValueError(_nothing(modules, name))
    return found


def _class_names(module: nn.Module) -> set[str]:
    kinds = type(module).__mro__
    kinds = kinds[: kinds.index(nn.Module)]
    return {one.__name__ for one in kinds} | {f"{one.__module__}.{one.__name__}" for one in kinds}


def _is_inside(path: str, others: Iterable[str]) -> bool:
    return any(path.startswith(f"{other}.") for other in others)


def _nothing(modules: Mapping[str, nn.Module], name: str | type[nn.Module]) -> str:
    classes = list(dict.fromkeys(type(module).__name__ for module in modules.values()))
    wanted = name if isinstance(name, str) else name.__name__
    close = nearest(wanted, [*classes, *filter(None, modules)])
    hint = f"did you mean {' or '.join(close)}?" if close else f"its classes: {', '.join(classes)}"
    return f"no module of the model has the class or path {wanted!r}; {hint}"


def _by_size(modules: Mapping[str, nn.Module], chosen: set[str], min_params: float) -> list[str]:
    """Paths of the smallest modules with enough parameters outside of those in ``chosen``."""
    taken = {id(one) for path in chosen for one in modules[path].parameters()}
    found: list[str] = []
    largest = 0
    # Children come after their parents in module order, so backwards they come first.
    for path, module in reversed(list(modules.items())):
        if not path or not _can_run(module) or path in chosen:
            continue
        free = [one for one in module.parameters() if id(one) not in taken]
        count = sum(one.numel() for one in free)
        largest = max(largest, count)
        if count >= min_params:
            found.append(path)
            taken.update(id(one) for one in free)
    if not found and not chosen:
        raise ValueError(
            f"no module of the model has min_params={min_params:g} parameters; the largest has "
            f"{largest}"
        )
    return found


def _can_run(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward or "forward" in vars(module)
