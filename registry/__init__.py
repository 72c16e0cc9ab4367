"""Names to classes; config text to checked settings to objects."""

from .catalog import (
    COMM_HOOKS,
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
from .checks.check_component import check_component
from .checks.check_config import check_config, examine_config, name_problems
from .checks.optimizer_sections import named_optimizers, optim_wrapper_sections, stepping_class
from .checks.paramwise import check_paramwise, default_of
from .checks.schema import (
    DEFAULT_HOOKS,
    HOOK_TYPES,
    DataSection,
    LaunchSection,
    LoaderSection,
    ParamwiseSection,
    RunSections,
    SchedulerSection,
)
from .errors import ConfigError, Problem, causes, did_you_mean, nearest, user_frame
from .registry import Registry, build_from_cfg, build_model_from_cfg
from .scan import Registration, count_registered_modules, list_registrations, traverse_registry_tree
from .text.config import Config, config_from_dict, dump_config, format_config, load_config
from .tree import build_tree, find_train_step, supply_where_taken

__all__ = [
    "COMM_HOOKS",
    "DATALOADERS",
    "DATASETS",
    "DEFAULT_HOOKS",
    "DIST_BACKENDS",
    "HOOKS",
    "HOOK_TYPES",
    "LOOPS",
    "METRICS",
    "MODELS",
    "MODEL_WRAPPERS",
    "OPTIMIZERS",
    "OPTIM_WRAPPERS",
    "PARAM_SCHEDULERS",
    "Config",
    "ConfigError",
    "DataSection",
    "LaunchSection",
    "LoaderSection",
    "ParamwiseSection",
    "Problem",
    "Registration",
    "Registry",
    "RunSections",
    "SchedulerSection",
    "build_from_cfg",
    "build_model_from_cfg",
    "build_tree",
    "causes",
    "check_component",
    "check_config",
    "check_paramwise",
    "config_from_dict",
    "count_registered_modules",
    "default_of",
    "did_you_mean",
    "dump_config",
    "examine_config",
    "find_train_step",
    "format_config",
    "list_registrations",
    "load_config",
    "name_problems",
    "named_optimizers",
    "nearest",
    "optim_wrapper_sections",
    "stepping_class",
    "supply_where_taken",
    "traverse_registry_tree",
    "user_frame",
]
