"""Export a trained model to a file for other programs: safetensors, torch.export or ONNX."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, is_dataclass
from importlib import import_module
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.utils._pytree import tree_flatten_with_path, tree_leaves, tree_unflatten

from ..loops.checkpoints.files import open_synced
from ..loops.evaluate import evaluation_mode
from ..primitives.files import replacing
from ..registry.local_paths import require_local
from ..wrappers.steps.plain_models import accept_mode, remove_targets
from ..wrappers.steps.preprocess import as_call

FORMATS = ("safetensors", "pt2", "onnx", "peft")
# For each format, the extra that installs the packages it needs, and these packages.
_PACKAGES = {
    "onnx": ("onnx", ["onnx", "onnxscript", "onnxruntime"]),
    "peft": ("peft", ["peft"]),
}
_RTOL, _ATOL = 1e-3, 1e-4
# Merging an adapter rounds weights of less than 32 bits: the allowed difference, relative to the
# largest output.
_MERGED_TOLERANCE = 0.05


class ExportError(RuntimeError):
    """A model cannot be exported, or the exported model has other outputs."""


@dataclass(frozen=True)
class Export:
    """An exported model.

    Attributes:
        path: the file, or the folder of an adapter.
        inputs: shapes of the program's inputs by name, with "batch" as the size of the batch
            dimension; empty if the export has only weights.
        difference: the largest absolute difference between the outputs of the file and the
            model's, on the example batch; for a program also on a part of it.
    """

    path: Path
    inputs: dict[str, tuple[int | str, ...]]
    difference: float


class _TensorForward(nn.Module):
    """Compute the outputs of a model from the tensors in a batch.

    Args:
        model: called with ``mode="tensor"`` after its ``data_preprocessor``.
        batch: an example; values in it that are not tensors become constants.
        used: indices of the tensors that are inputs, by default all; the others become constants.
    """

    def __init__(self, model: nn.Module, batch: Any, used: Sequence[int] | None = None) -> None:
        super().__init__()
        accept_mode(model)
        self.model = model
        paths, self._structure = tree_flatten_with_path(batch)
        self._leaves = [leaf for _, leaf in paths]
        self.used = used
        tensors = [at for at, leaf in enumerate(self._leaves) if isinstance(leaf, Tensor)]
        self._places = tensors if used is None else [tensors[at] for at in used]
        self.names = [_name(paths[at][0]) for at in self._places]

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """The tensors of the example that are inputs."""
        return tuple(self._leaves[at] for at in self._places)

    def forward(self, *tensors: Tensor) -> Any:
        leaves = [*self._leaves]
        for at, tensor in zip(self._places, tensors, strict=True):
            leaves[at] = tensor
        batch = tree_unflatten(leaves, self._structure)
        preprocessor = getattr(self.model, "data_preprocessor", None)
        if preprocessor is not None:
            batch = preprocessor(batch, training=False)
        args, kwargs = as_call(batch)
        outputs = self.model(*args, **remove_targets(self.model, kwargs), mode="tensor")
        if is_dataclass(outputs) and isinstance(outputs, Mapping):
            # The model is from transformers: keep only tensors, without the loss. A decoder's
            # output also has caches.
            return {k: v for k, v in outputs.items() if isinstance(v, Tensor) and k != "loss"}
        return outputs


def _name(path: Sequence[Any]) -> str:
    keys = [getattr(key, "key", getattr(key, "idx", key)) for key in path]
    return "_".join(f"input{key}" if isinstance(key, int) else str(key) for key in keys)


def export_model(
    model: nn.Module,
    path: str | os.PathLike[str],
    batch: Any,
    *,
    live: nn.Module | None = None,
) -> Export:
    """Export a model to a file, and check on a batch that the file has the same outputs.

    ``.safetensors`` contains only the weights. ``.pt2`` (``torch.export``) and ``.onnx`` also
    contain a program: it applies the ``data_preprocessor`` and calls the model with
    ``mode="tensor"``, for any batch size. Entries of the batch that the outputs do not depend on,
    such as targets, are not inputs of the program. If the check fails, no file is written.

    Args:
        model: a model on the CPU, as ``load_model`` returns it.
        path: the new file; its suffix determines the format.
        batch: a batch as the loader yields it; of at least two samples for a program.
        live: the model with which the file is compared, such as the trained model with an adapter
            if ``model`` is the merged one. Default: ``model``.

    Raises:
        ExportError: the model cannot be exported, or the difference is too large.
        FileExistsError: ``path`` exists, or the second file of a large ONNX model exists.
        ImportError: the format needs a package that is not installed.
        ValueError: the format is unknown.
    """
    path = Path(path)
    check_export(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    # Large ONNX models have a second file with weights.
    with replacing(path) as draft:
        with evaluation_mode(model), torch.no_grad(), _quiet():
            outputs = _TensorForward(model, batch)
            if path.suffix == ".safetensors":
                run = _as_safetensors(outputs, draft)
            else:
                program, outputs = _traced(outputs)
                write = _as_pt2 if path.suffix == ".pt2" else _as_onnx
                run = write(program, outputs, draft)
            is_program = path.suffix != ".safetensors"
            if live is None:
                difference = _compare(outputs, run, is_program=is_program)
            else:
                expected = _TensorForward(live, batch, outputs.used)
                with evaluation_mode(live):
                    tolerance = _merged_tolerance(live)
                    difference = _compare(expected, run, is_program=is_program, tolerance=tolerance)
        for file in draft.parent.iterdir():
            check_export(path.with_name(file.name), path.suffix.removeprefix("."))
    inputs = {} if path.suffix == ".safetensors" else _shapes(outputs)
    return Export(path, inputs, difference)


def export_adapter(
    adapter: Any, base: nn.Module, path: str | os.PathLike[str], batch: Any
) -> Export:
    """Write an adapter to a folder that ``peft.PeftModel.from_pretrained`` reads.

    Plain peft must compute the same outputs from this folder, otherwise no folder is written.

    Args:
        adapter: the ``Adapter`` in a model on the CPU.
        base: a second model with the base weights and without an adapter. For the check, plain
            peft adds the written adapter to it.
        path: the new folder.
        batch: as for ``export_model``.

    Raises:
        ExportError: plain peft computes other outputs.
        FileExistsError: ``path`` exists.
        ImportError: peft is not installed.
    """
    from peft import PeftModel

    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as draft:
        adapter.save(draft)
        # peft adds the adapter in place, so the result is not needed.
        PeftModel.from_pretrained(base.get_submodule(adapter.net), str(draft))
        outputs = _TensorForward(adapter.model, batch)
        with evaluation_mode(adapter.model), evaluation_mode(base), torch.no_grad():
            difference = _compare(outputs, _TensorForward(base, batch), is_program=False)
        check_export(path, "peft")
    return Export(path, {}, difference)


def check_export(path: Path, kind: str = "") -> None:
    """Check that the format is known, its packages are installed and the file is new.

    Call this before loading the model.

    Args:
        path: the new file or folder.
        kind: the format; default: the suffix.

    Raises:
        FileExistsError, ImportError, ValueError: as for ``export_model``.
    """
    require_local(path, "the exported file")
    files = [format_name for format_name in FORMATS if format_name != "peft"]
    if not kind and (kind := path.suffix.removeprefix(".")) not in files:
        suffixes = ", ".join(f".{format_name}" for format_name in files)
        raise ValueError(f"an export needs a file that ends in {suffixes}, got {path.name!r}")
    if path.exists():
        raise FileExistsError(
            f"an export needs a new file, and {path} exists: remove it, or choose another name"
        )
    extra, packages = _PACKAGES.get(kind, ("", []))
    try:
        for package in packages:
            import_module(package)
    except ImportError as error:
        raise ImportError(
            f"an export to {kind} needs {error.name}: pip install 'stepwrap[{extra}]'"
        ) from error


def _batch_size(outputs: _TensorForward) -> int:
    sizes = [tensor.shape[0] for tensor in outputs.inputs if tensor.ndim]
    if not sizes or sizes[0] < 2:
        raise ExportError(
            "an export needs a batch of at least two samples, along the first dimension of its "
            f"tensors; got sizes {sizes}"
        )
    return int(sizes[0])


def _shapes(outputs: _TensorForward) -> dict[str, tuple[int | str, ...]]:
    size = _batch_size(outputs)
    return {
        name: tuple("batch" if not at and n == size else n for at, n in enumerate(tensor.shape))
        for name, tensor in zip(outputs.names, outputs.inputs, strict=True)
    }


def _dynamic(outputs: _TensorForward) -> tuple[Any, ...]:
    """Return the dynamic dimensions: the first dimension of inputs with one row per sample."""
    batch = Dim("batch")
    shapes = _shapes(outputs).values()
    return tuple({0: batch} if shape and shape[0] == "batch" else None for shape in shapes)


def _traced(outputs: _TensorForward) -> tuple[ExportedProgram, _TensorForward]:
    """Return the exported program, and the module from which it was exported.

    Both have only the inputs that the outputs depend on.
    """
    _require_tensors(outputs)
    program = _exported(outputs)
    nodes = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    names = program.graph_signature.user_inputs
    used = [at for at, name in enumerate(names) if _is_used(nodes[str(name)])]
    if len(used) in (0, len(names)):
        return program, outputs
    model, leaves, structure = outputs.model, outputs._leaves, outputs._structure
    outputs = _TensorForward(model, tree_unflatten(leaves, structure), used)
    return _exported(outputs), outputs


def _require_tensors(outputs: _TensorForward) -> None:
    results = outputs(*outputs.inputs)
    if isinstance(results, list) and results and isinstance(results[0], Mapping):
        raise ExportError(
            f"{type(outputs.model).__name__} returns a list with a dict for each sample, as "
            "detectors do, and a program returns tensors with one row for each sample; export the "
            "weights, to safetensors"
        )


def _is_used(node: torch.fx.Node) -> bool:
    """Return whether the outputs depend on more of an input than its batch size."""
    return any(user.target is not torch.ops.aten.sym_size.int for user in node.users)


def _exported(outputs: _TensorForward) -> ExportedProgram:
    try:
        return torch.export.export(
            outputs, outputs.inputs, dynamic_shapes=(_dynamic(outputs),), strict=False
        )
    except ExportError:
        raise
    except Exception as error:
        raise ExportError(
            f"torch.export cannot follow the model: {str(error).strip().splitlines()[0]}"
        ) from error


def _as_safetensors(outputs: _TensorForward, path: Path) -> Callable[..., Any]:
    from safetensors.torch import load_model, save_model

    loaded = deepcopy(outputs)
    _use_own_memory(loaded)
    save_model(loaded.model, str(path), metadata={"format": "pt"})
    # Zero the copy's values: the comparison must show that they come from the file.
    for tensor in loaded.model.state_dict().values():
        if isinstance(tensor, Tensor):
            tensor.zero_()
    load_model(loaded.model, str(path))
    return loaded


def _use_own_memory(model: nn.Module) -> None:
    """Copy tensors that share memory, except for tied weights.

    safetensors stores only tensors that fill their memory.
    """
    copies: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.clone(memory_format=torch.contiguous_format)
        for name, parameter in module._parameters.items():
            if parameter is not None and not _is_compact(parameter):
                values = parameter.detach().clone(memory_format=torch.contiguous_format)
                copy = nn.Parameter(values, parameter.requires_grad)
                module._parameters[name] = copies.setdefault(id(parameter), copy)


def _is_compact(tensor: Tensor) -> bool:
    """Return whether a tensor fills its memory; slices and expanded tensors do not."""
    return tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


class _KeepingErrors:
    """A file that keeps the error of a failed write instead of raising it.

    If a write raises, torch raises an error about its position in the file, or ends the process.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            if self.error is None:
                self._file.write(data)
        except OSError as error:
            self.error = error
        return memoryview(data).nbytes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def _as_pt2(program: ExportedProgram, outputs: _TensorForward, path: Path) -> Callable[..., Any]:
    # With a path, a full disk would end the process in torch's C++ code.
    with open_synced(path, "wb") as file:
        draft = _KeepingErrors(file)
        torch.export.save(program, draft)
        if draft.error is not None:
            raise draft.error
    loaded: Callable[..., Any] = torch.export.load(path).module()
    return loaded


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide torch's deprecation warnings, and what its ONNX exporter logs below level ERROR."""
    logs = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript")]
    levels = [log.level for log in logs]
    for log in logs:
        log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            for kind in (FutureWarning, DeprecationWarning):
                warnings.simplefilter("ignore", kind)
            # torch.export warns if buffers are slices. The outputs are compared anyway.
            warnings.filterwarnings("ignore", "No complete tensor found in the group")
            yield
    finally:
        for log, level in zip(logs, levels, strict=True):
            log.setLevel(level)


def _as_onnx(program: ExportedProgram, outputs: _TensorForward, path: Path) -> Callable[..., Any]:
    import onnxruntime

    exported = torch.onnx.export(program, input_names=outputs.names, verbose=False)
    assert exported is not None
    exported.save(str(path))
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])

    def run(*tensors: Tensor) -> list[Tensor]:
        named_tensors = zip(outputs.names, tensors, strict=True)
        results = session.run(None, {name: tensor.numpy() for name, tensor in named_tensors})
        return [torch.from_numpy(array) for array in results]

    return run


def _merged_tolerance(model: nn.Module) -> float:
    """Return the difference that a merge may make, relative to the largest output; 0 for fp32."""
    dtypes = {tensor.dtype for tensor in model.parameters() if tensor.is_floating_point()}
    return _MERGED_TOLERANCE if any(dtype.itemsize < 4 for dtype in dtypes) else 0.0


def _compare(
    outputs: _TensorForward, run: Callable[..., Any], *, is_program: bool, tolerance: float = 0.0
) -> float:
    """Return the largest difference between an exported form and the model.

    Args:
        outputs: the model.
        run: the exported form.
        is_program: whether the size of the batch may vary; then a part of the batch is compared
            as well.
        tolerance: a further allowed difference, relative to the largest output.

    Raises:
        ExportError: the difference is too large, or the number or shapes of the outputs differ.
    """
    batches = {"the batch": outputs.inputs}
    if is_program:
        size = _batch_size(outputs)
        count = max(1, size // 2)
        batches[f"its first {count} samples"] = tuple(
            tensor[:count] if tensor.ndim and len(tensor) == size else tensor
            for tensor in outputs.inputs
        )
    differences = [0.0]
    for name, inputs in batches.items():
        expected, actual = (_tensors(program(*inputs)) for program in (outputs, run))
        if [tensor.shape for tensor in expected] != [tensor.shape for tensor in actual]:
            raise ExportError(
                f"the exported form returns tensors of shapes {[tuple(o.shape) for o in actual]} "
                f"for {name}, and the model {[tuple(o.shape) for o in expected]}"
            )
        for own, other in zip(expected, actual, strict=True):
            own, other = own.double(), other.double()
            difference = (own - other).abs().max().item() if own.numel() else 0.0
            atol = max(_ATOL, tolerance * own.abs().max().item()) if tolerance else _ATOL
            if not torch.allclose(own, other, _RTOL, atol, equal_nan=True):
                raise ExportError(
                    f"the exported form differs from the model by {difference:.3g}, for {name}"
                )
            differences.append(difference)
    return max(differences)


def _tensors(outputs: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)]
