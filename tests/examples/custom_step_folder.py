"""Make the modules of examples/custom_steps importable, here and on the ranks."""

import sys
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "examples/custom_steps"
if str(FOLDER) not in sys.path:
    sys.path.insert(0, str(FOLDER))
