"""`adapter`: LoRA and other methods of peft; checkpoints that hold only the adapter."""

from __future__ import annotations

import re
import sys
from collections import OrderedDict
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from marks import nightly, slow
from parallel_runs import BATCH, PLAN, Sentences, Transformer, settings
from ranks import run_ranks
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_swa_multi_avg_fn, update_bn
from weights import apart, whole_weights

from stepwrap.loops import CheckpointError, find_checkpoint, load_checkpoint
from stepwrap.registry import ConfigError
from stepwrap.runner import Runner, add_adapter, load_model
from stepwrap.runner.command.cli import main
from stepwrap.runner.failure import BuildError

pytest.importorskip("peft")

Capture = pytest.CaptureFixture[str]
LORA = {"r": 2, "lora_alpha": 6, "target_modules": ["qkv", "blocks.1.up", "embed"],
        "modules_to_save": ["head"]}  # fmt: skip
# The same modules by the model's names and patterns.
SECTION = {**LORA, "target_modules": ["net.blocks.*.attn.qkv", "net.blocks.1.u?", "net.embed"],
           "modules_to_save": ["net.head"]}  # fmt: skip
ADAPTERS: dict[str, dict[str, Any]] = {
    "LoRA": {},
    "DoRA": {"use_dora": True},
    "biases": {"bias": "all"},
    "PiSSA": {"init_lora_weights": "pissa"},
    "LoHa": {"type": "LoHaConfig", "r": 2, "alpha": 4, "target_modules": ["qkv", "up"]},
    "IA3": {"type": "IA3Config", "target_modules": ["qkv", "down"],
            "feedforward_modules": ["down"]},
}  # fmt: skip


def base(dtype: str) -> dict[str, Tensor]:
    torch.manual_seed(7)
    return {f"net.{n}": param.detach() for n, param in Transformer(dtype).named_parameters()}


def train_plainly(section: dict[str, Any], dtype: str = "float64", amp: bool = False) -> nn.Module:
    """Train by plain peft and PyTorch on whole batches; return the net."""
    net = Transformer(dtype)
    net.load_state_dict({n.removeprefix("net."): value for n, value in base(dtype).items()})
    torch.manual_seed(0)
    trained = with_adapter(net, section)
    optimizer: Any = torch.optim.AdamW(trained, lr=1e-2)
    if dtype == "float32":
        # AdamW amplifies the rounding errors of small gradients.
        optimizer = torch.optim.SGD(trained, lr=0.1)
    for batch in Sentences().words.split(BATCH) * 2:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16) if amp else nullcontext():
            loss = nn.functional.cross_entropy(net(batch[:, :-1]), batch[:, 1:])
        loss.backward()
        optimizer.step()
    return net


def with_adapter(net: nn.Module, section: dict[str, Any]) -> list[nn.Parameter]:
    """Add an adapter by plain peft, and return the parameters to train."""
    import peft

    kind = getattr(peft, section.get("type", "LoraConfig"))
    peft.get_peft_model(
        net, kind(**{key: value for key, value in section.items() if key != "type"})
    )
    return [param for param in net.parameters() if param.requires_grad]


def parameters(net: nn.Module) -> dict[str, Tensor]:
    return {f"net.{name}": param.detach() for name, param in net.named_parameters()}


def latest(run_dir: str) -> str:
    return str(find_checkpoint(run_dir))


def make_config(
    section: dict[str, Any], data_size: int = 1, dtype: str = "float64", **sections: Any
) -> dict[str, Any]:
    torch.save(base(dtype), "base.pt")
    config = settings(data_size, adapter=section, load_from="base.pt", **sections)
    config["hooks"] = {**config["hooks"], "checkpoint": {"every_steps": 2, "keep_last": None}}
    config["model"]["net"]["dtype"] = dtype
    if dtype == "float32":
        config["optimizer"] = {"type": "SGD", "lr": 0.1}
    return config


def trained_and_resumed(config: dict[str, Any], at: int) -> list[dict[str, Tensor]]:
    """Return the weights of a run, and of one that continues its checkpoint."""
    results = []
    for source in (False, f"runs/False/checkpoints/step_{at:08d}"):
        runner = Runner.from_config({**config, "run_dir": f"runs/{bool(source)}"})
        runner.train(resume=source)
        results.append(whole_weights(runner.state.model.module))
    return results


FORMS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "single": (1, 1, {}),
    "compiled": (1, 1, {"compile": {"step": True, "min_steps": 0}}),
    "compiled blocks": (1, 1, {"compile": {"blocks": "Block", "backend": "eager"}}),
    "accumulated": (1, 2, {"optim_wrapper": {"accumulative_counts": 2}}),
    "amp": (1, 1, {"optim_wrapper": {"type": "AmpOptimWrapper", "dtype": "bfloat16"}}),
    "dp": (1, 1, {"wrapper": {"type": "dp", "device_ids": ["cpu", "cpu"]}}),
    "ddp": (2, 2, {"wrapper": {"type": "ddp"}}),
    "ddp on 4": (4, 4, {"wrapper": {"type": "ddp"}}),
    "separate": (2, 2, {"wrapper": {"type": "separate"}}),
    "fsdp": (2, 2, {"wrapper": {"type": "fsdp", "shard": ["Block"]}}),
    "fsdp on 4": (4, 4, {"wrapper": {"type": "fsdp", "shard": ["Block"]}}),
    "meta": (2, 2, {"wrapper": {"type": "fsdp", "shard": ["Block"]}, "init_device": "meta"}),
}
ON_FOUR = ("ddp on 4", "fsdp on 4")


# Raised inside torch's compiler, which hides it outside tests.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize(
    ("form", "adapter"),
    [
        ("single", "LoRA"),
        ("fsdp", "LoRA"),
        *slow(
            *((form, "LoRA") for form in FORMS if form not in ("single", "fsdp", *ON_FOUR)),
            *(("single", adapter) for adapter in ADAPTERS if adapter != "LoRA"),
            *(("fsdp", "IA3"), ("ddp", "DoRA"), ("meta", "LoHa")),
        ),
        *nightly(*((form, "LoRA") for form in ON_FOUR)),
    ],
)
def test_like_plain_peft_and_after_a_resume(form: str, adapter: str) -> None:
    ranks, data_size, sections = FORMS[form]
    # PiSSA computes its initial values in float32 only.
    dtype = "float32" if form in ("meta", "amp") or adapter == "PiSSA" else "float64"
    options = ADAPTERS[adapter]
    config = make_config(
        options if "type" in options else {**SECTION, **options}, data_size, dtype, **sections
    )
    net = train_plainly(options if "type" in options else {**LORA, **options}, dtype, form == "amp")
    expected = parameters(net)
    limit = 1e-12 if dtype == "float64" else 1e-6
    if ranks == 1 and form != "compiled":
        results = [trained_and_resumed(config, 2)]
    else:
        results = run_ranks(trained_and_resumed, ranks, config, 2)
    for uninterrupted, resumed in results:
        assert apart(uninterrupted, expected) <= limit
        assert apart(resumed, uninterrupted) == 0
        if adapter != "PiSSA":
            for name, value in base(dtype).items():
                path, _, leaf = name.rpartition(".")
                layers = (f"{path}.base_layer.{leaf}", f"{path}.original_module.{leaf}", name)
                layer_value = next(
                    uninterrupted[layer] for layer in layers if layer in uninterrupted
                )
                if not (adapter == "biases" and leaf == "bias"):
                    assert torch.equal(layer_value, value)
    # The checkpoint has the trained weights under the names of the model and of peft.
    saved = load_checkpoint(latest("runs/False")).read_model()
    count = sum(param.numel() for param in net.parameters() if param.requires_grad)
    assert sum(value.numel() for value in saved.values() if isinstance(value, Tensor)) == count
    assert not any(".default" in name or "base_layer" in name for name in saved)
    if adapter == "LoRA":
        assert {"net.head.weight", "net.embed.lora_embedding_A"} <= {*saved}
        assert "net.blocks.0.attn.qkv.lora_B.weight" in saved


def outputs(net: nn.Module) -> Tensor:
    with torch.no_grad():
        return net.eval()(Sentences().words[:, :-1])


def test_merged_exported_and_continued(capsys: Capture) -> None:
    import peft

    config = make_config(SECTION, run_dir="runs/tuned")
    Runner.from_config(config).train()
    expected = outputs(train_plainly(LORA))
    merged = load_model("runs/tuned")
    torch.testing.assert_close(outputs(merged.net), expected, rtol=0, atol=1e-12)
    assert list(merged.state_dict()) == list(base("float64"))
    assert all(param.requires_grad for param in merged.parameters())
    assert not merged._state_dict_hooks

    # Another training starts from the merged weights, with and without an adapter.
    plain = settings(load_from="runs/tuned")
    actual = whole_weights(Runner.from_config(plain).state.model.module)
    assert apart(actual, dict(merged.named_parameters())) == 0
    again = Runner.from_config({**config, "load_from": latest("runs/tuned")})
    actual = outputs(again.state.model.module.net)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)

    assert main(["export", "runs/tuned", "--to", "peft"]) == 0
    text = capsys.readouterr().out
    assert "load it with: peft.PeftModel.from_pretrained(net, 'runs/tuned/peft')" in text
    assert "largest difference from the model: 0\n" in text
    net = Transformer()
    net.load_state_dict({n.removeprefix("net."): value for n, value in base("float64").items()})
    loaded = peft.PeftModel.from_pretrained(net, "runs/tuned/peft")
    torch.testing.assert_close(outputs(loaded), expected, rtol=0, atol=1e-12)
    assert main(["export", "runs/tuned", "--to", "safetensors"]) == 0
    weights = load_file("runs/tuned/model.safetensors")
    assert apart(weights, {name: merged.state_dict()[name] for name in weights}) == 0


class Normed(nn.Sequential):
    """A net whose running statistics change in training even in frozen layers."""

    def __init__(self, dtype: str = "float32") -> None:
        layers = nn.Embedding(12, 8), nn.Flatten(), nn.BatchNorm1d(48), nn.Linear(48, 72)
        super().__init__(*layers, nn.Unflatten(1, (12, 6)))
        self.to(getattr(torch, dtype))


@pytest.mark.parametrize("ranks", [1, *slow(2)])
def test_averages_and_running_statistics(ranks: int) -> None:
    config = settings(ranks, seed=3, run_dir="runs/ema", adapter={"target_modules": ["net.*"]})
    config["model"]["net"] = {"type": Normed}
    config["wrapper"] = {"type": "ddp"} if ranks == 2 else None
    config["hooks"] = {**config["hooks"], "checkpoint": True, "ema": {"decay": 0.5}}
    _train(config) if ranks == 1 else run_ranks(_train, ranks, config)
    checkpoint = load_checkpoint(latest("runs/ema"))
    plain, average = checkpoint.read_model(), checkpoint.read_model(evaluated=True)
    assert plain.keys() == average.keys()
    assert not torch.equal(plain["net.3.lora_B.weight"], average["net.3.lora_B.weight"])
    # The base weights are the initial ones, which the seed determines.
    torch.manual_seed(3)
    net = Normed()
    low, high = average["net.3.lora_A.weight"], average["net.3.lora_B.weight"]
    expected = net[3].weight + high @ low * (8 / 8)
    merged = load_model("runs/ema")
    torch.testing.assert_close(merged.net[3].weight, expected, rtol=0, atol=1e-6)
    assert torch.equal(merged.net[2].running_mean, plain["net.2.running_mean"])
    assert merged.net[2].running_mean.abs().max() > 0
    assert main(["export", "runs/ema", "--to", "peft"]) == 0


SAVED = {"no module": [], "a layer": ["3"], "BatchNorm": ["2"]}


@pytest.mark.parametrize(
    ("wrapper", "saved"),
    [
        ("single", "BatchNorm"),
        *slow(("single", "no module"), ("single", "a layer"), ("ddp", "BatchNorm")),
        *slow(("ddp", "a layer"), ("fsdp", "BatchNorm"), ("fsdp", "a layer")),
    ],
)
def test_swa_is_the_average_of_torch(wrapper: str, saved: str) -> None:
    ranks = 1 if wrapper == "single" else 2
    targets = [name for name in ("0", "3") if name not in SAVED[saved]]
    section = {"r": 2, "target_modules": targets, "modules_to_save": SAVED[saved]}
    torch.manual_seed(7)
    net = Normed("float64")
    torch.save({f"net.{n}": value for n, value in net.state_dict().items()}, "base.pt")
    # As many batches in each update as there are ranks.
    words = [batch[at::ranks] for batch in Sentences().words.split(BATCH) for at in range(ranks)]
    torch.manual_seed(0)
    optimizer = torch.optim.AdamW(with_adapter(net, section), lr=1e-2)
    # AveragedModel passes the count as a tensor, and its reciprocal would be in float32.
    rule = get_swa_multi_avg_fn()
    average = AveragedModel(net, multi_avg_fn=lambda mean, weight, n: rule(mean, weight, int(n)))
    steps = [words[at : at + ranks] for at in range(0, len(words), ranks)] * 2
    for number, batches in enumerate(steps, 1):
        optimizer.zero_grad()
        for batch in batches:
            loss = nn.functional.cross_entropy(net(batch[:, :-1]), batch[:, 1:])
            (loss / ranks).backward()
        optimizer.step()
        if number >= 3 and number % 2:
            average.update_parameters(net)
    update_bn([batch[:, :-1] for batch in words], average)

    config = settings(ranks, adapter=section, load_from="base.pt", run_dir="runs/swa")
    config["model"]["net"] = {"type": Normed, "dtype": "float64"}
    config["wrapper"] = {"type": wrapper}
    config["data"]["val"] = config["data"]["train"]
    config["metrics"] = {"loss": {"type": "MeanLoss"}}
    config["hooks"] |= {"swa": {"from_step": 3, "every": 2}}
    config["hooks"]["checkpoint"] = {"every_steps": 3, "keep_last": None}
    results = run_ranks(_swa, ranks, config) if ranks > 1 else [_swa(config)]
    expected = outputs(average.module)
    loss = nn.functional.cross_entropy(expected, Sentences().words[:, 1:]).item()
    for losses in results:
        assert losses == pytest.approx([loss] * 3, rel=1e-12)
    merged = load_model("runs/swa").net
    torch.testing.assert_close(outputs(merged), expected, rtol=0, atol=1e-12)


def _swa(config: dict[str, Any]) -> list[float]:
    """Return the loss after a training, of its checkpoint, and after a resume in the middle."""
    trained = Runner.from_config(config)
    losses = [trained.train().metrics["loss"]]
    losses.append(Runner.from_config(config).validate("latest")["loss"])
    checkpoint = find_checkpoint("runs/swa", before=5)
    assert checkpoint is not None
    resumed = Runner.from_config({**config, "run_dir": "runs/resumed"})
    return [*losses, resumed.train(resume=checkpoint).metrics["loss"]]


def _train(config: dict[str, Any]) -> None:
    Runner.from_config(config).train()


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_model_of_transformers_needs_no_target_modules(ranks: int) -> None:
    pytest.importorskip("transformers")
    kind = {"type": "transformers.GPT2Config", "vocab_size": 12, "n_positions": 8, "n_embd": 8}
    model = {"type": "transformers.GPT2LMHeadModel",
             "config": {**kind, "n_layer": 1, "n_head": 2}}  # fmt: skip
    config = settings(
        ranks, model=model, run_dir="runs/gpt", adapter={"r": 2, "fan_in_fan_out": True}
    )
    config["data"] = {"train": {"dataset": {"type": Words}, "batch_size": 4}}
    config["wrapper"] = {"type": "fsdp", "shard": ["GPT2Block"]} if ranks == 2 else None
    config["hooks"] = {**config["hooks"], "checkpoint": True}
    _train(config) if ranks == 1 else run_ranks(_train, ranks, config)
    names = [name for name in load_checkpoint(latest("runs/gpt")).read_model() if "lora" in name]
    path = "transformer.h.0.attn.c_attn"
    assert names == [f"{path}.lora_A.weight", f"{path}.lora_B.weight"]
    tied = load_model("runs/gpt").state_dict()
    assert torch.equal(tied["lm_head.weight"], tied["transformer.wte.weight"])


class Words(Sentences):
    """Samples in the format of transformers' models."""

    def __getitem__(self, index: int) -> Any:
        return {"input_ids": self.words[index], "labels": self.words[index]}


MISTAKES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "argument": ({"adapter": {"rank": 4}}, ["adapter.rank: LoraConfig has no such argument"]),
    "value": ({"adapter": {"r": "four"}}, ["adapter.r: must be a whole number"]),
    "kind": ({"adapter": {"type": "LoraConfg"}}, ["adapter.type: ", "did you mean LoraConfig"]),
    "tensor": (
        {"mesh": {"tensor": 1}, "tensor_parallel": {"plan": PLAN}},
        ["adapter: cannot be combined with tensor_parallel"],
    ),
    "meta": (
        {"init_device": "meta", "wrapper": {"type": "fsdp"}, "load_from": None},
        ["init_device: must be auto for an adapter without load_from"],
    ),
    "target": (
        {"adapter": {"target_modules": ["net.blocks.0.attn.qvk"]}},
        ["adapter.target_modules: ", "no layer of the model has the name 'net.blocks.0.attn.qvk'; "
         "did you mean net.blocks.0.attn.qkv"],
    ),
    "saved": (
        {"adapter": {**SECTION, "modules_to_save": ["haed"]}},
        ["adapter.modules_to_save: ", "did you mean head"],
    ),
    "pattern": (
        {"adapter": {"target_modules": ["lin*"]}},
        ["no layer of the model has the name 'lin*'", "net.embed, net.blocks.0.attn.qkv"],
    ),
    "prompts": (
        {"adapter": {"type": "PromptTuningConfig", "num_virtual_tokens": 2}},
        ["adapter: ", "PromptTuningConfig cannot be added to the modules of a model"],
    ),
    "unsupported": (
        {"adapter": {"target_modules": ["norm"]}}, ["adapter: ", "LayerNorm"],
    ),
    "ranks that the loop changes": (
        {"adapter": {**SECTION, "r": 8, "type": "AdaLoraConfig", "total_step": 40}},
        ["adapter: ", "AdaLoraConfig", "LoraConfig"],
    ),
}  # fmt: skip


def test_initial_weights_from_batches_are_refused() -> None:
    import peft

    config = peft.LoraConfig(
        target_modules=["qkv"], init_lora_weights="eva", eva_config=peft.EvaConfig()
    )
    with pytest.raises(ValueError, match=r"(?s)'eva'.*pissa"):
        add_adapter(Transformer("float32"), config)


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_in_the_section(name: str) -> None:
    sections, texts = MISTAKES[name]
    config = {**make_config(SECTION), **sections}
    with pytest.raises((ConfigError, BuildError)) as error:
        Runner.from_config({key: value for key, value in config.items() if value is not None})
    for text in texts:
        assert text in str(error.value)


def test_without_peft_the_error_names_the_extra(
    run: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    (run / "tuned.yaml").write_text("_base_: points.yaml\nadapter:\n  r: 2\n  rank: 2\n")
    for command in ("check", "train"):
        assert main([command, "tuned.yaml"]) == 2
        message = capsys.readouterr().err.splitlines()[0]
        assert re.match(r"tuned\.yaml:2: adapter: .*pip install 'stepwrap\[peft\]'$", message)
    with pytest.raises(ImportError, match=r"need peft: pip install 'stepwrap\[peft\]'"):
        add_adapter(nn.Linear(2, 2), None)


def test_an_initial_value_that_needs_the_base_is_refused_on_meta() -> None:
    config = make_config({**SECTION, "use_dora": True}, dtype="float32", **FORMS["meta"][2])
    for error in run_ranks(_build_error, 1, config):
        assert "lora_magnitude_vector" in error
        assert "use init_device: auto" in error


def _build_error(config: dict[str, Any]) -> str:
    with pytest.raises(BuildError) as error:
        Runner.from_config(config)
    return str(error.value)


def test_another_adapter_or_base_is_refused() -> None:
    config = make_config(SECTION, run_dir="runs/tuned")
    Runner.from_config(config).train()
    for section, text in {
        "r": "net.embed.lora_embedding_A: shape (2, 12) in the checkpoint, (4, 12)",
        "lora_alpha": "adapter.lora_alpha was 6 and is 4 now",
    }.items():
        with pytest.raises(CheckpointError) as error:
            Runner.from_config({**config, "adapter": {**SECTION, section: 4}}).train(resume=True)
        assert text in str(error.value)
    without = Runner.from_config({k: value for k, value in config.items() if k != "adapter"})
    with pytest.raises(CheckpointError, match="only an adapter, .*has none"):
        without.train(resume=True)

    other = {name: value + (name == "net.norm.bias") for name, value in base("float64").items()}
    torch.save(other, "base.pt")
    with pytest.raises(CheckpointError, match="the base weights differ") as error:
        load_model("runs/tuned")
    assert re.search(r"load_from was base\.pt, .*changed", str(error.value))
    # The original weights of a module in `modules_to_save` are not used.
    other = {name: value * (name != "net.head.weight") for name, value in base("float64").items()}
    torch.save(other, "base.pt")
    load_model("runs/tuned")
    Path("base.pt").unlink()
    with pytest.raises(ConfigError, match="load_from: base.pt does not exist"):
        load_model("runs/tuned")


class Tied(nn.Module):
    """A net whose embedding and last layer share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 8)
        self.hidden = nn.Linear(8, 8)
        self.head = nn.Linear(8, 12, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, words: Tensor) -> Tensor:
        return self.head(torch.relu(self.hidden(self.embed(words)))).transpose(1, 2)


TIED: dict[str, dict[str, Any]] = {
    "LoRA, head": {"target_modules": ["head"]},
    "LoRA, embedding": {"target_modules": ["embed"]},
    "LoRA, both": {"target_modules": ["embed", "head"]},
    "DoRA": {"target_modules": ["head"], "use_dora": True},
    "LoHa": {"type": "LoHaConfig", "r": 2, "target_modules": ["head"]},
    "IA3": {"type": "IA3Config", "target_modules": ["head"], "feedforward_modules": []},
    "tokens": {"target_modules": ["hidden"], "trainable_token_indices": {"embed": [1, 2]}},
}


def tied_config(section: dict[str, Any], **sections: Any) -> dict[str, Any]:
    config = settings(adapter=section, run_dir="runs/tied", **sections)
    config["model"]["net"] = {"type": Tied}
    config["optimizer"] = {"type": "AdamW", "lr": 0.1}
    config["data"]["val"] = config["data"]["train"]
    config["metrics"] = {"loss": {"type": "MeanLoss"}}
    config["hooks"] = {**config["hooks"], "checkpoint": True}
    return config


@pytest.mark.parametrize(
    "adapter", ["LoRA, head", *slow(*[one for one in TIED if one != "LoRA, head"])]
)
def test_an_adapter_on_one_of_two_tied_weights(adapter: str, capsys: Capture) -> None:
    config = tied_config(TIED[adapter])
    loss = Runner.from_config(config).train().metrics["loss"]
    live = Runner.from_config(config)
    live.validate("latest")
    expected = outputs(live.state.model.module.net)
    merged = load_model("runs/tied")
    torch.testing.assert_close(outputs(merged.net), expected, rtol=0, atol=1e-4)
    # The check compares with the model that has the adapter.
    assert main(["export", "runs/tied", "--to", "safetensors"]) == 0
    weights = load_file("runs/tied/model.safetensors")
    if adapter != "tokens":
        assert not torch.equal(weights["net.head.weight"], weights["net.embed.weight"])
        # A model with one weight cannot have both values.
        with pytest.raises(BuildError) as error:
            Runner.from_config({**config, "adapter": None, "load_from": "runs/tied"})
        text = str(error.value)
        assert "net.head.weight" in text
        assert "same as net.embed.weight" in text
        assert "without shared weights" in text
    assert "largest difference from the model: " in capsys.readouterr().out
    assert loss == pytest.approx(live.validate()["loss"])


def test_a_merge_warns_about_separate_weights(caplog: pytest.LogCaptureFixture) -> None:
    from peft import LoraConfig

    net = Tied()
    adapter = add_adapter(net, LoraConfig(target_modules=["hidden"]))
    assert adapter.merge().head.weight is net.embed.weight
    assert not caplog.records
    adapter = add_adapter(net, LoraConfig(target_modules=["head"], init_lora_weights=False))
    expected = outputs(net)
    torch.testing.assert_close(outputs(adapter.merge()), expected, rtol=0, atol=1e-5)
    assert net.head.weight is not net.embed.weight
    assert "embed.weight and head.weight are one" in caplog.text


def test_a_layer_under_two_names_with_an_adapter_under_one() -> None:
    from peft import LoraConfig

    layer = nn.Linear(6, 6)
    net = nn.Sequential(OrderedDict(a=layer, b=nn.Sequential(nn.ReLU(), layer)))
    adapter = add_adapter(net, LoraConfig(target_modules=["a"], init_lora_weights=False))
    words = torch.randn(4, 6)
    expected = net(words)
    torch.testing.assert_close(adapter.merge()(words), expected, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_a_merged_model_of_transformers_is_saved_with_separate_weights(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    from peft import LoraConfig

    settings = transformers.GPT2Config(vocab_size=12, n_positions=8, n_embd=8, n_layer=1, n_head=2)
    model = transformers.GPT2LMHeadModel(settings)
    adapter = add_adapter(model, LoraConfig(target_modules=["wte"], init_lora_weights=False))
    words = {"input_ids": torch.arange(6)[None]}
    with torch.no_grad():
        expected = model.eval()(**words).logits
        adapter.merge().save_pretrained(tmp_path)
        loaded = type(model).from_pretrained(tmp_path)
        torch.testing.assert_close(loaded.eval()(**words).logits, expected, rtol=0, atol=1e-5)
