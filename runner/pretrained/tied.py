"""Weights that several layers share, and a merge that changes them for some of the layers only."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable, Sequence
from copy import deepcopy
from typing import Any, cast

import torch
from torch import nn

logger = logging.getLogger(__name__)


def tied_names(model: nn.Module) -> list[list[str]]:
    """Return the names of each parameter that has several."""
    names: dict[int, list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[id(parameter)].append(name)
    return [group for group in names.values() if len(group) > 1]


def separate_adapted_layers(model: nn.Module) -> dict[nn.Parameter, nn.Parameter]:
    """Give each layer that peft adapts its own weights, before they are merged.

    peft merges into the weights of the adapted layer in place, which would also change the other
    layers that use them.

    Returns:
        The new parameters by the shared ones that they replace.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    owners: dict[int, set[int]] = defaultdict(set)
    for module in model.modules():
        for member in (*module._modules.values(), *module._parameters.values()):
            owners[id(member)].add(id(module))
    copies: dict[nn.Parameter, nn.Parameter] = {}
    for layer in [module for module in model.modules() if isinstance(module, BaseTunerLayer)]:
        base = cast(nn.Module, layer.base_layer)
        # Layers of peft can be nested; only the innermost one has the user's layer.
        if isinstance(base, BaseTunerLayer):
            continue
        if any(len(owners[id(member)]) > 1 for member in (base, *base.parameters())):
            layer.base_layer = copy = deepcopy(base)
            copies.update(zip(base.parameters(), copy.parameters(), strict=True))
    return copies


def report_separated(model: nn.Module, groups: Iterable[Sequence[str]]) -> None:
    """Log a warning about weights that the merge has made different.

    Args:
        model: the model after the merge.
        groups: the names of each parameter that was shared before.
    """
    for names in groups:
        weight, *copies = map(model.get_parameter, names)
        if not all(torch.equal(weight, copy) for copy in copies):
            logger.warning(
                "%s are one weight in the model, and the adapter does not change their layers "
                "alike: the merged model has separate weights. A program that ties them again when "
                "it loads these weights gets other outputs",
                " and ".join(names),
            )
    _declare_untied(model)


def _declare_untied(model: nn.Module) -> None:
    """Set ``tie_word_embeddings`` of transformers' models to False if the weights are separate.

    ``save_pretrained`` stores this setting, and ``from_pretrained`` ties the weights by it.
    """
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if not getattr(config, "tie_word_embeddings", False):
            continue
        ends = [
            getattr(module, f"get_{end}_embeddings", lambda: None)() for end in ("input", "output")
        ]
        weights = [getattr(end, "weight", None) for end in ends]
        if None not in weights and weights[0] is not weights[1]:
            config.tie_word_embeddings = False
