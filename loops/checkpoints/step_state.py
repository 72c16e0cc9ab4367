"""What a training step of one's own carries from batch to batch, in checkpoints."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..state import LoopState
from .plain import plain
from .together import own_rank

logger = logging.getLogger(__name__)


def step_state(state: LoopState) -> dict[str, Any]:
    """Return this rank's `step_state` of the wrapper; empty where it carries nothing."""
    tell = getattr(state.model, "step_state", dict)
    carried: dict[str, Any] = plain(tell(), "step_state")
    return carried


def load_step_state(state: LoopState, path: Path, content: Mapping[str, Any], same: bool) -> None:
    """Give the wrapper what its step carried on this rank.

    Args:
        path: The checkpoint, for the log.
        content: What the rank's file holds.
        same: The ranks of the run are those of the checkpoint.
    """
    carried = content.get("step")
    if carried and same:
        model: Any = state.model
        model.load_step_state(carried)
    elif carried or step_state(state):
        logger.warning(
            "%s has nothing that rank %d can carry on from batch to batch: its training step "
            "starts with an empty state",
            path,
            own_rank(),
        )
