"""Infer from a metric's name whether higher values are better; does not import torch."""

from __future__ import annotations

import re
from collections.abc import Mapping

# Words in the name of a metric, or of its class, from which the direction follows.
_LOWER_IS_BETTER = frozenset(
    ["err", "error", "errors", "loss", "losses", "mae", "mse", "nll", "perplexity", "ppl", "rmse"]
)
_HIGHER_IS_BETTER = frozenset(
    ["acc", "accuracy", "auc", "auroc", "f1", "iou", "precision", "recall"]
)
_WORD = re.compile(r"[A-Z]?[a-z]+[0-9]*|[A-Z]+[0-9]*(?![a-z])")


def find_direction(name: str, directions: Mapping[str, bool | None]) -> bool | None:
    """Return whether higher values of the result ``name`` are better; None if unknown.

    Args:
        name: a result, such as "accuracy" or "scores/f1".
        directions: the directions of metrics, by name.
    """
    while name:
        above, _, leaf = name.rpartition("/")
        direction = directions.get(name)
        direction = direction_by_words(leaf) if direction is None else direction
        if direction is not None:
            return direction
        name = above
    return None


def direction_by_words(text: str) -> bool | None:
    """Return whether the words in a name mean that higher values are better; None if unknown."""
    words = {word.lower() for word in _WORD.findall(text)}
    lower, higher = bool(words & _LOWER_IS_BETTER), bool(words & _HIGHER_IS_BETTER)
    return None if lower == higher else higher
