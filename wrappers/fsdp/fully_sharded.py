"""The wrapper for a model whose parameters are spread over the ranks."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from ...registry import MODEL_WRAPPERS
from ..batchnorm.conversion import convert_sync_batchnorm
from ..blocks import BlockSpec
from ..sharding.agreement import agree
from ..sharding.first_rank import broadcast_first
from ..sharding.mesh import Mesh
from ..sharding.meta_init import materialise
from ..steps.step import OptimizerWrapper, Steps, has_own_train_step
from ..steps.step_checks import detect_anomalous_params, watch_gradients
from ..torch_functions import check_options
from .build import check_model, place_preprocessors, shard_model
from .mesh import sharding_mesh
from .options import FURTHER, FsdpOptions, read_options
from .roots import Root, explained, free_all, gather_in, leave_all, show_shards

__all__ = ["StepFullyShardedDataParallel"]


@MODEL_WRAPPERS.register_module()
class StepFullyShardedDataParallel(Steps, nn.Module):
    """Parameters, gradients and optimizer state in shards, by torch's ``fully_shard``.

    Needs a process group, and every rank must construct it, train and evaluate with it: blocks
    are gathered where they are used and freed after. ``module`` is the user's model with its own
    names; its parameters are DTensors outside of a forward, so make the optimizer afterwards.
    Asking for ``parameters()`` frees what a forward without a backward left gathered: do it on
    all ranks or none. Weights and buffers become those of the first rank. A model whose
    parameters are on the meta device is built here, one module after the other (see
    ``meta_parameters``).

    A model with a ``train_step`` of its own is stepped by it, also with several optimizers. It
    calls ``self(...)`` or its children: each child that has parameters is gathered by itself
    then. Where the model has parameters of its own, or children share some, it calls ``self(...)``
    alone; use ``separate`` for any other step.

    For another optimization step override ``train_step(data, optim_wrapper)`` in a subclass, with
    ``self(...)`` for the forward. A sum over parameters is one over shards, and made whole before
    it meets other tensors::

        class Decaying(StepFullyShardedDataParallel):
            def train_step(self, data, optim_wrapper):
                with optim_wrapper.optim_context(self):
                    losses = self(*self.module.data_preprocessor(data, True), mode="loss")
                decay = sum(one.square().sum().full_tensor() for one in self.parameters())
                loss = losses["loss"] + 0.01 * decay
                optim_wrapper.update_params(loss)
                return {"loss": loss.detach()}

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
        TypeError: an option is unknown, or a value has the wrong type.
        ValueError: no process group; an option has no counterpart or contradicts another one; a
            parameter cannot be sharded or initialised; models or options differ between ranks.
    """

    averages_ranks = True
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
        given = {
            "shard": shard,
            "mesh": mesh,
            "mixed_precision": mixed_precision,
            "cpu_offload": cpu_offload,
            "reshard_after_forward": reshard_after_forward,
        }
        options = self._read(module, {**given, **fsdp_kwargs}, detect_anomalous_params)
        place = sharding_mesh(options, module)
        self.data_group, self._mesh = place.data_group, place.shards
        self.collective_eval = True
        if sync_batchnorm:
            convert_sync_batchnorm(module, process_group=self.data_group)
        roots = shard_model(module, options, place.shards)
        self.module = module
        if any(one.is_meta for one in module.parameters()):
            materialise(module, place.everywhere, options.param_init_fn)
        self._roots = [Root(one) for one in roots]
        self._install(module)
        self._prepare_steps(detect_anomalous_params)
        place_preprocessors(self, place.device)
        self._leaves: dict[str, nn.Parameter] = {}
        if detect_anomalous_params:
            self._watch_leaves()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Let the errors of a step of its own say what to do under shards."""
        super().__init_subclass__(**kwargs)
        if "train_step" in vars(cls):
            cls.train_step = explained(vars(cls)["train_step"])  # type: ignore[method-assign]

    @explained
    def train_step(self, data: Any, optim_wrapper: OptimizerWrapper) -> dict[str, Tensor]:
        """Train on one batch; returns what to log, detached.

        Every rank must call this. After an error, call ``zero_grad()`` and continue: the gradients
        of the failed step and of its window are lost.
        """
        return super().train_step(data, optim_wrapper)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Call the model."""
        try:
            output = self.module(*inputs, **kwargs)
        except BaseException:
            leave_all(self._roots)
            raise
        if not torch.is_grad_enabled():
            free_all(self._roots)
        return output

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Keep the gradients of the forwards inside on their ranks, whole and unsharded.

        The first backward of a forward outside adds them up over the ranks.
        """
        with ExitStack() as stack:
            for root in self._roots:
                stack.enter_context(root.no_sync())
            yield

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

    def _read(self, module: nn.Module, given: dict[str, Any], detect: bool) -> FsdpOptions:
        """Read the options; what is wrong on one rank is raised on all."""
        read: list[FsdpOptions] = []

        def describe() -> dict[str, Any]:
            self.check_options(given)
            read.append(read_options(given))
            check_model(module, detect)
            return {}

        ranks = given.get("device_mesh") if given["mesh"] is None else given["mesh"]
        ranks = ranks.device_mesh if isinstance(ranks, Mesh) else ranks
        if given.get("process_group") is None:
            agree(describe, ranks if isinstance(ranks, DeviceMesh) else None)
        else:
            # The other ranks may do something else.
            describe()
        return read[0]

    def _install(self, module: nn.Module) -> None:
        """Let the model's own methods gather what they need, and show its shards."""
        self._model_steps = has_own_train_step(module)
        for name in ("val_step", "test_step"):
            if hasattr(module, name):
                gather_in(name, module, self._roots)
        for one in dict.fromkeys([self, module, *(root.module for root in self._roots)]):
            show_shards(one, self._roots)
        if self._model_steps:
            # An optimizer wrapper asks what it is given for a forward, the model or a child.
            for root in self._roots:
                root.offer_no_sync()
            if not hasattr(module, "no_sync"):
                module.no_sync = self.no_sync  # type: ignore[assignment]

    def _evaluate(self, name: str, data: Any) -> Any:
        try:
            output = super()._evaluate(name, data)
        except BaseException:
            leave_all(self._roots)
            raise
        free_all(self._roots)
        return output

    def _watch_leaves(self) -> None:
        """Keep track of the parameters that a graph is made of: not the shards."""
        paths = {id(one): path for path, one in self.named_modules()}

        def note(unit: nn.Module, inputs: Any) -> None:
            self._leaves.update(unit.named_parameters(paths[id(unit)]))

        for root in self._roots:
            for unit in root.units:
                # dynamo cannot trace it: a root has a named_parameters of its own.
                untraced = torch.compiler.disable(note)  # type: ignore[no-untyped-call]
                unit.register_forward_pre_hook(untraced)

    def update_and_detect(self, total: Tensor, optim_wrapper: OptimizerWrapper) -> None:
        """As in the other wrappers, by the parameters that the last forward saw."""
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
