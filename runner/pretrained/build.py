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
    """Call ``init_weights`` of modules with an ``init_cfg``, unless they are already initialised.

    Their constructors do not call it.
    """
    # Without `init_cfg`, our default only calls `init_weights` of the children. Skip it: children
    # from other libraries may reset pretrained weights.
    is_skipped = (
        isinstance(model, BaseModule)
        and model.init_cfg is None
        and type(model).init_weights is BaseModule.init_weights
    )
    init_weights: Any = getattr(model, "init_weights", None)
    if hasattr(model, "init_cfg") and init_weights is not None and not is_skipped:
        # It also initialises the children.
        if not getattr(model, "is_init", False):
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
