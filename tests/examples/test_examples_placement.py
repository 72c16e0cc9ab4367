"""The example of placing an agent's models runs as its first lines say."""

from pathlib import Path

import pytest
from programs import run

EXAMPLE = Path(__file__).parents[2] / "examples" / "place_actor_critic.py"


@pytest.mark.slow
def test_place_actor_critic(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    out = run(str(EXAMPLE), "placement.png", cwd=tmp_path)
    heading, *devices, crossing = out.splitlines()
    assert heading.split() == ["device", "size", "allowed", "computes", "should", "models"]
    assert crossing.endswith("of the connections cross")
    placed = {line.split()[0]: line for line in devices}
    models = [name.strip(",") for line in devices for name in line.split()[7:]]
    models = [name for name in models if name != "-"]
    assert len(models) == len(set(models)) == 8
    for name in ("actor", "critic1", "critic2"):
        # A target takes all weights of its model every step, so it sits with it.
        assert any(f" {name}" in line and f"target_{name}" in line for line in placed.values())
    assert (tmp_path / "placement.png").stat().st_size > 10_000


def test_it_stays_short() -> None:
    assert sum(bool(line.strip()) for line in EXAMPLE.read_text().splitlines()) <= 60
