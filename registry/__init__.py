"""Names to classes; config text to checked settings to objects."""

from .build import build_from_cfg
from .catalog import (
    DATALOADERS,
    DATASETS,
    DIST_BACKENDS,
    HOOKS,
    LOOPS,
    METRICS,
    MODEL_WRAPPERS,
    MODELS,
    OPTIM_WRAPPERS,
    OPTIMIZERS,
    PARAM_SCHEDULERS,
)
from .errors import ConfigError, Problem, nearest
from .registry import Registry
from .tree import build_tree

__all__ = [
    "DATALOADERS",
    "DATASETS",
    "DIST_BACKENDS",
    "HOOKS",
    "LOOPS",
    "METRICS",
    "MODELS",
    "MODEL_WRAPPERS",
    "OPTIMIZERS",
    "OPTIM_WRAPPERS",
    "PARAM_SCHEDULERS",
    "ConfigError",
    "Problem",
    "Registry",
    "build_from_cfg",
    "build_tree",
    "nearest",
]
