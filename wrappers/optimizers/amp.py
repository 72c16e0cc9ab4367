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

from ...primitives.suggestions import did_you_mean
from ...registry import OPTIM_WRAPPERS
from ..layout import compute_device, get_parameters, has_placed_parameters, local_part
from ..torch_functions import check_options, option_names
from .gates import GradientGate
from .optim import OptimWrapper

_DTYPES = {name: getattr(torch, name) for name in ("float16", "bfloat16", "float32", "float64")}
_HALF = (torch.float16, torch.bfloat16)
_SCALE_KEY = "loss_scaler"

_Init = TypeVar("_Init", bound=Callable[..., None])


def _read_either_order(init: _Init) -> _Init:
    """Make ``init`` accept mmengine's order as well: ``(loss_scale, dtype, use_fsdp, *, ...)``."""
    names = ("loss_scale", "dtype", "use_fsdp")

    @wraps(init)
    def either(self: Any, *args: Any, **kwargs: Any) -> None:
        if args and isinstance(args[0], (str, int, float, Mapping)) and len(args) <= len(names):
            init(self, **dict(zip(names, args, strict=False)), **kwargs)
        else:
            init(self, *args, **kwargs)

    return either  # type: ignore[return-value]


@OPTIM_WRAPPERS.register_module()
class AmpOptimWrapper(OptimWrapper):
    """An optimizer wrapper for mixed precision, on any device with autocast.

    The loss is scaled only for float16, because bfloat16 has the range of float32. Positional
    arguments may have the order below or mmengine's order: ``AmpOptimWrapper("dynamic", "bfloat16",
    optimizer=optimizer)``.

    Args:
        optimizer: as in ``OptimWrapper``.
        accumulative_counts: as in ``OptimWrapper``.
        clip_grad: as in ``OptimWrapper``; the gradients are unscaled first.
        loss_scale: "dynamic", a number (a fixed scale), or arguments of
            ``torch.amp.GradScaler``.
        dtype: a ``torch.dtype`` or its name; default: autocast's default for the device. "float32"
            and "float64" disable autocast.
        use_fsdp: in float16, skip an update on all ranks if any rank has infinite gradients. This
            needs one small collective per update. It is always done if the optimizer's parameters
            are sharded.
        device: the device of autocast; default: the device on which the model computes.
        loss_weight: as in ``OptimWrapper``.

    Raises:
        TypeError: ``loss_scale`` has another type, or contains an unknown argument.
        ValueError: ``dtype`` is not float16, bfloat16, float32 or float64. See ``OptimWrapper`` for
            further errors.
    """

    config_plain = ("clip_grad", "loss_scale")

    @_read_either_order
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
        parameter = next(get_parameters(optimizer))
        self.device_type = torch.device(device or compute_device(parameter)).type
        self.cast_dtype = _dtype(dtype, self.device_type)
        enabled = self.cast_dtype is torch.float16
        self._skips_together = use_fsdp or (enabled and has_placed_parameters(optimizer))
        scaler: Any = torch.amp.GradScaler
        if self._skips_together:
            # Imported lazily: it loads large parts of torch.distributed.
            from ..sharding.part_scaler import PartScaler as scaler
        options, self._fixed_scale = _scaler_options(loss_scale)
        self.loss_scaler = scaler(**{"device": self.device_type, "enabled": enabled, **options})
        self.scales_losses = self.loss_scaler.is_enabled()
        if self.scales_losses:
            self.gates.gradients = GradientGate()
        if enabled and (
            parameter.device.type != self.device_type
            or len({local_part(param).device for param in get_parameters(optimizer)}) > 1
            or isinstance(optimizer, torch.optim.SGD)
        ):
            # A fused SGD that skips its first step would use uninitialised momentum, a fused step
            # on the host would read the flag of infinite gradients before it has arrived, and
            # torch adds up the flags of several devices, but fused steps look for 1.
            # With this flag the scaler does not call the optimizer at all if one is infinite.
            vars(optimizer)["_step_supports_amp_scaling"] = False

    @classmethod
    def config_signature(cls) -> inspect.Signature:
        """Return the declared signature, because configs pass arguments by name."""
        return inspect.signature(cls)

    @property
    def loss_scale(self) -> float | Tensor:
        """The factor by which ``backward`` multiplies losses: a 0-d tensor, 1 unless in float16."""
        device = compute_device(next(get_parameters(self.optimizer)))
        scale: Tensor = self.loss_scaler.scale(torch.ones((), device=device))
        return scale

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Run backward of the scaled loss and count the micro-batch."""
        super().backward(self.loss_scaler.scale(loss), **kwargs)

    def unscale(self) -> None:
        """Undo the loss scale in the gradients."""
        self.loss_scaler.unscale_(self.optimizer)

    def apply(self, **kwargs: Any) -> None:
        """Update the parameters unless a gradient is infinite, and adapt the loss scale."""
        if self._skips_together and self.clip is None:
            # Fused optimizers would otherwise unscale in their step, and look for infinite
            # gradients on this rank only.
            self.unscale()
        self.loss_scaler.step(self.optimizer, **kwargs)
        self.loss_scaler.update(self._fixed_scale)

    def optim_context(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Return autocast, with ``model.no_sync()`` unless the micro-batch ends its window."""
        context = super().optim_context(model)
        return context if self.cast_dtype not in _HALF else _both(context, self.precision_context())

    def precision_context(self) -> AbstractContextManager[Any]:
        """Return autocast alone, for evaluations during training."""
        if self.cast_dtype not in _HALF:
            return nullcontext()
        return torch.autocast(self.device_type, dtype=self.cast_dtype)

    def state_dict(self) -> dict[str, Any]:
        """Return ``OptimWrapper.state_dict()`` with ``loss_scaler``."""
        return {**super().state_dict(), _SCALE_KEY: self.loss_scaler.state_dict()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore ``state_dict()`` of this class or of ``OptimWrapper``."""
        state = dict(state_dict)
        scale = state.pop(_SCALE_KEY, None)
        # A disabled scaler saves an empty state, which an enabled scaler cannot load.
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
    torch_dtype = _DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    if torch_dtype is None or torch_dtype not in _DTYPES.values():
        hint = did_you_mean(str(dtype), _DTYPES, limit=1, cutoff=0.5)
        raise ValueError(f"dtype should be any of {tuple(_DTYPES)} or None, got {dtype!r}{hint}")
    return torch_dtype


def _scaler_options(loss_scale: Any) -> tuple[dict[str, Any], float | None]:
    """Return the arguments of the scaler, and the fixed scale or None."""
    if loss_scale == "dynamic":
        return {}, None
    if isinstance(loss_scale, Mapping):
        check_options("loss_scale", loss_scale, option_names(torch.amp.GradScaler))
        return dict(loss_scale), None
    if isinstance(loss_scale, (int, float)) and not isinstance(loss_scale, bool):
        return {"init_scale": float(loss_scale)}, float(loss_scale)
    raise TypeError(f'loss_scale must be of type float, dict, or "dynamic", but got {loss_scale!r}')
