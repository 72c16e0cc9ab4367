"""Mixup, CutMix and label smoothing: the batches, and a run that is stopped and resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from listeners import stop_at
from loop_parts import assert_identical, get_weights
from ranks import run_ranks
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, one_hot
from torch.utils.data import TensorDataset

from stepwrap.loops import (
    CheckpointHook,
    EpochTrainLoop,
    HookList,
    LoopState,
    MixCollator,
    build_loader,
    find_checkpoint,
    load_checkpoint,
    seed_rng,
)
from stepwrap.wrappers import (
    OptimWrapper,
    SingleDevice,
    StepDistributedDataParallel,
    SupervisedModel,
)

CLASSES, SIZE = 3, 6


def images(samples: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    pixels = torch.rand(samples, 1, SIZE, SIZE, generator=generator, dtype=torch.float64)
    return TensorDataset(pixels, torch.randint(CLASSES, (samples,), generator=generator))


def mix_samples(collate: MixCollator, samples: int = 4) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the inputs and class numbers of some samples, then the mixed ones."""
    dataset = images(samples)
    inputs, targets = collate([dataset[index] for index in range(samples)])
    return (*dataset.tensors, inputs, targets)  # type: ignore[return-value]


def test_mixup_adds_inputs_and_targets() -> None:
    torch.manual_seed(1)
    inputs, labels, mixed, targets = mix_samples(MixCollator(CLASSES, mixup=0.4))
    before = [3, 0, 1, 2]
    share = (mixed - inputs[before])[0, 0, 0, 0] / (inputs - inputs[before])[0, 0, 0, 0]
    assert 0 < share < 1
    assert torch.allclose(mixed, share * inputs + (1 - share) * inputs[before], rtol=1e-12)
    expected = one_hot(labels, CLASSES).double()
    assert torch.allclose(targets, share * expected + (1 - share) * expected[before], rtol=1e-12)
    assert targets.dtype == torch.float64


def test_cutmix_replaces_a_rectangle_and_counts_its_area() -> None:
    torch.manual_seed(2)
    for _ in range(20):
        inputs, labels, mixed, targets = mix_samples(MixCollator(CLASSES, cutmix=1.0))
        before = [3, 0, 1, 2]
        replaced = mixed == inputs[before]
        assert ((mixed == inputs) | replaced).all()
        rows, columns = replaced[0, 0].any(1), replaced[0, 0].any(0)
        assert torch.equal(replaced[0, 0], rows[:, None] & columns[None])
        share = 1 - float(replaced[0].double().mean())
        expected = one_hot(labels, CLASSES).double()
        mixture = share * expected + (1 - share) * expected[before]
        assert torch.allclose(targets, mixture, rtol=1e-12)


def test_label_smoothing_equals_that_of_the_loss() -> None:
    inputs, labels, same, targets = mix_samples(MixCollator(CLASSES, label_smoothing=0.1))
    assert torch.equal(same, inputs)
    scores = inputs.flatten(1)[:, :CLASSES]
    expected = cross_entropy(scores, labels, label_smoothing=0.1)
    assert torch.allclose(cross_entropy(scores, targets), expected, rtol=1e-12)


def test_a_share_of_the_batches_and_both_kinds() -> None:
    torch.manual_seed(3)
    collate = MixCollator(CLASSES, mixup=1.0, cutmix=1.0, probability=0.6)
    kinds = {"none": 0, "cutmix": 0, "mixup": 0}
    for _ in range(200):
        inputs, _, mixed, _ = mix_samples(collate)
        is_plain = (mixed == inputs) | (mixed == inputs[[3, 0, 1, 2]])
        kind = "mixup" if not is_plain.any() else "cutmix" if not mixed.equal(inputs) else "none"
        kinds[kind] += 1
    assert 50 < kinds["none"] < 130
    assert kinds["mixup"] > 30
    assert kinds["cutmix"] > 20


def test_mixed_batches_of_dicts() -> None:
    collate = MixCollator(CLASSES, mixup=1.0, input="pixels", target="labels")
    samples = [{"pixels": x, "labels": y, "id": 7} for x, y in images(4)]
    batch = collate(samples)
    assert batch["labels"].shape == (4, CLASSES)
    assert batch["id"].tolist() == [7] * 4


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"mixup": -1.0}, "mixup must be >= 0"),
        ({"cutmix": float("nan")}, "cutmix must be >= 0"),
        ({"probability": 1.5}, "probability must be from 0 to 1"),
        ({"label_smoothing": -0.1}, "label_smoothing must be from 0 to 1"),
    ],
)
def test_wrong_settings(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        MixCollator(CLASSES, **settings)


def test_wrong_batches() -> None:
    with pytest.raises(ValueError, match="classes must be from 0 to 1, .* got 0 to 2"):
        mix_samples(MixCollator(2, mixup=1.0), 8)
    rows: Any = [(torch.rand(3), torch.tensor(0)) for _ in range(2)]
    with pytest.raises(ValueError, match=r"height and a width, got the shape \(2, 3\)"):
        MixCollator(CLASSES, cutmix=1.0)(rows)


def _train(
    folder: Path, workers: int, stop: int | None = None, *, resume: bool = False
) -> dict[str, Tensor]:
    """Train with mixed batches to the end or a stop, and return the weights."""
    seed_rng(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(SIZE * SIZE, CLASSES)).double()
    model = SupervisedModel(net, nn.CrossEntropyLoss())
    wrapped = StepDistributedDataParallel(model) if dist.is_initialized() else SingleDevice(model)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1, momentum=0.9)
    state = LoopState(wrapped, OptimWrapper(optimizer), run_dir=folder)
    if resume:
        path = find_checkpoint(folder)
        assert path is not None
        load_checkpoint(path).restore(state)
    collate = MixCollator(CLASSES, mixup=0.4, cutmix=1.0, label_smoothing=0.1)
    loader = build_loader(
        images(24), batch_size=2, train=True, shuffle=True, collate=collate, num_workers=workers
    )
    hooks = HookList([CheckpointHook(every_epochs=None), stop_at(stop)])
    return get_weights(EpochTrainLoop(loader, max_epochs=2).run(state, hooks))


@pytest.mark.parametrize(("ranks", "workers"), [(1, 0), (1, 1), (3, 0)])
def test_a_resumed_run_mixes_the_same(tmp_path: Path, ranks: int, workers: int) -> None:
    calls: Any = {"init": ranks > 1}
    uninterrupted = run_ranks(_train, ranks, tmp_path / "whole", workers, **calls)
    run_ranks(_train, ranks, tmp_path / "run", workers, 5, **calls)
    resumed = run_ranks(_train, ranks, tmp_path / "run", workers, resume=True, **calls)
    for weights, expected in zip(resumed, uninterrupted, strict=True):
        assert_identical(weights, expected)


def test_the_loss_equals_that_of_a_loop_in_plain_pytorch(tmp_path: Path) -> None:
    """The same batches, from the same random numbers."""
    weights = _train(tmp_path, 1)
    seed_rng(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(SIZE * SIZE, CLASSES)).double()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    collate = MixCollator(CLASSES, mixup=0.4, cutmix=1.0, label_smoothing=0.1)
    loader: Any = build_loader(
        images(24), batch_size=2, train=True, shuffle=True, collate=collate, num_workers=1
    )
    for epoch in range(2):
        loader.batch_sampler.set_position(epoch)
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = -(targets * net(inputs).log_softmax(1)).sum(1).mean()
            loss.backward()
            optimizer.step()
    for name, value in net.state_dict().items():
        assert torch.allclose(weights[f"net.{name}"], value, rtol=1e-12, atol=1e-12)
