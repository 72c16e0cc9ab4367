"""The text of the reference pages: settings, registered classes, and the Python interface."""

import inspect
import json
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields, is_dataclass
from importlib import import_module
from types import ModuleType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from stepwrap.registry import (
    DEFAULT_HOOKS,
    HOOK_TYPES,
    Registration,
    RunSections,
    list_registrations,
)
from stepwrap.registry.arguments import get_options
from stepwrap.registry.checks import schema
from stepwrap.registry.scan import documented_items

# The front doors, in the order in which a reader needs them.
DOORS = {
    "wrappers": ["stepwrap.wrappers"],
    "loops": ["stepwrap.loops"],
    "runner": ["stepwrap.runner"],
    "registry": ["stepwrap.registry"],
    "collectives": ["stepwrap.collectives", "stepwrap.collectives.dist"],
    "parallel": ["stepwrap.parallel"],
    "rpc": ["stepwrap.rpc"],
    "plugins": ["stepwrap.plugins.lightning", "stepwrap.plugins.mmengine"],
    "diagnostics": ["stepwrap.diagnostics"],
}
# The sections of a config by the path of their settings.
SECTIONS = {
    "": RunSections,
    "load_from": schema.LoadFromSection,
    "freeze.NAME": schema.FreezeSection,
    "tensor_parallel": schema.TensorParallelSection,
    "optimizer.paramwise": schema.ParamwiseSection,
    "optimizer.paramwise.custom_keys.NAME": schema.CustomKeySection,
    "schedulers": schema.SchedulerSection,
    "data": schema.DataSection,
    "data.train": schema.LoaderSection,
    "data.val": schema.SetsSection,
    "metrics.NAME": schema.MetricSection,
    "ledger": schema.LedgerSection,
    "launch": schema.LaunchSection,
}
# The fields that hold the class of a section, whose settings stand next to ours in a file.
_INLINE = ("scheduler", "metric")
# Other mappings have keys of the user's choice.
_COMPONENTS = {"model", "wrapper", "optimizer", "optim_wrapper", "train_step", "dataset", "sampler"}
_COMPONENTS |= {"train", "val", "test", "transform", "adapter"}
_TYPES = {
    bool: "true or false",
    int: "integer",
    float: "number",
    str: "text",
    list: "list",
    dict: "mapping",
    type(None): "null",
}
_REGISTRIES = {
    "MODELS": "`model`, and any network or loss in it",
    "MODEL_WRAPPERS": "`wrapper`",
    "COMM_HOOKS": "`wrapper.comm_hook` of `ddp`",
    "OPTIMIZERS": "`optimizer`",
    "OPTIM_WRAPPERS": "`optim_wrapper`",
    "PARAM_SCHEDULERS": "`schedulers`",
    "ADAPTERS": "`adapter`",
    "DATASETS": "`dataset` in `data.train`, `data.val` and `data.test`",
    "DATALOADERS": "`data.train`, `data.val` and `data.test`, for a custom loader",
    "SAMPLERS": "`sampler` in `data.train`, `data.val` and `data.test`",
    "METRICS": "`metrics.NAME`",
    "LOOPS": "`train`, `val` and `test`",
    "HOOKS": "`hooks.NAME`",
    "DIST_BACKENDS": "no section: pass the name to `set_default_dist_backend`",
}


def pages() -> dict[str, str]:
    """Return the text of each reference page by its path in the site."""
    api = {f"api/{name}.md": _api(name, doors) for name, doors in DOORS.items()}
    return {"reference/settings.md": _settings(), "reference/classes.md": _classes(), **api}


def _settings() -> str:
    sections = [
        "# Every setting",
        "This page lists every key of a [config](../configs.md) with its type, its default and its "
        "meaning. It is generated from the schema that `stepwrap check` and "
        "`stepwrap schema` use. Set a key in the file or on the command line:",
        "```\nstepwrap train digits_ddp launch.nproc=1 data.train.batch_size=32\n```",
        "A *component* is a mapping whose `type` names a class; its other keys are the arguments "
        "of the class: [registered classes](classes.md). Any value can be `${...}`, which "
        "[inserts another value](../configs.md#changing-values).",
    ]
    for path, section in SECTIONS.items():
        text = (inspect.getdoc(section) or "").partition("\n\nAttributes:")[0]
        sections += [f"## {path or 'Top level'}", " ".join(text.split())]
        sections += [_table(("key", "type", "default", "meaning"), _rows(section))]
    return "\n\n".join(sections) + "\n"


def _rows(section: type) -> Iterator[tuple[str, ...]]:
    hints = get_type_hints(section)
    documented = documented_items(inspect.getdoc(section) or "", "Attributes")
    meanings = {key: text for names, text in documented.items() for key in names.split(", ")}
    for setting in fields(section):
        if setting.name not in _INLINE:
            kind = " or ".join(_type(hint, setting) for hint in get_options(hints[setting.name]))
            meaning = meanings.get(setting.name, "")
            # Defaults that other settings determine are described in words.
            default = "" if "default" in meaning else _default(setting)
            yield f"`{setting.name}`", kind, default, meaning


def _type(hint: Any, setting: Field[Any]) -> str:
    """Return the type of a setting in words, with its limits."""
    if hint == schema.Component and setting.name in _COMPONENTS:
        return "component"
    if get_origin(hint) is Literal:
        return ", ".join(f"`{value}`" for value in get_args(hint))
    if is_dataclass(hint):
        path = next(path for path, section in SECTIONS.items() if section is hint)
        return f"[section](#{path.replace('.', '').lower()})"
    text = _TYPES[get_origin(hint) or hint]
    if "minimum" in setting.metadata and hint in (int, float):
        text += f", at least {setting.metadata['minimum']}"
    return text


def _default(setting: Field[Any]) -> str:
    if setting.default is not MISSING:
        return f"`{json.dumps(setting.default)}`"
    return "required" if setting.default_factory is MISSING else "empty"


def _classes() -> str:
    sections = [
        "# Registered classes",
        "This page lists the names that a `type` in a [config](../configs.md) can have, by "
        "registry, and the arguments of stepwrap's own classes. In a terminal, "
        "`stepwrap list REGISTRY` prints the same. A `type` can also be the import path of any "
        "class, such as `my_package.Net`, or a name that your module "
        "[registers](../configs.md#your-own-classes).",
        "```yaml\noptimizer: {type: AdamW, lr: 0.001}\n"
        "hooks:\n  early_stop: {metric: val/loss, patience: 3}\n```",
    ]
    for registry, entries in list_registrations().items():
        sections += [f"## {registry}", f"Used in {_REGISTRIES[registry]}."]
        other_names = defaultdict(list)
        for entry in entries:
            if entry.source.startswith("stepwrap."):
                sections += _class(entry)
            else:
                other_names[entry.source].append(f"`{entry.name}`")
        sections += [
            f"From `{source}`: {', '.join(names)}." for source, names in other_names.items()
        ]
        if not entries:
            sections += ["Nothing is registered by default."]
    return "\n\n".join(sections) + "\n"


def _class(entry: Registration) -> Iterator[str]:
    yield f"### {entry.name}"
    yield entry.summary
    hook = next((name for name, kind in HOOK_TYPES.items() if kind == entry.name), None)
    if hook:
        state = "on" if hook in DEFAULT_HOOKS else "off"
        yield f"In `hooks` as `{hook}`, {state} by default."
    if entry.aliases:
        yield f"Other names: {', '.join(f'`{alias}`' for alias in entry.aliases)}."
    if entry.arguments:
        yield _table(("argument", "type", "default", "meaning"), _arguments(entry))


def _arguments(entry: Registration) -> Iterator[tuple[str, ...]]:
    for declaration, meaning in entry.arguments:
        typed, _, default = declaration.partition(" = ")
        name, _, kind = typed.partition(": ")
        yield f"`{name}`", _code(kind), _code(default), meaning


def _api(folder: str, doors: list[str]) -> str:
    entries = [f"# stepwrap.{folder}"]
    for path in doors:
        door = import_module(path)
        names = sorted(getattr(door, "__all__", ()), key=str.lower)
        # The docstring's other sentences are for readers of the code.
        entries += [re.split(r"(?<=\.)\s", door.__doc__ or "")[0], f"Import from `{path}`."]
        entries += [_entry(door, name) for name in names]
    return "\n\n".join(entries) + "\n"


def _entry(door: ModuleType, name: str) -> str:
    target = getattr(door, name)
    origin = getattr(target, "__module__", door.__name__)
    if origin.startswith("stepwrap"):
        return f"::: {door.__name__}.{name}"
    return f"## {name}\n\nThe same as `{origin}.{target.__qualname__}`."


def _table(head: tuple[str, ...], rows: Iterator[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines).replace("``", "`")


def _code(text: str) -> str:
    return f"`{text}`" if text else ""
