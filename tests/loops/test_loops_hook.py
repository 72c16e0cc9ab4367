"""What a hook may be."""

import re
from pathlib import Path

import pytest

from stepwrap.loops import Hook, HookList
from stepwrap.loops.hook import EVENTS


@pytest.mark.parametrize("name", ["on_batch_ended", "before_train", "after_train_epoch"])
def test_a_name_that_is_no_event_is_refused(name: str) -> None:
    with pytest.raises(TypeError, match=rf"Mine\.{name} would never be called.*on_save_point"):
        type("Mine", (Hook,), {name: lambda self, state: None})


def test_other_methods_are_welcome() -> None:
    mine = type("Mine", (Hook,), {"only": lambda self: None, "on_update": lambda self, state: None})
    assert len(HookList([mine()]).on_update) == 1


def test_the_docs_list_every_event() -> None:
    text = (Path(__file__).parents[2] / "docs" / "extending.md").read_text()
    table = "".join(line for line in text.splitlines(keepends=True) if line.startswith("| `"))
    assert set(re.findall(r"`(\w+)\(", table)) == set(EVENTS)
