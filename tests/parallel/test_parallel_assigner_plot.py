"""The picture of a placement."""

import sys
from pathlib import Path

import pytest
from placed import Placed

from stepwrap.parallel import ModelAssigner


def assigner(**settings: object) -> ModelAssigner:
    return ModelAssigner(
        {"actor": Placed(), "critic": Placed(), "a_name_that_is_far_too_long": Placed()},
        {("actor", "critic"): 999, ("critic", "a_name_that_is_far_too_long"): 1},
        max_mem_ratio=1,
        free_mib={"cuda:0": 30, "cpu": 100},
        sizes_mib={"actor": 10, "critic": 20, "a_name_that_is_far_too_long": 80},
        **settings,
    )


def test_it_says_who_sits_where_and_what_crosses(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    figure = assigner().plot(tmp_path / "placement.png")
    assert (tmp_path / "placement.png").read_bytes().startswith(b"\x89PNG")
    where, crossing = figure.axes
    texts = [text.get_text() for text in where.texts]
    assert texts[:4] == ["cuda:0", "30 MiB of 30 MiB", "actor · 10 MiB", "critic · 20 MiB"]
    assert texts[4:] == ["cpu", "80 MiB of 100 MiB", "a_name_that_i… · 80 MiB"]
    assert sorted(text.get_text() for text in crossing.texts) == ["100%", "<1%"]
    assert "<1% of all connections" in crossing.get_title()


def test_nothing_to_draw_but_one_model_and_many_connections() -> None:
    pytest.importorskip("matplotlib")
    alone = ModelAssigner([Placed()], {}, free_mib={"cpu": 0}, sizes_mib=[0]).plot()
    assert [text.get_text() for text in alone.axes[1].texts] == []
    links = {(i, j): i + j for i in range(20) for j in range(i)}
    free = {"cuda:0": 50, "cuda:1": 50}
    many = ModelAssigner([Placed()] * 20, links, free_mib=free, sizes_mib=[1] * 20, iterations=1)
    assert many.plot().axes[0].get_title() == "who sits where, the strongest 120 of 190"


def test_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install 'stepwrap\[plots\]'"):
        assigner().plot()
