"""The data and models behind the shipped configs."""

import math

import pytest
import torch

from stepwrap.configs.digits import Digits, SmallCNN
from stepwrap.configs.source_lm import CharTransformer, SourceText, UnigramEntropy


def test_digits_splits_share_no_image_and_lose_none() -> None:
    parts = [Digits(split) for split in ("train", "val", "test")]
    assert [len(part) for part in parts] == [1197, 300, 300]
    together = torch.cat([part.images for part in parts]).flatten(1)
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
    train, val = SourceText("train").text, SourceText("val").text
    start = len(val) // 2
    piece = bytes(val[start : start + 400].tolist())
    assert piece not in bytes(train.tolist())


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
