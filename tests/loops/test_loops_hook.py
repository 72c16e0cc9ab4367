"""Valid and invalid hooks."""

import pickle
import re
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from loop_parts import make_loader, make_state

from stepwrap.loops import EpochTrainLoop, Hook, HookList, IterTrainLoop, LoopState, ValLoop
from stepwrap.loops.hook import EVENTS


@pytest.mark.parametrize("name", ["on_batch_ended", "before_train", "after_train_epoch"])
def test_an_unknown_event_is_refused(name: str) -> None:
    with pytest.raises(TypeError, match=rf"Mine\.{name} would never be called.*on_save_point"):
        type("Mine", (Hook,), {name: lambda self, state: None})


def test_the_error_says_how_to_name_a_helper() -> None:
    with pytest.raises(TypeError, match="reserved for events.* _on_saved"):
        type("Mine", (Hook,), {"on_saved": staticmethod(print)})


def test_other_methods_and_attributes_are_welcome() -> None:
    mine = type(
        "Mine",
        (Hook,),
        {
            "only": lambda self: None,
            "_on_saved": print,
            # Not methods.
            "on_device": True,
            "after_steps": property(lambda self: 3),
            "on_update": lambda self, state: None,
        },
    )
    assert len(HookList([mine()]).on_update) == 1


class Frozen(Hook):
    """Put the model into eval mode at the start of each pass."""

    def __init__(self) -> None:
        self.modes: list[bool] = []

    def on_epoch_start(self, state: LoopState) -> None:
        assert state.model.training
        state.model.module.eval()

    def on_batch_end(self, state: LoopState, batch: Any, logs: Any) -> None:
        self.modes.append(state.model.module.training)


@pytest.mark.parametrize(
    "loop",
    [
        partial(EpochTrainLoop, max_epochs=2),
        partial(IterTrainLoop, max_steps=4, val_interval=1),
    ],
)
def test_eval_mode_that_a_hook_sets_at_the_start_of_a_pass_lasts(loop: Any) -> None:
    hook = Frozen()
    loop(make_loader(4), val_loop=ValLoop(make_loader(4))).run(make_state(), HookList([hook]))
    assert hook.modes == [False] * 4


@pytest.mark.parametrize("duplicate", [deepcopy, lambda logs: pickle.loads(pickle.dumps(logs))])
def test_a_copy_of_the_logs_is_separate(duplicate: Any) -> None:
    state = make_state()
    state.logs.append((1, {"loss": 2.0}))
    logs = duplicate(state.logs)
    logs.append((2, {"loss": 4.0}))
    assert logs.means() == {"loss": 3.0}
    assert state.logs.means() == {"loss": 2.0}


def test_a_deep_copy_of_a_state_trains_apart() -> None:
    state = make_state()
    twin = deepcopy(state)
    EpochTrainLoop(make_loader(4), max_epochs=1, log_every_steps=3).run(twin, HookList())
    assert twin.logs.means()
    assert not state.logs.means()


class Plain:
    """A hook that is not a subclass of Hook."""

    def __init__(self, name: str, heard: list[str]) -> None:
        self.name, self.heard = name, heard

    def on_update(self, state: LoopState) -> None:
        self.heard.append(f"{self.name} {state.step}")


def test_any_object_with_events_listens() -> None:
    heard: list[str] = []
    early = Plain("early", heard)
    early.order = 1  # type: ignore[attr-defined]
    hooks = HookList([Plain("late", heard), early])
    EpochTrainLoop(make_loader(4), max_epochs=1).run(make_state(), hooks)
    assert heard == ["early 1", "late 1", "early 2", "late 2"]


def test_an_object_without_events_is_refused() -> None:
    with pytest.raises(TypeError, match="Path.* without any; .*on_run_start"):
        HookList([Path()])
    almost = type("Almost", (), {"on_update": print, "on_epoch_ended": print})
    with pytest.raises(TypeError, match=r"Almost\.on_epoch_ended would never.*mean on_epoch_end"):
        HookList([almost()])


def test_the_docs_list_every_event() -> None:
    text = (Path(__file__).parents[2] / "docs" / "extending.md").read_text()
    table = "".join(line for line in text.splitlines(keepends=True) if line.startswith("| `"))
    assert set(re.findall(r"`(\w+)\(", table)) == set(EVENTS)
