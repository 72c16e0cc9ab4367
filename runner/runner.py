"""``Runner`` holds the parts of one run, and trains, validates and tests with them."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

import torch
from torch import nn

from ..collectives import (
    broadcast,
    distributed_available,
    get_rank,
    get_world_size,
    is_tracing,
    trace_collectives,
)
from ..loops import (
    EvalSets,
    HookList,
    LoopState,
    Phase,
    PredictionHook,
    Stateful,
    find_checkpoint,
    load_checkpoint,
    mix_seed,
    seed_rng,
)
from ..loops.evaluate import PredictLoop
from ..loops.evaluation import adapt_loop
from ..registry import (
    Config,
    config_from_dict,
    load_config,
)
from ..registry.local_paths import local_path, remote_url
from ..wrappers import LossWeight, wrap_model
from ..wrappers.features import require_optim_wrapper
from .parts import Parts, build_default_hooks, build_parts
from .pretrained.load import load_run_model
from .run_folder import (
    ConfigWriter,
    clear_results,
    locked_run_dir,
    resolve_checkpoint,
    saved_checkpoints,
)
from .sections import read_sections

if TYPE_CHECKING:
    from ..wrappers.steps.step import StepFunction
    from .remote.runs import RemoteRun

logger = logging.getLogger(__name__)


@contextmanager
def traced(on: bool) -> Iterator[None]:
    """Trace collectives if ``on`` is true or if they are traced already; every rank must enter."""
    before = is_tracing()
    trace_collectives(on or before)
    try:
        yield
    finally:
        trace_collectives(before)


class Loop(Protocol):
    """The interface that ``Runner`` requires of a loop."""

    def run(self, state: LoopState, hooks: HookList) -> Any:
        """Continue from ``state``; return it after training, or the metrics after an evaluation."""


class Runner:
    """Holds the parts of a run and runs its loops.

    With several ranks, every rank must construct a runner and call its methods inside a process
    group; see ``launch``. Only the parts that the called methods need must be given.

    Args:
        model: the user's model on its device, or a wrapped model.
        train_loop: the loop that ``train`` runs.
        optim_wrapper: the optimizer wrapper of the model's parameters.
        val_loop: the loop that ``validate`` runs. Default: the training loop's ``val_loop``.
        test_loop: the loop that ``test`` runs, as a test even if it is a ``ValLoop``.
        hooks: hooks in addition to the default hooks of a config (progress, log, checkpoint, ...),
            as a mapping of names to hooks or as a sequence. As in a config, a hook takes the place
            of the default hook of its name, and None or False removes that one:
            ``hooks={"nan_guard": None}``. In a sequence, a hook takes the place of the default
            hook of its class. ``()`` or False means no hooks at all. Checkpoints store hooks under
            their names.
        run_dir: the folder for records and checkpoints, or its URL, such as ``s3://bucket/run``
            (docs/remote.md). None writes nothing.
        seed: seed of the random number generators, the same on every rank; ranks with different
            data draw different numbers. None leaves the generators unchanged.
        train_step: a function ``(wrapper, batch, optim_wrapper)`` that trains on one batch and
            returns the values to log. It replaces the wrapper's ``train_step``; ``model`` must not
            be wrapped.
        precision: a function that returns the context for evaluations, such as
            ``partial(torch.autocast, "cuda", dtype=torch.bfloat16)``. Default: the context of an
            ``AmpOptimWrapper``, if there is one.
        loss_weight: weight of each batch's loss in evaluations; see ``OptimWrapper``. Default:
            the setting of the optimizer wrapper.

    Raises:
        RuntimeError: WORLD_SIZE is above 1 without a process group.
        TypeError: ``optim_wrapper`` is not an optimizer wrapper, for example an optimizer.
        RemoteError: ``run_dir`` is a URL that cannot be opened on this machine (a RuntimeError).

    Attributes:
        state: the state that the loops share.
    """

    def __init__(  # noqa: PLR0913
        self,
        model: nn.Module,
        train_loop: Loop | None = None,
        *,
        optim_wrapper: Any = None,
        val_loop: Loop | None = None,
        test_loop: Loop | None = None,
        hooks: Iterable[Any] | Mapping[str, Any] | Literal[False] | None = None,
        run_dir: str | os.PathLike[str] | None = None,
        seed: int | None = None,
        train_step: StepFunction | None = None,
        precision: Callable[[], AbstractContextManager[Any]] = nullcontext,
        loss_weight: Any = None,
    ) -> None:
        _require_group()
        if optim_wrapper is not None:
            require_optim_wrapper(optim_wrapper)
        named = _add_default_hooks(hooks)
        self._train_loop = train_loop
        if val_loop is None:
            val_loop = getattr(train_loop, "val_loop", None)
        self._val_loop: Loop | None = adapt_loop(val_loop, Phase.VAL)
        self._test_loop: Loop | None = adapt_loop(test_loop, Phase.TEST)
        self._owns_run_dir = False
        self._holds_run_dir = False
        self._is_traced = False
        self._hooks = HookList(named.values())
        self.state = LoopState(
            model=wrap_model(None, model, train_step=train_step),
            optim_wrapper=optim_wrapper,
            run_dir=None if run_dir is None else local_path(run_dir),
            precision=precision,
            loss_weight=None if loss_weight is None else LossWeight(loss_weight),
            stateful={f"hooks.{n}": h for n, h in named.items() if isinstance(h, Stateful)},
        )
        self._remote: RemoteRun | None = None
        if run_dir is not None and remote_url(run_dir):
            # Imported here, because most runs have no URL.
            from .remote.runs import RemoteRun

            self._remote = RemoteRun(remote_url(run_dir))
            self._remote.attach(self.state)
        if seed is not None:
            # Ranks must draw different numbers for dropout and augmentation, except for ranks
            # that hold parts of the same layers.
            group = getattr(self.state.model, "data_group", None)
            seed_rng(mix_seed(seed, get_rank(group), get_world_size(group)))

    @classmethod
    def from_config(cls, config: Config | Mapping[str, Any] | str | os.PathLike[str]) -> Runner:
        """Build a runner and all its parts from a ``Config``, a dict or a file.

        Every rank must call this. The settings ``launch`` and ``resume`` are for the command line
        and have no effect here.

        Raises:
            ConfigError: the config has mistakes; the error lists all of them.
        """
        if isinstance(config, str | os.PathLike):
            config = load_config(config)
        elif not isinstance(config, Config):
            config = config_from_dict(config)
        run = read_sections(config, get_world_size())
        with traced(run.trace_collectives):
            runner = cls.from_parts(build_parts(run), config)
        runner._is_traced = run.trace_collectives
        return runner

    @classmethod
    def from_parts(cls, parts: Parts, config: Config | None = None) -> Runner:
        """Return a runner with these parts; every rank must call this.

        Args:
            parts: the parts of a checked config.
            config: the config, which training writes into the run folder as ``config.yaml``.
        """
        hooks = parts.hooks
        if config is not None:
            hooks = {"config.yaml": ConfigWriter(config), **hooks}
        runner = cls(
            parts.model,
            parts.train_loop,
            optim_wrapper=parts.optim_wrapper,
            val_loop=parts.val_loop,
            test_loop=parts.test_loop,
            hooks=hooks,
            run_dir=parts.run_dir,
            seed=parts.seed,
            precision=parts.precision,
            loss_weight=parts.loss_weight,
        )
        if config is not None:
            runner.state.settings = config.to_dict()
        return runner

    def train(self, resume: bool | str | os.PathLike[str] = False) -> LoopState:
        """Train until the end, or until a stop is requested, and return the state.

        Every rank must call this.

        Args:
            resume: True continues from the latest checkpoint in the run folder, or starts from the
                beginning if there is none. "best", "latest" or the name of a checkpoint in the run
                folder continues from that checkpoint. A path, which is a text with a slash or a
                ``Path``, names another checkpoint, or a run folder whose latest one is used.

        Raises:
            ValueError: the runner has no training loop or no optimizer wrapper.
            CheckpointError: the checkpoint does not exist or is damaged.
            FileExistsError: ``run_dir`` holds checkpoints of another run and ``resume`` is False.
            BlockingIOError: another run uses ``run_dir``; the message names its process and host.
            RemoteError: ``run_dir`` is a URL, and the store cannot be reached, or files are missing
                there at the end (a RuntimeError).
        """
        loop = _required("train", "train_loop", self._train_loop)
        _required("train", "optim_wrapper", self.state.optim_wrapper)
        state = self.state
        with traced(self._is_traced), self.hold_run_dir():
            path: Path | None = None
            if resume:
                path = self._latest() if resume is True else self.resolve(resume, "latest")
            else:
                self._refuse_overwriting()
            for listener in self._hooks.on_run_start:
                listener(state)
            if path:
                load_checkpoint(path).restore(state)
                if get_rank() == 0:
                    logger.info("continuing from %s, step %d", path, state.step)
            self._owns_run_dir = True
            # Compare updates, not batches: if the number of ranks has changed, the loop converts
            # the number of finished batches, even if it trains nothing.
            done = state.step
            loop.run(state, self._hooks)
            if path and state.step == done and get_rank() == 0:
                end = f"max_steps is {state.max_steps}, and {state.step} are done"
                if state.max_epochs is not None:
                    end = f"max_epochs is {state.max_epochs}, and {state.epoch} are done"
                logger.info("nothing is left to train: %s; increase it to continue", end)
            for listener in self._hooks.on_run_end:
                listener(state)
        return state

    @contextmanager
    def hold_run_dir(self) -> Iterator[None]:
        """Keep other runs out of ``run_dir``; every rank must enter. ``train`` enters it itself."""
        if self._holds_run_dir or self.state.run_dir is None:
            yield
            return
        remote = nullcontext() if self._remote is None else self._remote.hold()
        with locked_run_dir(self.state.run_dir), remote:
            self._holds_run_dir = True
            try:
                yield
            finally:
                self._holds_run_dir = False

    def clear_run_dir(self) -> None:
        """Delete the results in ``run_dir``, which this runner holds; every rank must call this."""
        if get_rank() == 0:
            clear_results(self._folder())
        if self._remote is not None:
            # A resume elsewhere must not find the checkpoints of the earlier run.
            self._remote.clear()

    def validate(self, checkpoint: str | os.PathLike[str] | None = None) -> dict[str, float]:
        """Evaluate on the validation data and return the metrics; see ``test``."""
        return self._evaluate(_required("validate", "val_loop", self._val_loop), checkpoint)

    def test(self, checkpoint: str | os.PathLike[str] | None = None) -> dict[str, float]:
        """Evaluate on the test data and return the metrics; every rank must call this.

        Args:
            checkpoint: the checkpoint to restore first: "best", "latest" or the name of a
                checkpoint in the run folder, or a path; see ``train``. Of a run folder the best
                checkpoint is used, or the latest if no best one is kept. None evaluates the model
                as it is.

        Raises:
            ValueError: the runner has no test loop.
            CheckpointError: the checkpoint does not exist or is damaged.
        """
        return self._evaluate(_required("test", "test_loop", self._test_loop), checkpoint)

    def predict(
        self,
        path: str | os.PathLike[str],
        *,
        loader: Iterable[Any] | None = None,
        checkpoint: str | os.PathLike[str] | None = None,
    ) -> int:
        """Write the outputs of ``test_step`` to a file, one row per sample, in the data's order.

        Every rank must call this; rank 0 writes the file. Predictions use the same weights as
        evaluations, for instance the averages of an ``EMAHook``. Memory does not grow with the data
        set.

        Args:
            path: the new file; its suffix ``.jsonl``, ``.parquet`` or ``.npz`` determines the
                format.
            loader: the data, in natural order; default: the loader of the test loop. With several
                ranks it must be a loader of ``build_loader`` or a plain ``DataLoader`` over a
                map-style data set.
            checkpoint: as for ``test``.

        Returns:
            The number of samples.

        Raises:
            CheckpointError: the checkpoint does not exist or is damaged.
            FileExistsError: ``path`` exists.
            ImportError: the format needs a package that is not installed.
            TypeError: no output of ``test_step`` has one value per sample.
            ValueError: the format is unknown, the loader does not keep the order, or the test has
                several sets.
        """
        if loader is None:
            loader = _get_loader(_required("predict", "a loader or test_loop", self._test_loop))
        loop = PredictLoop(loader)
        loop.divide(self.state)
        hook = PredictionHook(path, loop.dataloader)
        self._evaluate(loop, checkpoint, HookList([*self._hooks, hook]))
        return broadcast(hook.count)

    def _evaluate(
        self, loop: Loop, which: str | os.PathLike[str] | None, hooks: HookList | None = None
    ) -> dict[str, float]:
        hooks = self._hooks if hooks is None else hooks
        with traced(self._is_traced):
            for listener in hooks.on_run_start:
                listener(self.state)
            if which is not None:
                checkpoint = load_checkpoint(self.resolve(which))
                if self.state.optim_wrapper is not None:
                    checkpoint.restore(self.state)
                else:
                    checkpoint.load_model(self.state.model)
                    checkpoint.load_states(self.state)
            metrics: dict[str, float] = loop.run(self.state, hooks)
            for listener in hooks.on_run_end:
                listener(self.state)
        return metrics

    def _refuse_overwriting(self) -> None:
        """Raise if ``run_dir`` holds checkpoints of another run; every rank must call this."""
        folder = self.state.run_dir
        if self._owns_run_dir or folder is None or self.state.step:
            return
        # Use rank 0's list: another rank might already see a checkpoint of this run.
        names = broadcast([path.name for path in saved_checkpoints(folder)])
        if names:
            raise FileExistsError(
                f"{folder} already holds {len(names)} checkpoint(s), the last {names[-1]}: "
                "continue that run with train(resume=True), or choose another run_dir"
            )

    def resolve(self, which: str | os.PathLike[str], of_other_run: str = "") -> Path:
        """Return the path of a checkpoint, as ``resolve_checkpoint``; every rank must call this."""
        folder = self._folder() if which in ("best", "latest") else self.state.run_dir
        if self._remote is not None and isinstance(which, str) and Path(which).name == which:
            folder = self._remote.fetch(which)
        return resolve_checkpoint(folder, which, of_other_run=of_other_run)

    def find(self, which: Literal["latest", "best"]) -> Path | None:
        """Return a checkpoint of the run, as ``find_checkpoint``; every rank must call this."""
        folder = self._folder() if self._remote is None else self._remote.fetch(which)
        return find_checkpoint(folder, which)

    def _latest(self) -> Path | None:
        path = self.find("latest")
        if path is None:
            logger.warning("%s has no checkpoint: starting from the beginning", self._folder())
        return path

    def _folder(self) -> Path:
        if self.state.run_dir is None:
            raise ValueError("run_dir must be set to find a checkpoint, got None")
        return self.state.run_dir


def load_model(
    run_dir: str | os.PathLike[str],
    which: str | os.PathLike[str] = "",
    *,
    device: torch.device | str = "cpu",
) -> nn.Module:
    """Return the model of a run with its evaluated weights, without a wrapper and in eval mode.

    The model is built from ``config.yaml`` in the run folder, on a single device. Its weights are
    those that were evaluated at the checkpoint, for instance the averages of an ``EMAHook``. If the
    run has an adapter, its base weights are loaded as in training, and the adapter is merged
    into them. Files are read with ``weights_only=True``. Inside a process group every rank must
    call this.

    Args:
        run_dir: the run's folder, or its URL.
        which: "best", "latest" or the name of a checkpoint in this folder, or a path or URL.
            Default: the best one if there is one, otherwise the latest.
        device: the device of the returned model.

    Raises:
        CheckpointError: the checkpoint does not exist, is damaged, or does not fit the model.
        FileNotFoundError: the folder has no ``config.yaml``, for instance because the ``Runner``
            was built from objects; the message shows how to load the model.
        ConfigError: the model cannot be built. Other parts of the run are not needed.
    """
    model, adapter = load_run_model(run_dir, which)
    if adapter is not None:
        model = adapter.merge()
    return model.eval().to(device)


T = TypeVar("T")


def _required(method: str, name: str, component: T | None) -> T:
    if component is None:
        raise ValueError(f"Runner.{method} requires {name}, but the Runner was built without it")
    return component


def _get_loader(loop: Any) -> Iterable[Any]:
    if isinstance(loop, EvalSets):
        names = ", ".join(loop.loops)
        raise ValueError(
            f"Runner.predict requires the loader of one set, but the test has several: {names}; "
            f"pass loader=test_loop.loops[{next(iter(loop.loops))!r}].dataloader"
        )
    loader: Iterable[Any] = loop.dataloader
    return loader


def _require_group() -> None:
    """Raise if several ranks were started without a process group: each would train alone."""
    started = int(os.environ.get("WORLD_SIZE") or 1)
    if started > 1 and not distributed_available():
        raise RuntimeError(
            f"WORLD_SIZE={started} requires a process group, but none is initialized: run this "
            "inside stepwrap.runner.launch(main), or call torch.distributed.init_process_group()"
        )


def _add_default_hooks(hooks: Any) -> dict[str, Any]:
    """Return the hooks by name: the default ones, except for those replaced or removed."""
    if hooks is False:
        return {}
    if isinstance(hooks, Mapping):
        defaults = {name: hook for name, hook in build_default_hooks().items() if name not in hooks}
        chosen = {name: hook for name, hook in hooks.items() if hook not in (None, False)}
        return {**defaults, **chosen}
    if hooks is not None and (isinstance(hooks, str) or not isinstance(hooks, Iterable)):
        raise TypeError(
            "hooks must be a list of hooks, a mapping of names to hooks, or False for none, got a "
            f"{type(hooks).__name__}; write hooks=[...] for a single hook"
        )
    named = _name_hooks(() if hooks is None else hooks)
    if hooks is not None and not named:
        return {}
    added = tuple(named.values())
    defaults = {
        name: hook
        for name, hook in build_default_hooks().items()
        if not any(isinstance(other, type(hook)) for other in added)
    }
    return {**defaults, **named}


def _name_hooks(hooks: Iterable[Any]) -> dict[str, Any]:
    """Name hooks by their classes; further hooks of the same class get a number."""
    named: dict[str, Any] = {}
    for hook in hooks:
        name = type(hook).__name__
        same = sum(type(other) is type(hook) for other in named.values())
        named[f"{name}.{same + 1}" if same else name] = hook
    return named
