"""The data and models behind the shipped configs."""

import math

import pytest
import torch

from stepwrap.configs.digits import Digits, SmallCNN
from stepwrap.configs.source_lm import (
    CharTransformer,
    NextCharLoss,
    SourceLines,
    SourceText,
    UnigramEntropy,
    pad_batch,
)


def test_digits_splits_share_no_image_and_lose_none() -> None:
    splits = [Digits(split) for split in ("train", "val", "test")]
    assert [len(split) for split in splits] == [1197, 300, 300]
    together = torch.cat([split.images for split in splits]).flatten(1)
    everything = Digits("all").images.flatten(1)
    assert torch.equal(
        torch.unique(together, dim=0, return_counts=True)[1],
        torch.unique(everything, dim=0, return_counts=True)[1],
    )


def test_digits_name_the_allowed_splits() -> None:
    with pytest.raises(ValueError, match="'train', 'val'"):
        Digits("validation")


def test_small_cnn_shape() -> None:
    assert SmallCNN(width=4)(torch.zeros(3, 1, 8, 8)).shape == (3, 10)


def test_source_text_is_shifted_by_one() -> None:
    text = SourceText("val", block=16, limit=10)
    assert len(text) == 10
    inputs, target = text[3]
    assert torch.equal(inputs[1:], target[:-1])


def test_source_text_holds_files_out() -> None:
    train, held_out = SourceText("train").text, SourceText("val").text
    start = len(held_out) // 2
    excerpt = bytes(held_out[start : start + 400].tolist())
    assert excerpt not in bytes(train.tolist())


def test_source_lines_are_lines_of_the_text() -> None:
    lines = SourceLines("val", max_length=20)
    text = bytes(SourceText("val").text.tolist())
    assert len(lines) == sum(1 for line in text.split(b"\n") if line.strip())
    inputs, target = lines[7]
    assert torch.equal(inputs[1:], target[:-1])
    assert bytes(inputs.tolist()).startswith(b"\n")
    assert bytes(inputs[1:].tolist()) in text
    lengths = {len(lines[index][0]) for index in range(200)}
    assert max(lengths) == 20
    assert len(lengths) > 5


def test_lines_are_spread_over_the_text() -> None:
    five, all_of_them = SourceLines("val", limit=5), SourceLines("val")
    assert len(five) == 5
    assert torch.equal(five[4][0], all_of_them[len(all_of_them) // 5 * 4][0])


def test_padding_changes_neither_loss_nor_entropy() -> None:
    samples = [SourceLines("val")[index] for index in range(4)]
    model, loss = CharTransformer(width=16, heads=2, max_length=80).double(), NextCharLoss()
    batch = pad_batch(samples)
    assert batch["inputs"].shape == batch["labels"].shape == (4, max(len(x) for x, _ in samples))
    alone = [loss(model(x[None]), y[None]).item() * len(y) for x, y in samples]
    together = loss(model(batch["inputs"]), batch["labels"]).item()
    assert together == pytest.approx(sum(alone) / sum(len(y) for _, y in samples))
    padded, plain = UnigramEntropy(), UnigramEntropy()
    padded.update(batch["labels"])
    for _, target in samples:
        plain.update(target)
    assert padded.compute() == plain.compute()


def test_transformer_counts_its_operations() -> None:
    # Two blocks of attention, two layers and two norms each, then another norm and the head.
    blocks = 2 * (3 * 64 + 64 + 4 * 64 + 32 + 4 * 64 + 8 + 2 * 16)
    model = CharTransformer(width=8, depth=2, heads=2, max_length=10)
    assert model.flops_per_token == 6 * (blocks + 16 + 8 * 128 + 128) + 12 * 2 * 8 * 10


def test_transformer_does_not_see_the_future() -> None:
    model = CharTransformer(width=16, heads=2, max_length=12).eval()
    text = torch.randint(128, (1, 12))
    changed = text.clone()
    changed[0, 8:] = 1
    before, after = model(text), model(changed)
    assert torch.allclose(before[:, :8], after[:, :8], atol=1e-6)
    assert not torch.allclose(before[:, 8:], after[:, 8:], atol=1e-6)


def test_unigram_entropy_by_hand() -> None:
    metric = UnigramEntropy()
    metric.update(torch.tensor([[1, 1, 2, 3]]))
    assert metric.compute().item() == pytest.approx(1.5 * math.log(2))
