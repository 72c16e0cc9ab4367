"""Verify programs: decide when to compare one with an eager step, and act if it differs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .capture import NotCompilableError, first_line
from .reference import changed_values, copied, largest_difference, random_states, set_random_states
from .trace import StepTensors

# Minimum number of steps between the last verification and an additional one.
_BETWEEN = 100
# The allowed difference is this many times larger after the first two steps.
_SLACK = 16.0


class StepMismatchError(RuntimeError):
    """Raised if a compiled step differs from the eager step, and earlier steps may differ too."""


class Verifier:
    """Compare steps 1, 2, 10, 100, 1,000, ... of a program with eager steps on copies.

    A step that differs is undone.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, device: torch.device) -> None:
        self._model, self._optimizer, self._device = model, optimizer, device
        self._next, self._last = 1, 0

    def is_due(self, step: int) -> bool:
        """Return whether to compare this step of the program."""
        return step >= self._next

    def expect_change(self, step: int) -> None:
        """Compare the next step too, unless the last comparison was less than 100 steps ago."""
        if step - self._last >= _BETWEEN:
            self._next = step + 1

    def run(
        self,
        step: int,
        program: Callable[[], list[Tensor]],
        actual: Callable[[list[Tensor]], Any],
        usual: Callable[..., Any],
    ) -> list[Tensor]:
        """Run a program, compare it with an eager step and return its outputs.

        Args:
            step: number of this step of the program, from 1.
            program: runs the program.
            actual: takes the program's outputs and returns all values that it has computed.
            usual: computes the same values by an eager step on copies of its first argument; takes
                ``dtype`` and ``nudge`` of ``EagerStep``.

        Raises:
            NotCompilableError: the program fails, or one of its first two steps differs.
            StepMismatchError: a later step differs.
        """
        try:
            origin = copied(self._model, self._optimizer)
        except Exception as error:
            reason = f"the model cannot be copied to compare steps: {first_line(error)}"
            raise NotCompilableError(reason) from error
        start, before = changed_values(StepTensors(*origin)), random_states(self._device)
        ends: list[list[Tensor]] = []

        def eager(**options: Any) -> Any:
            set_random_states(self._device, before)
            values = usual(origin, **options)
            ends.append(random_states(self._device))
            return values

        try:
            outputs = program()
            after = random_states(self._device)
            with _restored(self._model):
                # A later mismatch ends the training, so only a clear difference counts.
                limits = self._autocast_eps(), 1.0 if step <= 2 else _SLACK
                wrong = largest_difference(actual(outputs), start, eager, *limits)
        except Exception as error:
            self._undo(origin, before)
            reason = f"running or comparing the compiled step fails: {first_line(error)}"
            raise NotCompilableError(reason) from error
        except BaseException:
            # For example Ctrl-C: the step has not been counted yet.
            self._undo(origin, before)
            raise
        if wrong is None and not all(map(torch.equal, after, ends[0])):
            wrong = "random numbers"
        if wrong is not None:
            self._undo(origin, before)
            self._refuse(wrong, step)
        set_random_states(self._device, after)
        # The next power of ten, except that step 2 follows step 1.
        self._last, self._next = step, 2 if step < 2 else int(10 ** len(str(step)))
        return outputs

    def _autocast_eps(self) -> float:
        kind = self._device.type
        on = torch.is_autocast_enabled(kind)
        return torch.finfo(torch.get_autocast_dtype(kind)).eps if on else 0.0

    def _refuse(self, name: str, step: int) -> None:
        if step <= 2:
            raise NotCompilableError(f"the compiled step and the usual step differ in {name}")
        raise StepMismatchError(
            f"the compiled training step differs from the usual one in {name} at its step {step}: "
            f"they were last equal at step {self._last}, and the steps since then may be wrong. "
            "Resume from an earlier checkpoint, without compile: step"
        )

    @torch.no_grad()
    def _undo(self, origin: Any, draws: Sequence[Tensor]) -> None:
        current, original = StepTensors(self._model, self._optimizer), StepTensors(*origin)
        pairs = [*zip(current.parameters, original.parameters, strict=True)]
        pairs += zip(current.buffers, original.buffers, strict=True)
        states = zip(current.states(), original.states(), strict=True)
        pairs += [(mine[name], before[name]) for (_, name, mine), (_, _, before) in states]
        for tensor, before in pairs:
            tensor.copy_(before)
            if tensor.grad is None or before.grad is None:
                tensor.grad = before.grad
            else:
                tensor.grad.copy_(before.grad)
        set_random_states(self._device, draws)


@contextmanager
def _restored(model: nn.Module) -> Iterator[None]:
    """Restore the model's tensors and gradients at the end of the context.

    A step on a copy may change the model: the copy shares its functions with the model, and their
    closures may refer to the model.
    """
    tensors = [*model.parameters(), *model.buffers()]
    before = [
        (
            tensor,
            tensor.detach().clone(),
            tensor.grad,
            None if tensor.grad is None else tensor.grad.clone(),
        )
        for tensor in tensors
    ]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, value, grad, numbers in before:
                tensor.copy_(value)
                tensor.grad = grad
                if grad is not None and numbers is not None:
                    grad.copy_(numbers)
