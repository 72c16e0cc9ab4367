"""Samplers in configs: from the check to the resumed run, and the page that describes them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from marks import slow
from ranks import run_ranks
from test_runner_ddp_options import SAMPLES, Net, Points, flat, settings
from test_runner_ddp_resume import train
from torch import nn
from torch.utils.data import WeightedRandomSampler

from stepwrap.loops import mix_seed
from stepwrap.registry import load_config
from stepwrap.runner.command.cli import main
from stepwrap.runner.parts import build_parts
from stepwrap.runner.sections import read_sections

HERE, EPOCHS, GLOBAL_BATCH = "test_runner_samplers", 2, 6


class Growing:
    """A sampler that takes what the run supplies, and keeps a count of its own."""

    def __init__(self, dataset: Any, seed: int, factor: int = 1) -> None:
        self.size, self.seed, self.factor, self.passes = len(dataset), seed, factor, 0

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[int]:
        self.passes += 1
        generator = random.Random(self.seed * self.factor + self.passes)
        return iter(generator.sample(range(self.size), self.size))


def _plain(orders: list[list[int]]) -> torch.Tensor:
    """Return the weights of plain PyTorch after updates with these samples."""
    net, data = Net(), Points()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.9)
    for order in orders:
        for start in range(0, len(order), GLOBAL_BATCH):
            inputs, target = data[order[start : start + GLOBAL_BATCH]]
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(inputs), target).backward()
            optimizer.step()
    return flat(net)


def _weighted_orders() -> list[list[int]]:
    labels = Points().tensors[1].tolist()
    weights = [1 / labels.count(label) for label in labels]
    generators = [torch.Generator().manual_seed(mix_seed(0, epoch)) for epoch in range(EPOCHS)]
    return [
        [*WeightedRandomSampler(weights, SAMPLES, generator=generator)] for generator in generators
    ]


def read_labels() -> list[int]:
    labels: list[int] = Points().tensors[1].tolist()
    return labels


CASES: dict[str, tuple[dict[str, Any], list[list[int]]]] = {
    "weighted": ({"type": "weighted"}, _weighted_orders()),
    "labels": ({"type": "weighted", "labels": {"type": f"{HERE}.read_labels"}}, _weighted_orders()),
    "yours": (
        {"type": f"{HERE}.Growing", "seed": 5, "factor": 3},
        [random.Random(15 + n).sample(range(SAMPLES), SAMPLES) for n in (1, 2)],
    ),
}


@pytest.mark.parametrize(
    ("name", "wrapper"),
    [
        ("weighted", "ddp"),
        *slow(("yours", "ddp"), ("labels", "ddp"), ("weighted", "fsdp"), ("yours", "fsdp")),
    ],
)
def test_a_config_trains_on_two_three_and_one_ranks_as_plain_pytorch(
    name: str, wrapper: str, tmp_path: Path
) -> None:
    sampler, orders = CASES[name]
    for ranks, stop in ((2, 1), (3, 5), (1, 0)):
        config = settings({"type": wrapper})
        config["data"]["train"] |= {"batch_size": GLOBAL_BATCH // ranks, "sampler": sampler}
        results = run_ranks(train, ranks, config, tmp_path, stop)
    for weights, step in results:
        assert (weights - _plain(orders)).abs().max().item() <= 1e-12
        assert step == 8


def test_a_distributed_sampler_gets_the_ranks_of_the_run(tmp_path: Path) -> None:
    """Its draws are not divided once more."""
    name = "torch.utils.data.DistributedSampler"
    assert run_ranks(draw_first_epoch, 2, {"type": name, "shuffle": False}) == [
        list(range(0, SAMPLES, 2)),
        list(range(1, SAMPLES, 2)),
    ]


def draw_first_epoch(sampler: dict[str, Any]) -> list[int]:
    config = settings({"type": "ddp"})
    config["data"]["train"]["sampler"] = sampler
    loader = build_parts(read_sections(config)).train_loop.dataloader
    return [index for batch in loader.batch_sampler for index in batch]


def test_a_subset_is_shuffled_if_the_loader_is(tmp_path: Path) -> None:
    for shuffle in (False, True):
        config = settings({"type": "single"}, run_dir=str(tmp_path / str(shuffle)), launch={})
        config["data"]["train"] |= {
            "sampler": {"type": "subset", "indices": "3-11"},
            "shuffle": shuffle,
        }
        loader = build_parts(read_sections(config)).train_loop.dataloader
        drawn = [index for batch in loader.batch_sampler for index in batch]
        assert sorted(drawn) == list(range(3, 12))
        assert (drawn == list(range(3, 12))) is not shuffle


@pytest.mark.parametrize("limit", ["overfit=1", "limit_batches=1", "--dry-run"])
def test_limits_of_a_run_apply_to_samplers(run: Path, limit: str) -> None:
    words = ["train", "points.yaml", "train.max_epochs=1", "data.train.shuffle=false"]
    sampler = "data.train.sampler={type: weighted, num_samples: 12}"
    assert main([*words, sampler, limit]) == 0


@pytest.mark.parametrize(
    ("lines", "texts"),
    [
        ("sampler: {type: weigted}", ["sampler.type", "weighted"]),
        ("sampler: {type: weighted, weight: [1, 2]}", ["sampler.weight", "weights"]),
        ("sampler: weighted", ["sampler", "{type: weighted}"]),
        ("sampler: {type: weighted}\n    shuffle: true", ["shuffle", "must be false"]),
        ("sampler: {type: weighted, weights: [1, 2, 3]}", ["sampler", "48 samples", "0, 1"]),
        ("sampler: {type: weighted, weights: {0: 1, 3: 1}}", ["sampler", "class 3", "0, 1"]),
        ("sampler: {type: weighted, labels: label}", ["sampler", "mean labels"]),
        ("sampler: {type: subset, indices: 0-48}", ["sampler", "0 to 47"]),
        (
            "dataset: {_delete_: true, type: endless.Stream}\n"
            "    sampler: {type: subset, share: 1}",
            ["sampler", "Stream is read in its own order"],
        ),
    ],
)
def test_mistakes_name_the_line_before_a_process_starts(
    lines: str, texts: list[str], run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = "from torch.utils.data import IterableDataset\nclass Stream(IterableDataset): pass\n"
    (run / "endless.py").write_text(code)
    plain = "" if "shuffle" in lines else "    shuffle: false\n"
    text = f"_base_: points.yaml\nimports: [points.py]\ndata:\n  train:\n{plain}    {lines}\n"
    (run / "sampled.yaml").write_text(text)
    assert main(["check", "sampled.yaml", "launch.nproc=2"]) == 2
    shown = capsys.readouterr().err
    number = 1 + next(
        n for n, line in enumerate(text.splitlines()) if texts[0].partition(".")[0] + ":" in line
    )
    assert f"sampled.yaml:{number}: data.train.{texts[0]}" in shown
    assert [text for text in texts if text not in shown] == []


def test_a_config_with_a_sampler_is_written_as_it_was(run: Path) -> None:
    sampler = "data.train.sampler={type: weighted, weights: {0: 1, 1: 2}}"
    words = ["data.train.shuffle=false", "train.max_epochs=1"]
    assert main(["train", "points.yaml", sampler, *words]) == 0
    written = load_config(run / "runs/points/config.yaml").to_dict()
    assert written["data"]["train"]["sampler"] == {"type": "weighted", "weights": {0: 1, 1: 2}}
