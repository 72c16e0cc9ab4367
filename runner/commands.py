"""The commands that only read and write text: show, list, plot, convert."""

from __future__ import annotations

import argparse
import shutil
import sys
import textwrap
from collections import Counter
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path

from ..registry import Registration, format_config, list_registrations, load_config
from .convert import convert_config
from .options import UsageError
from .plots import draw_curves

# Some of a config had no counterpart.
INCOMPLETE = 3


def run_show(options: argparse.Namespace) -> int:
    """Print the resolved config, as YAML that can be run."""
    config = load_config(options.words[0], options.words[1:])
    print(format_config(config, origins=options.origin), end="")
    return 0


def run_list(options: argparse.Namespace) -> int:
    """Print what the registries hold: all in short, or one in full."""
    name = options.words[0] if options.words else None
    try:
        registries = list_registrations(name)
    except KeyError as error:
        raise UsageError(f"stepwrap list: {error}") from error
    for registry, entries in registries.items():
        print(registry)
        for line in _in_full(entries) if name else _in_short(entries):
            print(f"  {line}")
    if name is None:
        print("stepwrap list REGISTRY tells more; any import path can be a type as well")
    return 0


def _in_full(entries: Sequence[Registration]) -> list[str]:
    names = [" = ".join((entry.name, *entry.aliases)) for entry in entries]
    width = min(max(map(len, names), default=0), 44)
    room = max(shutil.get_terminal_size().columns - width - 6, 30)
    return [
        f"{name:<{width}}  {textwrap.shorten(entry.summary or entry.source, room)}"
        for name, entry in zip(names, entries, strict=True)
    ]


def _in_short(entries: Sequence[Registration]) -> list[str]:
    own = [entry.name for entry in entries if entry.source.startswith("stepwrap.")]
    others = Counter(entry.source for entry in entries if entry.name not in own)
    parts = [*own, *(f"{count} classes of {source}" for source, count in others.items())]
    return textwrap.wrap(", ".join(parts) or "nothing yet", 96, break_on_hyphens=False)


def run_plot(options: argparse.Namespace) -> int:
    """Draw the curves of a run folder."""
    print(draw_curves(Path(options.words[0])))
    return 0


def run_convert(options: argparse.Namespace) -> int:
    """Print a config of mmengine as one of ours, and on stderr what has no counterpart."""
    # What the config prints, and mmengine's own warnings, are no part of the YAML.
    with redirect_stdout(sys.stderr):
        conversion = convert_config(
            options.words[0], epoch_length=options.epoch_length, keep_order=options.keep_order
        )
    print(conversion.text(), end="")
    for miss in conversion.misses:
        print(miss, file=sys.stderr)
    return INCOMPLETE if conversion.misses else 0
