"""Several data sets by name, as one validation or test."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from typing import Any

from ..primitives.notes import add_note
from ..wrappers.steps.preprocess import get_device
from .evaluate import TestLoop, ValLoop
from .evaluation import Evaluation, Poll
from .hook import HookList
from .metrics.directions import find_directions
from .metrics.evaluation import AnyMetric
from .rng import preserved_rng
from .state import LoopState, Phase


class EvalSets(Evaluation):
    """Several data sets by name, evaluated one after another as one validation or test.

    The names of the results begin with the set's name: "noisy/accuracy". Hooks see one evaluation:
    ``on_eval_start`` before the first set, and ``on_eval_end`` with all results after the last one.
    In between, ``state.eval_set`` is the name of the current set. If an evaluation is interrupted,
    none of its results count.

    Args:
        loops: by name, a ``ValLoop`` for each set, or a ``TestLoop`` for each set.

    Raises:
        ValueError: ``loops`` is empty, or has loops of both kinds.
    """

    def __init__(self, loops: Mapping[str, ValLoop | TestLoop]) -> None:
        phases = {loop.phase for loop in loops.values()}
        if len(phases) != 1:
            kinds = ", ".join(type(loop).__name__ for loop in loops.values()) or "none"
            raise ValueError(f"EvalSets requires loops of one kind, such as ValLoop, got {kinds}")
        self.loops = dict(loops)
        self.phase: Phase = phases.pop()

    @property
    def metrics(self) -> dict[str, AnyMetric]:
        """The metrics of all sets, such as "noisy/accuracy"."""
        return {
            f"{name}/{key}": metric
            for name, loop in self.loops.items()
            for key, metric in loop.metrics.items()
        }

    def evaluate(self, state: LoopState, hooks: HookList, poll: Poll) -> dict[str, float]:
        """Evaluate inside another loop, like ``ValLoop.evaluate``; every rank must call this."""
        outer, state.phase = state.phase, self.phase
        try:
            with preserved_rng(get_device(state.model)):
                hooks.emit("on_eval_start", state)
                inner = hooks.without("on_eval_start", "on_eval_end")
                results = self._measure(state, inner, poll)
                hooks.emit("on_eval_end", state, results)
        finally:
            state.phase = outer
        return results

    def adapt_to(self, phase: Phase) -> Any:
        """Return these sets, or a copy of them that calls the step of ``phase``."""
        if self.phase is phase:
            return self
        other = copy(self)
        other.loops = {name: loop.adapt_to(phase) for name, loop in self.loops.items()}
        other.phase = phase
        return other

    def try_batch(self, state: LoopState) -> None:
        """Run the first batch of each set, like ``ValLoop.try_batch``; every rank must call."""
        for name, loop in self.loops.items():
            with _name_set(state, name):
                loop.try_batch(state)

    def _measure(self, state: LoopState, hooks: HookList, poll: Poll) -> dict[str, float]:
        results: dict[str, float] = {}
        was_stopped = bool(state.stop_reason)
        for name, loop in self.loops.items():
            with _name_set(state, name):
                set_results = loop.evaluate(state, hooks, poll)
            if not set_results and state.stop_reason and not was_stopped:
                return {}
            results |= {f"{name}/{key}": value for key, value in set_results.items()}
        if self.phase is Phase.VAL:
            state.metrics, state.evaluated_at = dict(results), state.step
            state.higher_is_better = find_directions(self.metrics)
        return results


@contextmanager
def _name_set(state: LoopState, name: str) -> Iterator[None]:
    """Set ``state.eval_set``, and undo the changes that the set's loop makes to other attributes.

    The loop stores its metrics in the state as if its set were the whole validation.
    """
    before = state.metrics, state.evaluated_at, state.higher_is_better
    state.eval_set = name
    try:
        yield
    except Exception as error:
        add_note(error, f"in the set {name!r}")
        raise
    finally:
        state.eval_set = ""
        state.metrics, state.evaluated_at, state.higher_is_better = before
