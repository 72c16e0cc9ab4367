"""Add an adapter of peft, such as LoRA, to a model; checkpoints then omit the frozen weights."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...collectives import broadcast, get_rank
from ...loops import CheckpointError
from ...loops.checkpoints.weights import ADAPTER
from ...primitives.tensor_bits import tensor_bytes
from ...registry import did_you_mean
from ...registry.errors import under_key
from ...wrappers import SupervisedModel
from ...wrappers.unwrap import plain_name
from .tied import report_separated, separate_adapted_layers, tied_names

_NAME = "default"
# Settings of peft that list modules.
_LISTS = ("modules_to_save", "target_modules", "feedforward_modules", "exclude_modules")
# A checkpoint may have other values of these settings and of settings whose names end in "dropout",
# because they do not change the outputs of the trained model.
_IRRELEVANT = {
    *("auto_mapping", "base_model_name_or_path", "inference_mode", "init_lora_weights"),
    *("init_weights", "peft_version", "revision", "runtime_config", "task_type"),
}


class Adapter:
    """An adapter in a model; see ``add_adapter``.

    Attributes:
        model: the model.
        config: peft's config, with the modules that it adapts.
    """

    def __init__(self, model: nn.Module, config: Any, base: str = "") -> None:
        from peft import PEFT_TYPE_TO_TUNER_MAPPING

        kind = PEFT_TYPE_TO_TUNER_MAPPING.get(config.peft_type)
        if kind is None or config.is_prompt_learning or getattr(kind, "uses_shared_state", False):
            raise ValueError(
                f"{type(config).__name__} cannot be added to the modules of a model; use a config "
                "that adapts layers, such as LoraConfig"
            )
        # AdaMSS has the method as well, and needs it only with `use_asa`.
        if hasattr(kind, "update_and_allocate") and getattr(config, "use_asa", True):
            raise ValueError(
                f"{type(config).__name__} changes the ranks by calls from the training loop, which "
                "no run makes; use a config with fixed ranks, such as LoraConfig"
            )
        if getattr(config, "init_lora_weights", None) == "eva":
            raise ValueError(
                "init_lora_weights must not be 'eva', which computes initial weights from batches; "
                "use another initialisation, such as 'pissa' or 'orthogonal'"
            )
        self.model = model
        self.config = config
        self._base_path = base
        self._shows_base = False
        # Give peft the network itself: for models of transformers it knows which layers to adapt.
        is_net = isinstance(model, SupervisedModel)
        self._root: nn.Module = model.net if is_net else model  # type: ignore[assignment]
        self._prefix = "net." if is_net else ""
        _find_modules(config, self._root, self._prefix)
        before = _saved_tensors(model)
        self._tied = tied_names(model)
        self._trained = [param for param in model.parameters() if param.requires_grad]
        with _stand_ins(model):
            self._tuner = kind(self._root, config, adapter_name=_NAME)
        # `_own` maps each name in the model to the name without peft's additions. `_of_base` has
        # the names of tensors that existed before, `_saved` the names that checkpoints contain.
        self._own, self._of_base, self._saved = _own_names(before, model)
        is_meta = any(param.is_meta for param in model.parameters())
        self._sha256 = "" if is_meta else _fingerprint(self._frozen())
        module: Any = model
        self._hooks = [
            # torch sets an attribute on the first hook, which a bound method does not allow.
            module.register_state_dict_post_hook(partial(self._on_save)),
            module.register_load_state_dict_pre_hook(self._on_load),
        ]

    @property
    def net(self) -> str:
        """The path of the module to which peft adds the adapter; "" for the whole model."""
        return self._prefix.removesuffix(".")

    @contextmanager
    def base_weights(self) -> Iterator[None]:
        """Let a wrapped model load the base weights.

        Inside this context the model's state dict has the base weights and no adapter. At the end
        they are copied to the modules that are trained as a whole (modules_to_save). Every rank
        must enter.
        """
        self._shows_base = True
        try:
            yield
        finally:
            self._shows_base = False
        plain, names = self._plain_tensors(), self._own
        originals = {names[name]: plain[name] for name in self._of_base}
        with torch.no_grad():
            for name in self._saved - self._of_base:
                if names[name] in originals:
                    plain[name].copy_(originals[names[name]])
        self._sha256 = _fingerprint(self._frozen())

    def merge(self) -> nn.Module:
        """Add the adapter's weights to the weights of the model, remove it, and return the model.

        If the adapter changes a weight for only some of the layers that share it, these layers get
        separate weights, and a warning names them.

        Raises:
            ValueError: the merged weights are not finite.
        """
        for handle in self._hooks:
            handle.remove()
        copies = separate_adapted_layers(self.model)
        with warnings.catch_warnings():
            # The warning below names the weights.
            warnings.filterwarnings("ignore", "Input and output embeddings are no longer tied")
            self._tuner.merge_and_unload(safe_merge=True)
        for parameter in self._trained:
            parameter.requires_grad_(True)
            copies.get(parameter, parameter).requires_grad_(True)
        report_separated(self.model, self._tied)
        return self.model

    def save(self, folder: Path) -> None:
        """Write a folder that ``peft.PeftModel.from_pretrained`` reads."""
        from peft import get_peft_model_state_dict
        from safetensors.torch import save_file

        raw = {
            name.removeprefix(self._prefix): param.detach().contiguous()
            for name, param in self._plain_tensors().items()
            if name.startswith(self._prefix) and name in self._saved
        }
        weights = get_peft_model_state_dict(
            self._root, state_dict=raw, adapter_name=_NAME, save_embedding_layers=False
        )
        # Add the tensors whose names peft did not change: buffers and trained biases.
        unmapped = [name for name in raw if self._own[self._prefix + name] == self._prefix + name]
        weights |= {name: raw[name] for name in unmapped}
        names = {f"base_model.model.{name}": value.clone() for name, value in weights.items()}
        folder.mkdir(parents=True)
        save_file(names, str(folder / "adapter_model.safetensors"), metadata={"format": "pt"})
        self.config.save_pretrained(str(folder))

    def _plain_tensors(self) -> dict[str, Tensor]:
        return {plain_name(name): value for name, value in self._tensors().items()}

    def _tensors(self) -> dict[str, Tensor]:
        """Return the parameters and persistent buffers of the model under all of their names."""
        named = [
            *self.model.named_parameters(remove_duplicate=False),
            *self.model.named_buffers(remove_duplicate=False),
        ]
        return {name: value for name, value in named if plain_name(name) in self._own}

    def _frozen(self) -> dict[str, Tensor]:
        """Return the weights of the base that checkpoints leave out, by the user's names."""
        replaced = {self._own[name] for name in self._saved}
        named = self._plain_tensors()
        return {original: named[n] for n, original in self._own.items() if original not in replaced}

    def _on_save(self, module: nn.Module, state: Any, prefix: str, _: Any) -> None:
        result: dict[str, Any] = {}
        for raw in [name for name in state if name.startswith(prefix)]:
            name = plain_name(raw.removeprefix(prefix))
            if name in self._own:
                value = state.pop(raw)
                if name in (self._of_base if self._shows_base else self._saved):
                    result[prefix + self._own[name]] = value
        state.update(result)
        if not self._shows_base:
            state[prefix + ADAPTER] = self.describe()

    def _on_load(self, module: nn.Module, state: Any, prefix: str, *_: Any) -> None:
        saved = state.pop(prefix + ADAPTER, None)
        if saved is not None:
            self._check(saved)
        expected = self._of_base if self._shows_base else self._saved
        values = {
            original: state.pop(prefix + original, None) for original in set(self._own.values())
        }
        for raw, tensor in self._tensors().items():
            name = plain_name(raw)
            value = values[self._own[name]]
            if value is not None and name in expected:
                state[prefix + raw] = value
            elif self._shows_base or name not in expected:
                # This tensor keeps its value: without an entry torch would report it as missing.
                state[prefix + raw] = tensor

    def describe(self) -> dict[str, Any]:
        """Return the settings of peft, and the path and fingerprint of the base weights."""
        settings = json.loads(json.dumps(self.config.to_dict(), default=_plain, sort_keys=True))
        present = {k: v for k, v in settings.items() if v not in (None, {}, [])}
        return {**present, "base": {"load_from": self._base_path, "sha256": self._sha256}}

    def _check(self, saved: dict[str, Any]) -> None:
        description = self.describe()
        base = saved["base"]
        for key in sorted({*saved, *description} - {"base"} - _IRRELEVANT):
            if saved.get(key) != description.get(key) and not key.endswith("dropout"):
                raise CheckpointError(
                    f"the checkpoint belongs to another adapter: adapter.{key} was "
                    f"{saved.get(key, 'not set')} and is {description.get(key, 'not set')} now; "
                    "set it back, or start a new run"
                )
        if base["sha256"] == description["base"]["sha256"]:
            return
        before, now = base["load_from"] or "none", description["base"]["load_from"] or "none"
        changed = "whose weights have changed since" if before == now else f"and it is {now} now"
        raise CheckpointError(
            "the base weights differ from those that the adapter was trained on, and the "
            f"checkpoint has only the adapter. Its load_from was {before}, {changed}. Restore "
            "those weights, or set load_from to a copy or a checkpoint of them"
        )


def add_adapter(model: nn.Module, config: Any, *, base: str = "") -> Adapter:
    """Add an adapter of peft to a model and freeze its other weights; every rank must call this.

    Call it after the weights of the model are loaded, and before it is wrapped. The state dict of
    the model, and therefore its checkpoints, then contain:

    - the trained weights, with the adapter's weights under their names in peft's files;
    - the buffers;
    - ``adapter_config``: the settings of the adapter, and a fingerprint of the frozen weights.

    Loading such a state dict into a model with other settings or other frozen weights is an error.

    Args:
        model: the model; the adapter of a ``SupervisedModel`` is added to its ``net``.
        config: a config of peft that adapts layers, such as ``peft.LoraConfig``. Its lists of
            modules may contain full names, suffixes of names as in peft, and fnmatch patterns.
        base: the path of the model's weights; checkpoints store it for error messages.

    Raises:
        ImportError: peft is not installed.
        ValueError: a name matches no module, or peft cannot adapt a module.
    """
    try:
        import peft  # noqa: F401
    except ImportError as error:
        raise ImportError("adapters need peft: pip install 'stepwrap[peft]'") from error
    return Adapter(model, config, base)


def _saved_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of a model's state dict without copying them."""
    state = model.state_dict(keep_vars=True)
    return {name: value for name, value in state.items() if isinstance(value, Tensor)}


def _own_names(
    before: dict[str, Tensor], model: nn.Module
) -> tuple[dict[str, str], set[str], set[str]]:
    """Map each name in the model to the name without peft's additions; also return two sets.

    The first set has the names of tensors that are in ``before``. The second has the names of
    tensors that checkpoints contain.
    """
    names: dict[int, list[str]] = {}
    for name, tensor in before.items():
        names.setdefault(id(tensor), []).append(name)
    own_names: dict[str, str] = {}
    of_base: set[str] = set()
    saved: set[str] = set()
    for name, tensor in _saved_tensors(model).items():
        if id(tensor) in names:
            # Shared tensors have several names, in the same order as before.
            own_names[name] = names[id(tensor)].pop(0)
            of_base.add(name)
        else:
            stem, dot, tail = name.replace(f".modules_to_save.{_NAME}.", ".").rpartition(".")
            own_names[name] = (
                stem if tail == _NAME else f"{stem.removesuffix(f'.{_NAME}')}{dot}{tail}"
            )
        is_frozen = isinstance(tensor, nn.Parameter) and not tensor.requires_grad
        if name not in of_base or not is_frozen:
            saved.add(name)
    # If a module is trained as a whole, peft trains a copy of it: save only the copy.
    copied = {own_names[name] for name in saved - of_base}
    return (
        own_names,
        of_base,
        {name for name in saved if name not in of_base or own_names[name] not in copied},
    )


def _fingerprint(tensors: dict[str, Tensor]) -> str:
    """Return the SHA-256 of tensors; every rank must call this."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        gather = getattr(tensors[name], "full_tensor", None)
        full = tensors[name].detach() if gather is None else gather().detach()
        if get_rank() == 0:
            digest.update(f"{name} {full.dtype} {tuple(full.shape)}".encode())
            digest.update(tensor_bytes(full.cpu()).numpy().data)
    return str(broadcast(digest.hexdigest()))


@contextmanager
def _stand_ins(model: nn.Module) -> Iterator[None]:
    """Replace meta parameters with NaN, so that peft creates real weights next to them.

    The replacements take almost no memory, and are removed at the end.

    Raises:
        ValueError: an initial value is NaN too, so it depends on the base weights.
    """
    owners = [
        (module, name, param)
        for module in model.modules()
        for name, param in module.named_parameters(recurse=False)
        if param.is_meta
    ]
    for module, name, param in owners:
        nan = torch.full((1,), float("nan"), dtype=param.dtype).expand(param.shape)
        module._parameters[name] = nn.Parameter(nan, param.requires_grad)
    yield
    for module, name, param in owners:
        param.requires_grad_(module._parameters[name].requires_grad)  # type: ignore[union-attr]
        module._parameters[name] = param
    for path, module in model.named_modules() if owners else ():
        for name, stand_in in [*module.named_parameters(recurse=False)]:
            if stand_in.is_meta or not stand_in.isnan().any():
                continue
            if f".modules_to_save.{_NAME}." not in f"{path}.":
                raise ValueError(
                    f"the initial value of {path}.{name} depends on the base weights, which "
                    "init_device: meta loads later; use init_device: auto"
                )
            # This is a copy of a base module (modules_to_save). `base_weights` gives it its values.
            module._parameters[name] = nn.Parameter(stand_in.to("meta"), stand_in.requires_grad)


def _find_modules(config: Any, root: nn.Module, prefix: str) -> None:
    """Replace the names and patterns in the lists of ``config`` with names in ``root``."""
    saved: list[str] = []
    for key in _LISTS:
        patterns = getattr(config, key, None)
        if isinstance(patterns, (list, set, tuple)):
            names = _named_by(key, sorted(patterns), root, prefix, saved)
            saved = names if key == "modules_to_save" else saved
            setattr(config, key, names if key == "modules_to_save" else set(names))


def _named_by(
    key: str, patterns: list[str], root: nn.Module, prefix: str, saved: list[str]
) -> list[str]:
    paths = [path for path, _ in root.named_modules() if path]
    names: list[str] = []
    for pattern in patterns:
        inside = pattern.removeprefix(prefix)
        if any(char in pattern for char in "*?["):
            matches = [path for path in _adaptable(root) if fnmatchcase(prefix + path, pattern)]
            matches = [path for path in matches if not _ends(path, saved)]
        else:
            matches = [inside] if any(_ends(path, [inside]) for path in paths) else []
        if not matches:
            layers = paths if key == "modules_to_save" else list(_adaptable(root))
            candidates = [
                *(prefix + path for path in layers),
                *(p.rpartition(".")[2] for p in layers),
            ]
            examples = ", ".join(prefix + path for path in layers[:4])
            hint = did_you_mean(pattern, candidates) or f"; it has {examples}, ..."
            with under_key(key):
                raise ValueError(f"no layer of the model has the name {pattern!r}{hint}")
        names += matches
    return list(dict.fromkeys(names))


def _ends(path: str, names: Iterable[str]) -> bool:
    return any(path == name or path.endswith(f".{name}") for name in names)


def _adaptable(root: nn.Module) -> Iterator[str]:
    """Yield the paths of linear, convolutional and embedding layers."""
    attention = [f"{p}." for p, m in root.named_modules() if isinstance(m, nn.MultiheadAttention)]
    for path, module in root.named_modules():
        weight = module._parameters.get("weight")
        if path and weight is not None and weight.ndim > 1 and not path.startswith((*attention,)):
            yield path


def _plain(value: Any) -> Any:
    return sorted(map(str, value)) if isinstance(value, (set, frozenset)) else str(value)
