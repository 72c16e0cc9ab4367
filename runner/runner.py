"""One run: its parts, what it remembers, and the verbs train, validate and test."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

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
    HookList,
    LoopState,
    PredictionHook,
    Stateful,
    TestLoop,
    find_checkpoint,
    load_checkpoint,
    mix_seed,
    seed_rng,
)
from ..registry import (
    MODELS,
    Config,
    ConfigError,
    build_tree,
    config_from_dict,
    load_config,
    model_problems,
)
from ..wrappers import LossWeight, wrap_model
from .failure import as_mistakes_in, building
from .parts import build_parts, default_hooks
from .run_folder import ConfigWriter, held, resolve_checkpoint, saved_checkpoints
from .sections import read_sections

if TYPE_CHECKING:
    from ..wrappers.steps.step import StepFunction

logger = logging.getLogger(__name__)


@contextmanager
def traced(on: bool) -> Iterator[None]:
    """Trace collectives when `on` or when they were traced before; every rank must enter."""
    before = is_tracing()
    trace_collectives(on or before)
    try:
        yield
    finally:
        trace_collectives(before)


class Loop(Protocol):
    """What `Runner` needs of a loop."""

    def run(self, state: LoopState, hooks: HookList) -> Any:
        """Go on from where `state` is; returns it after training, the metrics else."""


class Runner:
    """Puts the parts of a run together and runs its loops.

    With several ranks every rank must construct it and call its methods, inside a process
    group: see `launch`. Parts that only another verb needs may be left out.

    Args:
        model: The user's model, on the device where it is to run, or a wrapped one.
        train_loop: What `train` runs.
        optim_wrapper: The optimizer wrapper over the model's parameters.
        val_loop: What `validate` runs; default: the training loop's own.
        test_loop: What `test` runs.
        hooks: Listeners; as a mapping, with the names under which checkpoints keep them. Default:
            the default hooks of a config (progress, log, checkpoint, ...); () for none.
        run_dir: Folder for records and checkpoints; None writes nothing.
        seed: Starts this rank's own random streams; None leaves them as they are.
        train_step: A function(wrapper, batch, optim_wrapper) that trains on one batch and returns
            what to log, in place of the wrapper's own `train_step`; for a bare model.
        precision: Makes the context that evaluations run in, such as `partial(torch.autocast,
            "cuda", dtype=torch.bfloat16)`; default: that of an `AmpOptimWrapper`, if there is one.
        loss_weight: What losses are means over in evaluations, as for `OptimWrapper`; default: that
            of the optimizer wrapper.

    Attributes:
        state: What the loops remember.
    """

    def __init__(  # noqa: PLR0913
        self,
        model: nn.Module,
        train_loop: Loop | None = None,
        *,
        optim_wrapper: Any = None,
        val_loop: Loop | None = None,
        test_loop: Loop | None = None,
        hooks: Iterable[Any] | Mapping[str, Any] | None = None,
        run_dir: str | os.PathLike[str] | None = None,
        seed: int | None = None,
        train_step: StepFunction | None = None,
        precision: Callable[[], AbstractContextManager[Any]] = nullcontext,
        loss_weight: Any = None,
    ) -> None:
        _require_group()
        named = default_hooks() if hooks is None else _named(hooks)
        self._train_loop = train_loop
        self._val_loop = val_loop or getattr(train_loop, "val_loop", None)
        self._test_loop = test_loop
        self._owns_run_dir = False
        self._holds_run_dir = False
        self._is_traced = False
        self._hooks = HookList(named.values())
        self.state = LoopState(
            model=wrap_model(None, model, train_step=train_step),
            optim_wrapper=optim_wrapper,
            run_dir=None if run_dir is None else Path(run_dir),
            precision=precision,
            loss_weight=None if loss_weight is None else LossWeight(loss_weight),
            stateful={f"hooks.{n}": h for n, h in named.items() if isinstance(h, Stateful)},
        )
        if seed is not None:
            # The weights are the same on all ranks; dropout and augmentation must not be.
            # Ranks that hold parts of the same layers must draw the same.
            group = getattr(self.state.model, "data_group", None)
            seed_rng(mix_seed(seed, get_rank(group), get_world_size(group)))

    @classmethod
    def from_config(cls, config: Config | Mapping[str, Any] | str | os.PathLike[str]) -> Runner:
        """Build a runner, and all that its settings name, from a `Config`, a dict or a file.

        `launch` and `resume` in it are the command line's and have no effect here.

        Raises:
            ConfigError: Everything that is wrong with the settings.
        """
        if isinstance(config, str | os.PathLike):
            config = load_config(config)
        elif not isinstance(config, Config):
            config = config_from_dict(config)
        run = read_sections(config, get_world_size())
        with traced(run.trace_collectives):
            parts = build_parts(run)
            parts["hooks"] = {"config.yaml": ConfigWriter(config), **parts["hooks"]}
            runner = cls(**parts)
        runner._is_traced = run.trace_collectives
        return runner

    def train(self, resume: bool | str | os.PathLike[str] = False) -> LoopState:
        """Train to the end, or to an orderly stop; returns what the loop remembers.

        Args:
            resume: True continues from the latest checkpoint in the run folder (without one the
                run starts from the beginning); a path from that checkpoint, or from the latest
                in that run folder; "best" or "latest" from that one of this run.

        Raises:
            CheckpointError: There is no such checkpoint, or it is damaged.
            FileExistsError: Not to resume, and `run_dir` holds checkpoints of another run.
            BlockingIOError: Another run is using `run_dir`; says which process on which host.
        """
        loop = _given("train", "train_loop", self._train_loop)
        _given("train", "optim_wrapper", self.state.optim_wrapper)
        state = self.state
        with traced(self._is_traced), self.hold_run_dir():
            path: Path | None = None
            if resume:
                path = self._latest() if resume is True else self._resolve(str(resume))
            else:
                self._refuse_overwriting()
            for listener in self._hooks.on_run_start:
                listener(state)
            if path:
                load_checkpoint(path).restore(state)
                if get_rank() == 0:
                    logger.info("continuing from %s, step %d", path, state.step)
            self._owns_run_dir = True
            # In updates: another number of ranks may make them of other numbers of batches.
            done = state.step
            loop.run(state, self._hooks)
            if path and state.step == done and get_rank() == 0:
                end = f"max_steps is {state.max_steps}, and {state.step} are done"
                if state.max_epochs is not None:
                    end = f"max_epochs is {state.max_epochs}, and {state.epoch} are done"
                end = f"the run has come to its end ({end}); a higher number trains on"
                logger.info("nothing was left to train: %s", end)
            for listener in self._hooks.on_run_end:
                listener(state)
        return state

    @contextmanager
    def hold_run_dir(self) -> Iterator[None]:
        """Keep other runs out of `run_dir`, as `train` does by itself; every rank must enter."""
        if self._holds_run_dir or self.state.run_dir is None:
            yield
            return
        with held(self.state.run_dir):
            self._holds_run_dir = True
            try:
                yield
            finally:
                self._holds_run_dir = False

    def validate(self, checkpoint: str | os.PathLike[str] | None = None) -> dict[str, float]:
        """Evaluate on the validation data; `checkpoint` is as for `test`."""
        return self._evaluate(_given("validate", "val_loop", self._val_loop), checkpoint)

    def test(self, checkpoint: str | os.PathLike[str] | None = None) -> dict[str, float]:
        """Evaluate on the test data and return the metrics.

        Args:
            checkpoint: What to put the run back to before: a path, or "best" or "latest" of
                the run folder; None takes the model as it is.

        Raises:
            CheckpointError: There is no such checkpoint, or it is damaged.
        """
        return self._evaluate(_given("test", "test_loop", self._test_loop), checkpoint)

    def predict(
        self,
        path: str | os.PathLike[str],
        *,
        loader: Iterable[Any] | None = None,
        checkpoint: str | os.PathLike[str] | None = None,
    ) -> int:
        """Write what `test_step` returns to a file, one row per sample, in the data set's order.

        Every rank must call this; rank 0 writes the file. The weights are those of an evaluation:
        averages if an `EMAHook` has it use them. Memory does not grow with the data set.

        Args:
            path: The new file. Its suffix is the format: `.jsonl`, `.parquet` or `.npz`.
            loader: The data; default: that of the test loop. Several ranks need a loader of
                `build_loader`, in natural order.
            checkpoint: As for `test`.

        Returns:
            The number of samples.

        Raises:
            CheckpointError: There is no such checkpoint, or it is damaged.
            FileExistsError: `path` exists.
            TypeError: `test_step` returns nothing that has one value per sample.
            ValueError: The format is unknown, or the loader does not keep the order.
        """
        if loader is None:
            loader = _given("predict", "loader or test_loop", self._test_loop).dataloader  # type: ignore[attr-defined]
        hook = PredictionHook(path, loader)
        self._evaluate(TestLoop(loader), checkpoint, HookList([*self._hooks, hook]))
        return broadcast(hook.count)

    def _evaluate(
        self, loop: Loop, which: str | os.PathLike[str] | None, hooks: HookList | None = None
    ) -> dict[str, float]:
        hooks = self._hooks if hooks is None else hooks
        with traced(self._is_traced):
            for listener in hooks.on_run_start:
                listener(self.state)
            if which is not None:
                checkpoint = load_checkpoint(self._resolve(which))
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
        """Refuse to start over where another run has saved; every rank must call this."""
        folder = self.state.run_dir
        if self._owns_run_dir or folder is None or self.state.step:
            return
        # Rank 0 looks for all: another rank might see what rank 0 has saved since.
        there = broadcast([path.name for path in saved_checkpoints(folder)])
        if there:
            raise FileExistsError(
                f"{folder} already holds {len(there)} checkpoint(s), the last {there[-1]}: "
                "continue that run with train(resume=True), or give another run_dir"
            )

    def _resolve(self, which: str | os.PathLike[str]) -> Path:
        folder = self._folder() if which in ("best", "latest") else Path()
        return resolve_checkpoint(folder, str(which))

    def _latest(self) -> Path | None:
        folder = self._folder()
        path = find_checkpoint(folder)
        if path is None:
            logger.warning("there is no checkpoint in %s: starting from the beginning", folder)
        return path

    def _folder(self) -> Path:
        if self.state.run_dir is None:
            raise ValueError("checkpoints are looked for in run_dir, and it is None")
        return self.state.run_dir


def load_model(
    run_dir: str | os.PathLike[str],
    which: str | os.PathLike[str] = "",
    *,
    device: torch.device | str = "cpu",
) -> nn.Module:
    """Return the model of a run as it was evaluated, bare and in eval mode.

    It is built from the run folder's `config.yaml`, on one device whatever the run was wrapped
    in. Its weights are those that the evaluation at the checkpoint used: the averages where an
    `EMAHook` had it use them. Files are read with `weights_only=True`. Inside a process group
    every rank must call this.

    Args:
        run_dir: The run's folder.
        which: "best" or "latest", or the path of a checkpoint; by default the best, else the
            latest.
        device: Where the model is to be.

    Raises:
        CheckpointError: There is no such checkpoint, it is damaged, or it is of another model.
        FileNotFoundError: The folder has no `config.yaml`, for instance because the `Runner` was
            built from objects; the text shows how to load the model.
        ConfigError: The model cannot be built. Other parts of the run are not needed.
    """
    folder = Path(run_dir)
    path = resolve_checkpoint(folder, str(which))
    settings = folder / "config.yaml"
    if not settings.is_file():
        raise FileNotFoundError(
            f"{folder} has no config.yaml to build the model from; a Runner that was built from "
            "objects writes none. Build the model as for that Runner, and load its weights:\n"
            "  from stepwrap.loops import load_checkpoint\n"
            "  model = ...  # the model that the Runner was given\n"
            f"  load_checkpoint({str(path)!r}).load_model(model, evaluated=True)"
        )
    config = load_config(settings)
    if problems := model_problems(config):
        raise ConfigError(problems)
    with as_mistakes_in(config), building("model"):
        model: nn.Module = build_tree(config.to_dict()["model"], MODELS)
    load_checkpoint(path).load_model(model, evaluated=True)
    return model.eval().to(device)


T = TypeVar("T")


def _given(verb: str, name: str, part: T | None) -> T:
    if part is None:
        raise ValueError(f"Runner.{verb} needs {name}, and it was given none")
    return part


def _require_group() -> None:
    """Refuse to train the same thing several times over, as ranks without a group would."""
    started = int(os.environ.get("WORLD_SIZE") or 1)
    if started > 1 and not distributed_available():
        raise RuntimeError(
            f"WORLD_SIZE is {started}, but there is no process group: run this inside "
            "stepwrap.runner.launch(main), or call torch.distributed.init_process_group() first"
        )


def _named(hooks: Iterable[Any] | Mapping[str, Any]) -> dict[str, Any]:
    """Return the hooks by name; the second of a class gets a number."""
    if isinstance(hooks, Mapping):
        return dict(hooks)
    named: dict[str, Any] = {}
    for hook in hooks:
        name = type(hook).__name__
        same = sum(type(other) is type(hook) for other in named.values())
        named[f"{name}.{same + 1}" if same else name] = hook
    return named
