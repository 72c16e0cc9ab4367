"""The registries: one for each kind of component that a config can name.

They contain the names of modules only; nothing is imported before a look-up.
"""

from .registry import Registry, build_model_from_cfg

_WRAPPERS = ("stepwrap.wrappers",)
_LOOPS = ("stepwrap.loops",)

MODELS = Registry(
    "MODELS",
    build_model_from_cfg,
    locations=_WRAPPERS,
    namespaces=("torch.nn",),
    kind="torch.nn.Module",
)
MODEL_WRAPPERS = Registry(
    "MODEL_WRAPPERS",
    locations=_WRAPPERS,
    # Imported separately, because it imports much of torch.
    namespaces=("stepwrap.wrappers.fsdp.fully_sharded",),
    aliases={
        "MMFullyShardedDataParallel": "StepFullyShardedDataParallel",
        "FullyShardedDataParallel": "StepFullyShardedDataParallel",
        "fsdp": "StepFullyShardedDataParallel",
    },
)
COMM_HOOKS = Registry("COMM_HOOKS", locations=_WRAPPERS)
OPTIMIZERS = Registry(
    "OPTIMIZERS",
    locations=_WRAPPERS,
    namespaces=("torch.optim", "stepwrap.wrappers.optimizers.post_local_sgd"),
    kind="torch.optim.Optimizer",
)
OPTIM_WRAPPERS = Registry("OPTIM_WRAPPERS", locations=_WRAPPERS)
PARAM_SCHEDULERS = Registry(
    "PARAM_SCHEDULERS",
    locations=_LOOPS,
    namespaces=("torch.optim.lr_scheduler",),
    kind="torch.optim.lr_scheduler.LRScheduler",
)
DATASETS = Registry("DATASETS", namespaces=("torch.utils.data",), kind="torch.utils.data.Dataset")
DATALOADERS = Registry("DATALOADERS", locations=_LOOPS)
SAMPLERS = Registry("SAMPLERS", locations=("stepwrap.loops.data.samplers",))
ADAPTERS = Registry("ADAPTERS", namespaces=("peft",), kind="peft.PeftConfig")
METRICS = Registry(
    "METRICS",
    locations=_LOOPS,
    namespaces=(
        # Imported separately, because it imports torchmetrics.
        "stepwrap.loops.metrics.mean_loss",
        "torchmetrics.classification",
        "torchmetrics.regression",
        "torchmetrics.text",
        "torchmetrics.aggregation",
        "torchmetrics",
    ),
    kind="torchmetrics.Metric",
)
LOOPS = Registry("LOOPS", locations=_LOOPS)
HOOKS = Registry(
    "HOOKS",
    locations=(*_LOOPS, "stepwrap.loops.hooks.grad_guard", "stepwrap.diagnostics.ledger_hook"),
)
DIST_BACKENDS = Registry(
    "DIST_BACKENDS",
    namespaces=(
        "stepwrap.collectives.backends.torch_backends",
        "stepwrap.collectives.backends.mpi",
    ),
    aliases={
        "non_dist": "NonDist",
        "mpi4py": "MPI4PyDist",
        "torch": "TorchDist",
        "torch_cpu": "TorchCPUDist",
        "torch_cuda": "TorchCUDADist",
    },
)

REGISTRIES = {
    table.name: table for table in list(globals().values()) if isinstance(table, Registry)
}
