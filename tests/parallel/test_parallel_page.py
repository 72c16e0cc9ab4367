"""The page on pools and queues: its programs run and print what it says."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import stepwrap.parallel

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/pools.md").read_text()
PROGRAMS = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
SAYS = {
    "Pool(2)": "[0, 3, 6, 9, 12]\nTrue\n",
    "CtxPool(2": r"\['0 on cuda:\d', '1 on cuda:\d', '2 on cuda:\d', '3 on cuda:\d'\]\n",
    "SimpleQueue()": "2 4\n",
}


@pytest.mark.parametrize("call", SAYS)
def test_programs_run(call: str, tmp_path: Path) -> None:
    (program,) = [code for code in PROGRAMS if call in code]
    (tmp_path / "program.py").write_text(program)
    done = subprocess.run(
        [sys.executable, "program.py"],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    says = SAYS[call]
    assert done.stdout == says or re.fullmatch(says, done.stdout)


def test_names_of_the_page_are_there() -> None:
    table = PAGE.split("## When to use what")[1].split("\n## ")[0]
    first = {
        name for cell in re.findall(r"\| (.*) \|\n", table) for name in re.findall(r"`(\w+)`", cell)
    }
    ours = first - {"DataLoader", "num_workers"}
    assert {"Pool", "P2PPool", "CtxPool", "ThreadPool", "Process", "SimpleQueue"} <= ours
    for name in ours:
        assert hasattr(stepwrap.parallel, name), name
