"""The command that converts configs of mmengine."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout

from ..convert.convert import convert_config
from .command import Options

# The exit code of `convert` if some settings could not be converted.
INCOMPLETE = 3


def run_convert(options: Options) -> int:
    """Convert an mmengine config; print YAML to stdout and unconverted settings to stderr."""
    # The output of the config and the warnings of mmengine must not mix with the YAML.
    with redirect_stdout(sys.stderr):
        conversion = convert_config(
            options.words[0], epoch_length=options.epoch_length, keep_order=options.keep_order
        )
    print(conversion.text(), end="")
    for title, misses in conversion.sorted_misses().items():
        print(f"{title}:", *misses, sep="\n  ", file=sys.stderr)
    return INCOMPLETE if any(miss.changes_result for miss in conversion.misses) else 0
