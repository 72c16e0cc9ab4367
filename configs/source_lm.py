"""A character-level language model on the source code of Python's standard library."""

import sysconfig
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset
from torchmetrics import Metric

from ..registry import DATASETS, METRICS, MODELS

__all__ = [
    "CharTransformer",
    "NextCharLoss",
    "SourceLines",
    "SourceText",
    "UnigramEntropy",
    "pad_batch",
]

VOCABULARY = 128
# The target that cross-entropy ignores by default.
IGNORED = -100


@lru_cache(maxsize=2)
def _read_source(split: str) -> Tensor:
    """Return the text of a split: every tenth file of the standard library is held out."""
    if split not in ("train", "val"):
        raise ValueError(f"split must be 'train' or 'val', got {split!r}")
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    held_out = files[5::10]
    chosen = held_out if split == "val" else [file for file in files if file not in held_out]
    text = b"\n".join(file.read_bytes() for file in chosen)
    codes = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return torch.where(codes < VOCABULARY, codes, ord("?"))


@DATASETS.register_module()
class SourceText(Dataset[tuple[Tensor, Tensor]]):
    """Blocks of characters and the same blocks one character later.

    A sample is (characters (block,), next characters (block,)), both int64 below 128;
    characters outside ASCII read as "?". The blocks do not overlap.

    Args:
        split: "train" or "val"; the held-out part consists of whole files.
        block: characters in a sample.
        limit: use at most this many blocks, spread evenly over the text.
    """

    def __init__(self, split: str = "train", block: int = 64, limit: int | None = None) -> None:
        self.text = _read_source(split)
        self.block = block
        blocks = (len(self.text) - 1) // block
        self.stride = block * max(1, blocks // limit) if limit else block
        self.size = min(blocks, limit or blocks)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = index * self.stride
        chunk = self.text[start : start + self.block + 1].long()
        return chunk[:-1], chunk[1:]


@DATASETS.register_module()
class SourceLines(Dataset[tuple[Tensor, Tensor]]):
    """Single lines of source text of different lengths, without empty lines.

    A sample is (characters (length,), next characters (length,)), from the line feed before the
    line to the one at its end; ``pad_batch`` makes batches of them.

    Args:
        split: "train" or "val"; see ``SourceText``.
        max_length: longer lines are cut.
        limit: use at most this many lines, spread evenly over the text.
    """

    def __init__(
        self, split: str = "train", max_length: int = 80, limit: int | None = None
    ) -> None:
        text = _read_source(split).numpy().tobytes()
        lines = [line.rstrip() for line in text.split(b"\n") if line.strip()]
        stride = max(1, len(lines) // limit) if limit else 1
        self.lines = lines[::stride][:limit]
        self.max_length = max_length

    def __len__(self) -> int:
        return len(self.lines)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        line = b"\n" + self.lines[index] + b"\n"
        codes = torch.tensor(list(line[: self.max_length + 1]))
        return codes[:-1], codes[1:]


def pad_batch(samples: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    """Pad samples to the length of the longest; the loss ignores padded targets.

    Returns:
        ``inputs`` and ``labels``, both (batch, length).
    """
    inputs, labels = zip(*samples, strict=True)
    return {
        "inputs": pad_sequence(list(inputs), batch_first=True),
        "labels": pad_sequence(list(labels), batch_first=True, padding_value=IGNORED),
    }


class _Block(nn.Module):
    """Causal self-attention and a feed-forward layer, each after a normalisation."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.norm2 = nn.LayerNorm(width)
        self.feed = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        fed: Tensor = self.feed(self.norm2(x))
        return x + fed


@MODELS.register_module()
class CharTransformer(nn.Module):
    """A small causal transformer: (batch, length) int64 -> (batch, length, 128) logits.

    Attributes:
        flops_per_token: operations per token of forward and backward in a sequence of
            ``max_length``, by the formula of Chowdhery et al., "PaLM", 2022, appendix B.
    """

    def __init__(
        self, width: int = 96, depth: int = 2, heads: int = 4, max_length: int = 64
    ) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"width must be a multiple of heads, got {width} and {heads}")
        self.characters = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(max_length, width)
        self.blocks = nn.Sequential(*(_Block(width, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY)
        computing = nn.ModuleList([self.blocks, self.norm, self.head])
        weights = sum(weight.numel() for weight in computing.parameters())
        self.flops_per_token = 6 * weights + 12 * depth * width * max_length

    def forward(self, characters: Tensor) -> Tensor:
        positions = torch.arange(characters.shape[1], device=characters.device)
        x = self.blocks(self.characters(characters) + self.positions(positions))
        logits: Tensor = self.head(self.norm(x))
        return logits


@MODELS.register_module()
class NextCharLoss(nn.Module):
    """Mean cross-entropy in nats of (batch, length, 128) logits, without ignored targets."""

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        flat = logits.flatten(0, 1)
        return functional.cross_entropy(flat, target.flatten(), ignore_index=IGNORED)


@METRICS.register_module()
class UnigramEntropy(Metric):
    """Entropy in nats of the frequencies of the target characters.

    It is the lowest loss of a model that uses no context (Shannon 1948).
    """

    full_state_update = False
    counts: Tensor

    def __init__(self) -> None:
        super().__init__()
        zeros = torch.zeros(VOCABULARY, dtype=torch.float64)
        self.add_state("counts", zeros, dist_reduce_fx="sum")

    def update(self, target: Tensor) -> None:
        self.counts += torch.bincount(target[target != IGNORED], minlength=VOCABULARY)

    def compute(self) -> Tensor:
        shares = self.counts / self.counts.sum()
        entropy: Tensor = torch.special.entr(shares).sum()
        return entropy.float()
