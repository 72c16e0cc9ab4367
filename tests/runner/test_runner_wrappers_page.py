"""The page on wrappers: its configs and its code run, and its names exist."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from parallel_runs import Sentences, Transformer, settings
from ranks import run_ranks
from torch import Tensor, nn
from weights import whole_weights

import stepwrap.wrappers
from stepwrap.registry import MODEL_WRAPPERS
from stepwrap.runner import Runner
from stepwrap.wrappers import BaseModel, OptimWrapper, SupervisedModel

PAGE = (Path(__file__).parents[2] / "docs/wrappers.md").read_text()
HERE = "test_runner_wrappers_page"

# Warnings of the compiler's own imports and of its checks of block inputs.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
]


def blocks(language: str) -> list[Any]:
    """Return the page's blocks of a language, named by section; all but the first are slow."""
    params = []
    for section in PAGE.split("\n## ")[1:]:
        title = section.partition("\n")[0].partition(":")[0]
        for code in re.findall(rf"```{language}\n(.*?)```", section, flags=re.DOTALL):
            marks = [pytest.mark.slow] if params else []
            params.append(pytest.param(code, id=title.replace(" ", "_"), marks=marks))
    return params


class Gan(BaseModel):
    """Two children that learn from each other, each with a separate optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.discriminator = nn.Linear(6, 6), nn.Linear(6, 1)

    def train_step(self, data: Any, optim_wrapper: Any) -> dict[str, Tensor]:
        samples = data[0].float()
        discriminator, generator = optim_wrapper["discriminator"], optim_wrapper["generator"]
        with discriminator.optim_context(self.discriminator):
            fake = self.generator(samples).detach()
            judged = self.discriminator(torch.cat([samples, fake]))
            signs = torch.tensor([-1.0, 1.0]).repeat_interleave(len(samples))
            loss = nn.functional.softplus(judged.squeeze(1) * signs).mean()
        discriminator.update_params(loss)
        self.discriminator.requires_grad_(False)
        with generator.optim_context(self.generator):
            missed = -self.discriminator(self.generator(samples)).mean()
        generator.update_params(missed)
        self.discriminator.requires_grad_(True)
        return {"loss": loss.detach()}


def read(text: str) -> dict[str, Any]:
    return OmegaConf.to_container(OmegaConf.create(text))


def trained_by(text: str) -> list[str]:
    """Train by a config of the page on every rank; return the names of unchanged weights."""
    sections = read(text)
    hooks = sections.pop("hooks", {})
    config = settings(**sections)
    config["model"]["net"]["dtype"] = "float32"
    config["hooks"].update(hooks)
    if "generator" in sections.get("optimizer", {}):
        config["model"] = {"type": f"{HERE}.Gan"}
    if "compile" in config:
        # Avoid the C++ compiler, which takes a minute.
        config["compile"]["backend"] = "aot_eager"
    runner = Runner.from_config(config)
    model: Any = runner.state.model.module
    before = whole_weights(model)
    runner.train()
    after = whole_weights(model)
    assert all(value.isfinite().all() for value in after.values())
    return [name for name, value in after.items() if torch.equal(value, before[name])]


@pytest.mark.parametrize("text", blocks("yaml"))
def test_the_configs_run(text: str) -> None:
    sections = read(text)
    ranks = sections["launch"]["nproc"]
    frozen = ["net.embed.weight"] if "freeze" in sections else []
    assert run_ranks(trained_by, ranks, text) == [frozen] * ranks


def run_code(code: str, folder: Path) -> list[str]:
    """Run a snippet of the page with the names that it uses; return all names afterwards."""
    words = Sentences().words[:8]

    def make_model() -> SupervisedModel:
        torch.manual_seed(0)
        return SupervisedModel(Transformer("float32"), nn.CrossEntropyLoss())

    def make_optim(model: nn.Module) -> OptimWrapper:
        return OptimWrapper(torch.optim.AdamW(model.parameters()), clip_grad={"max_norm": 1.0})

    names: dict[str, Any] = {
        "make_model": make_model,
        "model": make_model(),
        "optim_of": make_optim,
        "batch": [words[:, :-1], words[:, 1:]],
        "batches": [[words[:, :-1], words[:, 1:]]] * 3,
        "samples": [torch.randn(4, 6)],
        "folder": folder,
    }
    exec(code, names)
    return list(names)


@pytest.mark.parametrize("code", blocks("python"))
def test_the_code_runs(code: str, tmp_path: Path) -> None:
    for names in run_ranks(run_code, 2, code, tmp_path):
        assert {"wrapper", "replicated"} & set(names)


def test_every_wrapper_is_on_the_page() -> None:
    kinds = {name for name in re.findall(r"type: (\w+)", PAGE) if name in MODEL_WRAPPERS}
    assert {"ddp", "dp", "fsdp", "separate", "auto"} <= kinds
    assert all(name in MODEL_WRAPPERS for name in re.findall(r"`(MM\w+)`", PAGE))
    imported = set(re.findall(r"\b[A-Z]\w+", " ".join(re.findall(r"import (.+)", PAGE))))
    assert imported - set(stepwrap.wrappers.__all__) == {"LoopState"}
