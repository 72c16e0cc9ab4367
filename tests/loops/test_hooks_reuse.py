"""A hook with a state belongs to one run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from loop_parts import Value, make_loader, make_state

from stepwrap.loops import (
    CheckpointHook,
    EarlyStopHook,
    EMAHook,
    EpochTrainLoop,
    Hook,
    HookList,
    LoopState,
    MeanLoss,
    SWAHook,
    ValLoop,
    load_checkpoint,
    save_checkpoint,
)


class Counter(Value):
    """A user's hook with a state."""

    def on_update(self, state: LoopState) -> None:
        self.value += 1


def train(hook: Any, state: LoopState | None = None) -> LoopState:
    state = make_state() if state is None else state
    loop = EpochTrainLoop(
        make_loader(), max_epochs=2, val_loop=ValLoop(make_loader(), {"loss": MeanLoss()})
    )
    return loop.run(state, HookList([hook]))


@pytest.mark.parametrize(
    "make",
    [
        EMAHook,
        lambda: SWAHook(from_epoch=1),
        lambda: CheckpointHook(keep_best="loss"),
        lambda: EarlyStopHook("loss", patience=9),
        Counter,
    ],
)
def test_another_run_needs_new_hooks(make: Callable[[], Any]) -> None:
    hook = make()
    train(hook)
    with pytest.raises(ValueError, match=f"new {type(hook).__name__}"):
        train(hook)
    train(make())


def test_the_same_run_may_continue() -> None:
    hook, state = Counter(), make_state()
    train(hook, state)
    train(hook, state)
    assert hook.value == state.step


def test_a_restored_hook_belongs_to_the_resumed_run(tmp_path: Path) -> None:
    hook, state = Counter(), make_state()
    state.stateful["counter"] = hook
    train(hook, state)
    path = save_checkpoint(tmp_path, state)
    resumed = make_state()
    resumed.stateful["counter"] = hook
    load_checkpoint(path).restore(resumed)
    train(hook, resumed)


def test_hooks_without_a_state_may_be_shared() -> None:
    class Listener(Hook):
        def on_update(self, state: LoopState) -> None:
            pass

    hook = Listener()
    train(hook)
    train(hook)


def test_an_average_does_not_evaluate_another_model() -> None:
    hook = EMAHook()
    train(hook)
    with pytest.raises(ValueError, match="another model"):
        ValLoop(make_loader(), {"loss": MeanLoss()}).run(make_state(), HookList([hook]))
