"""The examples of processes that call each other."""

import re
from pathlib import Path

import pytest
from programs import run

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.slow
def test_the_parameter_server_under_torchrun(tmp_path: Path) -> None:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    out = run(*torchrun, str(EXAMPLES / "parameter_server.py"), cwd=tmp_path)
    (line,) = [line for line in out.splitlines() if "test accuracy" in line]
    assert float(line.split()[-1]) >= 0.95


@pytest.mark.slow
def test_evaluators_follow_the_trainer_of_the_model_server(tmp_path: Path) -> None:
    out = run(str(EXAMPLES / "model_server.py"), cwd=tmp_path)
    seen: dict[str, list[tuple[int, float]]] = {"validator": [], "tester": []}
    for line in out.splitlines():
        name, version, accuracy = re.fullmatch(
            r"(\w+): version (\d), accuracy (\S+)", line
        ).groups()
        seen[name].append((int(version), float(accuracy)))
    for results in seen.values():
        versions = [version for version, _ in results]
        assert versions == sorted(set(versions))
        assert versions[0] >= 1
        assert versions[-1] == 8
        assert results[-1][1] > 0.9
