"""Run the command with ``python -m stepwrap.runner`` or ``torchrun -m stepwrap.runner``."""

import sys

from .command.cli import main

if __name__ == "__main__":
    sys.exit(main())
