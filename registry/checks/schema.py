"""The typed sections of a run config."""

from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, TypeAlias

Component: TypeAlias = dict[str, Any]
# Settings without a type.
Options: TypeAlias = dict[str, object]

# Hooks whose type follows from their name in the config; DEFAULT_HOOKS are on unless set to false.
HOOK_TYPES = {
    "progress": "ProgressHook",
    "log": "LogHook",
    "checkpoint": "CheckpointHook",
    "throughput": "ThroughputHook",
    "early_stop": "EarlyStopHook",
    "ema": "EMAHook",
    "swa": "SWAHook",
    "grad_norm": "GradNormHook",
    "nan_guard": "NanGuardHook",
    "spike_guard": "SpikeGuardHook",
    "grad_guard": "GradGuardHook",
    "profile": "ProfileHook",
    "step_blocks": "StepBlocksHook",
    "system": "SystemHook",
    "time_limit": "TimeLimitHook",
    "tensorboard": "TensorBoardHook",
    "wandb": "WandbHook",
    "mlflow": "MLflowHook",
    "trackio": "TrackioHook",
    "ledger": "LedgerHook",
    "run_info": "RunInfoHook",
}
DEFAULT_HOOKS = ("progress", "log", "checkpoint", "throughput", "nan_guard", "run_info")
# The setting of a custom loader that stepwrap defines: whether it gives each rank its own data.
PER_RANK = "per_rank"
# Settings in a scheduler's section that stepwrap defines; the others are arguments of its class.
SCHEDULER_KEYS = ("by", "after", "until", "metric", "optimizer", "warmup")
# The same for a metric's section.
METRIC_KEYS = ("sets", "head", "transform")


@dataclass(frozen=True, kw_only=True)
class LoaderSection:
    """A loader that makes batches from a dataset.

    Attributes:
        dataset: a map-style or iterable dataset.
        batch_size: samples per batch and rank.
        shuffle: whether each pass over the data has a new order.
        sampler: draws the order instead: by weights, from a subset, or by a class of yours.
        num_workers: processes that read samples; 0 reads in the process of the rank.
        drop_last: whether to leave out a last batch with fewer samples.
        collate: the import path of a function that makes a batch from a list of samples, or a dict
            with the ``type`` and the arguments of such a collator.
        pin_memory: whether batches are in pinned memory; "auto" pins them for CUDA devices.
        prefetch_factor: batches that each worker reads ahead.
        persistent_workers: whether workers continue to run between passes.
        seed: the seed of the order and of the workers; default: the run's seed.
        in_memory: whether to make batches by indexing the dataset's ``tensors``; "device" indexes
            copies of them on the run's device.
    """

    dataset: Component
    batch_size: int = field(metadata={"minimum": 1})
    shuffle: bool = False
    sampler: Component | None = None
    num_workers: int = field(default=0, metadata={"minimum": 0})
    drop_last: bool = False
    collate: Component | str | None = None
    pin_memory: bool | Literal["auto"] = "auto"
    prefetch_factor: int | None = field(default=None, metadata={"minimum": 1})
    persistent_workers: bool = True
    seed: int | None = field(default=None, metadata={"minimum": 0})
    in_memory: bool | Literal["auto", "device"] = "auto"


@dataclass(frozen=True, kw_only=True)
class SetsSection:
    """The loaders of several sets by name.

    Attributes:
        sets: the loaders by name; in a config, the names are keys of the section itself.
    """

    sets: dict[str, LoaderSection | Component]


@dataclass(frozen=True, kw_only=True)
class DataSection:
    """The loaders of the three loops; a section with a ``type`` is a custom loader.

    Attributes:
        train: the data to train on.
        val: the data to validate on, or several sets by name.
        test: the data to test on, or several sets by name.
    """

    train: LoaderSection | Component | None = None
    val: LoaderSection | Component | SetsSection | None = None
    test: LoaderSection | Component | SetsSection | None = None

    def loader(self, path: str) -> Any:
        """Return the section of one loader: "train", "val", or a set such as "val.noisy"."""
        name, _, set_name = path.partition(".")
        section = getattr(self, name)
        return section.sets[set_name] if isinstance(section, SetsSection) else section

    def get_sets(self, name: str) -> dict[str, str]:
        """Return the paths of the loaders of "val" or "test" by the names of the sets.

        A single set has the name "".
        """
        section = getattr(self, name)
        if isinstance(section, SetsSection):
            return {set_name: f"{name}.{set_name}" for set_name in section.sets}
        return {} if section is None else {"": name}


@dataclass(frozen=True, kw_only=True)
class MetricSection:
    """A metric.

    Attributes:
        sets: the sets on which it is computed; default: all.
        head: the head of the model whose predictions it gets.
        transform: the import path of a function of the predictions, or a dict with the path as
            ``type`` and further options.
    """

    sets: list[str] | None = None
    head: str | None = None
    transform: Component | str | None = None
    metric: Component


@dataclass(frozen=True, kw_only=True)
class LaunchSection:
    """The number of processes, how they connect, and how often they are restarted.

    Attributes:
        nproc: processes on this machine.
        oversubscribe: whether to start more processes than fit on the machine.
        max_restarts: how often all ranks are restarted after one of them died.
        backend: of the process group, such as "gloo"; "auto" selects it by device.
        timeout_s: seconds that a collective waits for a rank.
    """

    nproc: int = field(default=1, metadata={"minimum": 1})
    oversubscribe: bool = False
    max_restarts: int = field(default=0, metadata={"minimum": 0})
    backend: str = "auto"
    timeout_s: float = field(default=1800, metadata={"minimum": 1})


@dataclass(frozen=True, kw_only=True)
class LedgerSection:
    """Hashes of the steps, for comparing runs; equivalent to ``hooks.ledger``.

    Attributes:
        every_steps: updates between two entries.
        full: whether to hash each parameter, gradient and buffer separately.
        max_mib: the largest size of a rank's file, in MiB.
    """

    every_steps: int = field(default=1, metadata={"minimum": 1})
    full: bool = False
    max_mib: float = field(default=64.0, metadata={"minimum": 1})


@dataclass(frozen=True, kw_only=True)
class CustomKeySection:
    """Options of the parameters that a custom key names: factors or absolute values.

    Attributes:
        lr_mult: factor of the learning rate.
        decay_mult: factor of the weight decay.
        lr: the learning rate.
        weight_decay: the weight decay.
    """

    lr_mult: float = field(default=1.0, metadata={"minimum": 0})
    decay_mult: float = field(default=1.0, metadata={"minimum": 0})
    lr: float | None = field(default=None, metadata={"minimum": 0})
    weight_decay: float | None = field(default=None, metadata={"minimum": 0})


@dataclass(frozen=True, kw_only=True)
class ParamwiseSection:
    """Options by kind of parameter and by name; custom keys take precedence.

    Attributes:
        custom_keys: options of parameters by a part of their name or a pattern.
        bias_lr_mult: factor of the learning rate of biases outside norm layers.
        bias_decay_mult: factor of the weight decay of biases outside norm layers.
        norm_decay_mult: factor of the weight decay in norm layers.
        flat_decay_mult: factor of the weight decay of other parameters with one dimension.
        dwconv_decay_mult: factor of the weight decay in depthwise convolutions.
        layer_decay: factor of the learning rate, applied once for each layer above a parameter.
        layers: paths of the layers, from input to output.
        bypass_duplicate: whether a shared parameter gets the options of its first name.
        as_mmengine: classify parameters and match custom keys like mmengine.
    """

    custom_keys: dict[str, Any] = field(default_factory=dict)
    bias_lr_mult: float | None = field(default=None, metadata={"minimum": 0})
    bias_decay_mult: float | None = field(default=None, metadata={"minimum": 0})
    norm_decay_mult: float | None = field(default=None, metadata={"minimum": 0})
    flat_decay_mult: float | None = field(default=None, metadata={"minimum": 0})
    dwconv_decay_mult: float | None = field(default=None, metadata={"minimum": 0})
    layer_decay: float | None = field(default=None, metadata={"minimum": 0})
    layers: list[str] = field(default_factory=list)
    bypass_duplicate: bool = False
    as_mmengine: bool = False


@dataclass(frozen=True, kw_only=True)
class SchedulerSection:
    """A learning-rate scheduler.

    Attributes:
        by: the unit that the scheduler counts; null is "step" for the schedules that take their
            length from the run, and "epoch" for all others.
        after: the count after which it starts.
        until: the count of its last step.
        metric: the metric that it watches.
        optimizer: the name of its optimizer if there are several.
        warmup: the updates in which the rate rises linearly at the beginning; or a share of the run
            below 1, or a text such as "2 epochs".
    """

    by: Literal["batch", "step", "epoch"] | None = None
    after: int = field(default=0, metadata={"minimum": 0})
    until: int | None = field(default=None, metadata={"minimum": 1})
    metric: str | None = None
    optimizer: str | None = None
    warmup: int | float | str | None = None
    scheduler: Component


@dataclass(frozen=True, kw_only=True)
class TensorParallelSection:
    """Which layers are split over the tensor axis.

    Attributes:
        plan: module paths or patterns, and how each is split.
    """

    plan: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class FreezeSection:
    """When parameters are frozen.

    Attributes:
        until_step: the last update in which they are frozen; null for the whole run.
        eval: whether the modules also stay in evaluation mode while they are frozen, so that their
            running statistics do not change.
    """

    until_step: int | None = field(default=None, metadata={"minimum": 1})
    eval: bool = False


@dataclass(frozen=True, kw_only=True)
class LoadFromSection:
    """The weights that a new training starts from; a resumed run does not load them.

    Attributes:
        path: a run folder or checkpoint, a file with a state dict or a safetensors file, or a
            folder with weights in the layout of Hugging Face.
        map: beginnings of names in the file, and their replacements in the model.
        ignore: names, paths of modules or patterns of weights that are not loaded.
        strict: whether each weight must fit; if false, weights that do not fit keep their initial
            values.
    """

    path: str
    map: dict[str, Any] = field(default_factory=dict)
    ignore: list[str] = field(default_factory=list)
    strict: bool = True


@dataclass(frozen=True, kw_only=True)
class RunSections:
    """A checked run config.

    Attributes:
        model: the model, such as a ``SupervisedModel`` with a network and a loss.
        name: the name of the run; default: the name of the file.
        imports: modules or ``.py`` files that register classes.
        import_from: folders that are searched last for modules that the config names.
        seed: of the weights, the order of the data, and all random numbers.
        deterministic: whether only deterministic algorithms are used.
        cudnn_benchmark: whether cuDNN times its algorithms for each new shape, and uses the
            fastest; null keeps torch's setting.
        matmul_precision: of float32 matrix products on CUDA devices; "high" and "medium" round
            their inputs (TF32, bfloat16) and are faster; null keeps torch's setting.
        device: "auto" selects CUDA devices if there are any; a run on an XPU or on MPS names it.
        run_dir: the folder of the results; default: ``runs/${name}``.
        tensor_parallel: layers that are split over ranks.
        wrapper: default: ``ddp`` on several processes, otherwise ``single``.
        optim_wrapper: accumulation, precision and clipping; default: ``OptimWrapper``.
        data: the loaders of the three loops.
        train: the training loop; None for evaluation only.
        launch: the number of processes, and how they connect.
        resume: true continues the latest checkpoint; or "best", or a checkpoint's name or path.
        hooks: the settings of each hook by its name; they include the default hooks, but not
            disabled ones.
        optimizer: one optimizer with a ``type``, or several by name; then ``optim_wrapper`` may be
            by name too.
        schedulers: always a list.
        metrics: the metrics by name.
        limit_batches: the largest number of batches per pass and rank, for a quick try.
        overfit: train and evaluate on this many batches of the training data only, in order.
        val, test: the evaluation loop; None if ``data`` has no such section.
        ledger: the section ``ledger``, an alternative to ``hooks.ledger``.
        init_device: "meta" builds parameters without memory, which the wrapper allocates.
        load_from: the weights that a new training starts from, or only their path.
        adapter: peft's settings of an adapter that is trained instead of the weights.
        freeze: names of parameters, or paths of modules, that are not trained; or a mapping of
            these to the settings of ``FreezeSection``.
        activation_checkpointing: blocks whose forward is repeated in the backward pass.
        compile: true, options of torch.compile with the blocks to compile, or "step".
        train_step: the import path of a training-step function, or a dict with the path as ``type``
            and further options.
        mesh: sizes of the axes of the device mesh.
        trace_collectives: compare every collective across ranks; errors say where each rank is.
    """

    model: Component
    name: str
    imports: list[str] = field(default_factory=list)
    import_from: list[str] = field(default_factory=list)
    seed: int = field(default=0, metadata={"minimum": 0})
    deterministic: bool = False
    cudnn_benchmark: bool | None = None
    matmul_precision: Literal["highest", "high", "medium"] | None = None
    trace_collectives: bool = False
    device: Literal["auto", "cpu", "cuda", "xpu", "mps"] = "auto"
    run_dir: str = ""
    init_device: Literal["auto", "meta"] = "auto"
    load_from: LoadFromSection | str | None = None
    adapter: Component | None = None
    freeze: list[str] | dict[str, Any] = field(default_factory=list)
    activation_checkpointing: Options | list[str] | str | None = None
    compile: bool | Literal["step"] | Options = False
    mesh: dict[str, int] = field(default_factory=dict)
    tensor_parallel: TensorParallelSection | None = None
    wrapper: Component | None = None
    train_step: Component | str | None = None
    optimizer: Component | None = None
    optim_wrapper: Component = field(default_factory=dict)
    schedulers: list[SchedulerSection] = field(default_factory=list)
    data: DataSection = field(default_factory=DataSection)
    limit_batches: int | None = field(default=None, metadata={"minimum": 1})
    overfit: int | None = field(default=None, metadata={"minimum": 1})
    train: Component | None = None
    val: Component | None = None
    test: Component | None = None
    metrics: dict[str, MetricSection] = field(default_factory=dict)
    hooks: dict[str, Component] = field(default_factory=dict)
    ledger: LedgerSection | bool = False
    launch: LaunchSection = field(default_factory=LaunchSection)
    resume: bool | str = False

    def without_loaded(self) -> "RunSections":
        """Return the settings for a model that is restored from a checkpoint.

        ``load_from`` is removed, because the checkpoint has all weights. A run with an adapter
        keeps it: its checkpoints do not have the weights that the adapter adapts.
        """
        return self if self.adapter is not None else replace(self, load_from=None)

    @property
    def frozen(self) -> list[str]:
        """The names in ``freeze`` that are never trained."""
        return [name for name in self.freeze if name not in self.frozen_until]

    @property
    def frozen_until(self) -> dict[str, int]:
        """The names in ``freeze`` that are trained later, with their last frozen update."""
        freeze = self.freeze if isinstance(self.freeze, dict) else {}
        steps = {name: (options or {}).get("until_step") for name, options in freeze.items()}
        return {name: step for name, step in steps.items() if step is not None}

    @property
    def frozen_in_eval(self) -> list[str]:
        """The names in ``freeze`` whose modules stay in evaluation mode while they are frozen."""
        sections = self.freeze if isinstance(self.freeze, dict) else {}
        return [name for name, section in sections.items() if (section or {}).get("eval")]


# The key paths of settings that users may put at the top of a config by mistake.
PLACES = {
    **{setting.name: f"data.train.{setting.name}" for setting in fields(LoaderSection)},
    **{setting.name: f"launch.{setting.name}" for setting in fields(LaunchSection)},
    **{name: f"hooks.{name}" for name in HOOK_TYPES},
    **{
        name: f"{section}.{name}"
        for section, names in {
            "model": "net loss",
            "optimizer": "lr momentum weight_decay paramwise",
            "optim_wrapper": "accumulative_counts clip_grad dtype loss_scale loss_weight",
            "train": "max_epochs max_steps val_interval log_every_steps",
        }.items()
        for name in names.split()
    },
}
