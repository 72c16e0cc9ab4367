"""The JSON schema of configs: it accepts the project's own configs and rejects mistakes."""

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from stepwrap.registry import config_schema, list_registrations
from stepwrap.registry.text.files import parse
from stepwrap.runner.command.cli import main

ROOT = Path(__file__).resolve().parents[2]
FILES = [*ROOT.glob("configs/*.yaml"), *ROOT.glob("examples/**/*.yaml")]
VALID = jsonschema.Draft202012Validator(config_schema())


def mistakes(text: str) -> list[tuple[str, str]]:
    """Return the key path and the message of each mistake."""
    # Editors read 1e-3 as a number, as YAML 1.2 and stepwrap do; PyYAML does not.
    errors = VALID.iter_errors(parse(text, "")[0])
    return [(".".join(map(str, error.path)), error.message) for error in errors]


def test_the_command_prints_a_valid_schema(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == config_schema()
    jsonschema.Draft202012Validator.check_schema(printed)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_shipped_configs_are_valid(file: Path) -> None:
    assert mistakes(file.read_text()) == []


def test_configs_in_the_documentation_are_valid() -> None:
    blocks = []
    for page in [ROOT / "README.md", *ROOT.glob("docs/*.md")]:
        yaml_blocks = re.findall(r"^```yaml\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
        blocks += [
            block
            for block in yaml_blocks
            if re.search(r"^(model|data|hooks):", block, re.MULTILINE)
        ]
    assert len(blocks) > 5
    assert [(block, wrong) for block in blocks if (wrong := mistakes(block))] == []


@pytest.mark.parametrize(
    ("text", "key", "words"),
    [
        ("optimiser: {type: SGD}", "", "'optimiser' was unexpected"),
        ("data: {train: {batch_sise: 3}}", "data.train", "'batch_sise' was unexpected"),
        ("data: {train: {batch_size: 0}}", "data.train.batch_size", "0 is not valid"),
        ("data: {val: {batch_sise: 3}}", "data.val.batch_sise", "3 is not of type"),
        ("data: {val: {a: {batch_sise: 3}}}", "data.val.a", "'batch_sise' was unexpected"),
        ("metrics: {a: {type: my.M, sets: 3}}", "metrics.a.sets", "3 is not valid"),
        ("launch: {nproc: many}", "launch.nproc", "'many' is not valid"),
        ("hooks: {early_stop: 3}", "hooks.early_stop", "3 is not valid"),
        ("hooks: true", "hooks", "True is not valid"),
        ("hooks: {mine: 3}", "hooks.mine", "3 is not of type"),
        ("schedulers: [{type: StepLR, by: epok}]", "schedulers.0.by", "'epok' is not valid"),
        ("optimizer: {type: SGD, paramwise: {bias: 1}}", "optimizer.paramwise", "'bias' was"),
        ("model: 3", "model", "3 is not valid"),
        ("train: {type: EpochTrainLoop, epochs: 3}", "train", "'epochs' was unexpected"),
        ("train: {epochs: 3}", "train.epochs", "3 is not of type 'object'"),
        ("train: {type: EpochLoop}", "train.type", "'EpochLoop' is not valid"),
        ("train: {max_epochs: many}", "train.max_epochs", "'many' is not valid"),
        ("optim_wrapper: {dtype: bf16}", "optim_wrapper.dtype", "'bf16' is not valid"),
        ("optim_wrapper: {type: AmpOptimWrapper, dtype: bf16}", "optim_wrapper.dtype", "'bf16' is"),
        ("optim_wrapper: {clip_grad: 1.0}", "optim_wrapper.clip_grad", "1.0 is not valid"),
        ("optim_wrapper: {type: OptimWrapper, clip: 1}", "optim_wrapper", "'clip' was unexpected"),
        ("schedulers: {type: Cosine}", "schedulers.type", "'Cosine' is not valid"),
        ("schedulers: [{type: StepLr}]", "schedulers.0.type", "'StepLr' is not valid"),
        ("optimizer: {type: Adamm}", "optimizer.type", "'Adamm' is not valid"),
        ("optimizer: {type: AdamW, lr: '1e-3'}", "optimizer.lr", "'1e-3' is not valid"),
        ("hooks: {checkpoint: {monitor: loss}}", "hooks.checkpoint", "is not valid"),
    ],
)
def test_mistakes_are_found(text: str, key: str, words: str) -> None:
    [(path, message)] = mistakes(text)
    assert path == key
    assert words in message


@pytest.mark.parametrize(
    "text",
    [
        "_base_: base.yaml\ndata: {train: {_delete_: true, type: my.loader, anything: 1}}",
        "data: {train: {batch_size: '${size}'}}\nlaunch: ${launcher}",
        "hooks: {progress: false, ema: {decay: 0.9}, mine: {type: my.Hook, x: 1}}",
        "schedulers: {type: StepLR, step_size: 3, by: step}\ntrain: null",
        "hooks: false",
        "ledger: true",
        "data: {val: {a: {dataset: {}, batch_size: 3}, b: {type: my.loader, x: 1}}}",
        "metrics: {a: {type: my.Metric, sets: [a], head: cls, top_k: 3}}",
        "optimizer: {a: {type: SGD, lr: 0.1}, b: {type: Adam}}",
        "optimizer: {type: Mine, _scope_: mine, lr: 1e-3}\nschedulers: {type: mine.Schedule}",
        "train: {_delete_: true, type: mine.Loop, epochs: 3}\noptim_wrapper: {type: mine.Wrapper}",
        "optim_wrapper: {backbone: {clip_grad: {max_norm: 1.0}}}",
        "optim_wrapper: {dtype: '${dtype}', clip_grad: {max_norm: 1}}\ntrain: {max_epochs: 1e1}",
    ],
)
def test_parts_of_configs_are_accepted(text: str) -> None:
    assert mistakes(text) == []


def test_editors_are_offered_names_and_descriptions() -> None:
    schema: dict[str, Any] = config_schema()
    names = schema["$defs"]["OPTIMIZERS"]["properties"]["type"]["anyOf"][0]["enum"]
    assert {
        registration.name for registration in list_registrations("OPTIMIZERS")["OPTIMIZERS"]
    } <= {*names}
    arguments = schema["properties"]["hooks"]["properties"]["early_stop"]["anyOf"][1]["properties"]
    assert arguments["patience"]["description"].startswith("patience: int. the number of")
    batch_size = schema["properties"]["data"]["then"]["properties"]["train"]["then"]
    assert "per batch and rank" in batch_size["properties"]["batch_size"]["description"]
