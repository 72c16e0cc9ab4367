"""Collate texts, mixed samples, samples of different sizes; prepare Hugging Face's data sets."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import one_hot
from torch.utils.data import IterableDataset, default_collate

from ...registry import did_you_mean

# As many tokens as no model takes; the fast tokenizers accept no greater number.
_NO_LIMIT = 2**31 - 1


class TextCollator:
    """Tokenise the texts of samples and pad them to a batch of tensors, for a transformers model.

    Samples are mappings, such as the rows of a Hugging Face data set. The batch is a dict with what
    the tokenizer returns (``input_ids`` and ``attention_mask`` of shape (samples, tokens)), and
    ``labels``.

    Args:
        tokenizer: a tokenizer of transformers with a padding token.
        text: the column with the text.
        pair: the column with a second text, if the model reads two.
        label: the column that becomes ``labels``; None if there are none.
        max_length: leave out tokens beyond this number. Default: the tokenizer's
            ``model_max_length``, which is the longest input that its model takes.
        collate: makes a batch from the tokenised samples. Default: transformers'
            ``DataCollatorWithPadding``. For a language model, pass transformers'
            ``DataCollatorForLanguageModeling``, which adds ``labels``.

    Raises:
        KeyError: a sample lacks a column.
        ValueError: the tokenizer has no padding token.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        text: str = "text",
        pair: str | None = None,
        label: str | None = None,
        max_length: int | None = None,
        collate: Callable[[list[dict[str, Any]]], Mapping[str, Any]] | None = None,
    ) -> None:
        if getattr(tokenizer, "pad_token", None) is None:
            raise ValueError(
                "TextCollator needs a tokenizer with a padding token: set its pad_token to a token "
                "of its vocabulary, such as '[PAD]'"
            )
        if collate is None:
            from transformers import DataCollatorWithPadding

            collate = DataCollatorWithPadding(tokenizer)
        self.tokenizer, self._collate = tokenizer, collate
        self._columns = {"text": text, "pair": pair, "label": label}
        # A tokenizer that knows no limit states a huge one.
        limit = getattr(tokenizer, "model_max_length", None) or _NO_LIMIT
        self._max_length = min(limit, _NO_LIMIT) if max_length is None else max_length

    def __call__(self, samples: list[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the batch of some samples."""
        columns = {
            key: self._column(samples, key) for key, column in self._columns.items() if column
        }
        tokens = self.tokenizer(
            columns["text"],
            columns.get("pair"),
            truncation=self._max_length < _NO_LIMIT,
            max_length=self._max_length if self._max_length < _NO_LIMIT else None,
        )
        rows = [{name: tokens[name][at] for name in tokens} for at in range(len(samples))]
        for row, label in zip(rows, columns.get("label", ()), strict=False):
            row["labels"] = label
        return dict(self._collate(rows))

    def _column(self, samples: Sequence[Mapping[str, Any]], key: str) -> list[Any]:
        name = str(self._columns[key])
        if name not in samples[0]:
            names = [str(column) for column in samples[0]]
            message = f"is not a column of the samples{did_you_mean(name, names)}"
            columns = ", ".join(names)
            raise KeyError(f"TextCollator: {key}={name!r} {message}; the columns are {columns}")
        return [sample[name] for sample in samples]


class MixCollator:
    """Mix the samples of a batch in pairs by mixup or CutMix, with probabilities as targets.

    Each sample is mixed with the one before it in the batch. All pairs of a batch have the same
    share, which has the distribution Beta(a, a). Mixup (arXiv 1710.09412) adds the weighted inputs.
    CutMix (arXiv 1905.04899) replaces a rectangle of the last two dimensions, and the share is that
    of the area. If both are given, each batch takes one of them with equal probability.

    The random numbers are drawn from torch's global stream, so a resumed run draws the same ones.

    Args:
        num_classes: the number of classes; the targets become (samples, classes).
        mixup: the parameter a of mixup; 0 for never.
        cutmix: the parameter a of CutMix; 0 for never.
        probability: the share of batches that are mixed.
        label_smoothing: the part of the probability that is divided equally among all classes.
        input: the index or key of the input in a batch.
        target: the index or key of the class numbers, or of probabilities.
        collate: makes a batch of the samples; default: torch's ``default_collate``.

    Raises:
        ValueError: a number is out of its range; or, for a batch, a class number is.
    """

    def __init__(
        self,
        num_classes: int,
        *,
        mixup: float = 0.0,
        cutmix: float = 0.0,
        probability: float = 1.0,
        label_smoothing: float = 0.0,
        input: int | str = 0,
        target: int | str = 1,
        collate: Callable[[list[Any]], Any] = default_collate,
    ) -> None:
        for name, value in (("mixup", mixup), ("cutmix", cutmix)):
            if not 0 <= value < float("inf"):
                raise ValueError(f"{name} must be >= 0, got {value!r}")
        for name, value in (("probability", probability), ("label_smoothing", label_smoothing)):
            if not 0 <= value <= 1:
                raise ValueError(f"{name} must be from 0 to 1, got {value!r}")
        self._num_classes = num_classes
        self._mixers = [
            (mix, parameter) for mix, parameter in ((_mixup, mixup), (_cutmix, cutmix)) if parameter
        ]
        self._probability, self._label_smoothing = probability, label_smoothing
        self._input, self._target, self._collate = input, target, collate

    def __call__(self, samples: list[Any]) -> Any:
        """Return the mixed batch of some samples."""
        batch = self._collate(samples)
        entries: Any = dict(batch) if isinstance(batch, Mapping) else list(batch)
        inputs = entries[self._input]
        targets = self._probabilities(entries[self._target], inputs.dtype)
        if self._mixers and float(torch.rand(())) < self._probability:
            mix, parameter = self._mixers[int(torch.randint(len(self._mixers), ()))]
            share = float(torch.distributions.Beta(parameter, parameter).sample())
            inputs, share = mix(inputs, share)
            targets = share * targets + (1 - share) * targets.roll(1, 0)
        entries[self._input], entries[self._target] = inputs, targets
        return entries

    def _probabilities(self, targets: Tensor, dtype: torch.dtype) -> Tensor:
        if not targets.is_floating_point():
            low, high = targets.aminmax()
            if low < 0 or high >= self._num_classes:
                raise ValueError(
                    f"MixCollator: classes must be from 0 to {self._num_classes - 1}, as "
                    f"num_classes says, got {int(low)} to {int(high)}"
                )
            dtype = dtype if dtype.is_floating_point else torch.get_default_dtype()
            targets = one_hot(targets.long(), self._num_classes).to(dtype)
        smoothing = self._label_smoothing
        return targets * (1 - smoothing) + smoothing / self._num_classes


def _mixup(inputs: Tensor, share: float) -> tuple[Tensor, float]:
    return share * inputs + (1 - share) * inputs.roll(1, 0), share


def _cutmix(inputs: Tensor, share: float) -> tuple[Tensor, float]:
    """Return the inputs with a rectangle of others, and the share of the area that is unchanged."""
    if inputs.ndim < 3:
        raise ValueError(
            f"CutMix needs inputs with a height and a width, got the shape {tuple(inputs.shape)}"
        )
    slices, area = [], 1.0
    for size in inputs.shape[-2:]:
        center, half = int(torch.randint(size, ())), size * (1 - share) ** 0.5 / 2
        low, high = max(0, round(center - half)), min(size, round(center + half))
        slices.append(slice(low, high))
        area *= (high - low) / size
    mixed = inputs.clone()
    mixed[..., slices[0], slices[1]] = inputs.roll(1, 0)[..., slices[0], slices[1]]
    return mixed, 1 - area


def keep_lists(samples: list[Any]) -> Any:
    """Make a batch of lists, one for each entry of the samples, without stacking tensors.

    It suits samples of different sizes, such as the images and targets of a detector. Tuples give a
    tuple of lists, mappings a dict of lists.
    """
    if isinstance(samples[0], Mapping):
        return {name: [sample[name] for sample in samples] for name in samples[0]}
    return tuple(map(list, zip(*samples, strict=True)))


def prepare_dataset(dataset: Any, shard: tuple[int, int], *, formatted: bool) -> Any:
    """Return a Hugging Face data set in the form that a loader needs, any other one unchanged.

    Args:
        dataset: the data set. A stream is divided here, unless the caller has already divided it.
        shard: the index of this rank's part, and the number of parts.
        formatted: return rows as tensors if the data set has no format yet.

    Raises:
        ValueError: it is a dict of several data sets.
    """
    if type(dataset).__module__.partition(".")[0] != "datasets":
        return dataset
    if isinstance(dataset, dict):
        raise ValueError(
            f"the data set is a {type(dataset).__name__} with the splits {', '.join(dataset)}: "
            f"choose one, for instance by split: {next(iter(dataset), 'train')}"
        )
    is_stream = isinstance(dataset, IterableDataset)
    if is_stream and shard[1] > 1 and getattr(dataset, "_distributed", None) is None:
        from datasets.distributed import split_dataset_by_node

        dataset = split_dataset_by_node(dataset, *shard)
    current = getattr(dataset, "_formatting", None) if is_stream else dataset.format["type"]
    return dataset.with_format("torch") if formatted and current is None else dataset
