"""The picture of a placement."""

import re
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


def test_the_plot_shows_placements_and_crossing_connections(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    figure = assigner().plot(tmp_path / "placement.png")
    assert (tmp_path / "placement.png").read_bytes().startswith(b"\x89PNG")
    (axes,) = figure.axes
    models = [label.get_text() for label in axes.get_yticklabels()]
    assert models == ["actor · 10 MiB", "critic · 20 MiB", "a_name_that_i… · 80 MiB"]
    (devices,) = axes.child_axes
    labels = {tick.label2.get_text(): tick.get_loc() for tick in devices.yaxis.get_major_ticks()}
    assert labels == {"cuda:0: 30 MiB of 30 MiB": 0.5, "cpu: 80 MiB of 100 MiB": 2.0}
    frames = [(frame.get_xy(), frame.get_width()) for frame in axes.patches]
    assert frames == [((-0.5, -0.5), 2), ((1.5, 1.5), 1)]
    assert re.search(r"<1% .*connections cross \(red\)$", axes.get_title())
    crossing, staying = (image.get_array() for image in axes.images)
    assert [tuple(position) for position in zip(*crossing.nonzero(), strict=True)] == [
        (1, 2),
        (2, 1),
    ]
    assert [tuple(position) for position in zip(*staying.nonzero(), strict=True)] == [
        (0, 1),
        (1, 0),
    ]


def test_nothing_to_draw_but_one_model_and_many_connections() -> None:
    pytest.importorskip("matplotlib")
    alone = ModelAssigner([Placed()], {}, free_mib={"cpu": 0}, sizes_mib=[0]).plot()
    assert [image.get_array().count() for image in alone.axes[0].images] == [0, 0]
    links = {(i, j): i + j for i in range(20) for j in range(i)}
    free = {"cuda:0": 50, "cuda:1": 50}
    assigner = ModelAssigner(
        [Placed()] * 20, links, free_mib=free, sizes_mib=[1] * 20, iterations=1
    )
    shown = [image.get_array().count() for image in assigner.plot().axes[0].images]
    assert sum(shown) == 2 * len(links)


def test_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install 'stepwrap\[plots\]'"):
        assigner().plot()
