"""Valid and invalid hooks."""

import re
from pathlib import Path

import pytest
from loop_parts import make_loader, make_state

from stepwrap.loops import EpochTrainLoop, Hook, HookList, LoopState
from stepwrap.loops.hook import EVENTS


@pytest.mark.parametrize("name", ["on_batch_ended", "before_train", "after_train_epoch"])
def test_an_unknown_event_is_refused(name: str) -> None:
    with pytest.raises(TypeError, match=rf"Mine\.{name} would never be called.*on_save_point"):
        type("Mine", (Hook,), {name: lambda self, state: None})


def test_other_methods_are_welcome() -> None:
    mine = type("Mine", (Hook,), {"only": lambda self: None, "on_update": lambda self, state: None})
    assert len(HookList([mine()]).on_update) == 1


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
    with pytest.raises(TypeError, match="Path.* without any; the events are on_run_st"):
        HookList([Path()])
    almost = type("Almost", (), {"on_update": print, "on_epoch_ended": print})
    with pytest.raises(TypeError, match=r"Almost\.on_epoch_ended would never.*mean on_epoch_end"):
        HookList([almost()])


def test_the_docs_list_every_event() -> None:
    text = (Path(__file__).parents[2] / "docs" / "extending.md").read_text()
    table = "".join(line for line in text.splitlines(keepends=True) if line.startswith("| `"))
    assert set(re.findall(r"`(\w+)\(", table)) == set(EVENTS)
