"""Models of transformers and many types of batches equal plain loops under every wrapper."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from marks import slow
from ranks import run_ranks
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from warm import ended, run

from stepwrap.loops import (
    HookList,
    LoopState,
    MeanLoss,
    TextCollator,
    ValLoop,
    build_loader,
    keep_lists,
)
from stepwrap.loops.predictions.rows import make_rows
from stepwrap.runner.export import export_model
from stepwrap.wrappers import (
    BaseModel,
    LossWeight,
    OptimWrapper,
    SingleDevice,
    StepDataParallel,
    StepDistributedDataParallel,
    StepFullyShardedDataParallel,
    compile_step,
    parse_losses,
)
from stepwrap.wrappers.steps.plain_models import BatchMismatchError
from stepwrap.wrappers.steps.step import MissingLossError

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
PAGE = (Path(__file__).parents[2] / "docs/models.md").read_text()
SMALL = {"vocab_size": 20, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
STEPS = 3


def wrapped(kind: str, model: nn.Module) -> Any:
    if kind == "dp":
        return StepDataParallel(model, ["cpu", "cpu"])
    kinds = {"single": SingleDevice, "ddp": StepDistributedDataParallel}
    return {**kinds, "fsdp": StepFullyShardedDataParallel}[kind](model)


# Kinds of batches.


@dataclass
class Fields:
    image: Tensor
    label: Tensor


class Named(NamedTuple):
    image: Tensor
    label: Tensor


class Net(BaseModel):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 3)

    def forward(self, image: Tensor, label: Tensor, mode: str = "tensor") -> Any:
        logits = self.head(image)
        return (
            {"loss": cross_entropy(logits, label)}
            if mode == "loss"
            else [logit.clone() for logit in logits]
        )


def make_batch(kind: str, image: Tensor, label: Tensor) -> Any:
    classes = {"dict": dict, "dataclass": Fields, "BatchEncoding": transformers.BatchEncoding}
    if kind == "tuple":
        return image, label
    if kind == "NamedTuple":
        return Named(image, label)
    named = {"image": image, "label": label}
    return classes[kind](named) if kind == "BatchEncoding" else classes[kind](**named)


KINDS = ["dict", "tuple", "dataclass", "NamedTuple", "BatchEncoding"]


def train_on_all_kinds(wrapper: str) -> dict[str, float]:
    torch.manual_seed(0)
    image, label = torch.randn(4, 4), torch.tensor([0, 1, 2, 0])
    state, losses = Net().state_dict(), {}
    for kind in KINDS:
        model = Net()
        model.load_state_dict(state)
        wrapper_ = wrapped(wrapper, model)
        optim = OptimWrapper(torch.optim.SGD(wrapper_.parameters(), lr=0.1))
        batch = make_batch(kind, image, label)
        for _ in range(STEPS):
            losses[kind] = wrapper_.train_step(batch, optim)["loss"].item()
        assert len(wrapper_.eval().val_step(batch)) == 4
        assert LossWeight("samples").of(batch) == 4
    net = nn.Linear(4, 3)
    net.load_state_dict({name.removeprefix("head."): value for name, value in state.items()})
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(STEPS):
        loss = cross_entropy(net(image), label)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return {**losses, "plain": loss.item()}


@pytest.mark.parametrize("wrapper", ["single", "dp", *slow("ddp", "fsdp")])
def test_every_kind_of_batch_trains_like_a_plain_loop(wrapper: str) -> None:
    ranks = 2 if wrapper in ("ddp", "fsdp") else 1
    results = run_ranks(train_on_all_kinds, ranks, wrapper) if ranks > 1 else []
    for losses in results or [train_on_all_kinds(wrapper)]:
        plain = losses.pop("plain")
        assert losses == pytest.approx(dict.fromkeys(KINDS, plain), rel=1e-5)


def test_predictions_take_the_id_of_a_dataclass() -> None:
    @dataclass
    class WithId:
        id: list[str]

    rows = make_rows(torch.zeros(2), WithId(["a", "b"]), 2)
    assert [row["id"] for row in rows] == ["a", "b"]


# Models of transformers.


def bert() -> nn.Module:
    torch.manual_seed(0)
    options = {**SMALL, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = transformers.BertConfig(**options, intermediate_size=16, num_labels=3)
    return transformers.BertForSequenceClassification(config)


def gpt2() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"vocab_size": 20, "n_positions": 8, "n_embd": 16, "n_layer": 1, "n_head": 2}
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **dropout, **ends))


def tokens(seed: int, name: str) -> dict[str, Tensor]:
    ids = torch.randint(20, (4, 8), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids.clone() if name == "gpt2" else torch.arange(4) % 3}


MODELS = {"bert": bert, "gpt2": gpt2}


def train_both(name: str, kind: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the weights of our training on half batches, and of a plain loop."""
    rank = torch.distributed.get_rank() if kind in ("ddp", "fsdp") else None
    plain, wrapper = MODELS[name](), wrapped(kind, MODELS[name]())
    optim = OptimWrapper(torch.optim.SGD(wrapper.parameters(), lr=0.1))
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for seed in range(STEPS):
        batch = tokens(seed, name)
        rows = slice(None) if rank is None else slice(2 * rank, 2 * rank + 2)
        encoding = transformers.BatchEncoding({key: value[rows] for key, value in batch.items()})
        wrapper.train_step(encoding, optim)
        optimizer.zero_grad()
        plain(**batch).loss.backward()
        optimizer.step()
    ours = {
        n: getattr(p, "full_tensor", lambda p=p: p)() for n, p in wrapper.module.named_parameters()
    }
    return {n: p.detach() for n, p in ours.items()}, {
        n: p.detach() for n, p in plain.named_parameters()
    }


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("bert", "single"),
        *slow(("gpt2", "ddp"), ("gpt2", "single"), ("bert", "dp"), ("gpt2", "dp")),
        *slow(("bert", "ddp"), ("bert", "fsdp"), ("gpt2", "fsdp")),
    ],
)
def test_training_equals_a_plain_loop_of_transformers(name: str, kind: str) -> None:
    results = (
        run_ranks(train_both, 2, name, kind)
        if kind in ("ddp", "fsdp")
        else [train_both(name, kind)]
    )
    for ours, plain in results:
        # from_pretrained and load_state_dict accept the names.
        assert ours.keys() == plain.keys()
        torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-5)


def ragged(length: int) -> dict[str, Tensor]:
    """Return 4 sequences, of which only ``length`` labels or a few more are not ignored."""
    batch = tokens(length, "gpt2")
    for row in range(4):
        batch["labels"][row, length + row // 2 :] = -100
    return batch


def loss_of_predicted_tokens(model: nn.Module, batches: list[dict[str, Tensor]]) -> Tensor:
    """Return the mean over the tokens that the model predicts, that is, not the first ones."""
    logits = torch.cat([model(input_ids=batch["input_ids"]).logits[:, :-1] for batch in batches])
    labels = torch.cat([batch["labels"][:, 1:] for batch in batches])
    return cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)


def train_on_a_window(kind: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the weights after one update of two batches: ours, and those of a plain loop."""
    plain, batches = gpt2(), [ragged(2), ragged(7)]
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.5)
    loss_of_predicted_tokens(plain, batches).backward()
    optimizer.step()
    wrapper = wrapped(kind, gpt2())
    weighted = {"accumulative_counts": 2, "loss_weight": "tokens"}
    optim = OptimWrapper(torch.optim.SGD(wrapper.parameters(), lr=0.5), **weighted)
    # The two ranks get unequal numbers of tokens.
    share = slice(torch.distributed.get_rank(), None, 2) if kind in ("ddp", "fsdp") else slice(None)
    for batch in batches:
        wrapper.train_step({name: rows[share] for name, rows in batch.items()}, optim)
    ours = {
        name: getattr(param, "full_tensor", lambda param=param: param)().detach()
        for name, param in wrapper.module.named_parameters()
    }
    return ours, {name: param.detach() for name, param in plain.named_parameters()}


@pytest.mark.parametrize("kind", ["single", "dp", "ddp", *slow("fsdp")])
def test_the_weight_of_a_causal_language_model_counts_what_it_predicts(kind: str) -> None:
    ranks = kind in ("ddp", "fsdp")
    results = run_ranks(train_on_a_window, 2, kind) if ranks else [train_on_a_window(kind)]
    for ours, plain in results:
        torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-6)


def test_a_validation_is_the_mean_over_predicted_tokens() -> None:
    model, batches = gpt2(), [ragged(2), ragged(7)]
    state = LoopState(SingleDevice(model), loss_weight=LossWeight("tokens"))
    results = ValLoop(batches, {"loss": MeanLoss()}).run(state, HookList())
    with torch.no_grad():
        expected = loss_of_predicted_tokens(model, batches).item()
    assert results["loss"] == pytest.approx(expected, rel=1e-5)


def test_only_causal_language_models_skip_first_labels() -> None:
    batch = {"labels": torch.tensor([[1, 2, -100], [3, 4, 5]])}
    config = transformers.BertConfig(**SMALL, intermediate_size=16)
    for model, count in (
        (gpt2(), 3),
        (transformers.BertForMaskedLM(config), 5),
        (Net(), 5),
        (None, 5),
    ):
        assert LossWeight("tokens").of(batch, model) == count


def test_targets_are_aligned_like_the_loss() -> None:
    masked = transformers.BertForMaskedLM(transformers.BertConfig(**SMALL, intermediate_size=16))
    for model in (gpt2(), masked):
        batch = tokens(0, "gpt2")
        batch["labels"][:, -2:] = -100
        outputs = SingleDevice(model).eval().val_step(batch)
        preds, target = outputs["preds"].flatten(0, 1), outputs["target"].flatten()
        torch.testing.assert_close(cross_entropy(preds, target, ignore_index=-100), outputs.loss)
        assert outputs["num_samples"] == 4


def test_fields_of_predictions_have_the_documented_names() -> None:
    """The names in files and in metrics, as docs/predictions.md explains them."""
    for model, kind, names in (
        (bert(), "bert", {"logits", "target"}),
        (gpt2(), "gpt2", {"logits", "preds", "target"}),
    ):
        batch = tokens(0, kind)
        outputs = SingleDevice(model).eval().val_step(batch)
        (row, *_) = make_rows(outputs, batch, 4)
        assert row.keys() == names
        preds = outputs["preds"][0]
        assert torch.equal(preds, torch.from_numpy(row["logits"])[: len(preds)])


@pytest.mark.slow
def test_an_export_has_no_labels_and_predictions_no_repeated_logits(tmp_path: Path) -> None:
    batch = tokens(0, "bert")
    model = bert().eval()
    exported = export_model(model, tmp_path / "model.pt2", batch)
    assert exported.inputs == {"input_ids": ("batch", 8)}
    rows = make_rows(SingleDevice(model).val_step(batch), batch, 4)
    assert rows[0].keys() == {"logits", "target"}


@pytest.mark.parametrize(
    ("model", "change", "error", "text"),
    [
        (
            "bert",
            {"label": "labels"},
            MissingLossError,
            "keys input_ids, label; did you mean labels",
        ),
        ("base", {}, MissingLossError, r"BertModel.forward has no argument labels: choose"),
        (
            "own",
            {"imag": "image"},
            BatchMismatchError,
            r"'imag'; did you mean image\?.*takes image",
        ),
    ],
)
def test_errors_name_the_remedy(model: str, change: Any, error: Any, text: str) -> None:
    net = {"bert": bert, "own": Net, "base": lambda: bert().bert}[model]()
    batch = tokens(0, "bert")
    if model == "own":
        batch = {"image": torch.randn(2, 4), "label": torch.tensor([0, 1])}
    for new_name, old_name in change.items():
        batch[new_name] = batch.pop(old_name)
    with pytest.raises(error, match=text):
        SingleDevice(net).train_step(batch, OptimWrapper(torch.optim.SGD(net.parameters(), lr=0.1)))


class Classifier(Net):
    """Has the interface of a classifier of transformers."""

    def forward(self, image: Tensor, labels: Tensor | None = None, mode: str = "tensor") -> Any:
        if labels is None:
            return transformers.modeling_outputs.SequenceClassifierOutput(logits=self.head(image))
        return super().forward(image, labels, mode)


def error_of_a_batch(batch: dict[str, Tensor], compiled: bool) -> Exception:
    """Return the error for a batch after four batches that fit."""
    model = Classifier()
    wrapper: Any = SingleDevice(model)
    if compiled:
        compile_step(wrapper, min_steps=0, backend="eager")
    optim = OptimWrapper(torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(4):
        wrapper.train_step({"image": torch.ones(2, 4), "labels": torch.tensor([0, 1])}, optim)
    assert not compiled or wrapper.batch_runner.programs
    with pytest.raises((MissingLossError, BatchMismatchError)) as caught:
        wrapper.train_step(batch, optim)
    return caught.value


@pytest.mark.parametrize("keys", [["image"], ["image", "label"]])
def test_a_compiled_step_explains_errors_like_the_usual_step(keys: list[str]) -> None:
    batch = {key: torch.ones(2, 4) for key in keys}
    usual, compiled = (error_of_a_batch(batch, flag) for flag in (False, True))
    assert f"The batch has the keys {', '.join(keys)}" in str(usual)
    assert (type(compiled), str(compiled)) == (type(usual), str(usual))


class Detector(nn.Module):
    """A detector like torchvision's, whose losses do not have "loss" in their names."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, images: list[Tensor], targets: list[dict[str, Tensor]] | None = None) -> Any:
        if self.training:
            assert targets is not None
            sums = [
                (self.scale * i.mean() - t["x"]) ** 2 for i, t in zip(images, targets, strict=True)
            ]
            return {"regression": torch.stack(sums).mean()}
        return [{"scores": self.scale * image.mean()} for image in images]


@pytest.mark.parametrize("copies", [0, 2])
def test_a_detector_returns_losses_or_predictions(copies: int) -> None:
    model = Detector()
    wrapper: Any = StepDataParallel(model, ["cpu"] * copies) if copies else SingleDevice(model)
    images = [torch.ones(3, 4, 5), torch.full((3, 6, 2), 2.0), torch.zeros(3, 2, 2)]
    targets = [{"x": torch.tensor(float(at))} for at in range(3)]
    optim = OptimWrapper(torch.optim.SGD(model.parameters(), lr=0.1))
    logs = wrapper.train_step((images, targets), optim)
    # The mean of (2 - 0)^2, (4 - 1)^2 and (0 - 2)^2.
    assert logs["regression"].item() == pytest.approx(17 / 3)
    assert model.scale.item() == pytest.approx(2 - 0.1 * (2 * 2 + 2 * 3 * 2) / 3)
    outputs = wrapper.eval().val_step((images, targets))
    assert outputs["target"] is targets or outputs["target"] == targets
    assert outputs["num_samples"] == len(outputs["preds"]) == 3
    # Calls without `mode` are unchanged.
    assert len(model(images)) == 3


def test_without_a_name_with_loss_only_trained_values_count() -> None:
    weight = torch.tensor(3.0, requires_grad=True)
    total, logs = parse_losses({"classification": weight * 2, "share": torch.tensor(0.5)})
    assert total.item() == 6
    assert set(logs) == {"loss", "classification", "share"}


# Data.


def test_keep_lists() -> None:
    assert keep_lists([(1, "a"), (2, "b")]) == ([1, 2], ["a", "b"])
    assert keep_lists([{"x": 1}, {"x": 2}]) == {"x": [1, 2]}


def test_data_sets_of_hugging_face_return_tensors_and_are_divided() -> None:
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    rows = datasets.Dataset.from_dict({"x": [[float(i), 0.0] for i in range(6)]})
    (batch,) = build_loader(rows, batch_size=6)
    assert batch["x"].shape == (6, 2)
    stream = rows.to_iterable_dataset()
    loaded = [list(build_loader(stream, batch_size=6, shard=(rank, 2))) for rank in range(2)]
    assert sorted(value for (batch,) in loaded for value in batch["x"][:, 0].tolist()) == [
        0,
        1,
        2,
        3,
        4,
        5,
    ]
    with pytest.raises(ValueError, match="DatasetDict .*splits train.*split: train"):
        build_loader(datasets.DatasetDict(train=rows), batch_size=2)


def test_text_collator_mistakes() -> None:
    from tokenizers import Tokenizer, models

    words = Tokenizer(models.WordLevel({"[PAD]": 0, "a": 1}, unk_token="[PAD]"))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words)
    with pytest.raises(ValueError, match="padding token: set its pad_token"):
        TextCollator(tokenizer)
    tokenizer.pad_token = "[PAD]"
    with pytest.raises(KeyError, match="label='lable' .*did you mean label"):
        TextCollator(tokenizer, label="lable")([{"text": "a", "label": 0}])
    batch = TextCollator(tokenizer, label="label")(
        [{"text": "a", "label": 1}, {"text": "", "label": 0}]
    )
    assert batch["labels"].tolist() == [1, 0]


def test_text_collator_keeps_the_limit_of_the_tokenizer() -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({"[PAD]": 0, "a": 1}, unk_token="[PAD]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()

    def tokens(limit: int | None, **options: Any) -> int:
        limits = {} if limit is None else {"model_max_length": limit}
        tokenizer = transformers.PreTrainedTokenizerFast(
            tokenizer_object=words, pad_token="[PAD]", **limits
        )
        collate = TextCollator(tokenizer, **options)
        return int(collate([{"text": "a " * 9}, {"text": "a"}])["input_ids"].shape[1])

    assert tokens(4) == 4
    assert tokens(None) == 9
    assert tokens(4, max_length=6) == 6


def test_a_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    from stepwrap.registry import import_path

    monkeypatch.setitem(__import__("sys").modules, "timm", None)
    with pytest.raises(ImportError, match=r"timm .*pip install 'stepwrap\[vision\]'"):
        import_path("timm.create_model")


def write_page(folder: Path) -> dict[str, str]:
    """Write the files of the page and the data; return the environment for commands."""
    pytest.importorskip("datasets", reason="datasets is not installed")
    environment = {**os.environ, "HF_HOME": str(folder / "cache"), "HF_HUB_OFFLINE": "1"}
    for name in ("make_reviews.py", "reviews.yaml", "language.yaml"):
        (code,) = re.findall(rf"```\w+\n(# {re.escape(name)}\n.*?)```", PAGE, flags=re.DOTALL)
        (folder / name).write_text(code)
    run("make_reviews.py", cwd=folder, env=environment)
    return environment


@pytest.mark.slow
@pytest.mark.parametrize("name", ["reviews", "language"])
def test_the_configs_of_the_page_train(name: str, tmp_path: Path) -> None:
    environment = write_page(tmp_path)
    command = ("-m", "stepwrap.runner", "train", f"{name}.yaml", "--nproc", 2)
    text = run(*command, cwd=tmp_path, env=environment)
    losses = [float(loss) for loss in re.findall(r"^val .* loss ([\d.]+)", text, re.MULTILINE)]
    assert len(losses) == 4
    assert losses[-1] < losses[0]
    if name == "reviews":
        assert losses[-1] < 0.2


@pytest.mark.slow
def test_check_reports_a_batch_without_labels(tmp_path: Path) -> None:
    environment = write_page(tmp_path)
    config = "_base_: reviews.yaml\ndata: {train: {collate: {label: null}}}\n"
    (tmp_path / "bad.yaml").write_text(config)
    done = ended("-m", "stepwrap.runner", "check", "bad.yaml", cwd=tmp_path, env=environment)
    assert done.returncode != 0
    assert "data.train: SequenceClassifierOutput has no loss" in done.stdout + done.stderr
