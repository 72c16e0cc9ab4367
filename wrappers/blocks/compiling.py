"""``torch.compile`` of a model, or of its blocks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import torch
from torch import nn

from ...registry import did_you_mean
from ..torch_functions import check_options
from .blocks import find_blocks

CompileSpec: TypeAlias = bool | Mapping[str, Any]

_OPTIONS = ("blocks", "backend", "mode", "dynamic", "fullgraph", "options")


def compile_model(model: nn.Module, spec: CompileSpec = True) -> nn.Module:
    """Compile ``model`` by ``torch.compile``, in place; returns it.

    The names of parameters stay what they were. Nothing is compiled before the first forward.

    Args:
        spec: True, or a mapping with ``blocks`` (as for ``find_blocks``; default: the whole
            model) and what ``torch.compile`` takes: ``backend``, ``mode``, ``dynamic``,
            ``fullgraph``, ``options``. False compiles nothing.

    Raises:
        ValueError: something matches no module, or there is no such backend or mode.
        TypeError: there is no such option.
    """
    for module in find_compiled(model, spec):
        module.compile(**_torch_options(spec))
    return model


def find_compiled(model: nn.Module, spec: CompileSpec) -> list[nn.Module]:
    """The modules that are to be compiled; arguments and errors as for ``compile_model``."""
    options = read_compile(spec)
    if options is None:
        return []
    _check_names(options)
    blocks = options.get("blocks")
    return [model] if blocks is None else list(find_blocks(model, blocks).values())


def _torch_options(spec: CompileSpec) -> dict[str, Any]:
    options = read_compile(spec) or {}
    return {name: value for name, value in options.items() if name != "blocks"}


def read_compile(spec: Any) -> dict[str, Any] | None:
    """Return the options, None when nothing is to be compiled.

    Raises:
        TypeError: there is no such option.
    """
    if spec is None or isinstance(spec, bool):
        return {} if spec else None
    if not isinstance(spec, Mapping):
        raise TypeError(f"compile must be true, false or its options, got {spec!r}")
    check_options("compile", spec, _OPTIONS)
    for name in ("dynamic", "fullgraph"):
        if spec.get(name) is not None and not isinstance(spec[name], bool):
            raise TypeError(f"compile: {name} must be true or false, got {spec[name]!r}")
    return {name: value for name, value in spec.items() if value is not None}


def _check_names(options: Mapping[str, Any]) -> None:
    backend, mode = options.get("backend", "inductor"), options.get("mode")
    if isinstance(backend, str):
        known = torch.compiler.list_backends(exclude_tags=())
        if backend not in known:
            hint = did_you_mean(backend, known)
            raise ValueError(f"compile: there is no backend {backend!r}{hint}")
    if mode is None:
        return
    if backend != "inductor":
        raise ValueError(f"compile: mode is an option of inductor, and the backend is {backend!r}")
    modes = list(torch._inductor.list_mode_options())
    if mode not in modes:
        hint = did_you_mean(mode, modes)
        raise ValueError(f"compile: there is no mode {mode!r}, only {', '.join(modes)}{hint}")
