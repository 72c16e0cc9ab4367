"""Registries, which map names to classes, and configs: read, checked and built into objects."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ..primitives.suggestions import did_you_mean, nearest
from .catalog import (
    ADAPTERS,
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
    SAMPLERS,
)
from .checks.check_component import check_component
from .checks.check_config import (
    Examination,
    check_config,
    examine_config,
    examine_names,
    import_problems,
    model_problems,
    name_problems,
    source_folders,
)
from .checks.data_sections import sets_in
from .checks.optimizer_sections import (
    check_paramwise,
    get_default,
    named_optimizers,
    optim_wrapper_sections,
    stepping_class,
)
from .checks.schema import (
    DEFAULT_HOOKS,
    HOOK_TYPES,
    DataSection,
    LaunchSection,
    LoaderSection,
    LoadFromSection,
    MetricSection,
    ParamwiseSection,
    RunSections,
    SchedulerSection,
    SetsSection,
)
from .errors import ConfigError, Problem, causes, is_users_file, key_noted_on, user_frame
from .imports import import_path
from .registry import Registry, build_from_cfg, build_model_from_cfg
from .text.config import Config, config_from_dict, dump_config, format_config, load_config
from .tree import build_tree, find_train_step, find_transform, supply_where_taken

if TYPE_CHECKING:
    from .json_schema import config_schema
    from .scan import (
        Registration,
        count_registered_modules,
        list_registrations,
        traverse_registry_tree,
    )

# Imported on first use: a run needs none of them.
_LATER = {
    "Registration": "scan",
    "config_schema": "json_schema",
    "count_registered_modules": "scan",
    "list_registrations": "scan",
    "traverse_registry_tree": "scan",
}

__all__ = [
    "ADAPTERS",
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
    "SAMPLERS",
    "Config",
    "ConfigError",
    "DataSection",
    "Examination",
    "LaunchSection",
    "LoadFromSection",
    "LoaderSection",
    "MetricSection",
    "ParamwiseSection",
    "Problem",
    "Registration",
    "Registry",
    "RunSections",
    "SchedulerSection",
    "SetsSection",
    "build_from_cfg",
    "build_model_from_cfg",
    "build_tree",
    "causes",
    "check_component",
    "check_config",
    "check_paramwise",
    "config_from_dict",
    "config_schema",
    "count_registered_modules",
    "get_default",
    "did_you_mean",
    "dump_config",
    "examine_config",
    "examine_names",
    "find_train_step",
    "find_transform",
    "format_config",
    "import_path",
    "import_problems",
    "is_users_file",
    "key_noted_on",
    "list_registrations",
    "load_config",
    "model_problems",
    "name_problems",
    "named_optimizers",
    "nearest",
    "optim_wrapper_sections",
    "sets_in",
    "source_folders",
    "stepping_class",
    "supply_where_taken",
    "traverse_registry_tree",
    "user_frame",
]


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_LATER[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
