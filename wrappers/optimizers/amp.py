"""Mixed precision: autocast around the forward, a loss scale around the backward."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ...registry import OPTIM_WRAPPERS, nearest
from ..sharding.layout import has_placed, parameters_of
from ..torch_functions import check_options, option_names
from .optim import OptimWrapper, closure_advice

_DTYPES = {name: getattr(torch, name) for name in ("float16", "bfloat16", "float32", "float64")}
_HALF = (torch.float16, torch.bfloat16)
_SCALE_KEY = "loss_scaler"

_Init = TypeVar("_Init", bound=Callable[..., None])


def _in_either_order(init: _Init) -> _Init:
    """Take ``(loss_scale, dtype, use_fsdp, *, optimizer, ...)``, mmengine's order, as well."""
    names = ("loss_scale", "dtype", "use_fsdp")

    @wraps(init)
    def either(self: Any, *args: Any, **kwargs: Any) -> None:
        if args and not hasattr(args[0], "param_groups") and len(args) <= len(names):
            init(self, **dict(zip(names, args, strict=False)), **kwargs)
        else:
            init(self, *args, **kwargs)

    return either  # type: ignore[return-value]


@OPTIM_WRAPPERS.register_module()
class AmpOptimWrapper(OptimWrapper):
    """An optimizer wrapper in mixed precision, on any device with autocast.

    The loss is scaled for float16 only: bfloat16 has the exponents of float32. By position the
    arguments may come as here or as in mmengine: ``AmpOptimWrapper("dynamic", "bfloat16",
    optimizer=optimizer)``.

    Args:
        optimizer, accumulative_counts, loss_weight: as in ``OptimWrapper``.
        clip_grad: as in ``OptimWrapper``; the gradients are unscaled first.
        loss_scale: "dynamic", a number (a fixed scale), or arguments of
            ``torch.amp.GradScaler``.
        dtype: a ``torch.dtype`` or its name; default: autocast's own for the device. "float32"
            and "float64" switch autocast off.
        use_fsdp: decide together with all ranks whether an update is skipped, at one small
            collective per update; so it is anyway where the optimizer's parameters are sharded.
        device: default: the device of the parameters.

    Raises:
        TypeError: a ``loss_scale`` of another type, or an unknown scaler argument in it.
        ValueError: another ``dtype``.
    """

    config_plain = ("clip_grad", "loss_scale")

    @_in_either_order
    def __init__(  # noqa: PLR0913
        self,
        optimizer: Optimizer,
        accumulative_counts: int = 1,
        clip_grad: Mapping[str, Any] | None = None,
        *,
        loss_scale: str | float | Mapping[str, Any] = "dynamic",
        dtype: str | torch.dtype | None = None,
        use_fsdp: bool = False,
        device: str | torch.device | None = None,
        loss_weight: str | Mapping[str, Any] | Callable[[Any], Any] | None = None,
    ) -> None:
        super().__init__(optimizer, accumulative_counts, clip_grad, loss_weight)
        place = next(parameters_of(optimizer)).device if device is None else torch.device(device)
        self.device_type = place.type
        self.cast_dtype = _dtype(dtype, self.device_type)
        enabled = self.cast_dtype is torch.float16
        self._together = use_fsdp or (enabled and has_placed(optimizer))
        scaler: Any = torch.amp.GradScaler
        if self._together:
            # It imports a good part of torch.distributed.
            from ..sharding.part_scaler import PartScaler as scaler
        options, self._fixed_scale = _scaler_options(loss_scale)
        self.loss_scaler = scaler(**{"device": self.device_type, "enabled": enabled, **options})
        if enabled and isinstance(optimizer, torch.optim.SGD):
            # Fused and told to skip its first step, it would take for its momentum what happens
            # to be in memory; now the scaler does not call it then.
            vars(optimizer)["_step_supports_amp_scaling"] = False

    @classmethod
    def config_signature(cls) -> inspect.Signature:
        """The arguments by name, which the decorator of ``__init__`` passes on as they are."""
        return inspect.signature(cls)

    @property
    def loss_scale(self) -> float | Tensor:
        """The scale of this window's losses, a tensor on the device; 1 but for float16."""
        device = next(parameters_of(self.optimizer)).device
        scale: Tensor = self.loss_scaler.scale(torch.ones((), device=device))
        return scale

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Run backward of the scaled loss and count the micro-batch."""
        super().backward(self.loss_scaler.scale(loss), **kwargs)

    def step(self, **kwargs: Any) -> None:
        """Unscale and clip, if so configured, and update unless a gradient is infinite."""
        if self._window is not None:
            self._window.average()
        if self._first is not None:
            self._check_first()
        if self.needs_closure:
            raise ValueError(closure_advice(self.optimizer))
        if self.guard is not None and not self.guard.allows(self):
            self.zero_grad()
            return
        # Fused optimizers unscale by themselves, and would ask no other rank.
        if self._clip is not None or self._together:
            self.loss_scaler.unscale_(self.optimizer)
        if self._clip is not None:
            self.grad_norm = self._clip(self.optimizer)
        self.loss_scaler.step(self.optimizer, **kwargs)
        self.loss_scaler.update(self._fixed_scale)

    def optim_context(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Autocast, inside ``model.no_sync()`` where the micro-batch does not end its window."""
        context = super().optim_context(model)
        return context if self.cast_dtype not in _HALF else _both(context, self.precision_context())

    def precision_context(self) -> AbstractContextManager[Any]:
        """Autocast alone, as an evaluation of the model in training runs in."""
        if self.cast_dtype not in _HALF:
            return nullcontext()
        return torch.autocast(self.device_type, dtype=self.cast_dtype)

    def state_dict(self) -> dict[str, Any]:
        """As ``OptimWrapper.state_dict()``, with ``loss_scaler``."""
        return {**super().state_dict(), _SCALE_KEY: self.loss_scaler.state_dict()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore ``state_dict()``, also that of an ``OptimWrapper``."""
        state = dict(state_dict)
        scale = state.pop(_SCALE_KEY, None)
        # A disabled scaler saves nothing, and an enabled one refuses to load nothing.
        if scale and self.loss_scaler.is_enabled():
            self.loss_scaler.load_state_dict(scale)
        super().load_state_dict(state)


@contextmanager
def _both(outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> Iterator[None]:
    with outer, inner:
        yield


def _dtype(dtype: str | torch.dtype | None, device_type: str) -> torch.dtype:
    if dtype is None:
        return torch.get_autocast_dtype(device_type)
    found = _DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    if found is None or found not in _DTYPES.values():
        near = nearest(str(dtype), _DTYPES, limit=1, cutoff=0.5)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ValueError(f"dtype should be any of {tuple(_DTYPES)} or None, got {dtype!r}{hint}")
    return found


def _scaler_options(loss_scale: Any) -> tuple[dict[str, Any], float | None]:
    """Arguments for the scaler, and the scale to return to after every update."""
    if loss_scale == "dynamic":
        return {}, None
    if isinstance(loss_scale, Mapping):
        check_options("loss_scale", loss_scale, option_names(torch.amp.GradScaler))
        return dict(loss_scale), None
    if isinstance(loss_scale, (int, float)) and not isinstance(loss_scale, bool):
        return {"init_scale": float(loss_scale)}, float(loss_scale)
    raise TypeError(f'loss_scale must be of type float, dict, or "dynamic", but got {loss_scale!r}')
