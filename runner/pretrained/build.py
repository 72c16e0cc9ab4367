"""Build the user's model from its section."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

from ...registry import MODELS, build_tree
from ...wrappers import BaseModule
from ..failure import building


def build_user_model(settings: Mapping[str, Any], *, is_meta: bool = False) -> nn.Module:
    """Return the model with its initial weights; without them if ``is_meta``.

    Raises:
        BuildError: it cannot be built.
    """
    with building("model"):
        model: nn.Module = build_tree(settings, MODELS)
        if not is_meta:
            with _quiet_mmengine():
                _init_weights(model)
    return model


def _init_weights(model: nn.Module) -> None:
    """Call ``init_weights`` of modules with an ``init_cfg``, which do not call it themselves."""
    init_weights: Any = getattr(model, "init_weights", None)
    if (
        isinstance(model, BaseModule)
        and model.init_cfg is None
        and type(model).init_weights is BaseModule.init_weights
    ):
        # Our default does nothing without `init_cfg`, except call the children's `init_weights`.
        # Children from other libraries may reset pretrained weights in it, so it is not called.
        init_weights = None
    if hasattr(model, "init_cfg") and init_weights is not None:
        # It initialises the children, too.
        init_weights()
        return
    for child in model.children():
        _init_weights(child)


@contextmanager
def _quiet_mmengine() -> Iterator[None]:
    """Keep mmengine's modules from logging a line about each of their parameters."""
    module = sys.modules.get("mmengine.logging")
    if module is None:
        yield
        return
    logger = module.MMLogger.get_current_instance()
    level = logger.level
    logger.setLevel("WARNING")
    try:
        yield
    finally:
        logger.setLevel(level)
