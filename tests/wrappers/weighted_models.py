"""A model of ragged sequences, its global batches, and what plain PyTorch makes of them."""

import random
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from stepwrap.wrappers import BaseModel

SAMPLES, LENGTH, FEATURES, CLASSES = 16, 5, 6, 3
IGNORED = -100
CLIP = {"max_norm": 0.05}

Batch = dict[str, Tensor]


class Tagger(BaseModel):
    """Tags every place of a sequence; its loss is a mean over what `counted` says."""

    def __init__(self, counted: str = "tokens", dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.counted = counted
        self.first = nn.Sequential(nn.Linear(FEATURES, 8, dtype=dtype), nn.Tanh())
        self.second = nn.Linear(8, CLASSES, dtype=dtype)

    def forward(self, inputs: Tensor, labels: Tensor, mask: Tensor, mode: str = "loss") -> Any:
        scores = self.second(self.first(inputs))
        if self.counted == "tokens":
            return {"loss": F.cross_entropy(scores.flatten(0, 1), labels.flatten())}
        losses = F.cross_entropy(scores.transpose(1, 2), labels, reduction="none")
        if self.counted == "samples":
            return {"loss": losses.mean()}
        return {"loss": (losses * mask).sum() / mask.sum()}


def count_of_mask(batch: Batch) -> Tensor:
    """A weight of one's own."""
    return batch["mask"].sum()


# By what the loss counts, the setting.
SETTINGS: dict[str, Any] = {
    "samples": "samples",
    "tokens": "tokens",
    "mask": {"key": "mask"},
    "own": f"{__name__}.count_of_mask",
}


def global_batch(update: int, dtype: torch.dtype = torch.float64) -> Batch:
    """Return the samples of an update; the labels of some are wholly ignored."""
    generator = torch.Generator().manual_seed(100 + update)
    inputs = torch.randn(SAMPLES, LENGTH, FEATURES, generator=generator, dtype=torch.float64)
    labels = torch.randint(CLASSES, (SAMPLES, LENGTH), generator=generator)
    labels[torch.rand(SAMPLES, LENGTH, generator=generator) < 0.5] = IGNORED
    labels[:3] = IGNORED
    mask = torch.rand(SAMPLES, LENGTH, generator=generator, dtype=torch.float64) + 0.1
    return {"inputs": inputs.to(dtype), "labels": labels, "mask": mask.to(dtype)}


def split(batch: Batch, pieces: int, seed: int) -> list[Batch]:
    """Cut a global batch into pieces of unequal sizes, one sample at least."""
    cuts = sorted(random.Random(seed).sample(range(1, SAMPLES), pieces - 1))
    bounds = [0, *cuts, SAMPLES]
    places = zip(bounds, bounds[1:], strict=False)
    return [{key: one[a:b] for key, one in batch.items()} for a, b in places]


def train_whole(
    counted: str, updates: int, dtype: torch.dtype = torch.float64, *, clip: bool = False
) -> tuple[dict[str, Tensor], list[float]]:
    """Train on whole batches by hand; return the weights and the loss of every update."""
    model = Tagger(counted, dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    losses = []
    for update in range(updates):
        loss = model(**global_batch(update, dtype))["loss"]
        loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), **CLIP)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return {name: one.detach() for name, one in model.state_dict().items()}, losses


def difference(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """Return the largest difference of a weight; infinity for a NaN."""
    largest = max((found[name].cpu() - one).abs().max().item() for name, one in wanted.items())
    return largest if largest == largest else float("inf")  # noqa: PLR0124
