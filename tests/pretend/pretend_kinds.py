"""The kinds of pretend devices, and what differs between them; imported before torch.

PRETEND_KIND chooses one: "cuda" (default), "xpu" or "mps". The functions that a kind offers are
those of its module in torch, such as `torch.mps`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class Kind:
    """What differs between the kinds of devices.

    Attributes:
        type: the type of `torch.device`.
        key: the dispatch key of its tensors.
        dlpack: the number of the type in DLPack.
        most: the maximum number of devices.
        has_float64: whether the devices compute in float64.
    """

    type: str
    key: str
    dlpack: int
    most: int = 16
    has_float64: bool = True


_KINDS = {
    "cuda": Kind("cuda", "CUDA", dlpack=2),
    "xpu": Kind("xpu", "XPU", dlpack=14),
    "mps": Kind("mps", "MPS", dlpack=8, most=1, has_float64=False),
}
KIND = _KINDS[os.environ.get("PRETEND_KIND", "cuda")]
