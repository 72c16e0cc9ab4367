"""Hooks that add measurements to the log records: the gradient norm, and the training speed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import partial, reduce
from operator import getitem
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from ...registry import HOOKS
from ...wrappers.features import model_features, optim_features
from ...wrappers.layout import gradient_norm
from ...wrappers.optimizers.clipping import GradClip
from ...wrappers.steps.preprocess import get_device, get_fields, path_to_samples
from ...wrappers.unwrap import num_data_ranks, user_model
from ..checkpoints.files import world_size
from ..display.limits import RankTimes, SpeedLimits
from ..hook import Hook, Listener, Scalars
from ..state import LoopState

# Time in hooks at these events counts; evaluations are not part of an interval.
_TIMED = frozenset(
    ["on_epoch_start", "on_batch_start", "on_batch_end", "on_update"]
    + ["collect_logs", "on_log", "on_save_point", "on_epoch_end", "on_train_end"]
)
# Those that follow directly after the work of a step.
_AFTER_STEP = frozenset(["on_update", "on_batch_end"])
# A path that no batch has.
_UNKNOWN = (object(),)


@HOOKS.register_module()
class GradNormHook(Hook):
    """Add ``grad_norm``, the total L2 norm of the gradients, to the log records.

    The norm of the gradients before clipping is averaged over the updates of a log interval. With
    several optimizers, each has an entry ``grad_norm/<name>``. If the optimizer wrapper clips by
    the L2 norm, the norm that it computed is used. For sharded parameters it is the norm of the
    whole gradients. If the optimizer computes them by a closure, it is the norm at the first
    evaluation of each update. Updates that a loss scaler skips do not count. Values stay on the
    device until the log record.
    """

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._counts: dict[str, Tensor | float] = {}
        self._handles: list[RemovableHandle] = []

    def on_train_start(self, state: LoopState) -> None:
        self._remove()
        # A hook of the loop would be too late: the update clears the gradients.
        for name, member, optimizer in get_optimizers(state):
            if isinstance(clip := getattr(member, "clip", None), GradClip):
                # Before the update, only the clipping sees the gradients as they were.
                clip.returns_l2 = True
            measure = partial(self._measure, f"grad_norm/{name}".rstrip("/"), member)
            self._handles.append(optimizer.register_step_pre_hook(measure))

    def collect_logs(self, state: LoopState, scalars: Scalars) -> None:
        for key, total in self._sums.items():
            count = self._counts[key]
            # A number would be copied from the host, which waits for the device.
            divisor = count.clamp(min=1) if isinstance(count, Tensor) else max(count, 1.0)
            scalars[key] = total / divisor

    def on_log(self, state: LoopState, record: dict[str, float]) -> None:
        if state.recorded_at == state.step:
            self._sums.clear()
            self._counts.clear()

    def state_dict(self) -> dict[str, Any]:
        return {"sums": dict(self._sums), "counts": dict(self._counts)}

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        self._sums, self._counts = dict(state["sums"]), dict(state["counts"])

    def on_train_end(self, state: LoopState) -> None:
        self._remove()

    def on_exception(self, state: LoopState, error: BaseException) -> None:
        self._remove()

    def _measure(
        self,
        key: str,
        wrapper: Any,
        optimizer: Optimizer,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Add the norm before an update; return other arguments for the update if it has a closure.

        ``args`` begins with the optimizer.
        """
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if not callable(closure):
            self._add(key, wrapper, optimizer)
            return None
        evaluations = 0

        def evaluate() -> Any:
            nonlocal evaluations
            loss = closure()
            evaluations += 1
            # Only now are there gradients.
            if evaluations == 1:
                self._add(key, wrapper, optimizer)
            return loss

        if len(args) > 1:
            return (args[0], evaluate, *args[2:]), kwargs
        return args, {**kwargs, "closure": evaluate}

    @torch.no_grad()
    def _add(self, key: str, wrapper: Any, optimizer: Optimizer) -> None:
        """Add the norm of the present gradients."""
        norm = optim_features(wrapper).grad_norm
        if norm is None:
            norm = gradient_norm(optimizer)
            # The gradients of a fused optimizer still contain the loss scaler's scale.
            scale = getattr(optimizer, "grad_scale", None)
            norm = norm if scale is None else norm / scale
        count: Tensor | float = 1.0
        # A fused optimizer is also called for skipped updates, with `found_inf` set.
        overflow = getattr(optimizer, "found_inf", None)
        if overflow is not None:
            norm = torch.where(overflow == 0, norm, 0.0).squeeze()
            count = (overflow == 0).to(norm.dtype).squeeze()
        self._sums[key] = self._sums[key] + norm if key in self._sums else norm
        self._counts[key] = self._counts.get(key, 0.0) + count

    def _remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []


def get_optimizers(state: LoopState) -> Iterator[tuple[str, Any, Optimizer]]:
    """Yield for each optimizer its name ("" for the only one), its wrapper and itself."""
    wrapper = state.optim_wrapper
    for name, member in wrapper.items() if hasattr(wrapper, "items") else [("", wrapper)]:
        optimizer = member.optimizer
        # Torch's optimizer for local SGD calls no step hooks, but the one inside it does.
        yield name, member, optimizer.optim if hasattr(optimizer, "averager") else optimizer


@HOOKS.register_module()
class ThroughputHook(Hook):
    """Add the training speed to the log records.

    docs/hooks.md describes ``samples_per_s``, ``steps_per_s``, ``data_share``, ``tokens_per_s``,
    ``mfu``, ``hooks_share``, ``slowest_rank`` and ``rank_wait_share``. The hook also sets
    ``state.limits``. Tensor-parallel ranks that process the same samples count them once. The hook
    does not synchronize with an accelerator. Its values describe whole log intervals, because every
    log record waits for the device. Time in which a CUDA device still works on the last step is not
    counted as waiting for data or hooks. Neither has been checked on a GPU.

    Args:
        tokens_per_sample: tokens in a sample. By default, the tokens are counted if ``loss_weight``
            is "tokens"; otherwise this is the model's attribute ``tokens_per_sample``.
        flops_per_token: floating-point operations of forward and backward for one token; default:
            the model's attribute ``flops_per_token``.
        flops_per_sample: the same for one sample; not together with ``flops_per_token``.
        peak_flops: the peak operations per second of one device, in the dtype in which the model
            computes.

    Raises:
        ValueError: a number is not positive and finite, or the numbers do not determine ``mfu``.
    """

    # After most other hooks, so that their time does not count as waiting for data.
    order = 95

    def __init__(
        self,
        *,
        tokens_per_sample: float | None = None,
        flops_per_token: float | None = None,
        flops_per_sample: float | None = None,
        peak_flops: float | None = None,
    ) -> None:
        self._given = {
            "tokens_per_sample": tokens_per_sample,
            "flops_per_token": flops_per_token,
            "flops_per_sample": flops_per_sample,
            "peak_flops": peak_flops,
        }
        for name, count in self._given.items():
            if count is not None and not 0 < count < math.inf:
                raise ValueError(f"ThroughputHook: {name} must be more than 0, got {count}")
        if flops_per_token is not None and flops_per_sample is not None:
            raise ValueError("ThroughputHook takes flops_per_token or flops_per_sample, got both")
        if peak_flops is None and (flops_per_token or flops_per_sample):
            raise ValueError(
                "ThroughputHook: mfu needs peak_flops in addition to the flops of a token or sample"
            )
        self._path: tuple[Any, ...] | None = _UNKNOWN
        self._tokens_per_sample: float | None = None
        self._counts_tokens = False
        self._seconds_per_unit: tuple[str, float] | None = None
        self._limits, self._times = SpeedLimits(), RankTimes()
        self._forward = _ForwardTimer(self._times)
        self._last_step: _LastStep | None = None
        # Seconds in other hooks so far, also while the device worked.
        self._in_hooks_s = 0.0
        self._start_interval(0, perf_counter())

    def around(self, event: str, hook: Any, listener: Listener) -> Listener:
        """Measure the time in the other hooks."""
        if event not in _TIMED:
            return listener
        name, follows_step = type(hook).__name__, event in _AFTER_STEP

        def timed(*args: Any) -> None:
            last_step = self._last_step
            if follows_step and last_step is not None:
                last_step.note_end()
            start_s = perf_counter()
            listener(*args)
            spent_s = perf_counter() - start_s
            self._in_hooks_s += spent_s
            if last_step is None or not last_step.is_running():
                self._times.hooks[name] = self._times.hooks.get(name, 0.0) + spent_s

        return timed

    def on_train_start(self, state: LoopState) -> None:
        self._optim = optim_features(state.optim_wrapper)
        weight = getattr(self._optim.loss_weight, "setting", None)
        self._counts_tokens = weight == "tokens" and self._given["tokens_per_sample"] is None
        self._tokens_per_sample = self._count(state, "tokens_per_sample")
        self._seconds_per_unit = self._find_seconds_per_unit(state)
        self._limits, state.limits = SpeedLimits(), {}
        self._forward.attach(state.model)
        device = get_device(state.model)
        self._last_step = None if device.type == "cpu" else _LastStep(device)
        self._start_interval(state.step, perf_counter())

    def on_epoch_start(self, state: LoopState) -> None:
        self._mark_s = perf_counter() - self._in_hooks_s

    def on_batch_start(self, state: LoopState, batch: Any) -> None:
        self._forward.start_s = now_s = perf_counter()
        if self._last_step is None or not self._last_step.is_running():
            self._times.loading_s += now_s - self._in_hooks_s - self._mark_s
        # Batches that only pad an uneven pass do not count, nor do skipped steps.
        counts = self._optim.batch_counts
        if self._path is None or not counts or state.step + 1 in (state.skip_steps or ()):
            return
        try:
            self._samples += len(reduce(getitem, self._path, batch))
        except (IndexError, KeyError, TypeError):
            batch = get_fields(batch)
            self._path = path_to_samples(batch)
            if self._path is not None:
                self._samples += len(reduce(getitem, self._path, batch))

    def on_batch_end(self, state: LoopState, batch: Any, logs: Mapping[str, Tensor]) -> None:
        if self._counts_tokens:
            self._tokens += state.optim_wrapper.last_weight
        if self._last_step is not None:
            self._last_step.note_end()
        # Time in hooks until the next batch does not count as waiting for it.
        self._mark_s = perf_counter() - self._in_hooks_s

    def collect_logs(self, state: LoopState, scalars: Scalars) -> None:
        now_s = perf_counter()
        elapsed_s = now_s - self._since_s - self._evaluating_s
        steps = state.step - self._first_step
        # Records average scalars over the ranks, but this is a total: multiply by the number of
        # ranks that see different samples (ranks that share a model's layers see the same ones).
        ranks = num_data_ranks(state.model)
        done: dict[str, float | Tensor] = {"sample": self._samples * ranks / elapsed_s}
        if self._counts_tokens:
            done["token"] = self._tokens * ranks / elapsed_s
        elif self._tokens_per_sample is not None:
            done["token"] = done["sample"] * self._tokens_per_sample
        scalars.update({f"{unit}s_per_s": rate for unit, rate in done.items()})
        if self._seconds_per_unit is not None:
            unit, seconds = self._seconds_per_unit
            scalars["mfu"] = done[unit] * seconds
        scalars["steps_per_s"] = steps / elapsed_s
        self._times.elapsed_s = elapsed_s
        scalars["data_share"] = min(1.0, self._times.loading_s / elapsed_s)
        _add_phases(state, self._times, self._evaluating_s)
        scalars.update(self._limits.update(state, self._times))
        # The exchange of times belongs to the next interval.
        self._start_interval(state.step, now_s)

    def on_log(self, state: LoopState, record: dict[str, float]) -> None:
        self._mark_s = perf_counter() - self._in_hooks_s

    def on_eval_start(self, state: LoopState) -> None:
        self._eval_start_s = perf_counter()

    def on_eval_end(self, state: LoopState, metrics: dict[str, float]) -> None:
        now_s = perf_counter()
        self._mark_s = now_s - self._in_hooks_s
        self._evaluating_s += now_s - self._eval_start_s

    def on_train_end(self, state: LoopState) -> None:
        self._forward.detach()
        # The last evaluation and the last save follow the last record.
        self._times.elapsed_s = perf_counter() - self._since_s - self._evaluating_s
        _add_phases(state, self._times, self._evaluating_s)

    def on_exception(self, state: LoopState, error: BaseException) -> None:
        self._forward.detach()

    def _count(self, state: LoopState, name: str) -> float | None:
        """Return the setting ``name``, or the attribute of the model or its ``net``, or None."""
        model = user_model(state.model)
        attributes = (
            getattr(source, name, None) for source in (model, getattr(model, "net", None))
        )
        values = (self._given[name], *attributes)
        return next((value for value in values if value is not None), None)

    def _find_seconds_per_unit(self, state: LoopState) -> tuple[str, float] | None:
        """Return "token" or "sample", and the seconds that one takes on all devices at peak speed.

        Returns None if ``peak_flops`` is not set.
        """
        peak = self._given["peak_flops"]
        if peak is None:
            return None
        # Settings take precedence over the model's attributes.
        units = sorted(
            ("token", "sample"), key=lambda unit: self._given[f"flops_per_{unit}"] is None
        )
        flops_by_unit = {unit: self._count(state, f"flops_per_{unit}") for unit in units}
        for unit, flops in flops_by_unit.items():
            if flops is None:
                continue
            if unit == "token" and not (self._counts_tokens or self._tokens_per_sample):
                raise ValueError(
                    "ThroughputHook: mfu by flops_per_token needs tokens_per_sample, as a setting "
                    "or as an attribute of the model, or loss_weight: tokens"
                )
            return unit, flops / (peak * _devices(state.model))
        raise ValueError(
            "ThroughputHook: mfu needs flops_per_token or flops_per_sample in addition to "
            "peak_flops, as a setting or as an attribute of the model"
        )

    def _start_interval(self, step: int, now_s: float) -> None:
        self._since_s = self._eval_start_s = now_s
        self._mark_s = now_s - self._in_hooks_s
        self._first_step = step
        self._samples = 0
        self._tokens: float | Tensor = 0.0
        self._evaluating_s = 0.0
        self._times.clear()


def _add_phases(state: LoopState, times: RankTimes, evaluating_s: float) -> None:
    state.phase_s["training"] += times.elapsed_s
    state.phase_s["evaluation"] += evaluating_s
    state.phase_s["data"] += times.loading_s
    state.phase_s["hooks"] += sum(times.hooks.values())


class _ForwardTimer:
    """Measure the time between the start of a step and the end of its first forward."""

    def __init__(self, times: RankTimes) -> None:
        self._times = times
        self._handle: RemovableHandle | None = None
        # The start of the step; None after its forward.
        self.start_s: float | None = None

    def attach(self, model: nn.Module) -> None:
        self.detach()
        if world_size() == 1 or model_features(model).recheck_every(1):
            # A hook on the module would change a compiled step.
            return

        # Use a plain function, which copies of the module share. If it were a method, each copy of
        # the module would contain a copy of this object.
        def count(*_: object) -> None:
            if self.start_s is not None:
                self._times.forward_s += perf_counter() - self.start_s
                self.start_s = None

        self._handle = model.register_forward_hook(count)

    def detach(self) -> None:
        if self._handle is not None:
            self._handle.remove()
            self._handle = None


class _LastStep:
    """Tell whether an accelerator still works on the last step."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._end = torch.Event(device)

    def note_end(self) -> None:
        """Note that the work of the last step is in the device's current stream."""
        torch.accelerator.current_stream(self._device).record_event(self._end)

    def is_running(self) -> bool:
        # An event that was never recorded is complete.
        return not self._end.query()


def _devices(model: nn.Module) -> int:
    """Return the number of devices that train the model, over all ranks."""
    local_devices = 1
    if isinstance(model, nn.DataParallel):
        local_devices = len(set(model.device_ids)) or torch.cuda.device_count() or 1
    return local_devices * world_size()
