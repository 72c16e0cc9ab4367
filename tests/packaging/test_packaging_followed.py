"""Follow pages as a reader does: write the files, run the commands, compare the output."""

import re
from pathlib import Path

import pytest
import yaml
from pages import page
from source_tree import ROOT
from warm import ended

import stepwrap.collectives
import stepwrap.diagnostics
import stepwrap.loops
import stepwrap.parallel
import stepwrap.registry
import stepwrap.rpc
import stepwrap.runner
import stepwrap.wrappers

PROGRAMS = {
    "stepwrap": ("-m", "stepwrap.runner"),
    "torchrun": ("-m", "torch.distributed.run"),
    "python": (),
}
DOORS = [
    stepwrap.collectives,
    stepwrap.diagnostics,
    stepwrap.loops,
    stepwrap.parallel,
    stepwrap.registry,
    stepwrap.rpc,
    stepwrap.runner,
    stepwrap.wrappers,
]


def fenced(text: str) -> list[tuple[str, str]]:
    """Return the language and the content of each code block, in order."""
    return re.findall(r"^```(\w*)\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)


def run_line(line: str, folder: Path) -> str:
    """Run a command of a page, which must exit with 0 or the code in its comment."""
    command, _, code = line.partition("    # exit code ")
    program, *words = command.partition(" #")[0].split()
    done = ended(*PROGRAMS[program], *words, cwd=folder, timeout=400)
    assert done.returncode == int(code or 0), f"{line}\n{done.stdout}{done.stderr}"
    return done.stdout + done.stderr


def follow(text: str, folder: Path) -> str:
    """Follow a page's blocks, and return the output of its last commands.

    A block with a file's name in its first line is a file, a block without a language has
    commands, and a block "text" after it has lines of their output, with any numbers.
    """
    output = ""
    for language, content in fenced(text):
        name = re.match(r"# ([\w.]+)\n", content)
        if name:
            (folder / name[1]).write_text(content)
        elif language == "":
            output = "".join(run_line(line, folder) for line in content.splitlines())
        elif language == "python":
            done = ended("-c", content, cwd=folder)
            assert done.returncode == 0, done.stderr
        elif language == "text" and output:
            plain = " ".join(output.split())
            for line in content.splitlines():
                shown = re.sub(r"\d+", r"\\d+", re.escape(" ".join(line.split())))
                assert re.search(shown, plain), f"{line}\nis not in\n{output}"
    return output


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "index",
        "tour",
        "tutorial_config",
        "tutorial_custom_step",
        "tutorial_lightning",
        "data",
        "metrics",
        "processes",
        "recipes",
        "failures",
        "reliability",
    ],
)
def test_a_page_can_be_followed(name: str, tmp_path: Path) -> None:
    follow(page(name), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("title", re.findall(r"^### (.*)$", page("errors"), flags=re.MULTILINE))
def test_an_error_of_the_catalogue_occurs(title: str, tmp_path: Path) -> None:
    entry = page("errors").partition(f"\n### {title}\n")[2].partition("\n### ")[0]
    assert follow(entry.partition("\n## ")[0], tmp_path)


@pytest.mark.nightly
def test_the_tutorial_on_configs_trains_the_same_on_two_processes(tmp_path: Path) -> None:
    text = page("tutorial_config")
    follow(text.partition("## 4. ")[0], tmp_path)
    two = "train digits.yaml --nproc 2 data.train.batch_size=16 --run-dir runs/two"
    assert f"stepwrap {two}\n" in text
    out = run_line(f"stepwrap {two}", tmp_path)
    alone, two_ranks = (
        (tmp_path / "runs" / run / "metrics.jsonl").read_text().splitlines()[-1]
        for run in ("digits", "two")
    )
    assert yaml.safe_load(alone)["accuracy"] == pytest.approx(
        yaml.safe_load(two_ranks)["accuracy"], abs=0.01
    ), out


@pytest.mark.slow
def test_the_examples_for_users_of_hugging_face_run(tmp_path: Path) -> None:
    text = page("migrate")
    for language, content in fenced(page("models")):
        if language in ("python", "yaml") and (name := re.match(r"# ([\w.]+)\n", content)):
            (tmp_path / name[1]).write_text(content)
    (config,) = [
        content for language, content in fenced(text) if language == "yaml" and "reviews" in content
    ]
    (tmp_path / "trainer.yaml").write_text(config)
    run_line("python make_reviews.py", tmp_path)
    run_line("stepwrap train trainer.yaml --dry-run", tmp_path)
    (program,) = [
        content for language, content in fenced(text) if language == "python" and "optim" in content
    ]
    (tmp_path / "accelerate_loop.py").write_text(program)
    run_line("python accelerate_loop.py", tmp_path)


def test_the_page_on_errors_lists_every_class() -> None:
    listed = set(re.findall(r"^\| `(\w+)` \| `stepwrap\.", page("errors"), flags=re.MULTILINE))
    offered = {
        name
        for door in DOORS
        for name in door.__all__
        if isinstance(getattr(door, name), type) and issubclass(getattr(door, name), Exception)
    }
    assert listed == offered


def test_the_page_on_errors_shows_real_messages() -> None:
    for entry in page("errors").split("\n### ")[1:]:
        languages = [language for language, _ in fenced(entry.partition("\n## ")[0])]
        assert languages.index("") < languages.index("text"), entry


def test_the_blocks_of_every_page_can_be_read() -> None:
    wrong = []
    for file in sorted((ROOT / "docs").glob("*.md")):
        for language, content in fenced(file.read_text()):
            try:
                if language == "python":
                    compile(content, file.name, "exec")
                elif language == "yaml":
                    yaml.safe_load(content)
            except (SyntaxError, yaml.YAMLError) as error:
                wrong.append(f"{file.name}: {error}")
    assert not wrong, wrong
