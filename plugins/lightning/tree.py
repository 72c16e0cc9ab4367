"""Lightning's classes, imported from the package that is in use."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

# Lightning is published as `pytorch_lightning` with `lightning_fabric`, and as `lightning`. Classes
# of one do not work with classes of the other.
_TREES = {
    "pytorch_lightning": "lightning_fabric",
    "lightning.pytorch": "lightning.fabric",
}


def _choose() -> str:
    """Return the package that is already imported; otherwise the first one that is installed."""
    for name in _TREES:
        if sys.modules.get(name) is not None:
            return name
    for name in _TREES:
        if find_spec(name.partition(".")[0]) is not None:
            return name
    raise ImportError(
        "stepwrap.plugins.lightning needs pytorch-lightning >= 2.4 (or lightning >= 2.4): "
        "pip install 'stepwrap[lightning]'"
    )


TREE = _choose()

if TYPE_CHECKING:
    from lightning_fabric.strategies import STRATEGY_REGISTRY as FABRIC_REGISTRY
    from lightning_fabric.strategies.ddp import DDPStrategy as FabricDDPStrategy
    from pytorch_lightning import Callback, LightningModule, Trainer
    from pytorch_lightning.strategies import DDPStrategy, ParallelStrategy, StrategyRegistry
else:
    _trainer = import_module(TREE)
    Callback, LightningModule = _trainer.Callback, _trainer.LightningModule
    Trainer = _trainer.Trainer
    _strategies = import_module(f"{TREE}.strategies")
    DDPStrategy, ParallelStrategy = _strategies.DDPStrategy, _strategies.ParallelStrategy
    StrategyRegistry = _strategies.StrategyRegistry
    _fabric = import_module(f"{_TREES[TREE]}.strategies")
    FabricDDPStrategy, FABRIC_REGISTRY = _fabric.DDPStrategy, _fabric.STRATEGY_REGISTRY

__all__ = [
    "FABRIC_REGISTRY",
    "TREE",
    "Callback",
    "DDPStrategy",
    "FabricDDPStrategy",
    "LightningModule",
    "ParallelStrategy",
    "StrategyRegistry",
    "Trainer",
]
