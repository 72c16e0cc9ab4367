"""The handwritten digits that scikit-learn ships, and a small network for them."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

from ..registry import DATASETS, MODELS

__all__ = ["Digits", "SmallCNN"]

_SPLITS = {"train": slice(0, 1197), "val": slice(1197, 1497), "test": slice(1497, 1797)}
_SPLIT_SEED = 7


@DATASETS.register_module()
class Digits(TensorDataset):
    """8x8 grey images of handwritten digits with their labels.

    The 1,797 images are split by a fixed permutation: 1,197 for training, 300 for validation, 300
    for testing. A sample is (image (1, 8, 8) in [0, 1], label 0-d int64).

    Args:
        split: "train", "val", "test" or "all".
        dtype: floating type of the images.

    Raises:
        ImportError: scikit-learn is not installed (extra ``examples``).
    """

    def __init__(self, split: str = "train", dtype: str = "float32") -> None:
        if split != "all" and split not in _SPLITS:
            raise ValueError(f"split must be 'all' or one of {sorted(_SPLITS)}, got {split!r}")
        try:
            from sklearn.datasets import load_digits
        except ImportError as error:
            raise ImportError(
                "the digits data needs scikit-learn: pip install 'stepwrap[examples]'"
            ) from error
        pixels, labels = load_digits(return_X_y=True)
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(_SPLIT_SEED))
        order = order if split == "all" else order[_SPLITS[split]]
        images = torch.from_numpy(pixels).reshape(-1, 1, 8, 8) / 16
        self.images = images.to(getattr(torch, dtype))[order]
        self.labels = torch.from_numpy(labels).long()[order]
        super().__init__(self.images, self.labels)


@MODELS.register_module()
class SmallCNN(nn.Sequential):
    """Two convolutions and a linear layer: (batch, 1, 8, 8) -> (batch, classes)."""

    def __init__(self, width: int = 32, dropout: float = 0.25, classes: int = 10) -> None:
        super().__init__(
            nn.Conv2d(1, width, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Dropout(dropout),
            nn.Linear(2 * width * 16, classes),
        )
