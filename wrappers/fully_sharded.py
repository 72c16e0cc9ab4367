"""The wrapper for a model whose parameters are spread over the ranks."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)

from ..registry import MODEL_WRAPPERS
from ._first_rank import broadcast_first, check_same
from ._fsdp_mesh import sharding_mesh
from ._fsdp_options import FURTHER, FsdpOptions, read_options
from ._fsdp_units import (
    check_shapes,
    find_ignored,
    find_units,
    full_precision_units,
    in_backward_order,
)
from .anomalies import detect_anomalous_params, watch_gradients
from .blocks import BlockSpec
from .mesh import Mesh
from .meta_init import check_no_meta_buffers, materialise
from .options import check_options
from .preprocess import DataPreprocessor
from .step import OptimizerWrapper, Steps, has_own_train_step
from .sync_conversion import convert_sync_batchnorm

_NAMES = [
    "StepFullyShardedDataParallel",
    "MMFullyShardedDataParallel",
    "FullyShardedDataParallel",
    "fsdp",
]


@MODEL_WRAPPERS.register_module(name=_NAMES)
class StepFullyShardedDataParallel(Steps, nn.Module):
    """Parameters, gradients and optimizer state in shards, by torch's ``fully_shard``.

    Needs a process group, and every rank must construct it, train and evaluate with it: blocks
    are gathered where they are used and freed after. ``module`` is the user's model with its own
    names; its parameters are DTensors outside of a forward, so make the optimizer afterwards.
    Weights and buffers become those of the first rank. A model whose parameters are on the meta
    device is built here, one module after the other (see ``meta_parameters``).

    A model with a ``train_step`` of its own is stepped by it. For another optimization step
    override ``train_step(data, optim_wrapper)`` in a subclass, as for
    ``StepDistributedDataParallel``, with ``self(...)`` for the forward.

    A wrapped model can be neither copied nor pickled, because its shards are tied to processes:
    copy the bare model before, or save ``state_dict()``.

    Args:
        module: the model.
        shard: what is gathered on its own, as for ``find_blocks``; the rest is one more block.
        mesh: over which ranks, default: all of them. With the axes replicate and shard, copies
            of the shards (HSDP).
        mixed_precision: ``param_dtype``, ``reduce_dtype``, ``output_dtype`` of the whole model
            (names of dtypes) and ``cast_forward_inputs``; or torch's policy. BatchNorm layers keep
            their dtype.
        cpu_offload: keep shards, gradients and optimizer state in the memory of the host; or a
            mapping with ``pin_memory``, which has no effect without an accelerator.
        reshard_after_forward: free blocks between forward and backward (default). False keeps
            them, a number keeps them shared out over so many ranks. What is in no block is kept.
        sync_batchnorm: make the model's BatchNorm layers train with the statistics of all ranks.
        detect_anomalous_params: log the parameters that the loss does not reach, on every step.
        fsdp_kwargs: ``prefetch``: how many blocks are gathered ahead, a number or a mapping of
            ``forward`` and ``backward``. ``param_init_fn``: called with every module that has
            parameters on the meta device, in place of its ``reset_parameters``. And the options
            of torch's older ``FullyShardedDataParallel``, as objects or as names.

    Raises:
        TypeError: there is no such option, or a value is of another kind.
        ValueError: no process group; an option has no counterpart or contradicts another one; a
            parameter cannot be sharded or initialised; the models of the ranks differ.
    """

    # A policy of wrapping is a mapping with a type, but no part of its own.
    config_plain = ("auto_wrap_policy", "param_init_fn")

    def __init__(
        self,
        module: nn.Module,
        *,
        shard: BlockSpec | None = None,
        mesh: Mesh | DeviceMesh | None = None,
        mixed_precision: Mapping[str, Any] | MixedPrecisionPolicy | None = None,
        cpu_offload: bool | Mapping[str, Any] | None = None,
        reshard_after_forward: bool | int | None = None,
        sync_batchnorm: bool = False,
        detect_anomalous_params: bool = False,
        **fsdp_kwargs: Any,
    ) -> None:
        super().__init__()
        self.check_options(fsdp_kwargs)
        options = read_options(
            {
                "shard": shard,
                "mesh": mesh,
                "mixed_precision": mixed_precision,
                "cpu_offload": cpu_offload,
                "reshard_after_forward": reshard_after_forward,
                **fsdp_kwargs,
            }
        )
        _check_model(module, detect_anomalous_params)
        place = sharding_mesh(options, module)
        self.data_group, self._mesh = place.data_group, place.shards
        self.collective_eval = True
        if sync_batchnorm:
            convert_sync_batchnorm(module, self.data_group)
        self.module = _shard(module, options, place.shards)
        if any(one.is_meta for one in module.parameters()):
            materialise(module, place.everywhere, options.param_init_fn)
        self._units = [one for one in module.modules() if isinstance(one, FSDPModule)]
        self._gathered_once = False
        self._holds = self._held = False
        self._install(module)
        self._prepare_steps(detect_anomalous_params)
        _place_preprocessors(self, place.device)
        self._leaves: dict[str, nn.Parameter] = {}
        if detect_anomalous_params:
            self._watch_leaves()

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Call the model."""
        output = self.module(*inputs, **kwargs)
        if not torch.is_grad_enabled():
            self._free()
        return output

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Keep the gradients of the forwards inside on their ranks, whole and unsharded.

        The first backward of a forward outside adds them up over the ranks.
        """
        before, self._holds = self._holds, True
        try:
            yield
        finally:
            self._holds = before

    def sync_buffers(self) -> None:
        """Give every rank the buffers of the first, before evaluation.

        Every rank must call this.
        """
        broadcast_first(self.module.buffers(), self._mesh)

    def __deepcopy__(self, memo: Any) -> NoReturn:
        """Refuse: see ``__reduce_ex__``."""
        self.__reduce_ex__(0)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Raise TypeError: shards cannot leave the processes that they are spread over."""
        raise TypeError(
            f"a {type(self).__name__} can be neither copied nor pickled, because its parameters "
            "are shards tied to this group of processes: copy the bare model before it is "
            "wrapped, or save state_dict() and load it into a new one"
        )

    @classmethod
    def check_options(cls, options: Mapping[str, Any]) -> None:
        """Raise TypeError for an option that this class does not take."""
        names = [name for name in cls.config_signature().parameters if name != "module"]
        check_options(cls.__name__, options, names)

    @classmethod
    def config_signature(cls) -> inspect.Signature:
        """The arguments with all options in place of ``**fsdp_kwargs``."""
        own = inspect.signature(cls.__init__).parameters.values()
        kept = [one for one in own if one.name != "self" and one.kind is not one.VAR_KEYWORD]
        if not any(one.kind is one.VAR_KEYWORD for one in own):
            return inspect.Signature(kept)
        mine = [one.name for one in kept]
        base = inspect.signature(StepFullyShardedDataParallel.__init__).parameters.values()
        passed = [one for one in base if one.kind is one.KEYWORD_ONLY and one.name not in mine]
        passed += [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default)
            for name, default in FURTHER.items()
            if name not in mine
        ]
        return inspect.Signature([*kept, *passed])

    def _install(self, module: nn.Module) -> None:
        """Let the model's own methods gather what they need, and tell backward what to reduce."""
        self._model_steps = has_own_train_step(module)
        if self._model_steps and not hasattr(module, "no_sync"):
            # An optimizer wrapper asks the model itself when the model steps itself.
            module.no_sync = self.no_sync  # type: ignore[assignment]
        for name in ("val_step", "test_step"):
            if hasattr(module, name):
                register_fsdp_forward_method(module, name)
        # In front of torch's own hook, which gathers.
        module.register_forward_pre_hook(self._before_forward, prepend=True)

    def _before_forward(self, module: nn.Module, inputs: Any) -> None:
        if torch.is_inference_mode_enabled():
            self._gather_once()
        elif torch.is_grad_enabled() and self._holds is not self._held:
            # torch looks at this in backward, which runs outside of `optim_context`.
            module.set_requires_gradient_sync(not self._holds)  # type: ignore[operator]
            self._held = self._holds

    def _gather_once(self) -> None:
        """Make the memory of whole parameters outside of inference mode.

        It is made at the first use and reused, and what is made inside can never be trained.
        """
        if self._gathered_once:
            return
        self._gathered_once = True
        with torch.inference_mode(mode=False), torch.no_grad():
            for unit in self._units:
                unit.unshard()
                unit.reshard()

    def _free(self) -> None:
        """Leave no block gathered: only a backward would free it."""
        for unit in self._units:
            unit.reshard()

    def _evaluate(self, name: str, data: Any) -> Any:
        if torch.is_inference_mode_enabled():
            self._gather_once()
        output = super()._evaluate(name, data)
        self._free()
        return output

    def _watch_leaves(self) -> None:
        """Keep track of the parameters that a graph is made of: not the shards."""
        paths = {id(one): path for path, one in self.named_modules()}

        def note(unit: nn.Module, inputs: Any) -> None:
            self._leaves.update(unit.named_parameters(paths[id(unit)]))

        for unit in self._units:
            unit.register_forward_pre_hook(note)

    def _update_and_detect(self, total: Tensor, optim_wrapper: OptimizerWrapper) -> None:
        leaves = _Leaves(self.__dict__, self._leaves)
        with watch_gradients(leaves) as received:
            optim_wrapper.update_params(total)
        detect_anomalous_params(total, leaves, received=received)
        self._leaves.clear()


class _Leaves(nn.Module):
    """The parameters of a wrapper as its last forward saw them."""

    def __init__(self, state: dict[str, Any], leaves: Mapping[str, nn.Parameter]) -> None:
        super().__init__()
        self.leaves = leaves
        self._anomalies_seen = state.setdefault("_anomalies_seen", set())

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        yield from self.leaves.items()


def _check_model(module: nn.Module, detect: bool) -> None:
    check_no_meta_buffers(module)
    if any(isinstance(one, FSDPModule) for one in module.modules()):
        raise ValueError(
            f"{type(module).__name__} is sharded already: give the model as it was before "
            "fully_shard; shard names its blocks"
        )
    if detect and has_own_train_step(module):
        raise ValueError(
            f"detect_anomalous_params needs the wrapper's own train_step, but "
            f"{type(module).__name__}.train_step is used"
        )


def _shard(module: nn.Module, options: FsdpOptions, mesh: DeviceMesh) -> nn.Module:
    ignored = find_ignored(module, options.ignored)
    check_shapes(module, ignored)
    if options.device is not None and not any(one.is_meta for one in module.parameters()):
        module = module.to(options.device)
    if options.same_weights:
        named = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        check_same(named, mesh)
        broadcast_first([one for one in named.values() if not one.is_meta], mesh)
    units = find_units(module, options, ignored)
    exact = full_precision_units(module, options.precision)
    common: dict[str, Any] = {"mesh": mesh, "offload_policy": options.offload}
    if ignored:
        common["ignored_params"] = ignored
    # Between blocks nothing would cast back what is not in the dtype of the next one.
    inner = replace(options.precision, output_dtype=None)
    # The innermost first: a unit takes what those inside it have left.
    for path, one in reversed(list(module.named_modules())):
        if path in exact or path in units:
            policy = exact.get(path, inner)
            free = options.free_after_forward
            fully_shard(one, mp_policy=policy, reshard_after_forward=free, **common)
    # None: torch keeps the outermost block, of which the backward begins.
    free_root = False if options.free_after_forward is False else None
    fully_shard(module, mp_policy=options.precision, reshard_after_forward=free_root, **common)
    _set_prefetch(module, units, options.prefetch)
    return module


def _set_prefetch(module: Any, units: dict[str, nn.Module], depth: tuple[int, int]) -> None:
    forward: list[Any] = [module, *units.values()]
    backward: list[Any] = [module, *(units[path] for path in in_backward_order(units))]
    for at, one in enumerate(forward):
        following = forward[at + 1 : at + 1 + depth[0]]
        if following:
            one.set_modules_to_forward_prefetch(following)
    for at, one in enumerate(backward):
        following = backward[at + 1 : at + 1 + depth[1]]
        if following:
            one.set_modules_to_backward_prefetch(following)


def _place_preprocessors(wrapper: nn.Module, device: torch.device) -> None:
    """Let batches go where the blocks are gathered, which need not be where the shards are."""
    for one in wrapper.modules():
        if isinstance(one, DataPreprocessor):
            one.to(device)
