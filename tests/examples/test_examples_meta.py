"""The example that builds a model on the meta device runs as its first lines say."""

from pathlib import Path

import pytest
from programs import run

EXAMPLE = Path(__file__).parents[2] / "examples" / "meta_device_fsdp.py"


@pytest.mark.slow
def test_meta_device_fsdp(tmp_path: Path) -> None:
    out = run(str(EXAMPLE), cwd=tmp_path)
    lines = [line for line in out.splitlines() if line.startswith("rank ")]
    assert [line.split()[1] for line in lines] == ["0:", "1:"]
    assert all(": 50% of the parameters" in line for line in lines)
    assert all(float(line.split()[-1]) > 0.93 for line in lines)


def test_the_example_stays_short() -> None:
    assert len(EXAMPLE.read_text().splitlines()) < 80
