"""The commands that only read and write text: show, list, plot, convert, version."""

from __future__ import annotations

import argparse
import shutil
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from importlib import metadata
from pathlib import Path

from ...registry import Registration, format_config, list_registrations, load_config
from ..convert.convert import convert_config
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


def _in_full(entries: Sequence[Registration]) -> Iterator[str]:
    rows = [row for entry in entries for row in _rows(entry)]
    width = min(max((len(name) for name, _ in rows), default=0), 40)
    room = max(shutil.get_terminal_size().columns - width - 4, 30)
    for name, text in rows:
        if len(name) > width:
            yield name
            name = ""
        for line in textwrap.wrap(text, room) or [""]:
            yield f"{name:<{width}}  {line}".rstrip()
            name = ""


def _rows(entry: Registration) -> Iterator[tuple[str, str]]:
    yield " = ".join((entry.name, *entry.aliases)), entry.summary or entry.source
    for declaration, meaning in entry.arguments:
        yield f"  {declaration}", meaning


def _in_short(entries: Sequence[Registration]) -> list[str]:
    own = [entry.name for entry in entries if entry.source.startswith("stepwrap.")]
    others = Counter(entry.source for entry in entries if entry.name not in own)
    parts = [*own, *(f"{count} classes of {source}" for source, count in others.items())]
    return textwrap.wrap(", ".join(parts) or "nothing yet", 96, break_on_hyphens=False)


def run_plot(options: argparse.Namespace) -> int:
    """Draw the curves of each run folder."""
    for folder in options.words:
        print(draw_curves(Path(folder)))
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


def run_version(options: argparse.Namespace) -> int:
    """Print the version of stepwrap."""
    print(f"stepwrap {metadata.version('stepwrap')}")
    return 0
