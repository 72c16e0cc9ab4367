"""Our wrappers inside Lightning: importing this room registers `Trainer(strategy="stepwrap")`. Only
here Lightning is imported. Start with strategy.py.
"""

from .module import StepLightningModule
from .strategy import StepFabricStrategy, StepStrategy

__all__ = ["StepFabricStrategy", "StepLightningModule", "StepStrategy"]
