"""`python -m stepwrap.runner` is the `stepwrap` command; torchrun's `-m` takes it too."""

import sys

from .command.cli import main

if __name__ == "__main__":
    sys.exit(main())
