"""The validation and test loops."""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from copy import copy
from itertools import chain
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torchmetrics import Metric

from ..collectives import all_gather_object, distributed_available
from ..registry import LOOPS
from .checkpoints.together import naming_missing_ranks
from .checkpoints.weights import user_model
from .data.loaders import first_batch_apart, length_of, size_before_padding
from .data.rounds import EvenRounds, Rounds, raise_everywhere
from .hook import HookList
from .metrics import (
    AnyMetric,
    ProcessMetric,
    compute_metrics,
    directions_of,
    empty_copies,
    feed_metric,
    merge_metrics,
)
from .notes import note_failure
from .rng import preserved_rng
from .signals import NoSignals, StopWatch
from .state import LoopState, Phase

logger = logging.getLogger(__name__)


class _EvalLoop:
    """One pass over the data under inference mode; each sample counts once.

    The model's training flags and the random streams are restored afterwards, so
    evaluations do not affect training. Steps run in the precision of the training if
    the state has an `AmpOptimWrapper`, otherwise in its `precision`, which is the
    model's own unless it was set.

    Args:
        dataloader: This rank's batches; ranks may have different numbers of
            them, including none. If steps must be called by every rank (the model's
            `collective_eval`), a rank that has run out continues with a batch that is not
            counted.
        metrics: torchmetrics objects, or those of a `BaseMetric`, by name, in the
            same order on every rank. If a step returns a mapping, each metric gets
            the values named by its arguments; any other result is passed as
            `update(outputs, batch)`, or `add(outputs, batch)`.
    """

    phase: ClassVar[Phase]
    step_name: ClassVar[str]

    def __init__(
        self, dataloader: Iterable[Any], metrics: Mapping[str, AnyMetric] | None = None
    ) -> None:
        self.dataloader = dataloader
        self.metrics = dict(metrics or {})
        for metric in self.metrics.values():
            if isinstance(metric, ProcessMetric):
                metric.tell_of(dataloader)
        self._polled_batches: float | None = None

    def run(self, state: LoopState, hooks: HookList) -> dict[str, float]:
        """Evaluate `state.model` and return the metrics; every rank must call this."""
        try:
            return self.evaluate(state, hooks, NoSignals())
        except BaseException as error:
            announce_failure(state, hooks, error)
            raise

    def evaluate(self, state: LoopState, hooks: HookList, watch: StopWatch) -> dict[str, float]:
        """Evaluate inside another loop; empty if `watch` stops it early.

        Every rank must call this.

        Raises:
            TypeError: The model lacks the step.
            ValueError: There is no batch on any rank, or a metric's input is missing.
            RuntimeError: Steps must be called by every rank, and the loader, a metric or a hook
                of another rank has raised an error, which is named.
        """
        if not hasattr(state.model, self.step_name):
            raise TypeError(
                f"{type(state.model).__name__} has no {self.step_name}; wrap the model, as in "
                "SingleDevice(model)"
            )
        outer, state.phase = state.phase, self.phase
        try:
            with naming_missing_ranks(state), preserved_rng(device_of(state.model)):
                for announce in hooks.on_eval_start:
                    announce(state)
                # Running statistics differ by rank; only those of the first are saved.
                sync = getattr(state.model, "sync_buffers", None)
                if sync is not None:
                    sync()
                with evaluation_mode(state.model), torch.inference_mode():
                    results = self._measure(state, hooks, watch)
                for announce_end in hooks.on_eval_end:
                    announce_end(state, results)
        except Exception as error:
            note_failure(error, state, self.dataloader, self.step_name)
            raise
        finally:
            state.phase = outer
        return results

    def try_batch(self, state: LoopState) -> None:
        """Run the first batch, to find mistakes before training; every rank must call this.

        It leaves no trace: random streams, buffers and plain attributes of the model's modules,
        metrics and loader are afterwards as they were, and hooks hear nothing of it. Nothing is
        tried where that cannot be known: with lazy parameters, an `evaluate` of a subclass, or
        a loader that is neither a sequence nor a plain DataLoader of a map-style data set.
        """
        batches = first_batch_apart(self.dataloader)
        tensors = chain(state.model.parameters(), state.model.buffers())
        is_own = type(self).evaluate is _EvalLoop.evaluate
        if batches is None or not is_own or any(map(is_lazy, tensors)):
            return
        trial, device = copy(self), device_of(state.model)
        trial.dataloader, trial.metrics = batches, empty_copies(self.metrics)
        trial._polled_batches = 0.0
        outer, state.phase = state.phase, self.phase
        failure: Exception | None = None
        try:
            # What a model keeps of inference mode could not be trained with.
            with preserved_rng(device), _unchanged(state.model), torch.no_grad():
                trial._place_metrics(device)
                trial._pass(state, HookList(), NoSignals())
        except Exception as error:
            note_failure(error, state, self.dataloader, self.step_name)
            failure = error
            # Where steps need all ranks, the others have heard of it, or wait in the step.
            if getattr(state.model, "collective_eval", False):
                raise
        finally:
            state.phase = outer
        raise_everywhere(failure)

    def _place_metrics(self, device: torch.device) -> None:
        for metric in self.metrics.values():
            if isinstance(metric, Metric):
                metric.to(device)
            metric.reset()

    def _measure(self, state: LoopState, hooks: HookList, watch: StopWatch) -> dict[str, float]:
        self._place_metrics(device_of(state.model))
        if not self._pass(state, hooks, watch):
            return {}
        # Ranks that share one model have seen the same samples, and count them once.
        group = getattr(state.model, "data_group", None)
        merge_metrics(self.metrics, group)
        results = compute_metrics(self.metrics, size_before_padding(self.dataloader), group)
        if self.phase is Phase.VAL:
            state.metrics, state.evaluated_at = results, state.step
            state.higher_is_better = directions_of(self.metrics)
        return dict(results)

    def _pass(self, state: LoopState, hooks: HookList, watch: StopWatch) -> bool:
        """Run all batches; False when a request to stop has cut them short."""
        together = distributed_available() and getattr(state.model, "collective_eval", False)
        # A test may follow a training that was stopped: only what comes now counts.
        polled = 0.0 if state.stop_reason else math.inf if together else self._batches_to_poll()
        step = getattr(state.model, self.step_name)
        precision = getattr(state.optim_wrapper, "precision_context", state.precision)
        rounds = self._rounds(state, together)
        count = 0
        for batch, counts in rounds.batches():
            if counts:
                with rounds.kept():
                    for announce in hooks.on_eval_batch_start:
                        announce(state, batch)
            if not rounds.agree():
                break
            with precision():
                outputs = step(batch)
            if counts:
                with rounds.kept():
                    self._take_in(batch, outputs)
                    for announce_end in hooks.on_eval_batch_end:
                        announce_end(state, batch, outputs)
            count += 1
            if count <= polled:
                watch.poll(state)
                if state.stop_reason:
                    return False
        if not count and not distributed_available():
            raise ValueError(f"the {self.phase.value} loader has no batches")
        return True

    def _take_in(self, batch: Any, outputs: Any) -> None:
        for name, metric in self.metrics.items():
            feed_metric(name, metric, outputs, batch)

    def _rounds(self, state: LoopState, together: bool) -> Rounds:
        if not together:
            return Rounds(self.dataloader)
        group = getattr(state.model, "data_group", None)
        return EvenRounds(self.dataloader, group, f"{self.phase.value} loader")

    def _batches_to_poll(self) -> float:
        """Return how many batches every rank has: beyond them ranks cannot agree on anything."""
        if self._polled_batches is None:
            lengths = all_gather_object(length_of(self.dataloader))
            if not any(length is None or length for length in lengths):
                raise ValueError(f"the {self.phase.value} loader has no batches on any rank")
            self._polled_batches = math.inf if len(lengths) == 1 else min(n or 0 for n in lengths)
        return self._polled_batches


@LOOPS.register_module()
class ValLoop(_EvalLoop):
    """Validates: `val_step` on each batch, each sample once; see `run`."""

    phase = Phase.VAL
    step_name = "val_step"


@LOOPS.register_module()
class TestLoop(_EvalLoop):
    """Tests: `test_step` on each batch, each sample once; see `run`."""

    # Keeps pytest from collecting it.
    __test__ = False
    phase = Phase.TEST
    step_name = "test_step"


def device_of(model: nn.Module) -> torch.device:
    """Return where the first parameter of `model` is; the CPU where there is none."""
    return next((p.device for p in model.parameters()), torch.device("cpu"))


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put `model` into eval mode, and every submodule's own flag back afterwards."""
    flags = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in flags:
            module.training = training


@contextmanager
def _unchanged(model: nn.Module) -> Iterator[None]:
    """Evaluate `model` inside; its buffers and its modules' plain attributes stay as they are."""
    modules = list(user_model(model).modules())
    buffers = [
        (module._buffers, name, buffer, buffer.detach().clone())
        for module in modules
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    plain = [(vars(module), name, value) for module in modules for name, value in _plain_in(module)]
    # Compiled for a batch of the validation first, it would be compiled otherwise for training.
    compiles = "torch._dynamo" in sys.modules
    try:
        with (
            evaluation_mode(model),
            torch.compiler.set_stance("force_eager") if compiles else nullcontext(),
        ):
            yield
    finally:
        for attributes, name, value in plain:
            attributes[name] = value
        with torch.no_grad():
            for owner, name, buffer, value in buffers:
                owner[name] = buffer.copy_(value)


def _plain_in(module: nn.Module) -> list[tuple[str, Any]]:
    kinds = (bool, int, float, str, type(None))
    return [(name, value) for name, value in vars(module).items() if type(value) in kinds]


def announce_failure(state: LoopState, hooks: HookList, error: BaseException) -> None:
    """Tell the hooks of an error; one that fails itself keeps no other from hearing of it."""
    for announce in hooks.on_exception:
        try:
            announce(state, error)
        except Exception:
            logger.exception("a hook failed while handling %s", type(error).__name__)
