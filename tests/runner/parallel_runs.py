"""A small transformer, trained through a config and by plain PyTorch."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatch
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.data import Dataset
from weights import whole_weights

from stepwrap.runner import Runner

WORDS, TIME, SAMPLES, BATCH = 12, 6, 32, 8
PLAN = {
    "net.embed": "rowwise",
    "net.blocks.*.attn.qkv": "colwise",
    "net.blocks.*.attn.out": "rowwise",
    "net.blocks.*.up": "colwise",
    "net.blocks.*.down": "rowwise",
    "net.head": "colwise_replicate_output",
}
# The same with norms that are split along the sequence.
SEQUENCE_PLAN = {
    "net.embed": {"type": "rowwise", "output": "shard(1)"},
    "net.blocks.*.attn.qkv": {"type": "colwise", "input": "shard(1)"},
    "net.blocks.*.attn.out": {"type": "rowwise", "output": "shard(1)"},
    "net.blocks.*.up": {"type": "colwise", "input": "shard(1)"},
    "net.blocks.*.down": {"type": "rowwise", "output": "shard(1)"},
    "net.blocks.*norm?": "sequence",
    "net.norm": "sequence",
    "net.head": {"type": "colwise_replicate_output", "input": "shard(1)"},
}


class Attention(nn.Module):
    """Attention that splits into heads before it splits into query, key and value."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.head_size = width // heads
        self.dropout = dropout
        # The gradient of a key's bias is rounding noise, which Adam would amplify.
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(x).unflatten(-1, (-1, 3, self.head_size))
        query, key, value = heads.permute(3, 0, 2, 1, 4)
        rate = self.dropout if self.training else 0.0
        mixed = scaled_dot_product_attention(query, key, value, dropout_p=rate, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention and a small network, each with a norm before it and a residual connection."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = Attention(width, heads, dropout)
        self.dropout = nn.Dropout(dropout)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attn(self.norm1(x)))
        hidden = self.dropout(torch.tanh(self.up(self.norm2(x))))
        return x + self.down(hidden)


class Transformer(nn.Module):
    """Compute scores `(batch, words, time)` of the next words for words `(batch, time)`."""

    def __init__(self, dtype: str = "float64", dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 8)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(8, 4, dropout) for _ in range(2))
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, WORDS)
        self.to(getattr(torch, dtype))

    def forward(self, words: Tensor) -> Tensor:
        x = self.dropout(self.embed(words))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)).transpose(1, 2)


class Sentences(Dataset[Any]):
    """Random words and their next words."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.words = torch.randint(WORDS, (SAMPLES, TIME + 1), generator=generator)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.words[index, :-1], self.words[index, 1:]


OPTIMIZERS: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.1, "momentum": 0.9},
    "AdamW": {"lr": 1e-2},
}


def settings(data_size: int = 1, **sections: Any) -> dict[str, Any]:
    """Return a config of 8 steps in which `data_size` ranks share a batch."""
    model = {
        "type": "SupervisedModel",
        "net": {"type": Transformer},
        "loss": {"type": "CrossEntropyLoss"},
    }
    common: dict[str, Any] = {
        "model": model,
        "device": "cpu",
        "optimizer": {"type": "AdamW", **OPTIMIZERS["AdamW"]},
        "data": {"train": {"dataset": {"type": Sentences}, "batch_size": BATCH // data_size}},
        "train": {"type": "EpochTrainLoop", "max_epochs": 2},
        "hooks": dict.fromkeys(("progress", "log", "checkpoint", "throughput"), False),
    }
    return {**common, **sections}


def trained(config: dict[str, Any]) -> dict[str, Tensor]:
    """Train by `config` on every rank; return the whole weights by name."""
    runner = Runner.from_config(config)
    runner.train()
    return whole_weights(runner.state.model.module)


def train_plainly(config: dict[str, Any]) -> dict[str, Tensor]:
    """Train the same model on whole batches by plain PyTorch."""
    arguments = {k: v for k, v in config["model"]["net"].items() if k != "type"}
    torch.manual_seed(config.get("seed", 0))
    net = Transformer(**arguments)
    for name, parameter in net.named_parameters():
        parameter.requires_grad_(not _matches(f"net.{name}", config.get("freeze", ())))
    chosen = dict(config["optimizer"])
    optimizer = getattr(torch.optim, chosen.pop("type"))(net.parameters(), **chosen)
    words = Sentences().words
    for _ in range(config["train"]["max_epochs"]):
        for batch in words.split(BATCH):
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(batch[:, :-1]), batch[:, 1:]).backward()
            optimizer.step()
    return {f"net.{name}": value.detach() for name, value in net.named_parameters()}


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(name.startswith(f"{pattern}.") or fnmatch(name, pattern) for pattern in patterns)
