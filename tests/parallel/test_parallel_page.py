"""The page on pools and queues: its programs run and print the shown output."""

import re
from pathlib import Path

import pytest
from marks import slow
from warm import run_script

import stepwrap.parallel

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/pools.md").read_text()
PROGRAMS = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
SAYS = {
    "Pool(2)": "[0, 3, 6, 9, 12]\nTrue\n",
    "CtxPool(2": r"\['0 on cuda:\d', '1 on cuda:\d', '2 on cuda:\d', '3 on cuda:\d'\]\n",
    "SimpleQueue()": "2 4\n",
    "set_forkserver_preload": "[tensor(10.), tensor(10.)]\n",
}


@pytest.mark.parametrize("call", [*list(SAYS)[:1], *slow(*list(SAYS)[1:])])
def test_programs_run(call: str, tmp_path: Path) -> None:
    (program,) = [code for code in PROGRAMS if call in code]
    printed = run_script(program, tmp_path)
    says = SAYS[call]
    assert printed == says or re.fullmatch(says, printed)


def test_names_of_the_page_are_there() -> None:
    table = PAGE.split("## Which class to use")[1].split("\n## ")[0]
    page_names = {
        name for cell in re.findall(r"\| (.*) \|\n", table) for name in re.findall(r"`(\w+)`", cell)
    }
    ours = page_names - {"DataLoader", "num_workers"}
    assert {"Pool", "P2PPool", "CtxPool", "ThreadPool", "Process", "SimpleQueue"} <= ours
    for name in ours:
        assert hasattr(stepwrap.parallel, name), name
