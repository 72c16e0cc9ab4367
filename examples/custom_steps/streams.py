"""Text as streams that continue from batch to batch, and a recurrent model, for tbptt.py."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from stepwrap.configs.source_lm import SourceText
from stepwrap.registry import DATASETS, MODELS
from stepwrap.wrappers import BaseModel


@DATASETS.register_module()
class SourceStreams(SourceText):
    """Each row of the ranks' batches continues a stream; the third item is (stream, block)."""

    def __init__(self, streams: int, block: int = 32, limit: int | None = None) -> None:
        super().__init__("train", block, limit)
        self.streams, self.size = streams, self.size // streams * streams

    def __getitem__(self, index: int) -> Any:
        block, stream = divmod(index, self.streams)
        start = (stream * (self.size // self.streams) + block) * self.block
        chunk = self.text[start : start + self.block + 1].long()
        return chunk[:-1], chunk[1:], torch.tensor([stream, block])


@MODELS.register_module()
class CharGRU(BaseModel):
    """Characters (batch, time), state (batch, width) -> logits (batch, time, 128), state."""

    def __init__(self, width: int = 96) -> None:
        super().__init__()
        self.characters, self.head = nn.Embedding(128, width), nn.Linear(width, 128)
        self.gru = nn.GRU(width, width, batch_first=True)

    def forward(self, characters: Tensor, state: Tensor | None = None, mode: str = "tensor") -> Any:
        before = None if state is None else state[None]
        states, final_state = self.gru(self.characters(characters), before)
        return self.head(states), final_state[0].clone()  # fsdp warns about views

    def val_step(self, data: Any) -> dict[str, Any]:
        characters, target = self.data_preprocessor(data, training=False)
        loss = cross_entropy(self(characters)[0].flatten(0, 1), target.flatten())
        return {"loss": loss, "target": target, "num_samples": len(target)}
