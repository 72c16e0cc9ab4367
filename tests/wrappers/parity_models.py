"""The models of the parity matrix, a transformer and a network with BatchNorm, and their data.

No gradient is only rounding noise (as for a bias before BatchNorm or of the keys), because AdamW
turns such noise into whole steps. The activations are smooth.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from stepwrap.wrappers import BaseModel

WIDTH, HEADS, TOKENS, VOCABULARY = 16, 4, 8, 24
SAMPLES, BATCH = 240, 16
# Sizes of micro-batches that are not all full, in turn.
RAGGED = (BATCH, 9, 13)
IGNORED = -100

# Pairs of linear layers: the first is split by its outputs, the second by its inputs.
PLANS = {
    "transformer": {
        "body.block.attention.qkv": "colwise",
        "body.block.attention.out": "rowwise",
        "head.block.up": "colwise",
        "head.block.down": "rowwise",
    },
    "cnn": {"head.hidden": "colwise", "head.out": "rowwise"},
}
BLOCKS = {"transformer": ["Block"], "cnn": ["Convolution"]}


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        # The rows of a head's query, key and value are adjacent, so that a split is by heads.
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.qkv(x).unflatten(-1, (-1, 3, WIDTH // HEADS))
        query, key, value = rows.transpose(1, 2).unbind(3)
        weights = (query @ key.transpose(-1, -2) * (WIDTH // HEADS) ** -0.5).softmax(-1)
        return self.out((weights @ value).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), Attention()
        self.norm2, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        hidden: Tensor = self.down(F.gelu(self.up(self.norm2(x))))
        return x + hidden


class TransformerBody(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.block = nn.Embedding(VOCABULARY, WIDTH), Block()
        self.position = nn.Parameter(torch.randn(TOKENS, WIDTH) * 0.1)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.block(self.embed(tokens) + self.position)


class TransformerHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block, self.norm = Block(), nn.LayerNorm(WIDTH)
        self.out = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.out(self.norm(self.block(x)))
        return scores.flatten(0, 1)


class Convolution(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(outputs)

    def forward(self, x: Tensor) -> Tensor:
        return F.avg_pool2d(F.gelu(self.norm(self.conv(x))), 2)


class CnnBody(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Convolution(1, 8), Convolution(8, 16)

    def forward(self, images: Tensor) -> Tensor:
        features: Tensor = self.second(self.first(images))
        return features.flatten(1)


class CnnHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.out = nn.Linear(64, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(F.gelu(self.hidden(x)))


PARTS: Mapping[str, tuple[type[nn.Module], type[nn.Module]]] = {
    "transformer": (TransformerBody, TransformerHead),
    "cnn": (CnnBody, CnnHead),
}


def make_parts(name: str, dtype: torch.dtype, seed: int = 0) -> tuple[nn.Module, nn.Module]:
    """Return body and head with weights drawn from a seed in float32."""
    torch.manual_seed(seed)
    body, head = PARTS[name]
    return body().to(dtype), head().to(dtype)


class TwoParts(BaseModel):
    def __init__(self, body: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.body, self.head = body, head

    def forward(self, inputs: Tensor, target: Tensor, mode: str = "tensor") -> Any:
        scores = self.head(self.body(inputs))
        if mode == "loss":
            return {"loss": F.cross_entropy(scores, target.flatten())}
        return list(scores) if mode == "predict" else scores

    def val_step(self, data: Any) -> dict[str, Any]:
        inputs, target = self.data_preprocessor(data, training=False)
        return {"loss": self(inputs, target, mode="loss")["loss"], "num_samples": len(inputs)}


class SeparateParts(TwoParts):
    """The same with an optimizer for each part and a custom step."""

    def train_step(self, data: Any, optim_wrapper: Any) -> dict[str, Tensor]:
        body, head = optim_wrapper["body"], optim_wrapper["head"]
        with body.optim_context(self.body), head.optim_context(self.head):
            data = self.data_preprocessor(data, training=True)
            optim_wrapper.weigh(data)
            losses = self(*data, mode="loss")
        total, logs = self.parse_losses(losses)
        # Each part has a separate backward, so that each optimizer wrapper counts one.
        body.backward(
            body.scale_loss(total), inputs=list(self.body.parameters()), retain_graph=True
        )
        head.backward(head.scale_loss(total), inputs=list(self.head.parameters()))
        for member in (body, head):
            if member.should_update():
                member.step()
                member.zero_grad()
        return logs


def make_data(
    name: str, dtype: torch.dtype, seed: int = 1, *, padded: bool = False
) -> tuple[Tensor, Tensor]:
    """Return inputs and targets of all samples for a seed.

    With `padded` the transformer's sequences have different lengths.
    """
    generator = torch.Generator().manual_seed(seed)
    if name == "transformer":
        tokens = torch.randint(VOCABULARY, (SAMPLES, TOKENS), generator=generator)
        # The rule to learn: the target is the previous token plus one.
        target = (tokens.roll(1, dims=1) + 1) % VOCABULARY
        if padded:
            lengths = torch.randint(1, TOKENS + 1, (SAMPLES, 1), generator=generator)
            target.masked_fill_(torch.arange(TOKENS) >= lengths, IGNORED)
        return tokens, target
    images = torch.randn(SAMPLES, 1, 8, 8, generator=generator, dtype=torch.float64).to(dtype)
    return images, images.unflatten(2, (2, 4)).unflatten(4, (2, 4)).mean((1, 3, 5)).flatten(
        1
    ).argmax(1)


def micro_batch(
    data: tuple[Tensor, Tensor], index: int, rank: int = 0, ranks: int = 1, *, ragged: bool = False
) -> list[Tensor]:
    """Return a rank's part of micro-batch `index`; all of it for one rank.

    With `ragged`, micro-batches and the ranks' parts of one have different sizes.
    """
    size = RAGGED[index % len(RAGGED)] if ragged else BATCH
    # Later ranks have more samples.
    cuts = [int(size * (edge / ranks) ** (1.5 if ragged else 1)) for edge in (rank, rank + 1)]
    start = index * BATCH % SAMPLES
    return [tensor[start + cuts[0] : start + cuts[1]] for tensor in data]
