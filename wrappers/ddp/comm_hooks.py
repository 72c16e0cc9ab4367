"""Communication hooks, which combine the gradients of the ranks, and their registered names."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed import GradBucket, ProcessGroup
from torch.distributed.algorithms.ddp_comm_hooks import (
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
)
from torch.futures import Future

from ...collectives import all_gather_object
from ...collectives.process.init import inherit_timeout
from ...registry import COMM_HOOKS, Registry, build_tree, did_you_mean

# Called by torch with the state and a bucket of gradients.
HookFunction = Callable[[Any, GradBucket], Any]


class CommHook:
    """Base class of communication hooks; an instance holds the options of a hook.

    Subclasses must override ``bind``.

    Attributes:
        averages: whether the hook always computes the mean over the ranks, except for rounding
            errors; ``loss_weight`` requires this.
    """

    averages = False

    def bind(self, group: ProcessGroup) -> tuple[Any, HookFunction]:
        """Return the arguments of torch's ``register_comm_hook``: a state and a function.

        Every rank of ``group`` must call this.
        """
        raise NotImplementedError(f"{type(self).__name__} must override bind(group)")


def _mean_in_bfloat16(group: ProcessGroup, bucket: GradBucket) -> Future[Tensor]:
    # torch's bf16_compress_hook does not support gloo.
    gradients = bucket.buffer()
    small = gradients.to(torch.bfloat16).div_(group.size())
    work = distributed.all_reduce(small, group=group, async_op=True)
    assert work is not None
    return work.get_future().then(lambda done: gradients.copy_(done.value()[0]))  # type: ignore[no-any-return]


@dataclass(frozen=True)
class _Function(CommHook):
    """Hold a hook function; its state is the process group if no state is given."""

    function: HookFunction
    state: Any = None
    given_state: bool = False

    def bind(self, group: ProcessGroup) -> tuple[Any, HookFunction]:
        return (self.state if self.given_state else group), self.function


@COMM_HOOKS.register_module(name=["allreduce", "AllReduce"])
class AllReduce(_Function):
    """Average gradients in their own precision, as torch does without a hook."""

    averages = True

    def __init__(self) -> None:
        super().__init__(default_hooks.allreduce_hook)


@COMM_HOOKS.register_module(name=["fp16_compress", "FP16Compress"])
class FP16Compress(_Function):
    """Average gradients in float16: half the bytes of float32, but values beyond 65504 overflow."""

    averages = True

    def __init__(self) -> None:
        super().__init__(default_hooks.fp16_compress_hook)


@COMM_HOOKS.register_module(name=["bf16_compress", "BF16Compress"])
class BF16Compress(_Function):
    """Average gradients in bfloat16: float32's range, half its bytes, only 8 bits of precision."""

    averages = True

    def __init__(self) -> None:
        super().__init__(_mean_in_bfloat16)


@COMM_HOOKS.register_module(name=["powerSGD", "PowerSGD"])
@dataclass(frozen=True)
class PowerSGD(CommHook):
    """Average low-rank approximations of the gradients, after some exact steps.

    The fields are the arguments of torch's ``PowerSGDState``. Vogels, Karimireddy, Jaggi,
    "PowerSGD: Practical Low-Rank Gradient Compression", 2019. The state of the error feedback is
    not saved in checkpoints: a resumed run starts with exact steps again.
    """

    matrix_approximation_rank: int = 1
    start_powerSGD_iter: int = 1000  # noqa: N815 torch's own spelling
    min_compression_rate: float = 2
    use_error_feedback: bool = True
    warm_start: bool = True
    orthogonalization_epsilon: float = 0
    random_seed: int = 0
    compression_stats_logging_frequency: int = 10000
    batch_tensors_with_same_shape: bool = False

    def bind(self, group: ProcessGroup) -> tuple[Any, HookFunction]:
        state = powerSGD_hook.PowerSGDState(process_group=group, **vars(self))
        return state, powerSGD_hook.powerSGD_hook


@COMM_HOOKS.register_module(name=["post_localSGD", "PostLocalSGD"])
@dataclass(frozen=True)
class PostLocalSGD(CommHook):
    """Average gradients over all ranks at first, later only over subgroups of consecutive ranks.

    Use it with the optimizer ``PostLocalSGD``, which averages the parameters of all ranks
    periodically. Its ``warmup_steps`` should equal ``start_localSGD_iter``.

    Attributes:
        start_localSGD_iter: number of backward passes that average over all ranks.
        subgroup_size: number of ranks in a subgroup. With 1, gradients are not averaged after the
            first passes.
    """

    start_localSGD_iter: int  # noqa: N815 torch's own spelling
    subgroup_size: int = 1

    def bind(self, group: ProcessGroup) -> tuple[Any, HookFunction]:
        subgroup = self._subgroup(group) if self.subgroup_size > 1 else None
        state = post_localSGD_hook.PostLocalSGDState(  # type: ignore[no-untyped-call]
            process_group=group,
            subgroup=subgroup,
            start_localSGD_iter=self.start_localSGD_iter,
            post_local_gradient_allreduce=self.subgroup_size > 1,
        )
        return state, post_localSGD_hook.post_localSGD_hook

    def _subgroup(self, group: ProcessGroup) -> ProcessGroup:
        # torch requires that every rank of the run takes part in creating every subgroup.
        size, ranks = self.subgroup_size, distributed.get_process_group_ranks(group)
        if len(ranks) % size:
            raise ValueError(
                f"comm_hook: subgroup_size must divide the {len(ranks)} ranks of the group, got "
                f"{size}"
            )
        rows = sorted({tuple(rank_list) for rank_list in all_gather_object(ranks)})
        rank_groups = [list(row[at : at + size]) for row in rows for at in range(0, len(row), size)]
        subgroup: ProcessGroup
        subgroup, _ = distributed.new_subgroups_by_enumeration(rank_groups)  # type: ignore[no-untyped-call]
        inherit_timeout(subgroup)
        return subgroup


def read_comm_hook(setting: Any) -> CommHook:
    """Return the communication hook for a setting, and check its options.

    Args:
        setting: a registered name, ``{"type": name, **options}``, the import path of a function,
            a function ``hook(state, bucket)``, a pair ``(state, hook)`` or a ``CommHook``. A
            function without a state gets the process group as its state. A state that is a dict
            with a ``type`` is replaced by the object that the registry builds from it.

    Raises:
        ValueError: no hook is registered under the name.
        TypeError: an option is unknown, or ``setting`` has another type.
    """
    if isinstance(setting, CommHook):
        return setting
    if isinstance(setting, Mapping):
        kind = setting.get("type")
        table = COMM_HOOKS.at_scope(setting.get("_scope_"))
        target = _find(kind, table) if isinstance(kind, str) else kind
        if not (isinstance(target, type) and issubclass(target, CommHook)):
            raise TypeError(f"comm_hook: {kind!r} takes no options; give its name without a dict")
        hook: CommHook = COMM_HOOKS.build({**setting, "type": target})
        return hook
    if isinstance(setting, str):
        target = _find(setting)
        return target() if isinstance(target, type) else _Function(_check_function(target))
    if isinstance(setting, Sequence) and len(setting) == 2:
        state, function = setting
        if isinstance(state, Mapping) and "type" in state:
            state = build_tree(state, COMM_HOOKS)
        function = _find(function) if isinstance(function, str) else function
        return _Function(_check_function(function), state, given_state=True)
    return _Function(_check_function(setting))


def unannotated(function: HookFunction) -> HookFunction:
    """Return ``function`` without annotations, because torch rejects string annotations."""

    def hook(state, bucket):  # type: ignore[no-untyped-def]
        return function(state, bucket)

    # torch writes this name to its logs.
    hook.__qualname__ = getattr(function, "__qualname__", type(function).__name__)
    return hook


def _find(name: str, table: Registry = COMM_HOOKS) -> Any:
    comm_hook = table.get(name)
    if comm_hook is None:
        choices = ", ".join(COMM_HOOKS)
        hint = did_you_mean(name, list(COMM_HOOKS))
        raise ValueError(
            f"comm_hook must be one of {choices}, or an import path, got {name!r}{hint}"
        )
    return comm_hook


def _check_function(function: Any) -> HookFunction:
    if not callable(function) or "bucket" not in inspect.signature(function).parameters:
        raise TypeError(
            "comm_hook must be a name, a dict with a type, hook(state, bucket) or a pair "
            f"(state, hook), got {function!r}"
        )
    return function  # type: ignore[no-any-return]
