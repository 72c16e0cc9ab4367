"""Use stepwrap's wrappers in Lightning. Importing this package registers the strategy "stepwrap".

No other package of stepwrap imports Lightning. Start with strategy.py.
"""

from .module import StepLightningModule
from .strategy import StepFabricStrategy, StepStrategy

__all__ = ["StepFabricStrategy", "StepLightningModule", "StepStrategy"]
