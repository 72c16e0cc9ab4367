"""Collate texts and samples of different sizes, and prepare data sets of Hugging Face."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.utils.data import IterableDataset

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
