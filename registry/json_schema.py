"""A JSON schema of run configs, with which editors complete and check YAML files."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any, Literal, TypeAlias, get_args, get_origin, get_type_hints

from .arguments import get_options
from .checks.other_trainers import SETTINGS_BY_NAME
from .checks.schema import (
    HOOK_TYPES,
    METRIC_KEYS,
    SCHEDULER_KEYS,
    LaunchSection,
    LoaderSection,
    MetricSection,
    ParamwiseSection,
    RunSections,
    SchedulerSection,
    SetsSection,
)
from .scan import Registration, documented_items, list_registrations
from .text.values import BASE, DELETE, dotted, walk

Schema: TypeAlias = dict[str, Any]

_TYPES: dict[Any, str] = {
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    list: "array",
    dict: "object",
    type(None): "null",
}
_TYPES_BY_NAME = {"None": "null", **{kind.__name__: name for kind, name in _TYPES.items()}}
_INTERPOLATION = {"$ref": "#/$defs/interpolation"}
_NOT_TEXT = {"anyOf": [{"type": ["number", "array", "object", "null"]}, _INTERPOLATION]}
# Arguments that are numbers in all optimizers.
_NUMBERS = ("lr", "weight_decay", "momentum", "eps")
# The values of arguments that are annotated as text.
_VALUES: dict[str, list[str | None]] = {
    "dtype": ["float16", "bfloat16", "float32", "float64", None],
}
# Keys that are allowed in each section with a ``type``.
_KEYS = ("type", "_scope_", DELETE)
# Registries whose classes of ours have no arguments but the declared ones.
_CLOSED = ("LOOPS", "OPTIM_WRAPPERS", "HOOKS")
# Registries whose classes have registered names only if they are ours or torch's.
_NAMED_BY_PATH = ("LOOPS", "OPTIM_WRAPPERS", "OPTIMIZERS", "PARAM_SCHEDULERS")
# The registry of each section that names one component.
_REGISTRIES = {
    "model": "MODELS",
    "wrapper": "MODEL_WRAPPERS",
    "train": "LOOPS",
    "val": "LOOPS",
    "test": "LOOPS",
    "adapter": "ADAPTERS",
    "optimizer": "OPTIMIZERS",
    "optim_wrapper": "OPTIM_WRAPPERS",
}


def config_schema() -> Schema:
    """Return the JSON schema (draft 2020-12) of run configs.

    The schema describes single files. Required settings may be missing, since ``_base_`` or another
    file may set them, and any value may be ``${...}``. A ``type`` may be any text, because configs
    can name import paths and classes of the user; the registered names are suggestions. Only
    optimizers, optimizer wrappers, schedulers and loops of the user need an import path. Nothing is
    imported to describe our own classes.
    """
    registered = list_registrations()
    components = {
        name: _component(entries, is_closed=name in _CLOSED)
        for name, entries in registered.items()
        if name in {*_REGISTRIES.values(), "HOOKS", "METRICS", "PARAM_SCHEDULERS"}
    }
    schema = _section(RunSections)
    settings = schema["properties"]
    for key, registry in _REGISTRIES.items():
        settings[key] |= _component_ref(registry)
    settings["metrics"] |= {"additionalProperties": _add_our_settings("METRICS", MetricSection)}
    settings["hooks"] |= _hooks(registered["HOOKS"])
    settings["schedulers"] = _schedulers()
    for name in _NAMED_BY_PATH:
        _require_known_type(components[name])
    for name in ("LOOPS", "OPTIM_WRAPPERS"):
        _check_without_type(components[name], registered[name])
    components["OPTIMIZERS"]["properties"] |= dict.fromkeys(_NUMBERS, _NOT_TEXT)
    components["OPTIMIZERS"]["properties"]["paramwise"] = _section(ParamwiseSection)
    files = {"type": ["string", "array"], "description": "The files that this one extends."}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "stepwrap run config",
        **schema,
        "properties": {BASE: files, **settings},
        "$defs": {
            "interpolation": {"type": "string", "pattern": r"\$\{"},
            **components,
        },
    }


def setting_paths(config: Mapping[str, Any]) -> list[str]:
    """Return the sorted key paths of the settings that a config has or may have.

    These are its own values, the settings of the sections, and the arguments of our classes, for
    its types and for the hooks that need no ``type``. Nothing is imported to find them.
    """
    registered = [entry for entries in list_registrations().values() for entry in entries]
    arguments = {
        name: [declaration.partition(":")[0] for declaration, _ in entry.arguments]
        for entry in registered
        for name in (entry.name, *entry.aliases)
    }
    paths = {field.name for field in fields(RunSections)}
    paths |= {f"launch.{field.name}" for field in fields(LaunchSection)}
    for name in ("train", "val", "test"):
        paths |= {f"data.{name}.{field.name}" for field in fields(LoaderSection)}
    for name, kind in HOOK_TYPES.items():
        paths |= {f"hooks.{name}", *(f"hooks.{name}.{key}" for key in arguments[kind])}
    for path, value in walk(dict(config)):
        if path:
            paths.add(dotted(path))
        if isinstance(value, Mapping) and isinstance(value.get("type"), str):
            paths |= {dotted((*path, key)) for key in arguments.get(value["type"], ())}
    return sorted(paths)


def _section(section: type) -> Schema:
    """Return the schema of a dataclass of settings."""
    hints = get_type_hints(section)
    meanings = documented_items(inspect.getdoc(section) or "", "Attributes")
    settings = {setting.name: _setting(setting, hints[setting.name]) for setting in fields(section)}
    for name, text in meanings.items():
        for setting_name in name.split(", "):
            settings[setting_name]["description"] = text
    settings[DELETE] = {"const": True, "description": "Replace the section of the base file."}
    return {"type": "object", "properties": settings, "additionalProperties": False}


def _setting(setting: Field[Any], hint: Any) -> Schema:
    """Return the schema of a field, which a YAML file may set to ``${...}`` as well."""
    hints = get_options(hint)
    section = next((option for option in hints if is_dataclass(option)), None)
    if isinstance(section, type):
        # A component has a type; without one, unknown settings are mistakes.
        is_section: Schema = {"type": "object"}
        if dict[str, Any] in hints:
            is_section["not"] = {"required": ["type"]}
        kinds = {
            _TYPES[get_origin(option) or option] for option in hints if not is_dataclass(option)
        }
        full = {"type": sorted(kinds | {"object", "null", "string"}), "if": is_section}
        single = {**full, "then": _section(section)}
        # Other keys are the names of sets.
        sets = {**full, "then": {**_section(section), "additionalProperties": single}}
        return sets if SetsSection in hints else single
    options = [_value(option, setting.metadata) for option in hints]
    if str not in hints:
        options.append(_INTERPOLATION)
    schema: Schema = {"anyOf": options} if len(options) > 1 else options[0]
    return schema if setting.default is MISSING else {**schema, "default": setting.default}


def _value(hint: Any, metadata: Mapping[str, Any]) -> Schema:
    """Return the schema of one alternative of an annotation."""
    if isinstance(hint, type) and is_dataclass(hint):
        return _section(hint)
    if get_origin(hint) is Literal:
        return {"enum": list(get_args(hint))}
    schema: Schema = {"type": _TYPES[get_origin(hint) or hint]}
    if get_origin(hint) is list:
        schema["items"] = _value(get_args(hint)[0], {})
    if hint in (int, float) and "minimum" in metadata:
        schema["minimum"] = metadata["minimum"]
    return schema


def _component(entries: list[Registration], *, is_closed: bool) -> Schema:
    """Return the schema of a dict with a ``type``: the names, and the arguments of our classes.

    Args:
        is_closed: whether our classes have no further arguments.
    """
    names = sorted({name for entry in entries for name in (entry.name, *entry.aliases)})
    schema: Schema = {"properties": {"type": {"anyOf": [{"enum": names}, {"type": "string"}]}}}
    by_type = [
        {
            "if": {
                "properties": {"type": {"enum": [entry.name, *entry.aliases]}},
                "required": ["type"],
            },
            "then": {"description": entry.summary, **_arguments(entry, is_closed=is_closed)},
        }
        for entry in entries
        if entry.arguments
    ]
    # A schema must not have an empty allOf.
    return {**schema, "allOf": by_type} if by_type else schema


def _check_without_type(component: Schema, entries: list[Registration]) -> None:
    """Check a section whose type may be in a base file by the arguments of all our classes.

    Names of other trainers are refused, unless they name an optimizer whose settings follow.
    """
    refused = {
        name: {"type": "object", "description": f"in stepwrap: {ours}"}
        for name, ours in SETTINGS_BY_NAME.items()
    }
    for entry in entries:
        refused |= _arguments(entry, is_closed=True)["properties"]
    is_untyped = {"not": {"required": ["type"]}}
    component["allOf"].append({"if": is_untyped, "then": {"properties": refused}})


def _require_known_type(component: Schema) -> None:
    """Allow only registered names and import paths as ``type``, unless there is a ``_scope_``."""
    names = component["properties"]["type"]["anyOf"][0]
    types = {"anyOf": [names, {"type": "string", "pattern": r"\."}, _INTERPOLATION]}
    is_here = {"not": {"required": ["_scope_"]}}
    rule = {"if": is_here, "then": {"properties": {"type": types}}}
    component.setdefault("allOf", []).append(rule)


def _arguments(entry: Registration, *, is_closed: bool) -> Schema:
    """Return the schema of the arguments with descriptions and, if they are plain, with types."""
    settings = {
        declaration.partition(":")[0]: {
            "description": f"{declaration}. {meaning}".rstrip(),
            **_declared_type(declaration),
        }
        for declaration, meaning in entry.arguments
    }
    if not is_closed:
        return {"properties": settings}
    return {"properties": {**dict.fromkeys(_KEYS, True), **settings}, "additionalProperties": False}


def _declared_type(declaration: str) -> Schema:
    """Return the schema of an argument such as "patience: int = 3"; empty for other types."""
    name, _, annotation = declaration.partition(": ")
    if name in _VALUES:
        return {"anyOf": [{"enum": _VALUES[name]}, _INTERPOLATION]}
    kinds = [
        "object" if kind.startswith("Mapping[") else _TYPES_BY_NAME.get(kind, "")
        for kind in re.split(r" \| (?![^\[]*\])", annotation.partition(" = ")[0])
    ]
    return {"anyOf": [{"type": kinds}, _INTERPOLATION]} if all(kinds) else {}


def _component_ref(registry: str) -> Schema:
    return {"$ref": f"#/$defs/{registry}"}


def _hooks(entries: list[Registration]) -> Schema:
    """Return the schema of the hooks by name: the known ones need no ``type``."""
    known = {entry.name: entry for entry in entries}
    settings: Schema = {}
    for name, kind in HOOK_TYPES.items():
        ours = _arguments(known[kind], is_closed=True)
        own_type = {"if": {"not": {"required": ["type"]}}, "then": ours}
        arguments = {"type": "object", "properties": {**ours["properties"]}, **own_type}
        settings[name] = {
            "description": known[kind].summary,
            "anyOf": [{"type": ["boolean", "null"]}, arguments, _INTERPOLATION],
        }
    others = {"type": ["boolean", "null", "object"], **_component_ref("HOOKS")}
    return {
        "anyOf": [{"type": "object"}, {"const": False}, _INTERPOLATION],
        "properties": settings,
        "additionalProperties": others,
    }


def _add_our_settings(registry: str, section: type) -> Schema:
    """Return the schema of a component whose dict may also have settings of ``section``."""
    ours = {
        name: setting
        for name, setting in _section(section)["properties"].items()
        if name in (*METRIC_KEYS, *SCHEDULER_KEYS)
    }
    return {**_component_ref(registry), "properties": ours}


def _schedulers() -> Schema:
    """Return the schema of one scheduler or a list."""
    scheduler = _add_our_settings("PARAM_SCHEDULERS", SchedulerSection)
    is_list = {"if": {"type": "array"}, "then": {"items": scheduler}, "else": scheduler}
    return {"type": ["array", "object", "null", "string"], **is_list}
