"""Tell which parameters kept DistributedDataParallel waiting for gradients."""

from __future__ import annotations

import re
from collections.abc import Sequence

from torch import nn

_CHANGED = "Your training graph has changed in this iteration"
_UNFINISHED = "Expected to have finished reduction in the prior iteration"
_INDICES = re.compile(r"did not receive grad for rank \d+:((?:\s\d+)+)")


class UnusedParametersError(RuntimeError):
    """Parameters got no gradient in a backward that was to synchronise them.

    Attributes:
        names: these parameters, by the user's names; empty where torch does not say which.
    """

    def __init__(self, names: Sequence[str]) -> None:
        which = ", ".join(names) or "some parameters"
        super().__init__(
            f"the last step's loss did not depend on {which}, so their gradients never came. "
            "Either let the wrapper look for such parameters (find_unused_parameters: true), or "
            "take them out of the training: remove them, or freeze them (requires_grad=False) "
            "before the model is wrapped. Where that step's backward raised an error, build "
            "the wrapper anew instead"
        )
        self.names = tuple(names)


def trainable_names(module: nn.Module, ignored: set[str]) -> list[str]:
    """Names of the parameters by the index that torch's reducer gives them."""
    return [
        name
        for name, parameter in module.named_parameters()
        if parameter.requires_grad and name not in ignored
    ]


def explain_unused(error: BaseException, names: Sequence[str], failure: str = "") -> None:
    """Raise UnusedParametersError where ``error`` is torch's about parameters without a gradient.

    Args:
        names: what ``trainable_names`` gave when the module was wrapped.
        failure: the error of the previous update, which is then reported as the cause.
    """
    text = str(error)
    if _CHANGED in text:
        raise RuntimeError(
            "a parameter got a gradient now that had none in the first step, which static_graph "
            "excludes: every step must use the same parameters. Either leave static_graph out "
            "and give find_unused_parameters: true, or remove or freeze the parameters that only "
            "some steps use"
        ) from error
    if _UNFINISHED not in text:
        return
    if failure:
        raise RuntimeError(
            f"the last update raised {failure}; its backward was not finished, after which "
            "DistributedDataParallel cannot go on: build the wrapper anew around the bare model. "
            "Weights and optimizer are as they were before that update; clear the gradients"
        ) from error
    found = _INDICES.search(text)
    indices = [int(index) for index in found.group(1).split()] if found else []
    raise UnusedParametersError([names[at] for at in indices if at < len(names)]) from error
