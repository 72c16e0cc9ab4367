"""The wrapper for one replica per process, which averages the gradients over the ranks."""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import compress
from typing import Any

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from ...collectives import comm_device
from ...registry import MODEL_WRAPPERS
from ..batchnorm.conversion import apply_sync_batchnorm
from ..layout import unreduced
from ..sharding.mesh import require_process_group, warn_of_gloo
from ..steps.plain_models import prepare_steps
from ..steps.step import ModelWrapper, reject_model_train_step
from ..steps.step_checks import DifferentGradientsError, averaging_wrappers
from ..torch_functions import check_options, option_names, refuse_double_backward
from .buckets import FixedBuckets
from .comm_hooks import read_comm_hook, unannotated
from .replica_checks import AveragingWatch, LayoutWatch, ThawWatch, check_same_model

_STATIC = (
    "is incomplete under static_graph, which averages the gradients after the inner backward; "
    "leave static_graph out"
)
_REMEDY = (
    "Set `wrapper: {type: separate}` (SeparateDistributedDataParallel), which averages the "
    "gradients of each child separately, for example of a GAN. Or: "
)
# The proposal of this folder's wrappers in a process without a group.
REPLACED = "use wrap_model, which uses SingleDevice without a process group"
_TORCH_OPTIONS = inspect.signature(DistributedDataParallel.__init__).parameters
# Newer versions of torch have renamed the option `broadcast_buffers` and its attribute.
_SYNC_BUFFERS = "forward_sync_buffers"
if _SYNC_BUFFERS not in _TORCH_OPTIONS:
    _SYNC_BUFFERS = "broadcast_buffers"


class UnusedParametersError(RuntimeError):
    """Raised in a forward, or a first update, if the last backward left out parameters.

    Attributes:
        names: the names of these parameters; empty if torch does not report them.
    """

    def __init__(self, names: Sequence[str]) -> None:
        which = ", ".join(names) or "some parameters"
        super().__init__(
            f"every step's loss must depend on all trained parameters, but the last one did not "
            f"depend on {which}. Either let the wrapper find such parameters "
            "(find_unused_parameters: true), or exclude them from the training: remove them, or "
            "freeze them (requires_grad=False) before the model is wrapped. If the backward of the "
            "last step raised an error, create a new wrapper instead"
        )
        self.names = tuple(names)


@MODEL_WRAPPERS.register_module(
    name=[
        "StepDistributedDataParallel",
        "MMDistributedDataParallel",
        "DistributedDataParallel",
        "ddp",
    ]
)
class StepDistributedDataParallel(ModelWrapper, FixedBuckets):
    """A ``DistributedDataParallel`` with training, validation and test steps.

    Needs a process group, and every rank must construct it. For a custom training step, override
    ``train_step(data, optim_wrapper)`` in a subclass; docs/extending.md has an example. The step
    must compute its losses with ``self(...)``, because ``self.module(...)`` does not average the
    gradients. As in torch's class, a second backward of one forward (``retain_graph``) does not
    average them either: sum the losses. Both mistakes raise RuntimeError at the beginning of a run.

    Args:
        module: the model, on the device that it is trained on.
        detect_anomalous_params: after every step, search for parameters without a gradient, and
            log each set of them once; for debugging only, because it takes some microseconds per
            parameter and step.
        sync_batchnorm: convert the model's BatchNorm layers by ``convert_sync_batchnorm``, so that
            they normalise with the statistics of all ranks; or a mapping with its ``precision``.
            ``wrap_model`` ignores it without a process group.
        comm_hook: how the gradients are combined: "allreduce", "fp16_compress", "bf16_compress",
            ``{"type": "powerSGD", **options}``, ``{"type": "post_localSGD", **options}``, or
            a custom hook; see ``read_comm_hook``.
        uneven_inputs: whether stepwrap's training loop may get different numbers of batches on the
            ranks; or a dict with arguments of ``join``. In your own loop, use
            ``with model.join():`` instead.
        ddp_kwargs: all options of torch's class. ``device_ids`` defaults to the CUDA device of
            the parameters, or to None on the CPU.

    Raises:
        TypeError: an option is unknown, or the model has its own ``train_step``.
        ValueError: the process group is missing, or two options cannot be combined.
        RuntimeError: no parameter requires a gradient. A forward raises it if a parameter that
            was frozen at construction requires a gradient now, or if the memory layout of a
            parameter has changed; and ``UnusedParametersError`` if the loss of the previous step
            did not depend on some parameters. The first update raises the latter too.
    """

    averages_ranks = True

    def __init__(
        self,
        module: nn.Module,
        detect_anomalous_params: bool = False,
        *,
        sync_batchnorm: bool | Mapping[str, Any] = False,
        comm_hook: Any = None,
        uneven_inputs: bool | Mapping[str, Any] = False,
        **ddp_kwargs: Any,
    ) -> None:
        # Calls the check of this class, because a subclass may have other arguments.
        StepDistributedDataParallel.check_options(ddp_kwargs)
        reject_model_train_step(type(self), module, "skips the averaging of the gradients", _REMEDY)
        if sync_batchnorm and uneven_inputs:
            raise ValueError(
                "uneven_inputs and sync_batchnorm cannot be combined, because a rank without a "
                "batch has no statistics: use only one of the two"
            )
        self._hook = None if comm_hook is None else read_comm_hook(comm_hook)
        require_process_group(type(self).__name__, REPLACED)
        module = apply_sync_batchnorm(module, sync_batchnorm, ddp_kwargs.get("process_group"))
        devices = {parameter.device for parameter in module.parameters()}
        check_same_model(module, type(self).__name__, ddp_kwargs.get("process_group"))
        on_cuda = [device.type for device in devices] == ["cuda"]
        if on_cuda:
            warn_of_gloo(type(self).__name__, next(iter(devices)), ddp_kwargs.get("process_group"))
        ddp_kwargs.setdefault("device_ids", list(devices) if on_cuda else None)
        super().__init__(module=module, **_renamed(ddp_kwargs))
        prepare_steps(self, detect_anomalous_params)
        self._failure = ""
        self._is_weighed = self._is_joined = False
        ignored = self.parameters_to_ignore
        named = module.named_parameters()
        names = [name for name, param in named if param.requires_grad and name not in ignored]
        # The keys are the indices that torch's reducer uses in its error messages.
        indices = range(len(names))[::-1] if self._is_reversed else range(len(names))
        self._trainable = dict(zip(indices, names, strict=True))
        everyone = self.process_group is distributed.group.WORLD
        self.data_group = None if everyone else self.process_group
        self.uneven_inputs = _join_options(uneven_inputs)
        self._thawed = ThawWatch(type(self).__name__, module, ignored, self.process_group)
        self._layout = LayoutWatch(type(self).__name__, module, ignored)
        self._install_hook()
        own_step = type(self).train_step is not ModelWrapper.train_step
        self._watch = AveragingWatch(self) if own_step else None

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Call the model; the next backward averages its gradients."""
        self._thawed.check()
        self._layout.check()
        if self.static_graph:
            self._record_graph()
        try:
            outputs = super().forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            _explain_unused(error, self._trainable, self._failure)
            raise
        if torch.is_grad_enabled():
            unreduced.note_forward(self, is_reduced=self.require_backward_grad_sync)
            if self._watch is not None:
                self._watch.note_forward()
        if self.static_graph:
            refuse_double_backward(outputs, _STATIC)
        if self._failure and self.require_backward_grad_sync and torch.is_grad_enabled():
            # torch's forward has just checked that the previous backward was complete.
            self._failure = ""
        return outputs

    @torch.no_grad()
    def reduce_gradients(self, ids: Collection[int]) -> bool:
        """Average the gradients of forwards under ``no_sync``; every rank must call this.

        Gradients that are averaged already do not change. Returns whether the module has a
        parameter with one of these ids; without one, nothing happens.

        Raises:
            RuntimeError: a communication hook combines gradients in another way.
        """
        if not any(id(parameter) in ids for parameter in self.module.parameters()):
            return False
        group, ignored = self.process_group, self.parameters_to_ignore
        params = [p for name, p in self.module.named_parameters() if name not in ignored]
        has_grad = [parameter.grad is not None for parameter in params]
        flags = torch.tensor(has_grad, dtype=torch.uint8, device=comm_device(group))
        # Ranks may have used different parameters of the module.
        distributed.all_reduce(flags, distributed.ReduceOp.MAX, group=group)
        if self._combines_otherwise() and flags.any():
            raise RuntimeError(
                f"the last micro-batch of an accumulation window did not use "
                f"{next(iter(self._trainable.values()))}, so the comm_hook did not combine the "
                "gradients of the earlier ones: use the module in the last micro-batch as well, or "
                "a comm_hook that averages (allreduce, fp16_compress, bf16_compress)"
            )
        for parameter in compress(params, flags.tolist()):
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradient = parameter.grad / distributed.get_world_size(group)
            gradient = gradient.coalesce() if gradient.is_sparse else gradient.contiguous()
            distributed.all_reduce(gradient, group=group)
            if gradient.is_sparse:
                parameter.grad = gradient
            else:
                parameter.grad.copy_(gradient)
        return True

    @contextmanager
    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Iterator[None]:
        """Train with different numbers of batches per rank inside this context.

        Every rank must enter it, and all ranks leave it together. A rank without further batches
        contributes zero gradients, and at the end every rank gets the weights of the rank that
        trained longest. Optimizer state, schedulers and counters are not synchronised.

        Args:
            divide_by_initial_world_size: divide gradients by the number of all ranks, so that
                all samples have the same weight. False divides by the number of ranks that still
                have batches.
            enable: False makes the context do nothing, for equal numbers of batches.
            throw_on_early_termination: raise RuntimeError on every rank as soon as one rank has
                no further batches.

        Raises:
            ValueError: gradients are weighted by ``loss_weight``.
        """
        # torch changes the warning filters and the state of the wrapper without restoring them.
        with warnings.catch_warnings():
            try:
                self._is_joined = enable
                self._check_weights()
                with super().join(divide_by_initial_world_size, enable, throw_on_early_termination):
                    yield
            finally:
                super().join(enable=False)
                self._is_joined = False

    def __getstate__(self) -> dict[str, Any]:
        group, everyone = self.process_group, distributed.group.WORLD
        assert everyone is not None
        # torch's method accepts the default group only, because other groups cannot be pickled.
        # But deepcopy calls this method too, and it can copy a wrapper with any group.
        self.process_group = everyone
        try:
            state = super().__getstate__()
        finally:
            self.process_group = group
        own_group = {} if self.data_group is None else {"process_group": group}
        # The hooks and the watch refer to the process group, so they are left out.
        return {**state, **own_group, "_comm_hooks": [], "_watch": None}

    def __setstate__(self, state: Any) -> None:
        # torch creates new buckets, in the current layout.
        super().__setstate__(state)
        self._layout.accept()
        self._failure = ""
        self._install_hook()

    def _install_hook(self) -> None:
        averaging_wrappers[self] = None
        if self._hook is not None:
            state, function = self._hook.bind(self.process_group)
            self.register_comm_hook(state, unannotated(function))

    @property
    def own_buffers(self) -> bool:  # type: ignore[override]
        """Whether the next forward does not copy the first rank's buffers to all ranks."""
        copies = getattr(self, _SYNC_BUFFERS) and self.require_forward_param_sync
        return not copies or bool(self.parameters_to_ignore)

    def keep_own_buffers(self) -> None:
        """Make the next forward continue with the buffers of each rank, inside a window."""
        self.require_forward_param_sync = False

    def set_loss_weight(self, loss_weight: Any) -> None:
        """Accept gradients that are weighted by a ``LossWeight``.

        Raises:
            ValueError: a communication hook does not average, or ``join`` is active.
        """
        self._is_weighed = True
        self._check_weights()

    def _check_weights(self) -> None:
        if not self._is_weighed:
            return
        if self._combines_otherwise():
            raise ValueError(
                "loss_weight needs gradients that are averaged over the ranks, but the comm_hook "
                f"{self._comm_hooks[0][0].__qualname__} may combine them in another way: use "
                "allreduce, fp16_compress or bf16_compress, or a CommHook with averages = True"
            )
        if self._is_joined:
            raise ValueError(
                "loss_weight cannot be combined with join(), in which a rank without batches "
                "cannot report a weight of 0. Let this rank repeat its last batch in the context "
                "uncounted_batch(wrapper, optim_wrapper) until all ranks have finished"
            )

    def _combines_otherwise(self) -> bool:
        """Return whether a communication hook does more than average."""
        return bool(self._comm_hooks) and not getattr(self._hook, "averages", False)

    def _explain_update(self, error: BaseException) -> None:
        _explain_unused(error, self._trainable)
        if isinstance(error, DifferentGradientsError) and error.wrapper is self:
            weights = (param for param in self.module.parameters() if param.requires_grad)
            names = zip(self._trainable.values(), weights, strict=False)
            unused = [name for name, weight in names if weight.grad is None]
            # Without these gradients, torch does not average the others of the same bucket.
            if unused and not (self.find_unused_parameters or self.static_graph):
                raise UnusedParametersError(unused) from error
        # Keeps only the text, because the error would keep the graph in memory.
        self._failure = self._failure or f"{type(error).__name__}: {error}"

    @classmethod
    def check_options(cls, options: Mapping[str, Any]) -> None:
        """Raise TypeError or ValueError for an option that this class does not accept."""
        super().check_options(options)
        if options.get("comm_hook") is not None:
            read_comm_hook(options["comm_hook"])
        _join_options(options.get("uneven_inputs", False))


def _explain_unused(error: BaseException, names: Mapping[int, str], failure: str = "") -> None:
    """Raise a clearer error if ``error`` is one of torch's errors about missing gradients.

    Args:
        names: the names of the parameters that were trainable when the module was wrapped, by
            torch's index.
        failure: the error of the previous update, if any.
    """
    text = str(error)
    if "Your training graph has changed in this iteration" in text:
        raise RuntimeError(
            "under static_graph every step must use the same parameters, but a parameter without a "
            "gradient in the first step has one now. Either remove static_graph and set "
            "find_unused_parameters: true, or remove or freeze the parameters that only some steps "
            "use"
        ) from error
    if "Expected to have finished reduction in the prior iteration" not in text:
        return
    if failure:
        raise RuntimeError(
            f"the last update raised {failure} before its backward ended, and "
            "DistributedDataParallel cannot continue after that: create a new wrapper around the "
            "bare model and clear the gradients. The failed update changed neither weights nor "
            "optimizer"
        ) from error
    match = re.search(r"did not receive grad for rank \d+:((?:\s\d+)+)", text)
    indices = set(map(int, match.group(1).split())) if match else set()
    raise UnusedParametersError([name for at, name in names.items() if at in indices]) from error


def _join_options(setting: bool | Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the arguments of ``join``; None if all ranks have the same number of batches."""
    if isinstance(setting, bool):
        return {} if setting else None
    allowed = [name for name in option_names(DistributedDataParallel.join) if name != "enable"]
    check_options("uneven_inputs", setting, allowed)
    return dict(setting)


def _renamed(options: dict[str, Any]) -> dict[str, Any]:
    """Replace the option ``broadcast_buffers`` by its new name if torch knows the new one."""
    old_value = options.pop("broadcast_buffers", None)
    name = _SYNC_BUFFERS if options.get(_SYNC_BUFFERS) is None else "broadcast_buffers"
    return options if old_value is None else {**options, name: old_value}
