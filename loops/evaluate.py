"""The validation and test loops."""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from copy import copy, deepcopy
from functools import partial
from itertools import chain, repeat
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parameter import is_lazy

from ..collectives import all_gather_object, distributed_available, failure_of, get_rank
from ..registry import LOOPS
from ..wrappers.features import model_features, optim_features
from ..wrappers.steps.buffers import buffers_of_first_rank, restore_buffers, save_buffers
from ..wrappers.steps.preprocess import get_device
from ..wrappers.unwrap import user_model
from .data.loaders import batches_from, get_length, peek_first_batch
from .data.sampler import compare_orders
from .data.shares import Share, drop_padding
from .error_notes import get_name, naming_missing_ranks, note_failure, record_inference_tensors
from .evaluation import Evaluation, Poll, require_step
from .hook import HookList
from .metrics import evaluation
from .metrics.directions import find_directions
from .metrics.inputs import MetricInputs
from .rng import preserved_generators, preserved_rng
from .state import LoopState, Phase
from .undo import WeightWatch, attribute_restorer
from .uneven_inputs import get_first_batch, true_on_all_ranks

logger = logging.getLogger(__name__)

_END = object()
_STEPS = {Phase.VAL: "val_step", Phase.TEST: "test_step", Phase.PREDICT: "test_step"}


class Rounds:
    """The batches of an evaluation on this rank.

    If ``together`` is false, these are the batches that it reads. If it is true, every rank makes
    the same number of steps: a rank that has run out of batches repeats its last one, and a rank
    without batches gets another rank's; neither is counted. Before each step the ranks agree
    whether to continue. An exception in a loader, a metric or a hook is kept until then, and ends
    the evaluation on all ranks.
    """

    def __init__(
        self,
        batches: Callable[[], Iterable[Any]],
        together: bool,
        group: dist.ProcessGroup | None,
        phase: Phase,
    ) -> None:
        self._read, self._together, self._group, self._phase = batches, together, group, phase
        self._has_batch = False
        self._failure: Exception | None = None

    def batches(self) -> Iterator[tuple[Any, bool]]:
        """Return an iterator over (batch, whether it counts), endless if ``together`` is true."""
        if not self._together:
            return zip(self._read(), repeat(True), strict=False)
        return self._endless()

    @contextmanager
    def deferred_errors(self) -> Iterator[None]:
        """Defer an exception to the next ``agree``, if other ranks would wait for this rank."""
        try:
            yield
        except Exception as error:
            if not self._together:
                raise
            self._failure = error if self._failure is None else self._failure

    def agree(self) -> bool:
        """Return whether there is another step; raise a deferred exception on every rank."""
        if not self._together:
            return True
        # Over all ranks, not only `data_group`: a step also needs the ranks that hold the other
        # parts of split layers.
        all_done, none_failed = true_on_all_ranks(None, not self._has_batch, self._failure is None)
        if not none_failed:
            raise_everywhere(self._failure)
        return not all_done

    def _endless(self) -> Iterator[tuple[Any, bool]]:
        iterator: Iterator[Any] = iter(())
        with self.deferred_errors():
            iterator = iter(self._read())
        batch = self._next(iterator)
        self.agree()
        latest = get_first_batch(self._group, batch, self._has_batch)
        if latest is _END:
            raise ValueError(f"the {self._phase.value} loader has no batches on any rank")
        while True:
            yield latest, self._has_batch
            batch = self._next(iterator)
            latest = batch if self._has_batch else latest

    def _next(self, iterator: Iterator[Any]) -> Any:
        batch = _END
        with self.deferred_errors():
            batch = next(iterator, _END)
        self._has_batch = batch is not _END
        return batch


def raise_everywhere(error: Exception | None) -> None:
    """Raise ``error``, and on other ranks a RuntimeError that names it; every rank must call."""
    failures = all_gather_object(failure_of(error))
    if error is not None:
        raise error
    texts = "; ".join(
        f"rank {failure.rank}: {failure.full_text}" for failure in failures if failure
    )
    if texts:
        raise RuntimeError(f"the evaluation failed on {texts}")


class _EvalLoop(Evaluation):
    """One pass over the data without gradients, in which each sample counts once.

    The model's training flags and the random streams are restored afterwards, so evaluations do not
    affect training. If the state has an ``AmpOptimWrapper``, steps run in its precision, as in
    training. Otherwise they run in ``state.precision``, which is the model's dtype by default.

    Args:
        dataloader: this rank's batches; ranks may have different numbers of them, including none.
            If every rank must call each step (the model's ``collective_eval``), a rank that has
            run out continues with a batch that is not counted.
        metrics: metrics of torchmetrics, or instances of ``BaseMetric``, by name, in the same
            order on every rank. If a step returns a mapping, each argument of a metric's ``update``
            or ``add`` gets the value of that name. Any other result is passed as
            ``update(outputs, batch)`` or ``add(outputs, batch)``. ``MetricInputs`` selects other
            values.
        inference_mode: run under ``torch.inference_mode()`` instead of ``torch.no_grad()``. Tensors
            that the model creates in an evaluation and keeps, such as tables that grow, cannot be
            used in training then.
        per_rank: whether ``dataloader`` gives each rank its own data. If false, the ranks compare
            their first batches, and divide them if they are the same; see docs/data.md.
    """

    phase: Phase
    step_name: str

    def __init__(
        self,
        dataloader: Iterable[Any],
        metrics: Mapping[str, evaluation.AnyMetric | MetricInputs] | None = None,
        *,
        inference_mode: bool = False,
        per_rank: bool = False,
    ) -> None:
        self.dataloader = dataloader
        self.inference_mode = inference_mode
        self._share = Share(per_rank)
        self.metrics, self._inputs = evaluation.split_inputs(metrics or {})
        for metric in self.metrics.values():
            if isinstance(metric, evaluation.ProcessMetric):
                metric.use_metainfo(dataloader)
        self._polled_batches: float | None = None

    def evaluate(self, state: LoopState, hooks: HookList, poll: Poll) -> dict[str, float]:
        """Evaluate inside another loop; every rank must call this.

        ``poll`` is called between batches; if it requests a stop the result is empty.

        Raises:
            TypeError: the model lacks the step.
            ValueError: no rank has a batch, or a metric's input is missing.
            RuntimeError: the loader, a metric or a hook of another rank failed, if every rank
                must call each step (``collective_eval``). The message names the error.
        """
        require_step(state.model, self.step_name)
        with (
            self._running(state),
            naming_missing_ranks(state),
            preserved_rng(get_device(state.model)),
        ):
            hooks.emit("on_eval_start", state)
            without_gradients = torch.inference_mode if self.inference_mode else torch.no_grad
            try:
                # Ranks have different running statistics; all evaluate with rank 0's, which are
                # also in checkpoints.
                with (
                    buffers_of_first_rank(state.model),
                    evaluation_mode(state.model),
                    without_gradients(),
                ):
                    results = self._measure(state, hooks, poll)
            finally:
                if self.inference_mode:
                    record_inference_tensors(state)
            hooks.emit("on_eval_end", state, results)
        return results

    def adapt_to(self, phase: Phase) -> Any:
        """Return this loop, or a copy of it that calls the step of ``phase``."""
        if self.phase is phase:
            return self
        other = copy(self)
        if self.step_name == _STEPS[self.phase]:
            other.step_name = _STEPS[phase]
        other.phase = phase
        return other

    @contextmanager
    def _running(self, state: LoopState) -> Iterator[None]:
        outer, state.phase = state.phase, self.phase
        try:
            with preserved_gradients(state.model):
                yield
        except Exception as error:
            note_failure(error, state, self.dataloader, self.step_name)
            raise
        finally:
            state.phase = outer

    def try_batch(self, state: LoopState) -> None:
        """Run the first batch, to find mistakes before training; every rank must call this.

        Random streams, buffers and the modules' plain attributes are restored afterwards. Metrics,
        loader and data are not changed, and no hook is called. Nothing is run if that cannot be
        guaranteed: with lazy parameters, an overridden ``evaluate``, or a loader that is neither a
        sequence nor a plain DataLoader of a map-style data set.
        """
        self.divide(state)
        batches = peek_first_batch(self.dataloader)
        tensors = chain(state.model.parameters(), state.model.buffers())
        is_overridden = type(self).evaluate is not _EvalLoop.evaluate
        if batches is None or is_overridden or any(map(is_lazy, tensors)):
            return
        trial, device = copy(self), get_device(state.model)
        group = model_features(state.model).data_group
        trial._share = Share(per_rank=True)
        # The step may change the batch in place, which may be a part of the data set.
        trial.dataloader = map(_copy_if_possible, batches)
        trial.metrics = evaluation.empty_copies(self.metrics)
        trial._polled_batches = 0.0
        failure: Exception | None = None
        count: int | None = 0
        try:
            # Never under inference mode: the model may keep tensors of this step.
            with (
                self._running(state),
                preserved_rng(device),
                _unchanged(state.model),
                torch.no_grad(),
            ):
                evaluation.start_metrics(trial.metrics, device, group)
                count = trial._pass(state, HookList(), lambda _: None)
        except Exception as error:
            # With `collective_eval`, do not communicate here: either `agree` has already raised the
            # error on every rank, or the other ranks are waiting in the collectives of the step.
            if model_features(state.model).collective_eval:
                raise
            failure = error
        raise_everywhere(failure)
        self._require_batches(count)

    def _measure(self, state: LoopState, hooks: HookList, poll: Poll) -> dict[str, float]:
        # Ranks that share one model see the same samples, which count once.
        group = model_features(state.model).data_group
        evaluation.start_metrics(self.metrics, get_device(state.model), group)
        self.divide(state)
        count = self._pass(state, hooks, poll)
        if count is None:
            return {}
        self._require_batches(count)
        evaluation.merge_metrics(self.metrics, group)
        results = evaluation.compute_metrics(self.metrics, group, by_batch=self._share.is_by_batch)
        if self.phase is Phase.VAL:
            state.metrics, state.evaluated_at = results, state.step
            state.higher_is_better = find_directions(self.metrics)
        return dict(results)

    def _require_batches(self, count: int | None) -> None:
        """Raise ValueError if no rank has had a batch; every rank must call this."""
        is_empty = not count
        if distributed_available():
            is_empty = true_on_all_ranks(None, is_empty)[0]
        if is_empty:
            raise ValueError(f"the {self.phase.value} loader has no batches on any rank")

    def divide(self, state: LoopState) -> None:
        """Read each sample on one rank, if it would be read on several; every rank must call."""
        group = model_features(state.model).data_group
        share = self._share.divide(self.dataloader, group, repeats=False)
        self.dataloader = drop_padding(share)

    def _batches(self) -> Iterable[Any]:
        compare_orders(self.dataloader, epoch=0)
        return self._share.take(batches_from(self.dataloader, epoch=0))

    def _pass(self, state: LoopState, hooks: HookList, poll: Poll) -> int | None:
        """Run all batches and return their number; None if a request to stop interrupted them."""
        together = distributed_available() and model_features(state.model).collective_eval
        # A stop that was requested earlier, for example in a stopped training, does not count.
        polled = 0.0 if state.stop_reason else math.inf if together else self._last_polled_batch()
        step = getattr(state.model, self.step_name)
        optim = optim_features(state.optim_wrapper)
        precision = optim.precision_context or state.precision
        loss_weight = optim.loss_weight or state.loss_weight
        model = user_model(state.model)
        weight_of = None if loss_weight is None else partial(loss_weight.of, model=model)
        group = model_features(state.model).data_group
        rounds = Rounds(self._batches, together, group, self.phase)
        count = 0
        for batch, counts in rounds.batches():
            if counts:
                with rounds.deferred_errors():
                    hooks.emit("on_eval_batch_start", state, batch)
            if not rounds.agree():
                break
            with precision():
                outputs = step(batch)
            if counts:
                with rounds.deferred_errors():
                    evaluation.feed_metrics(self.metrics, outputs, batch, weight_of, self._inputs)
                    hooks.emit("on_eval_batch_end", state, batch, outputs)
            count += 1
            if count <= polled:
                poll(state)
                if state.stop_reason:
                    return None
        return count

    def _last_polled_batch(self) -> float:
        """Return the number of batches that are followed by a poll: the first ones of the pass.

        This is the smallest number of batches on any rank, because a rank that has finished cannot
        take part in a poll. It is 0 if a number is unknown or an estimate, and infinity for a
        single process.
        """
        if self._polled_batches is None:
            is_exact = self._share.has_exact_length(self.dataloader)
            exact = get_length(self.dataloader) if is_exact else None
            lengths = all_gather_object(exact)
            self._polled_batches = math.inf if len(lengths) == 1 else min(n or 0 for n in lengths)
            if None in lengths and len(lengths) > 1 and get_rank() == 0:
                logger.info(
                    "the number of batches of %s is not certain, so a stop signal takes effect "
                    "after the %s, not within it",
                    *(get_name(self.dataloader), self.phase.value),
                )
        return self._polled_batches


@LOOPS.register_module()
class ValLoop(_EvalLoop):
    """The validation loop: calls ``val_step`` on each batch, and counts each sample once.

    Args:
        dataloader: this rank's batches; the number may differ between ranks.
        metrics: metrics of torchmetrics, or instances of ``BaseMetric``, by name, in the same
            order on every rank; docs/extending.md describes how they are updated.
        inference_mode: run under ``torch.inference_mode()`` instead of ``torch.no_grad()``. Tensors
            that the model creates in the evaluation and keeps cannot be used in training then.
        per_rank: whether ``dataloader`` gives each rank its own data. If false, the ranks compare
            their first batches, and divide them if they are the same; see docs/data.md.
    """

    phase = Phase.VAL
    step_name = "val_step"


@LOOPS.register_module()
class TestLoop(_EvalLoop):
    """The test loop: the same as ``ValLoop``, but with ``test_step``."""

    # Keeps pytest from collecting this class.
    __test__ = False
    phase = Phase.TEST
    step_name = "test_step"


class PredictLoop(_EvalLoop):
    """The loop of ``Runner.predict``: calls ``test_step`` on each batch, for ``PredictionHook``."""

    phase = Phase.PREDICT
    step_name = "test_step"


@contextmanager
def preserved_gradients(model: nn.Module) -> Iterator[None]:
    """Keep the gradients of an evaluation step, such as one with an attack, out of training."""
    gradients = {p: p.grad for p in model.parameters() if p.grad is not None}
    for parameter in gradients:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter in model.parameters():
            parameter.grad = gradients.get(parameter)


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put ``model`` into eval mode, and restore the flag of every submodule afterwards."""
    flags = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in flags:
            module.training = training


def _copy_if_possible(batch: Any) -> Any:
    try:
        return deepcopy(batch)
    except Exception:  # noqa: BLE001 - objects may refuse to be copied in any way
        return batch


@contextmanager
def _unchanged(model: nn.Module) -> Iterator[None]:
    """Put ``model`` into eval mode; restore its buffers and its modules' plain attributes.

    Raises:
        ValueError: the forward of a layer, apart from embeddings with ``max_norm``, has changed its
            weights. They are not copied, to save memory.
    """
    buffers, restore_attributes = save_buffers(model), attribute_restorer(model)
    weights = WeightWatch(model)
    # Compiling for a validation batch first would change how training is compiled.
    compiles = "torch._dynamo" in sys.modules
    eager = torch.compiler.set_stance("force_eager") if compiles else nullcontext()
    try:
        with evaluation_mode(model), eager, preserved_generators(user_model(model).modules()):
            yield
    finally:
        restore_attributes()
        restore_buffers(buffers)
        changed = weights.restore()
    if changed:
        raise ValueError(
            f"the forward changes the weight {changed} even in eval mode, so that the validation "
            "batch before training would change the run: set train.sanity_val to false"
        )
