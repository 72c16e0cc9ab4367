"""The example notebook and the cells of the page on notebooks, executed by a real kernel."""

import json
from pathlib import Path
from typing import Any

import pytest
from pages import blocks, page
from programs import run

NOTEBOOK = Path(__file__).parents[2] / "examples" / "notebook.ipynb"
# Run in a separate process, because a kernel's client leaves event loops and sockets open.
EXECUTE = """
import json, sys
import nbclient, nbformat
cells = [nbformat.v4.new_code_cell(source) for source in json.load(sys.stdin)]
notebook = nbformat.v4.new_notebook(cells=cells)
nbclient.NotebookClient(notebook, timeout=150).execute()
print(json.dumps([cell.outputs for cell in notebook.cells]))
"""
HOOK = """
import torch
from torch import nn
from stepwrap.loops import ProgressHook
from stepwrap.loops.state import LoopState

state = LoopState(model=nn.Linear(1, 1), max_steps=500)
hook = ProgressHook(refresh_s=1e-6)
hook.on_train_start(state)
for state.step in range(1, 501):
    hook.on_update(state)
    hook.on_log(state, {"loss": 1 / state.step})
print("a line of the user")
hook.on_train_end(state)
"""


def outputs(cells: list[str], folder: Path) -> list[list[dict[str, Any]]]:
    """Return the outputs of each cell, without other packages' output to stderr."""
    printed = run("-c", EXECUTE, cwd=folder, input=json.dumps(cells))
    every = json.loads(printed.splitlines()[-1])
    return [[output for output in cell if output.get("name") != "stderr"] for cell in every]


def read_lines(output: dict[str, Any]) -> list[str]:
    """Return the lines of a display, and check that its HTML has the same text."""
    assert output["output_type"] == "display_data"
    text = output["data"]["text/plain"]
    assert all(line in output["data"]["text/html"] for line in text.splitlines()[:-1])
    return text.splitlines()


def test_progress_is_one_display_that_is_updated_in_place(tmp_path: Path) -> None:
    ((display, streams),) = outputs([HOOK], tmp_path)
    assert streams["text"] == "a line of the user\n"
    *lines, final_line = read_lines(display)
    assert len(lines) == 19
    assert lines[0] == "epoch 1 step 482/500 loss 0.002075"
    assert lines[-1] == "epoch 1 step 500/500 loss 0.002"
    assert final_line.startswith("done: step 500/500 in 0:00:")
    assert len(str(display)) < 5000


@pytest.mark.slow
def test_the_example_notebook(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    every = json.loads(NOTEBOOK.read_text())["cells"]
    cells = ["".join(cell["source"]) for cell in every if cell["cell_type"] == "code"]
    assert not any(cell.get("outputs") for cell in every)
    _, trained, plotted, predicted, launched = outputs(cells, tmp_path)
    for (display, result), steps in ((trained, 320), (launched, 160)):
        *lines, final_line = read_lines(display)
        assert lines[-1].startswith(f"val epoch 5/5 step {steps}/{steps} accuracy 0.9")
        assert f"step {steps}/{steps}" in final_line
        assert result["output_type"] == "execute_result"
    assert "image/png" in plotted[-1]["data"]
    assert predicted[0]["data"]["text/plain"] == "[1, 0]"
    results = eval(launched[1]["data"]["text/plain"])
    assert results[0] == results[1]
    assert [run_folder.name for run_folder in (tmp_path / "runs").iterdir()] == ["circle"]


FAILS = """
lock = __import__("threading").Lock()
def fail():
    raise ValueError("no luck")
for fn in (fail, lambda: lock):
    try:
        launch(fn, nproc=2)
    except Exception as error:
        print(f"{type(error).__name__}: {error}")
"""


@pytest.mark.slow
def test_the_cells_of_the_page_on_notebooks(tmp_path: Path) -> None:
    cells = [*blocks(page("notebooks"), "python"), "accuracies", FAILS]
    in_process, launched, _, listed, failed = outputs(cells, tmp_path)
    # The training and the test each have a display.
    for training, test, result in (in_process, launched):
        assert read_lines(training)[-2].startswith("val epoch 3/3 step 57/57 accuracy 0.")
        assert read_lines(test)[0].startswith("test epoch 3/3 step 57/57 accuracy 0.")
        assert eval(result["data"]["text/plain"])["accuracy"] > 0.8
    assert len(eval(listed[0]["data"]["text/plain"])) == 3
    text = "".join(output["text"] for output in failed)
    assert "LaunchError: ValueError: no luck (rank " in text
    assert "in fail\n" in text
    assert "TypeError: launch pickles fn" in text
