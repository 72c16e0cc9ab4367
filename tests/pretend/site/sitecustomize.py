"""Load the pretend devices in each process that has PRETEND_CUDA and this folder on its path.

Ranks, pools and commands that tests start inherit both, so that all of them see the devices.
"""

import os
import sys
from pathlib import Path

if os.environ.get("PRETEND_CUDA"):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    import pretend_devices

    pretend_devices.prepare()
