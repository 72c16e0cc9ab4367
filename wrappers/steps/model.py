"""Models that compute their own losses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from ...registry import MODELS
from ..features import explain_optim_wrapper, optim_features
from .preprocess import DataPreprocessor, as_call, get_device, path_to_samples
from .step import OptimizerWrapper, parse_losses
from .weight_init import BaseModule, InitSettings


@MODELS.register_module()
class BaseModel(BaseModule):
    """Base class of models that compute their own losses.

    A subclass implements ``forward(*inputs, mode="tensor")``. Mode "loss" returns a dict of losses:
    the sum of the entries whose name contains "loss" is optimised, the others are only logged. Mode
    "predict" returns a list of predictions, mode "tensor" the raw output. A subclass may also
    override ``parse_losses(losses) -> (total, logs)``, ``val_step(data)`` and ``test_step(data)``.
    A model that overrides ``train_step`` works under ``single``, ``separate`` and ``fsdp`` only. To
    support ``ddp`` and ``dp``, put the step into a subclass of the wrapper (docs/extending.md).

    Args:
        data_preprocessor: module called as ``data_preprocessor(data, training)``, or a dict
            from which the registry MODELS builds it; default: ``DataPreprocessor()``.
        init_cfg: settings of ``init_weights()``; see ``initialize``.

    Raises:
        TypeError: ``data_preprocessor`` is not a module.
    """

    def __init__(
        self,
        data_preprocessor: nn.Module | Mapping[str, Any] | None = None,
        init_cfg: InitSettings | None = None,
    ) -> None:
        super().__init__(init_cfg)
        if data_preprocessor is None:
            data_preprocessor = DataPreprocessor()
        elif isinstance(data_preprocessor, Mapping):
            data_preprocessor = MODELS.build(data_preprocessor)
        if not isinstance(data_preprocessor, nn.Module):
            raise TypeError(
                "data_preprocessor should be a `dict` or `nn.Module` instance, "
                f"but got {type(data_preprocessor).__name__}"
            )
        self.data_preprocessor = data_preprocessor

    # Static, so that wrappers can recognise this function, whose logs are detached already.
    parse_losses = staticmethod(parse_losses)

    def train_step(self, data: Any, optim_wrapper: OptimizerWrapper) -> dict[str, Tensor]:
        """Train on one batch without a wrapper; return the detached values to log."""
        try:
            context = optim_wrapper.optim_context(self)
        except AttributeError as error:
            explain_optim_wrapper(error, optim_wrapper, data)
            raise
        with context:
            data = self.data_preprocessor(data, training=True)
            optim_features(optim_wrapper).weigh(data, self)
            losses = self._run_forward(data, "loss")
        total, logs = self.parse_losses(losses)
        optim_wrapper.update_params(total)
        return logs

    def val_step(self, data: Any) -> Any:
        """Return predictions for one batch; the caller sets eval mode and disables gradients."""
        return self._run_forward(self.data_preprocessor(data, training=False), "predict")

    test_step = val_step

    def _run_forward(self, data: Any, mode: str) -> Any:
        """Call the model with the entries of a preprocessed batch as arguments."""
        args, kwargs = as_call(data)
        return self(*args, **kwargs, mode=mode)


@MODELS.register_module()
class SupervisedModel(BaseModel):
    """A model made of any network and a loss function.

    A batch is a sequence or mapping that contains an input and, except for predictions, a target.

    Args:
        net: called with the input.
        loss: called as ``loss(output, target)``; returns a tensor, whose mean is the loss, or a
            dict of losses.
        input_key: index or name of the input in the batch.
        target_key: index or name of the target in the batch.
        data_preprocessor: as in ``BaseModel``.
        init_cfg: as in ``BaseModel``.

    Raises:
        TypeError: ``loss`` is not callable.
    """

    def __init__(
        self,
        net: nn.Module,
        loss: Callable[..., Any],
        *,
        input_key: int | str = 0,
        target_key: int | str = 1,
        data_preprocessor: nn.Module | Mapping[str, Any] | None = None,
        init_cfg: InitSettings | None = None,
    ) -> None:
        super().__init__(data_preprocessor, init_cfg)
        if not callable(loss):
            raise TypeError(f"loss must be callable, got {type(loss).__name__}")
        self.net = net
        self.loss = loss
        self.input_key = input_key
        self.target_key = target_key
        self.data_preprocessor.to(get_device(net))

    def forward(self, *entries: Any, mode: str = "tensor", **named: Any) -> Any:
        """Return the net's output ("tensor"), its losses ("loss") or a list of predictions.

        Raises:
            KeyError: the batch has no entry ``input_key`` or ``target_key``.
            TypeError: mode "predict", and the net returns neither a tensor nor a list.
            ValueError: ``mode`` is not "tensor", "loss" or "predict".
        """
        batch: Any = named or entries
        key, target = self.input_key, None
        try:
            net_input = batch[key]
            if mode == "loss":
                key = self.target_key
                target = batch[key]
        except (LookupError, TypeError):
            setting = "input_key" if key == self.input_key else "target_key"
            is_named = isinstance(batch, dict)
            description = f"the keys {list(batch)}" if is_named else f"{len(batch)} entries"
            raise KeyError(
                f"{setting}={key!r} is not in the batch, which has {description}; "
                f"change {setting} of SupervisedModel"
            ) from None
        output = self.net(net_input)
        if mode == "loss":
            loss = self.loss(output, target)
            return loss if isinstance(loss, dict) else {"loss": loss}
        if mode == "tensor":
            return output
        if mode != "predict":
            raise ValueError(f"mode must be 'loss', 'predict' or 'tensor', got {mode!r}")
        if isinstance(output, Tensor):
            return list(output.unbind(0))
        if isinstance(output, list):
            return output
        raise TypeError(
            "mode='predict' needs a net that returns a tensor of shape (samples, ...) or a list, "
            f"got {type(output).__name__}"
        )

    def val_step(self, data: Any) -> dict[str, Any]:
        """Evaluate one batch.

        Returns:
            ``preds`` and ``target`` (first dimension: samples), ``loss`` (mean, 0-d) and
            ``num_samples``; ``target`` and ``loss`` only if the batch has a target.
        """
        entries, named = as_call(self.data_preprocessor(data, training=False))
        preds = self(*entries, **named, mode="tensor")
        batch: Any = named or entries
        key = self.target_key
        result: dict[str, Any] = {"preds": preds}
        if batch.get(key) is not None if named else isinstance(key, int) and key < len(batch):
            result["target"] = batch[key]
            loss = self.loss(preds, batch[key])
            losses = loss if isinstance(loss, dict) else {"loss": loss}
            result["loss"] = self.parse_losses(losses)[0]
        result["num_samples"] = _count_samples(result.get("target"), preds, batch)
        return result

    def test_step(self, data: Any) -> dict[str, Any]:
        """Evaluate one batch as ``val_step`` does."""
        return self.val_step(data)


def _count_samples(*sources: Any) -> int:
    """Return the length of the first source that has samples along its first dimension.

    The target is the first source, because a net may return several outputs of other lengths.
    """
    for source in sources:
        if isinstance(source, list):
            return len(source)
        path = path_to_samples(source)
        if path is not None:
            for key in path:
                source = source[key]
            return len(source)
    raise TypeError(f"no samples can be counted in {', '.join(type(p).__name__ for p in sources)}")
