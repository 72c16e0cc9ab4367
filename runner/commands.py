"""The commands that need no torch: show, list, plot."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..registry import format_config, load_config
from .plots import draw_curves


def run_show(options: argparse.Namespace) -> int:
    """Print the resolved config, as YAML that can be run."""
    config = load_config(options.words[0], options.words[1:])
    print(format_config(config, origins=options.origin), end="")
    return 0


def run_plot(options: argparse.Namespace) -> int:
    """Draw the curves of a run folder."""
    print(draw_curves(Path(options.words[0])))
    return 0
