"""The wrapper for a model whose parameters are sharded over the ranks."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from ...registry import MODEL_WRAPPERS
from ..batchnorm.conversion import apply_sync_batchnorm
from ..blocks import BlockSpec
from ..sharding.mesh import Mesh, agree, warn_of_gloo
from ..sharding.meta_init import materialise
from ..steps.plain_models import prepare_steps
from ..steps.preprocess import DataPreprocessor, get_device, move
from ..steps.step import ModelWrapper, OptimizerWrapper
from .options import EXTRA_OPTIONS, FsdpOptions, read_options, sharding_mesh
from .roots import Root
from .torch_internals import call_as_forward
from .units import calls_children, check_model, shard_model

__all__ = ["StepFullyShardedDataParallel"]


def _explained(step: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a ``train_step`` to reset the roots after an error, and to explain errors of torch."""

    @wraps(step)
    def train_step(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return step(self, *args, **kwargs)
        except BaseException as error:
            for root in self._roots:
                root.reset_depth()
                root.recover()
            for phrase, advice in _ADVICE.items():
                if phrase in str(error):
                    raise RuntimeError(advice) from error
            raise

    return train_step


# Parts of torch's error messages -> a better message.
_ADVICE = {
    "mixed torch.Tensor and DTensor": (
        "parameters must be used inside a forward, but were used outside, where they are shards. "
        "Run layers through self(...) of the wrapper, or, if the model has its own train_step, "
        "through the model's children. Compute sums over parameters from shards only, and gather "
        "the results before combining them with other tensors: sum(one.square().sum()"
        ".full_tensor() for one in self.parameters()). If this is not possible, use ddp, or "
        "separate with several optimizers"
    ),
    "already been lazily initialized": (
        "a layer was called directly, before the module that it is sharded with. Run the forward "
        "through self(...), or, if the model has its own train_step, call only the model's "
        "children. If this is not possible, use ddp, or separate with several optimizers"
    ),
}


@MODEL_WRAPPERS.register_module()
class StepFullyShardedDataParallel(ModelWrapper, nn.Module):
    """A wrapper that shards parameters, gradients and optimizer state with ``fully_shard``.

    Needs a process group, and every rank must construct it, train and evaluate with it. Each rank
    keeps a shard of every parameter. The ranks *gather* the whole parameters of a block before it
    runs, and free them afterwards. ``module`` is the user's model, and its parameters keep their
    names; outside of a forward they are DTensors. All ranks get the weights and buffers of the
    first rank. Parameters on the meta device are initialised here (see ``meta_parameters``).

    Create the optimizer from the wrapper's ``parameters()`` after wrapping. If one rank calls
    ``parameters()``, every rank must: it frees parameters that a forward without a backward has
    gathered, and the next forward gathers them on all ranks. Evaluate and clear gradients through
    the wrapper as well, because the model's own ``val_step`` and ``zero_grad`` see only shards.

    If the model has its own ``train_step``, the wrapper calls it; docs/wrappers.md describes which
    modules this step may call. To replace the step, override ``train_step(data, optim_wrapper)`` in
    a subclass and call ``self(...)`` for the forward: docs/extending.md has an example with sums
    over parameters.

    Args:
        module: the model.
        shard: the blocks that are gathered separately (see ``find_blocks``); all other
            parameters form one more block.
        mesh: the ranks to shard over; default: all ranks. With the axes replicate and shard, the
            shards are replicated (HSDP).
        mixed_precision: a mapping with ``param_dtype``, ``reduce_dtype`` and ``output_dtype`` (the
            dtype of the whole model's output), as names of dtypes, and ``cast_forward_inputs``; or
            torch's policy. BatchNorm layers keep their dtype, and so do the targets of a
            ``SupervisedModel``.
        cpu_offload: whether to keep shards, gradients and optimizer state in host memory; or a
            mapping with ``pin_memory``, which has no effect without an accelerator.
        reshard_after_forward: whether to free blocks between forward and backward (default: True).
            False keeps them gathered; a number keeps them sharded over this many ranks. Parameters
            outside of all blocks always stay gathered.
        sync_batchnorm: convert the model's BatchNorm layers by ``convert_sync_batchnorm``, so that
            they normalise with the statistics of all ranks; or a mapping with its ``precision``.
        detect_anomalous_params: after every step, search for parameters without a gradient, and
            log each set of them once.
        fsdp_kwargs: ``prefetch``: number of blocks to gather ahead, or a mapping with such numbers
            for ``forward`` and ``backward``. ``param_init_fn``: called with every module that has
            parameters on the meta device, instead of its ``reset_parameters``. The options of
            torch's ``FullyShardedDataParallel`` (FSDP1) are accepted too, as objects or as names.

    Raises:
        TypeError: an option is unknown, or a value has the wrong type.
        ValueError: the process group is missing, an option is not supported or contradicts another
            one, a parameter cannot be sharded or initialised, or models or options differ between
            ranks.
        RuntimeError: this version of torch lacks an undocumented name that the wrapper needs.
    """

    averages_ranks = True
    own_buffers = True
    # These options may have a ``type``, but the registry does not build them.
    config_plain = ("auto_wrap_policy", "param_init_fn")
    passed_on = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default)
        for name, default in EXTRA_OPTIONS.items()
    ]
    _shows_leaves = False

    def __init__(
        self,
        module: nn.Module,
        *,
        shard: BlockSpec | None = None,
        mesh: Mesh | DeviceMesh | None = None,
        mixed_precision: Mapping[str, Any] | MixedPrecisionPolicy | None = None,
        cpu_offload: bool | Mapping[str, Any] | None = None,
        reshard_after_forward: bool | int | None = None,
        sync_batchnorm: bool | Mapping[str, Any] = False,
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
            **fsdp_kwargs,
        }
        self._roots: list[Root] = []
        # Whether the next forward must be checked for changes of weights.
        self._is_watched = True
        options = _read(module, given, detect_anomalous_params)
        meshes = sharding_mesh(options, module)
        warn_of_gloo(type(self).__name__, meshes.device)
        self.data_group = meshes.data_group
        self.collective_eval = True
        apply_sync_batchnorm(module, sync_batchnorm, self.data_group)
        roots = shard_model(module, options, meshes.shards)
        self.module = module
        if any(param.is_meta for param in module.parameters()):
            materialise(module, meshes.everywhere, options.param_init_fn)
        self._adopt_model_step()
        self._roots = [Root(root, may_call_children=calls_children(module)) for root in roots]
        prepare_steps(self, detect_anomalous_params)
        for child in self.modules():
            # Batches must be on the device of the gathered blocks; shards may be on another one.
            if isinstance(child, DataPreprocessor):
                child.to(meshes.device)
        self._leaves = _watch_leaves(self, self._roots) if detect_anomalous_params else {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Wrap a subclass's ``train_step`` as well, to explain its errors."""
        super().__init_subclass__(**kwargs)
        if "train_step" in vars(cls):
            cls.train_step = _explained(vars(cls)["train_step"])  # type: ignore[method-assign]

    @_explained
    def train_step(self, data: Any, optim_wrapper: Any) -> dict[str, Tensor]:
        """Train on one batch; return the detached values to log.

        Every rank must call this. After an error you can continue: call ``zero_grad()`` first. The
        gradients of the failed step and of its accumulation window are lost.
        """
        return super().train_step(data, optim_wrapper)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Call the model."""
        with self._freed(keep=torch.is_grad_enabled()):
            if not self._is_watched or not torch.is_grad_enabled():
                return self.module(*inputs, **kwargs)
            # The whole parameters exist from the second forward on.
            exist = [root.note_versions() for root in self._roots]
            self._is_watched = not any(exist)
            outputs = self.module(*inputs, **kwargs)
            for root in self._roots:
                root.check_versions()
            return outputs

    @contextmanager
    def _freed(self, *, keep: bool = False) -> Iterator[None]:
        """Free the parameters that forwards in this context gather.

        With ``keep``, the backward frees them instead.
        """
        try:
            yield
        except BaseException:
            for root in self._roots:
                root.reset_depth()
            raise
        if not keep:
            for root in self._roots:
                root.free()

    def _evaluate(self, name: str, data: Any) -> Any:
        step = getattr(self.module, name, None)
        with self._freed():
            if step is None:
                return super()._evaluate(name, data)
            # The model's method may use parameters directly, without calling a layer.
            is_root = self._roots[0].module is self.module
            with ExitStack() as stack:
                for root in self._roots:
                    stack.enter_context(root.is_in_use(gather=not is_root))
                if not is_root:
                    return step(data)
                # Torch would move each tensor by itself, and wait for it.
                return call_as_forward(self.module, step, move(data, get_device(self.module)))

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Do not reduce the gradients of forwards in this context; keep them unsharded.

        The backward of the next forward outside of the context reduces them with its own gradients.
        """
        with ExitStack() as stack:
            for root in self._roots:
                stack.enter_context(root.no_sync())
            yield

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the shards, after freeing parameters that a forward has left gathered."""
        if self._shows_leaves:
            return iter(self._leaves.items())
        for root in self._roots:
            root.free_if_unused()
        return super().named_parameters(*args, **kwargs)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear all gradients, including those from forwards under ``no_sync``."""
        super().zero_grad(set_to_none)
        for root in self._roots:
            root.drop_gradients()

    def __deepcopy__(self, memo: Any) -> NoReturn:
        self.__reduce_ex__(0)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Raise TypeError: shards are tied to their process group."""
        raise TypeError(
            f"a {type(self).__name__} can be neither copied nor pickled, because its parameters "
            "are shards tied to this group of processes: copy the bare model before it is "
            "wrapped, or save state_dict() and load it into a new one"
        )

    def update_and_detect(self, total: Tensor, optim_wrapper: OptimizerWrapper) -> None:
        """Update, and log which gathered parameters of the last forward got no gradient."""
        self._shows_leaves = True
        try:
            super().update_and_detect(total, optim_wrapper)
        finally:
            self._shows_leaves = False
            self._leaves.clear()


def _read(module: nn.Module, options: dict[str, Any], detect: bool) -> FsdpOptions:
    """Read the options; an error on one rank is raised on every rank."""
    parsed: list[FsdpOptions] = []

    def check() -> dict[str, Any]:
        # Not the check of a subclass, which may have other arguments.
        StepFullyShardedDataParallel.check_options(options)
        # Read only once, because options may be iterators.
        parsed.append(read_options(options))
        check_model(module, detect)
        return {}

    ranks = options.get("device_mesh") if options["mesh"] is None else options["mesh"]
    ranks = ranks.device_mesh if isinstance(ranks, Mesh) else ranks
    if options.get("process_group") is None:
        agree(check, ranks if isinstance(ranks, DeviceMesh) else None)
    else:
        # Ranks outside of this group need not construct the wrapper, so ranks are not compared.
        check()
    return parsed[0]


def _watch_leaves(wrapper: nn.Module, roots: Iterable[Root]) -> dict[str, nn.Parameter]:
    """Return a dict that each forward fills with the gathered parameters, by name."""
    leaves: dict[str, nn.Parameter] = {}
    paths = {id(module): path for path, module in wrapper.named_modules()}

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def collect(unit: nn.Module, inputs: Any) -> None:
        leaves.update(unit.named_parameters(paths[id(unit)]))

    for unit in (unit for root in roots for unit in root.units):
        unit.register_forward_pre_hook(collect)
    return leaves
