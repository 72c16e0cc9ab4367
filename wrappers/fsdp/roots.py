"""The modules of a model from which gathering starts, and when they are gathered and freed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method

from ..sharding.held_gradients import drop_held_gradients, is_running, recover, watch_units
from ..torch_functions import refuse_double_backward
from .flags import Flags

_DOUBLE = (
    "meets blocks that fsdp has freed by then; compute it inside of the model's forward with no "
    "block named in shard, or use ddp"
)


class Root:
    """A module that ``fully_shard`` was applied to last, with the units inside it.

    Attributes:
        module: the root.
        units: all that is gathered on its own, the root first.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module: Any = module
        self.units = [one for one in module.modules() if isinstance(one, FSDPModule)]
        self._holds = self._held = False
        self._gathered_once = False
        self._inside = self._depth = 0
        self._flags = Flags(self.units)
        watch_units(self.units)
        for unit in self.units:
            unit.register_forward_hook(_refuse_double_backward)
        # In front of torch's own hook, which gathers.
        module.register_forward_pre_hook(self._before_forward, prepend=True)
        module.register_forward_hook(self._after_forward, always_call=True)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Keep the gradients of the forwards inside on their ranks."""
        before, self._holds = self._holds, True
        try:
            yield
        finally:
            self._holds = before

    def offer_no_sync(self) -> None:
        """Give the module a ``no_sync`` where it has none."""
        if not hasattr(self.module, "no_sync"):
            self.module.no_sync = self.no_sync

    @contextmanager
    def inside(self, *, whole: bool = False) -> Iterator[None]:
        """Run a method that uses parameters outside of a forward; with ``whole``, gather them."""
        self._begin()
        if whole:
            self.module.unshard()
        self._inside += 1
        depth = self._depth
        try:
            yield
        finally:
            self._inside -= 1
            self._depth = depth

    def free(self) -> None:
        """Leave nothing gathered."""
        for unit in self.units:
            unit.reshard()

    def settle(self) -> None:
        """Let the module have its shards for parameters, unless it is being used."""
        if not self._inside and not self._depth and not is_running(self.module):
            self.free()

    def leave(self) -> None:
        """Take it that no forward runs: hooks of modules do not hear of an interrupt."""
        self._depth = 0

    def recover(self) -> None:
        """Make good what a forward or a backward that raised has left."""
        # A model that calls itself in its forward has not failed.
        if not self._inside and not self._depth:
            recover(self.module)

    def _before_forward(self, module: nn.Module, inputs: Any) -> None:
        try:
            self._begin()
            if not self._depth:
                self._flags.before_forward()
        finally:
            # The hook after it is called in any case.
            self._depth += 1

    def _after_forward(self, module: nn.Module, inputs: Any, output: Any) -> None:
        # Another hook may have raised before the first of ours.
        self._depth = max(0, self._depth - 1)
        if not self._depth:
            self._flags.after_forward()

    def _begin(self) -> None:
        self.recover()
        if torch.is_inference_mode_enabled():
            self._gather_once()
        elif torch.is_grad_enabled() and self._holds is not self._held:
            # torch looks at this in backward, which runs outside of `optim_context`.
            self.module.set_requires_gradient_sync(not self._holds)
            self._held = self._holds

    def _gather_once(self) -> None:
        """Make the memory of whole parameters outside of inference mode.

        It is made at the first use and reused, and what is made inside can never be trained.
        """
        if self._gathered_once:
            return
        self._gathered_once = True
        with torch.inference_mode(mode=False), torch.no_grad():
            for unit in self.units:
                unit.unshard()
                unit.reshard()


def _refuse_double_backward(unit: nn.Module, inputs: Any, output: Any) -> None:
    refuse_double_backward(output, _DOUBLE)


def gather_in(method: str, module: Any, roots: Sequence[Root]) -> None:
    """Let ``module``'s method use the parameters of all roots, also without calling them."""
    if roots[0].module is module:
        register_fsdp_forward_method(module, method)
    whole = roots[0].module is not module
    plain = getattr(module, method)

    def gathering(*args: Any, **kwargs: Any) -> Any:
        with inside(roots, whole=whole):
            return plain(*args, **kwargs)

    setattr(module, method, gathering)


@contextmanager
def inside(roots: Sequence[Root], *, whole: bool) -> Iterator[None]:
    """As ``Root.inside``, of all roots."""
    if not roots:
        yield
        return
    with roots[0].inside(whole=whole), inside(roots[1:], whole=whole):
        yield


def free_all(roots: Sequence[Root]) -> None:
    """Leave nothing gathered: only a backward would free it."""
    for root in roots:
        root.free()


def leave_all(roots: Sequence[Root]) -> None:
    """Take it that no forward runs."""
    for root in roots:
        root.leave()


def show_shards(module: Any, roots: Sequence[Root]) -> None:
    """Let ``module.parameters()`` be the shards, and ``zero_grad`` clear all gradients.

    After a forward without a backward a root stays gathered, and an optimizer that is made of the
    whole parameters would never train anything.
    """
    named, clear = module.named_parameters, module.zero_grad

    def named_parameters(*args: Any, **kwargs: Any) -> Any:
        for root in roots:
            root.settle()
        return named(*args, **kwargs)

    def zero_grad(set_to_none: bool = True) -> None:
        clear(set_to_none)
        drop_held_gradients(module.parameters())

    module.named_parameters, module.zero_grad = named_parameters, zero_grad


def explained(step: Callable[..., Any]) -> Callable[..., Any]:
    """A ``train_step`` of the wrapper that tidies up after an error, and says more about some."""

    @wraps(step)
    def train_step(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return step(self, *args, **kwargs)
        except BaseException as error:
            leave_all(self._roots)
            for root in self._roots:
                root.recover()
            advice = _advice(str(error))
            if advice is None:
                raise
            raise RuntimeError(advice) from error

    return train_step


def _advice(text: str) -> str | None:
    """What to do about an error of torch's that comes from parameters in shards."""
    if "mixed torch.Tensor and DTensor" in text:
        return (
            "parameters of the model were used where they are shards. Run layers through "
            "self(...) of the wrapper, or through children of a model that steps itself; make "
            "sums over parameters of shards alone, and whole before they meet other tensors: "
            "sum(one.square().sum().full_tensor() for one in self.parameters()). A model whose "
            "step does otherwise runs under ddp, or under separate with several optimizers"
        )
    if "already been lazily initialized" in text:
        return (
            "a part of the model was called by itself before the whole that it is sharded in: run "
            "it through self(...), or let the step of the model call its children only; a model "
            "whose step does otherwise runs under ddp, or under separate with several optimizers"
        )
    return None
