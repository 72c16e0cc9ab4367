"""The wrapper for one replica per process, gradients averaged."""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from ...registry import MODEL_WRAPPERS
from ..batchnorm.conversion import apply_sync_batchnorm
from ..steps.step import Steps, refuse_own_train_step
from ..steps.step_checks import AveragingWatch, ThawWatch
from ..torch_functions import check_options, option_names, refuse_double_backward
from .buckets import FixedBuckets
from .comm_hooks import read_comm_hook, unannotated

_STATIC = (
    "loses a part under static_graph, which averages the gradients when the inner backward is "
    "done; leave static_graph out"
)
_REMEDY = (
    "Set `wrapper: {type: separate}` (SeparateDistributedDataParallel), which averages the "
    "gradients of each child, as a GAN needs it. Or: "
)
_TORCH_OPTIONS = inspect.signature(DistributedDataParallel.__init__).parameters


class UnusedParametersError(RuntimeError):
    """Parameters got no gradient in a backward that was to synchronise them.

    Attributes:
        names: these parameters, by the user's names; empty where torch does not say which.
    """

    def __init__(self, names: Sequence[str]) -> None:
        which = ", ".join(names) or "some parameters"
        super().__init__(
            f"the last step's loss did not depend on {which}, so their gradients never came. "
            "Either let the wrapper look for such parameters (find_unused_parameters: true), or "
            "take them out of the training: remove them, or freeze them (requires_grad=False) "
            "before the model is wrapped. Where that step's backward raised an error, build "
            "the wrapper anew instead"
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
class StepDistributedDataParallel(Steps, FixedBuckets):
    """torch's ``DistributedDataParallel`` with the three steps.

    Needs a process group, and every rank must construct it. For another optimization step
    override ``train_step(data, optim_wrapper)`` in a subclass; it must compute its losses by
    ``self(...)``, because ``self.module(...)`` leaves the gradients of the ranks apart. So does,
    as in torch's class, a second backward of one forward (``retain_graph``): sum the losses. A
    step that does either raises RuntimeError in its first backwards. docs/extending.md has an
    example.

    Args:
        module: the model, on the device where it is to be trained.
        detect_anomalous_params: log the parameters that the loss does not reach, on every step;
            costs some microseconds per parameter and step, so for the search of a mistake only.
        sync_batchnorm: make the model's BatchNorm layers train with the statistics of all ranks,
            by ``convert_sync_batchnorm``; or a mapping with its ``precision``. Without a process
            group it has no effect.
        comm_hook: how the gradients are combined: "allreduce", "fp16_compress", "bf16_compress",
            ``{"type": "powerSGD", **options}``, ``{"type": "post_localSGD", **options}``, or
            one's own, as for ``read_comm_hook``.
        uneven_inputs: for the training loop: ranks may have different numbers of batches. A dict
            holds arguments of ``join``. In a loop of your own use ``with model.join():``.
        ddp_kwargs: every option of torch's class. ``device_ids`` is by default the CUDA
            device of the parameters, and none on the CPU.

    Raises:
        TypeError: torch's class has no such option, or the model has a ``train_step`` of its
            own.
        ValueError: no process group, or options that exclude each other.
        RuntimeError: no parameter requires a gradient. By a forward: one that was frozen at
            construction does now; UnusedParametersError, the loss of the step before did not
            depend on some parameters.
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
        # Not by the class: a subclass may take other arguments and pass on these.
        StepDistributedDataParallel.check_options(ddp_kwargs)
        refuse_own_train_step(type(self), module, "skips the averaging of the gradients", _REMEDY)
        if sync_batchnorm and uneven_inputs:
            raise ValueError(
                "uneven_inputs and sync_batchnorm exclude each other: a rank without a batch has "
                "no statistics to give"
            )
        self._hook = None if comm_hook is None else read_comm_hook(comm_hook)
        module = apply_sync_batchnorm(module, sync_batchnorm, ddp_kwargs.get("process_group"))
        devices = {parameter.device for parameter in module.parameters()}
        on_cuda = [device.type for device in devices] == ["cuda"]
        ddp_kwargs.setdefault("device_ids", list(devices) if on_cuda else None)
        super().__init__(module=module, **_renamed(ddp_kwargs))
        self._prepare_steps(detect_anomalous_params)
        self._failure = ""
        self._is_weighed = self._is_joined = False
        ignored = self.parameters_to_ignore
        names = [
            name
            for name, one in module.named_parameters()
            if one.requires_grad and name not in ignored
        ]
        indices = range(len(names))
        # By the index that torch's reducer gives them.
        self._trainable = dict(
            zip(indices[::-1] if self._is_reversed else indices, names, strict=True)
        )
        everyone = self.process_group is distributed.group.WORLD
        self.data_group = None if everyone else self.process_group
        self.uneven_inputs = _join_options(uneven_inputs)
        self._thawed = ThawWatch(type(self).__name__, module, ignored, self.process_group)
        self._install_hook()
        own_step = type(self).train_step is not Steps.train_step
        self._watch = AveragingWatch(self) if own_step else None

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Call the model, so that the next backward averages its gradients."""
        self._thawed.check()
        if self.static_graph:
            self._record_graph()
        try:
            outputs = super().forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            _explain_unused(error, self._trainable, self._failure)
            raise
        if self._watch is not None and torch.is_grad_enabled():
            self._watch.note_forward()
        if self.static_graph:
            refuse_double_backward(outputs, _STATIC)
        if self._failure and self.require_backward_grad_sync and torch.is_grad_enabled():
            # torch has found the backward before to be complete.
            self._failure = ""
        return outputs

    @contextmanager
    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Iterator[None]:
        """Train inside with as many batches as this rank has; the ranks leave together.

        Must be entered by every rank. A rank that is done contributes gradients of zero, and at the
        end every rank gets the weights of the rank that trained longest. Optimizer state,
        schedulers and counters are not synchronised.

        Args:
            divide_by_initial_world_size: every sample weighs the same; False: divide by the
                number of ranks that still have batches.
            enable: False if the numbers of batches are known to be equal.
            throw_on_early_termination: raise RuntimeError on every rank as soon as one is done.
        """
        # torch changes the filters at the end, and leaves the wrapper as if it were still inside.
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
        # torch refuses every other one, which a pickle cannot hold. A copy can.
        self.process_group = everyone
        try:
            state = super().__getstate__()
        finally:
            self.process_group = group
        kept = {} if self.data_group is None else {"process_group": group}
        # With the process group inside, like the three that torch leaves out.
        return {**state, **kept, "_comm_hooks": [], "_watch": None}

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state)
        self._failure = ""
        self._install_hook()

    def _install_hook(self) -> None:
        if self._hook is not None:
            state, function = self._hook.bind(self.process_group)
            self.register_comm_hook(state, unannotated(function))

    def weigh_by(self, loss_weight: Any) -> None:
        """Learn what losses are means over (a ``LossWeight``).

        Raises:
            ValueError: there is a communication hook that does not average, or ranks have joined.
        """
        self._is_weighed = True
        self._check_weights()

    def _check_weights(self) -> None:
        if not self._is_weighed:
            return
        if self._comm_hooks and not getattr(self._hook, "averages", False):
            raise ValueError(
                "loss_weight needs gradients that are averaged over the ranks, which the comm_hook "
                f"{self._comm_hooks[0][0].__qualname__} need not do: use allreduce, fp16_compress "
                "or bf16_compress, or a CommHook of your own with averages = True"
            )
        if self._is_joined:
            raise ValueError(
                "loss_weight excludes join(), in which a rank without batches cannot tell that it "
                "weighs nothing: let it repeat its last batch with optim_wrapper.batch_counts = "
                "False until all have ended"
            )

    def _explain(self, error: BaseException, stage: str = "update") -> None:
        if stage == "update":
            _explain_unused(error, self._trainable)
            # Its text: the error itself would keep the graph in memory.
            self._failure = self._failure or f"{type(error).__name__}: {error}"
        super()._explain(error, stage)

    @classmethod
    def check_options(cls, options: Mapping[str, Any]) -> None:
        """Raise TypeError or ValueError for an option that this class does not take."""
        super().check_options(options)
        if options.get("comm_hook") is not None:
            read_comm_hook(options["comm_hook"])
        _join_options(options.get("uneven_inputs", False))


def _explain_unused(error: BaseException, names: Mapping[int, str], failure: str = "") -> None:
    """Raise a better error for torch's about gradients that did not come.

    ``names`` are the trainable parameters when the module was wrapped, by torch's index;
    ``failure`` is the error of the previous update, if any.
    """
    text = str(error)
    if "Your training graph has changed in this iteration" in text:
        raise RuntimeError(
            "a parameter got a gradient now that had none in the first step, which static_graph "
            "excludes: every step must use the same parameters. Either leave static_graph out "
            "and give find_unused_parameters: true, or remove or freeze the parameters that only "
            "some steps use"
        ) from error
    if "Expected to have finished reduction in the prior iteration" not in text:
        return
    if failure:
        raise RuntimeError(
            f"the last update raised {failure}; its backward was not finished, after which "
            "DistributedDataParallel cannot go on: build the wrapper anew around the bare model. "
            "Weights and optimizer are as they were before that update; clear the gradients"
        ) from error
    found = re.search(r"did not receive grad for rank \d+:((?:\s\d+)+)", text)
    indices = set(map(int, found.group(1).split())) if found else set()
    raise UnusedParametersError([name for at, name in names.items() if at in indices]) from error


def _join_options(setting: bool | Mapping[str, Any]) -> dict[str, Any] | None:
    """Arguments of ``join``; None where all ranks have equally many batches."""
    if isinstance(setting, bool):
        return {} if setting else None
    allowed = [name for name in option_names(DistributedDataParallel.join) if name != "enable"]
    check_options("uneven_inputs", setting, allowed)
    return dict(setting)


def _renamed(options: dict[str, Any]) -> dict[str, Any]:
    """``broadcast_buffers`` under its name in newer versions of torch, which warn of the old."""
    new, old = "forward_sync_buffers", options.pop("broadcast_buffers", None)
    name = new if new in _TORCH_OPTIONS and options.get(new) is None else "broadcast_buffers"
    return options if old is None else {**options, name: old}
