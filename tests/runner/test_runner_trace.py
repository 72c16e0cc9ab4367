"""`trace_collectives` in a config: errors name ranks and lines; weights do not change."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from ranks import run_ranks
from runner_parts import Command, assert_identical, final_weights, points_config, write_run

from stepwrap.collectives import get_world_size, recent_collectives, trace_collectives
from stepwrap.registry import Config, load_config
from stepwrap.runner import Runner
from stepwrap.runner.jobs import train_on_rank
from stepwrap.runner.sections import read_sections

ASTRAY = """
import torch
from stepwrap.collectives import all_reduce, get_rank, mean_scalars
from stepwrap.loops import Hook


class Astray(Hook):
    def on_update(self, state):
        if state.step == 4 and get_rank() == 1:
            all_reduce(torch.ones(1))
        else:
            mean_scalars({"step": state.step})
"""


def make_config(folder: Path, run_dir: str, traced: str) -> Config:
    words = (f"trace_collectives={traced}", "train.max_epochs=2")
    return points_config(folder, f"run_dir={folder / run_dir}", *words)


@pytest.mark.slow
def test_a_rank_in_another_call_is_named_with_its_line(
    start: Callable[..., Command], tmp_path: Path
) -> None:
    """The two calls differ in size, which is noticed only with tracing."""
    (tmp_path / "astray.py").write_text(ASTRAY)
    command = start(
        *("train", "points.yaml", "--nproc=2", "--run-dir", "run", "trace_collectives=true"),
        "hooks.astray={type: astray.Astray}",
    )
    code, _, err = command.finish()
    assert code == 1
    assert re.search(r"CollectiveError: .*ranks \[0, 1\] must .*same call", err)
    assert re.search(r"rank 0 .*mean_scalars \(astray\.py:12\)", err)
    assert re.search(r"rank 1 .*all_reduce \(astray\.py:10\)", err)
    assert "Traceback" not in err
    assert command.wait_gone() == []


def train_twice(folder: Path) -> list[int]:
    """Train with and without tracing; return the recorded calls before, between and after."""
    counts = [recorded()]
    for name, traced in (("on", "true"), ("off", "false")):
        config = make_config(folder, name, traced)
        train_on_rank(config, read_sections(config, get_world_size()))
        counts.append(recorded())
    return counts


def recorded() -> int:
    return recent_collectives()[-1].number if recent_collectives() else 0


def test_tracing_ends_with_the_run_and_changes_no_weights(tmp_path: Path) -> None:
    write_run(tmp_path)
    for before, between, after in run_ranks(train_twice, 2, tmp_path):
        assert before + 5 < between == after
    assert_identical(final_weights(tmp_path / "on"), final_weights(tmp_path / "off"))


def verbs_of_a_runner(folder: Path) -> list[bool]:
    """Return for each verb whether it was traced."""
    runner = Runner.from_config(make_config(folder, "py", "true"))
    traced = []
    for verb in (runner.train, runner.validate, runner.test):
        before = recorded()
        verb()
        traced.append(recorded() > before)
    before = recorded()
    Runner(runner.state.model, test_loop=runner._test_loop).test()
    return [*traced, recorded() > before]


def test_a_runner_from_a_config_traces_only_its_own_verbs(tmp_path: Path) -> None:
    write_run(tmp_path)
    assert run_ranks(verbs_of_a_runner, 2, tmp_path) == [[True, True, True, False]] * 2


def train_while_traced(folder: Path) -> bool:
    config = make_config(folder, "r", "false")
    before = recorded()
    trace_collectives(True)
    try:
        train_on_rank(config, read_sections(config, get_world_size()))
    finally:
        trace_collectives(False)
    return recorded() > before


def test_false_does_not_switch_tracing_off(tmp_path: Path) -> None:
    write_run(tmp_path)
    assert run_ranks(train_while_traced, 2, tmp_path) == [True, True]


def test_the_key_is_true_or_false(run: Path) -> None:
    with pytest.raises(Exception, match="trace_collectives: .*true or false, .*'yes!'"):
        Runner.from_config(load_config(run / "points.yaml", ["trace_collectives=yes!"]))
