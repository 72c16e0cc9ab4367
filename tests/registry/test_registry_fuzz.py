"""Config files and overrides damaged at random: only a ConfigError may come of it."""

import random
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

import pytest
from marks import slow

from stepwrap.registry import Config, ConfigError, format_config, load_config, name_problems

SHIPPED = [
    path.read_text().replace("_base_: digits_single.yaml", "_base_: digits_single")
    for path in sorted(map(Path, files("stepwrap.configs").iterdir()))  # type: ignore[arg-type]
    if path.suffix == ".yaml"
]
PIECES = [
    *('"": {_base_: x}', "_base_: a.yaml", "_base_: [digits_single]", "_base_:", "_delete_: true"),
    *("_delete_: 1", "<<: *a", "&a", "*a", "a: &a {b: 1}", "<<: {_base_: x}", "? [a]", "!!set {a}"),
    *("- ", "{", "}", "[", "]", '"', "'", ":", ": ", "|", ">", "#", "\t", "\x00", "\ufeff", "%"),
    *("${a}", "${model}", "${.seed}", "${oc.env:HOME}", "???", "1: 2", "1.5: 2", "null: 1", "~: 1"),
    *("name: ${name}", "imports: 3", "imports: [3, a.py]", "- - - 1", "a.b: {c: 1}", '"\\ud800"'),
    *(
        "model: 3",
        "seed: 1e400",
        ".nan",
        "0b_",
        "2020-01-01",
        "é",
        "\u2028",
        "yes: no",
        "---",
        "...",
    ),
]
VALUES = ["1", "{}", "[]", "true", "null", "{_delete_: true}", "{a: {b: 1}}", "[1, {a: 2}]", "x"]


def damaged(text: str, chance: random.Random) -> str:
    """Return a config with lines and characters dropped, repeated, moved and put in."""
    lines = text.splitlines()
    for _ in range(chance.randint(1, 2)):
        at, other = chance.randrange(len(lines)), chance.randrange(len(lines))
        line, to = lines[at], chance.randint(0, len(lines[at]))
        piece = chance.choice(PIECES)
        lines[at] = chance.choice(
            [
                lines[other],
                line[:to] + piece + line[to:],
                line[:to] + line[to + 1 :],
                line[:to],
                " " * chance.randint(0, 6) + line.lstrip(),
                f"{line}\n{' ' * (len(line) - len(line.lstrip()))}{piece}",
                f"{line.partition(': ')[0]}: {piece}",
                f"{line.partition(': ')[0]}: {chance.choice(VALUES)}",
                line.replace("{", f"{{{piece}, "),
                f"{line}\n{chance.choice(chance.choice(SHIPPED).splitlines())}",
            ]
        )
    return "\n".join(lines)


def paths(values: object, at: str = "") -> Iterator[str]:
    pairs = values.items() if isinstance(values, dict) else enumerate(values)  # type: ignore[call-overload]
    for key, one in pairs:
        yield f"{at}{key}"
        if isinstance(one, dict | list):
            yield from paths(one, f"{at}{key}.")


def override(config: Config, chance: random.Random) -> str:
    """Return an override of something that the config has, or of something near to it."""
    path = chance.choice([*paths(config.to_dict())])
    end = chance.choice(["", "", ".a", "._delete_", "._base_", ".0", ".", ".1.b"])
    return f"{path}{end}={chance.choice(VALUES)}"


def check(config: Config, folder: Path) -> None:
    """The config prints as a file that has the same settings, with and without origins."""
    assert all(problem.what for problem in name_problems(config))
    for origins in (False, True):
        printed = folder / "printed.yaml"
        printed.write_text(format_config(config, origins=origins), encoding="utf-8")
        assert load_config(printed).to_dict() == config.to_dict()


def fuzz(numbers: range, folder: Path) -> int:
    """Return how many of so many damaged configs could still be read."""
    read = 0
    for number in numbers:
        chance = random.Random(number)
        path = folder / "a.yaml"
        path.write_bytes(damaged(chance.choice(SHIPPED), chance).encode(errors="surrogatepass"))
        try:
            config = load_config(path)
            check(config, folder)
            read += 1
            check(load_config(path, [override(config, chance)]), folder)
        except ConfigError:
            continue
        except Exception as error:
            raise AssertionError(f"config {number}: {error!r}") from error
    return read


@pytest.mark.parametrize("numbers", [range(300), *slow(range(300, 3000))], ids=str)
def test_any_damage_is_a_config_error_or_none(numbers: range, tmp_path: Path) -> None:
    assert 0.2 < fuzz(numbers, tmp_path) / len(numbers) < 0.8
