"""Run the batches of a wrapper by compiled programs, or decide to run the usual step instead."""

from __future__ import annotations

import logging
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from inspect import getattr_static
from typing import Any
from weakref import WeakSet

import torch
from torch import distributed, nn

from ...collectives import get_rank
from ..batchnorm.sync_batchnorm import SynchronizedBatchNorm
from ..ddp.distributed import StepDistributedDataParallel
from ..features import require_optim_wrapper
from ..layout import broadcast_from_first_rank, is_dtensor
from ..one_process import SingleDevice
from ..optimizers.amp import AmpOptimWrapper
from ..optimizers.first_update import FirstUpdate
from ..optimizers.gates import GradientGate
from ..optimizers.optim import OptimWrapper
from ..optimizers.optim_state import has_sharded_state
from ..optimizers.windows import WeightedWindow
from ..steps.preprocess import MODULE_HOOKS, as_call, get_device, only_moves
from ..steps.step import detached, parse_losses
from ..steps.step_checks import has_custom_step
from .capture import NotCompilableError, NotReadyError, first_line
from .contract import find_obstacles
from .cuda_graph import CudaGraph
from .program import Compiler
from .trace import GradientPlan
from .variant import StepVariant, shared_buffers, update_like_programs

logger = logging.getLogger(__name__)

# Number of eager accumulation windows before the first compiled one. The optimizer creates its
# state in the first window; the others are timed.
_EAGER_WINDOWS = 3
# If no more variants can be compiled, but existing ones have moved numbers of the optimizer to a
# GPU, drop them after this many eager steps in a row.
_UNUSED_STEPS = 100
# If a model is trained with more optimizer wrappers than this, they are assumed to take turns.
_MOST_OPTIM_WRAPPERS = 2
# Number of times in a row that a step is found to be not ready, such as without optimizer state,
# before compiling is given up.
_ATTEMPTS = 3
# The number of compiled steps that are timed.
_TIMED = 20
_SETTINGS_CHANGE = (
    "something that must stay the same changes from step to step: an attribute of the model, a "
    "number or text in the batches, or a setting of the optimizer other than learning rates, such "
    "as momentum under OneCycleLR without cycle_momentum: false"
)
# Compared with the optimizer wrapper of the first step.
_NO_OPTIM_WRAPPER = object()
_CUSTOM = "the wrapper has a custom train_step or forward"
_AUTOCAST = "torch.autocast is entered around train_step: use AmpOptimWrapper instead"


class CompiledStep:
    """The compiled part of a wrapper's ``train_step``: forward, backward and update of a batch.

    If a step cannot be compiled, the usual step runs. Each reason is logged once.

    Args:
        wrapper: the wrapper of the model.
        max_programs: the maximum number of compiled variants of the step. Each shape of batches,
            and each change of the model, needs another variant. When there are this many, other
            steps run as usual.
        min_steps: do not compile if the run is known to have fewer updates, because compiling would
            take longer than it saves.
        custom_optimizer: also compile optimizers that are not part of torch.
        backend: "inductor", or "eager" to run the traced step without a compiler, for debugging.

    Attributes:
        programs: the compiled variants of the step, most recently used first. Each has one program
            or two.
    """

    def __init__(
        self,
        wrapper: Any,
        max_programs: int = 8,
        min_steps: int = 500,
        custom_optimizer: bool = False,
        backend: str = "inductor",
    ) -> None:
        self._wrapper = wrapper
        self._options = max_programs, min_steps, custom_optimizer, backend
        self.max_programs, self._min_steps = max_programs, min_steps
        self._allow_custom, self._backend = custom_optimizer, backend
        self.programs: list[StepVariant] = []
        self._graphs: WeakSet[CudaGraph] = WeakSet()
        self._moved_states: list[tuple[dict[str, Any], str]] = []
        self._optim_wrapper: Any = _NO_OPTIM_WRAPPER
        # If True, every step runs as usual.
        self._is_off = False
        self._logged: set[str] = set()
        self._attempts, self._num_optim_wrappers = _ATTEMPTS, 0
        # If True, no more variants are compiled, but existing ones still run.
        self._compiles_no_more = False
        # Number of eager steps since the last one of a program.
        self._num_eager = 0
        self._clock = _Clock()
        # Steps per check of the model, and the number of steps that are left until the next check.
        self._block, self._left = 1, 0
        self._outdated = 0
        self._is_autocast, self._device_type = False, "cpu"

    def __reduce__(self) -> Any:
        return type(self), (self._wrapper, *self._options)

    def attach(self) -> None:
        """Make the wrapper run its batches by programs, unless it has a custom training step."""
        wrapper = self._wrapper
        if has_custom_step(wrapper):
            self._log_once(_CUSTOM)
            return
        wrapper.batch_runner = self
        wrapper.train_steps, wrapper.recheck_every = self.train_steps, self.recheck_every

    def __call__(self, wrapper: Any, data: Any, optim_wrapper: Any) -> Any:
        """Run a batch and return the values to log; NotImplemented if the usual step must run.

        Every rank must call this.
        """
        if not self._is_ready(optim_wrapper):
            self._left = 0
            self._expect_changes()
            return NotImplemented
        if (logs := self._run_unchecked(data, optim_wrapper)) is not None:
            return logs
        with optim_wrapper.optim_context(wrapper):
            batch = wrapper.preprocess(data, training=True)
            optim_wrapper.weigh(batch, wrapper)
            return self._step(data, batch, optim_wrapper)

    def train_steps(self, batches: Iterable[Any], optim_wrapper: Any) -> list[dict[str, Any]]:
        """Train on several batches, with a check of the model only before the first one."""
        self.recheck_every(sys.maxsize)
        try:
            return [self._wrapper.train_step(batch, optim_wrapper) for batch in batches]
        finally:
            self.recheck_every(1)

    def _is_ready(self, optim_wrapper: Any) -> bool:
        """Return whether this step may be compiled; the result is the same on all ranks."""
        if self._is_off:
            return False
        self._clock.tick()
        # Read here, because the optimizer wrapper's own context may enter autocast later.
        self._is_autocast = torch.is_autocast_enabled(self._device_type)
        if optim_wrapper is not self._optim_wrapper:
            require_optim_wrapper(optim_wrapper)
            self.programs.clear()
            self._return_states()
            self._optim_wrapper = optim_wrapper
            self._num_optim_wrappers += 1
            self._left, self._device_type = 0, get_device(self._wrapper.module).type
            self._is_autocast = torch.is_autocast_enabled(self._device_type)
            if (reason := self._obstacle() or self._why_too_short()) is not None:
                self._is_off = True
                self._log_once(reason)
                return False
        if optim_wrapper.inner_count < _EAGER_WINDOWS * optim_wrapper.accumulative_counts:
            return False
        gates = optim_wrapper.gates.active
        if gates and (deciding := [*filter(_decides, gates)]):
            kind = type(getattr(deciding[-1], "guard", deciding[-1])).__name__
            self._log_once(f"{kind} reads the gradients before each update")
            return False
        if self._wrapper.update_decorators:
            self._log_once("detect_anomalous_params checks each gradient")
            return False
        return True

    def _run_unchecked(self, data: Any, optim_wrapper: Any) -> dict[str, Any] | None:
        """Run a step without checking the model again; return None if no step was run."""
        if not self._left:
            return None
        self._left -= 1
        return None if self._is_autocast else self.programs[0].run_unchecked(data, optim_wrapper)

    def _step(self, data: Any, batch: Any, optim_wrapper: Any) -> dict[str, Any]:
        """Run a preprocessed batch by a program if there is one, otherwise by an eager step."""
        wrapper = self._wrapper
        self._left = 0
        plan = _plan(wrapper, optim_wrapper)
        variant = self._variant(plan, batch)
        if self._is_autocast:
            self._log_once(_AUTOCAST)
            variant = None
        if plan.ranks > 1 and not plan.held:
            broadcast_from_first_rank(shared_buffers(wrapper), wrapper.data_group)
        if variant is not None:
            failure: NotCompilableError | None
            try:
                logs = variant.run(batch, optim_wrapper)
                failure = variant.failure
            except NotCompilableError as reason:
                logs, failure = None, reason
            if failure is not None:
                self._refuse(failure)
                self.programs.remove(variant)
                self._return_states()
            elif self._block > 1 and variant.repeats(optim_wrapper) and only_moves(wrapper):
                self._left = self._block - 1
            if logs is not None:
                self._num_eager = 0
                return logs
        self._num_eager += 1
        if self._moved_states and self._compiles_no_more and self._num_eager > _UNUSED_STEPS:
            self.programs.clear()
            self._return_states()
        self._expect_changes()
        return self._step_eagerly(data, batch, optim_wrapper, plan.ranks)

    def _expect_changes(self) -> None:
        """Verify the next step of each program, because an eager step runs now."""
        for program in self.programs:
            program.expect_change()

    def _step_eagerly(
        self, data: Any, batch: Any, optim_wrapper: Any, ranks: int
    ) -> dict[str, Any]:
        """Run an eager step; ranks that average gradients do it as the programs of other ranks."""
        wrapper = self._wrapper
        model = wrapper.module
        args, kwargs = as_call(batch)
        forward = wrapper if ranks == 1 else model
        try:
            losses = forward(*args, **kwargs, mode="loss")
        except BaseException as error:
            wrapper.support.explain_forward(wrapper, error, data)
            raise
        # The usual step sums the losses and updates outside of autocast.
        with torch.autocast(get_device(model).type, enabled=False):
            total, logs = getattr(model, "parse_losses", parse_losses)(losses)
            if ranks == 1:
                try:
                    optim_wrapper.update_params(total)
                except BaseException as error:
                    wrapper.support.explain_update(wrapper, error)
                    raise
            else:
                update_like_programs(total, optim_wrapper, wrapper)
        return detached(logs)

    def recheck_every(self, steps: int) -> bool:
        """Check the model for changes only before every ``steps``-th step, starting with the next.

        Between these checks you may change only values of the model's tensors. Settings of the
        optimizer are checked before every step. Returns True, because this step is compiled.
        """
        self._block, self._left = steps, 0
        return True

    def _variant(self, plan: GradientPlan, batch: Any) -> StepVariant | None:
        """Return a variant for this step, compiled if necessary; None if that is not possible."""
        for at, variant in enumerate(self.programs):
            if variant.fits(plan, batch):
                if at:
                    self.programs.insert(0, self.programs.pop(at))
                return variant
        if self._compiles_no_more:
            return None
        try:
            if len(self.programs) >= self.max_programs:
                raise NotCompilableError(
                    f"there are max_programs={self.max_programs} compiled variants"
                )
            if (reason := self._obstacle()) is not None:
                raise NotCompilableError(reason)
            self._outdated += any(program.is_outdated(plan, batch) for program in self.programs[:1])
            if self._outdated > 1:
                raise NotCompilableError(_SETTINGS_CHANGE)
            with self._clock.compiling(get_device(self._wrapper.module)):
                compiler = Compiler(self._backend, self._clock.announce)
                variant = StepVariant(
                    self._wrapper,
                    self._optim_wrapper,
                    plan,
                    batch,
                    compiler=compiler,
                    graphs=self._graphs,
                )
            self.programs.insert(0, variant)
            self._moved_states += variant.moved_states
            self._attempts = _ATTEMPTS
            return variant
        except NotCompilableError as reason:
            self._refuse(reason)
        except Exception as error:
            # Compilers fail in many ways; the usual step still works.
            kind = type(error).__name__
            self._refuse(NotCompilableError(f"building it fails: {kind}: {first_line(error)}"))
        return None

    def _return_states(self) -> None:
        """Move numbers of the optimizer back to the CPU if no program uses them any more.

        Eager optimizers read them for each parameter, which would wait for a GPU.
        """
        if not self.programs:
            for state, name in self._moved_states:
                if name in state:
                    state[name] = state[name].cpu()
            self._moved_states.clear()

    def _refuse(self, reason: Exception) -> None:
        self._attempts -= 1
        if self._attempts and isinstance(reason, NotReadyError):
            # Usually the next step can be compiled.
            return
        self._log_once(str(reason))
        # Trying again would slow down every step.
        self._compiles_no_more = True

    def _why_too_short(self) -> str | None:
        """Return why the run is too short to compile, or None.

        This uses the planned length of the whole run, so a resumed run makes the same decision.
        """
        optim_wrapper = self._optim_wrapper
        updates = optim_wrapper.max_counts / optim_wrapper.accumulative_counts
        if not 0 < updates < self._min_steps:
            return None
        return (
            f"the run has {updates:.0f} updates, fewer than min_steps={self._min_steps}, so "
            "compiling would take longer than it saves"
        )

    def _obstacle(self) -> str | None:
        """Return why no step can be compiled, or None; the result is the same on all ranks."""
        if self._is_autocast:
            return _AUTOCAST
        if self._num_optim_wrappers > _MOST_OPTIM_WRAPPERS:
            return "several optimizer wrappers train this model in turn"
        return next(_obstacles(self._wrapper, self._optim_wrapper, self._allow_custom), None)

    def _log_once(self, reason: str) -> None:
        if reason not in self._logged and get_rank() == 0:
            logger.warning("a training step is not compiled and runs as usual: %s", reason)
        self._logged.add(reason)


class _Clock:
    """Measure steps before and after compiling, and log when compiling pays off."""

    def __init__(self) -> None:
        self._last: float | None = None
        self._eager: deque[float] = deque(maxlen=_TIMED)
        self._compiled: list[float] = []
        self._seconds = 0.0

    def tick(self) -> None:
        """Record the start of a step."""
        if len(self._compiled) > _TIMED:
            return
        now = time.perf_counter()
        if self._last is not None:
            (self._compiled if self._seconds else self._eager).append(now - self._last)
        self._last = now
        if len(self._compiled) > _TIMED and get_rank() == 0:
            logger.info("the training step was compiled in %.1f s%s", self._seconds, self._gain())

    def announce(self, seconds: float) -> None:
        """Log how long compiling will take, and when it can pay off."""
        if get_rank() != 0:
            return
        eager = min(list(self._eager)[1:], default=0.0)
        when = f"; it pays off after {seconds / eager:,.0f} steps at the earliest" if eager else ""
        logger.info("compiling the training step takes about %.0f s%s", seconds, when)

    @contextmanager
    def compiling(self, device: torch.device) -> Iterator[None]:
        """Measure the time spent compiling."""
        begin = time.perf_counter()
        yield
        self._seconds += time.perf_counter() - begin
        self._last = None
        if device.type != "cpu":
            # Kernel launches return immediately, so the time of a step is unknown.
            self._eager.clear()

    def _gain(self) -> str:
        # The first step includes one-time setup.
        if len(self._eager) < 2:
            return ""
        before, after = min(list(self._eager)[1:]), min(self._compiled)
        gain = f"; it takes {after * 1e3:.3g} ms instead of {before * 1e3:.3g} ms"
        if after >= before:
            return f"{gain}: remove compile: step"
        return f"{gain}, which pays off after {self._seconds / (before - after):,.0f} steps"


def _decides(gate: Any) -> bool:
    """Return whether a gate may prevent an update that a program would make."""
    return not isinstance(gate, (FirstUpdate, WeightedWindow, GradientGate))


def _plan(wrapper: Any, optim_wrapper: Any) -> GradientPlan:
    ranks = 1
    if wrapper.averages_ranks and distributed.is_initialized():
        ranks = distributed.get_world_size(wrapper.data_group)
    groups = optim_wrapper.optimizer.param_groups
    grads = [p.grad for group in groups for p in group["params"] if p.requires_grad]
    layouts: tuple[Any, ...] = ()
    if any(grad is not None for grad in grads):
        layouts = tuple(None if grad is None else (grad.stride(), grad.dtype) for grad in grads)
    if optim_wrapper.accumulative_counts == 1:
        return GradientPlan(layouts, ranks=ranks)
    return GradientPlan(layouts, optim_wrapper.should_sync(), optim_wrapper.window_length(), ranks)


def _obstacles(wrapper: Any, optim_wrapper: Any, allow_custom: bool) -> Iterator[str]:
    name = type(optim_wrapper).__name__
    if not isinstance(wrapper, (SingleDevice, StepDistributedDataParallel)):
        yield f"{type(wrapper).__name__} is not supported; only single and ddp are compiled"
    if type(wrapper).forward not in _FORWARDS:
        yield _CUSTOM
    if type(optim_wrapper) not in (OptimWrapper, AmpOptimWrapper):
        yield f"{name} is not an OptimWrapper or AmpOptimWrapper"
        return
    if optim_wrapper.scales_losses:
        yield "float16 needs loss scaling, which is not compiled; use bfloat16"
    members = ((kind, *member) for kind, own_members in _METHODS for member in own_members.items())
    if any(getattr_static(kind, key) is not member for kind, key, member in members):
        yield "a method of OptimWrapper has been replaced"
    kind = type(optim_wrapper)
    if patched := [
        attribute for attribute in vars(optim_wrapper) if callable(getattr(kind, attribute, None))
    ]:
        yield f"methods of the {name} have been replaced: {', '.join(patched)}"
    yield from _optimizer_obstacles(optim_wrapper)
    yield from find_obstacles(optim_wrapper.optimizer, allow_custom)
    yield from _model_obstacles(wrapper.module)
    if isinstance(wrapper, StepDistributedDataParallel):
        yield from _ddp_obstacles(wrapper)


def _optimizer_obstacles(optim_wrapper: OptimWrapper) -> Iterator[str]:
    optimizer: Any = optim_wrapper.optimizer
    kind = type(optimizer).__name__
    if optim_wrapper.needs_closure:
        yield f"{kind} needs a closure"
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        yield f"{kind} has hooks, for example from a ledger or a GradNormHook"
    if has_sharded_state(optimizer) or hasattr(optimizer, "averager"):
        yield f"{kind} exchanges data other than gradients between the ranks"


def _model_obstacles(model: nn.Module) -> Iterator[str]:
    for name, child in model.named_modules():
        if any(getattr(child, hooks) for hooks in MODULE_HOOKS):
            yield f"{name or 'the model'} has hooks"
        if getattr(child, "sparse", False):
            yield f"{name} has sparse gradients"
        if isinstance(child, (nn.SyncBatchNorm, SynchronizedBatchNorm)):
            yield f"{name} communicates in the forward"
    for name, param in model.named_parameters():
        if type(param) is not nn.Parameter or is_dtensor(param):
            yield f"{name} is a {type(param).__name__}"
        if param.device.type not in ("cpu", "cuda"):
            yield f"{name} is on {param.device}; only steps on CPUs and on CUDA GPUs are compiled"
        if param._backward_hooks or param._post_accumulate_grad_hooks:
            yield f"{name} has hooks"


def _ddp_obstacles(wrapper: Any) -> Iterator[str]:
    """Yield the options of DDP that prevent compiling."""
    if get_device(wrapper.module).type != "cpu":
        yield "on GPUs ddp averages gradients during the backward, which a compiled step cannot do"
    for option in ("find_unused_parameters", "static_graph", "parameters_to_ignore"):
        if getattr(wrapper, option):
            yield f"{option} is set"
    if wrapper._comm_hooks:
        yield "there is a comm_hook"
    if wrapper.uneven_inputs is not None:
        yield "ranks may run out of data at different steps (uneven_inputs)"


# The methods at import time, to detect replacements.
_METHODS = [
    (kind, {key: member for key in dir(kind) if callable(member := getattr_static(kind, key))})
    for kind in (OptimWrapper, AmpOptimWrapper)
]
_FORWARDS = (SingleDevice.forward, StepDistributedDataParallel.forward)
