"""Loaders, schedulers and metrics from a config's text to the built parts."""

import inspect
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from ranks import run_ranks
from runner_parts import assert_identical

from stepwrap.loops.data.tensors import TensorLoader
from stepwrap.registry import ConfigError, load_config
from stepwrap.registry.catalog import REGISTRIES
from stepwrap.runner import Runner
from stepwrap.runner.command.cli import main
from stepwrap.runner.parts import Parts, build_parts, rehearse
from stepwrap.runner.sections import read_sections

LOADERS = """
from torch.utils.data import DataLoader
from stepwrap.registry import DATALOADERS


def stated(dataset, batch_size):
    return DataLoader(dataset, batch_size=batch_size)


@DATALOADERS.register_module()
def reversed_loader(dataset, batch_size):
    return DataLoader(dataset, batch_size=batch_size, sampler=range(len(dataset) - 1, -1, -1))
"""


def write(folder: Path, extra: str = "") -> Path:
    (folder / "loaders.py").write_text(LOADERS)
    config = folder / "run.yaml"
    config.write_text(f"_base_: points.yaml\nrun_dir: {folder / 'run'}\n{extra}\n")
    return config


def complaint(folder: Path, extra: str) -> str:
    with pytest.raises(ConfigError) as caught:
        Runner.from_config(write(folder, extra))
    return str(caught.value)


def test_parts_are_the_arguments_of_a_runner() -> None:
    arguments = inspect.signature(Runner).parameters.keys() - {"train_step"}
    assert arguments == {field.name for field in fields(Parts)}


def test_hook_watching_an_unknown_metric_is_reported_before_the_run(run: Path) -> None:
    text = complaint(run, "hooks: {checkpoint: {keep_best: acuracy}}")
    assert re.search(r"run\.yaml:3: hooks\.checkpoint\.keep_best: .*no metric 'acuracy'", text)
    assert "did you mean accuracy?" in text


QUALITY = """
from torchmetrics import MeanMetric

class Quality(MeanMetric):
    def update(self, preds, target):
        super().update(preds.argmax(1) == target)
"""


@pytest.mark.parametrize(
    ("hook", "key"),
    [("checkpoint: {keep_best: quality}", "checkpoint.keep_best"),
     ("stop: {type: EarlyStopHook, metric: quality, patience: 2}", "stop.metric")],
)  # fmt: skip
def test_a_metric_of_unknown_direction_is_reported_with_its_line(
    hook: str, key: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "quality.py").write_text(QUALITY)
    extra = f"metrics: {{quality: {{type: quality.Quality}}}}\nhooks: {{{hook}, progress: false}}"
    config = str(write(run, extra))
    for words in (["check", config], ["train", config]):
        assert main(words) == 2
        error = capsys.readouterr().err
        assert f"run.yaml:4: hooks.{key}: " in error
        assert "mode must be given" in error
    assert not (run / "run").exists()
    assert main(["check", config, f"hooks.{key.partition('.')[0]}.mode=max"]) == 0


def test_plateau_needs_a_metric(run: Path) -> None:
    plateau = "schedulers: {_delete_: true, type: ReduceLROnPlateau"
    assert "ReduceLROnPlateau watches a metric" in complaint(run, plateau + "}")
    assert "no metric 'los'" in complaint(run, plateau + ", metric: los}")


def test_plateau_lowers_the_rate(run: Path) -> None:
    extra = (
        "schedulers: {_delete_: true, type: ReduceLROnPlateau, metric: accuracy, mode: min, "
        "patience: 0, factor: 0.5, threshold: 1.0}\nhooks: {progress: false}"
    )
    runner = Runner.from_config(write(run, extra))
    runner.train()
    optimizer = runner.state.optim_wrapper.optimizer
    # No accuracy reaches the threshold below zero, so each of four validations halves the rate.
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01 * 0.5**4)


def test_loader_of_the_users_own(run: Path) -> None:
    extra = (
        "imports: [points.py, loaders]\n"
        "data: {test: {_delete_: true, type: reversed_loader, batch_size: 5, "
        "dataset: {type: points.Points, size: 21}}}\nhooks: {progress: false}"
    )
    runner = Runner.from_config(write(run, extra))
    forwarded: list[torch.Tensor] = []
    runner.state.model.module.net.register_forward_pre_hook(
        lambda _, args: forwarded.append(args[0])
    )
    runner.test()
    points = torch.cat(forwarded)
    from points import Points

    assert torch.equal(points, Points(21).inputs.flip(0))


def test_own_loader_is_checked_by_name(run: Path) -> None:
    extra = "data: {test: {_delete_: true, type: torch.utils.data.DataLoader, batchsize: 5}}"
    text = complaint(run, extra)
    assert re.search(r"data\.test\.batchsize: DataLoader .*no such argument", text)
    assert "did you mean batch_size or" in text
    assert "data.test.dataset: is missing" in text


def test_loader_seed_changes_the_order_alone(run: Path) -> None:
    orders = []
    for seed in (None, 3, 4):
        extra = "hooks: {progress: false}"
        extra += "" if seed is None else f"\ndata: {{train: {{seed: {seed}}}}}"
        loader = build_parts(read_sections(write(run, extra))).train_loop.dataloader
        orders.append(torch.cat([labels for _, labels in loader]))
    assert torch.equal(orders[0], orders[1])
    assert not torch.equal(orders[0], orders[2])


ROWS = """
from points import Points


class Rows(Points):
    @property
    def tensors(self):
        return self.inputs, self.labels


class Noisy(Rows):
    def __getitem__(self, index):
        point, label = super().__getitem__(index)
        return point + 1e-6, label
"""


def rows(kind: str, in_memory: str) -> str:
    train = f"dataset: {{type: rows.{kind}}}, in_memory: {in_memory}"
    return f"data: {{train: {{{train}}}}}\nhooks: {{progress: false}}"


@pytest.mark.parametrize("in_memory", ["true", "device", "false"])
def test_batches_are_selected_from_the_tensors_of_a_data_set(in_memory: str, run: Path) -> None:
    (run / "rows.py").write_text(ROWS)
    loader = build_parts(read_sections(write(run, rows("Rows", in_memory)))).train_loop.dataloader
    assert isinstance(loader, TensorLoader) == (in_memory != "false")
    plain = build_parts(read_sections(write(run))).train_loop.dataloader
    for batch, other in zip(loader, plain, strict=True):
        assert all(map(torch.equal, batch, other))


@pytest.mark.parametrize("kind", ["EpochTrainLoop, max_epochs: 1", "IterTrainLoop, max_steps: 12"])
def test_a_run_that_prefetches_ends_with_the_same_weights(kind: str, run: Path) -> None:
    weights = []
    for prefetch in ("true", "false"):
        loop = f"{{_delete_: true, type: {kind}, prefetch_to_device: {prefetch}}}"
        extra = f"train: {loop}\nhooks: {{progress: false, checkpoint: false}}"
        runner = Runner.from_config(write(run, extra))
        assert runner.train().step == 12
        weights.append(runner.state.model.state_dict())
    assert_identical(*weights)


def test_samples_that_are_not_rows_are_reported(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "rows.py").write_text(ROWS)
    write(run, rows("Noisy", "true"))
    assert main(["check", "run.yaml"]) == 2
    err = capsys.readouterr().err
    assert re.search(r"data\.train: .*ValueError: in_memory needs samples", err)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ("optimizer: {lr: -1}", "run.yaml:3: optimizer: cannot be built: ValueError: Invalid"),
        ("metrics: {accuracy: {avrage: micro}}", "run.yaml:3: metrics.accuracy.avrage: cannot be"),
        ("hooks: {checkpoint: {keep_last: 0}}", "run.yaml:3: hooks.checkpoint.keep_last: cannot"),
    ],
)
def test_parts_that_cannot_be_built_are_reported_with_their_lines(
    extra: str, message: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(run, extra)
    assert main(["check", "run.yaml"]) == 2
    assert message in capsys.readouterr().err


SCOPED = """
from torch import nn, optim
from torchmetrics.classification import MulticlassAccuracy
from stepwrap import loops, wrappers
import stepwrap.wrappers.ddp.comm_hooks
from stepwrap.registry import Registry
from stepwrap.registry.catalog import REGISTRIES
import points

CLASSES = {
    "MODELS": (wrappers.SupervisedModel, points.Net, nn.CrossEntropyLoss),
    "MODEL_WRAPPERS": (wrappers.SingleDevice,),
    "OPTIMIZERS": (optim.AdamW,),
    "OPTIM_WRAPPERS": (wrappers.AmpOptimWrapper,),
    "PARAM_SCHEDULERS": (optim.lr_scheduler.CosineAnnealingLR,),
    "DATASETS": (points.Points,),
    "DATALOADERS": (),
    "LOOPS": (loops.EpochTrainLoop, loops.ValLoop, loops.TestLoop),
    "METRICS": (MulticlassAccuracy,),
    "HOOKS": (loops.EMAHook,),
}
for kind, classes in CLASSES.items():
    registry = REGISTRIES[kind]
    mine = Registry(kind, parent=registry, scope="mine")
    for base in classes:
        name = "My" + base.__name__
        mine.register_module(name=name, module=type(name, (base,), {}))


@Registry("COMM_HOOKS", parent=REGISTRIES["COMM_HOOKS"], scope="hooks").register_module()
class MyHook(wrappers.ddp.comm_hooks.AllReduce): pass


@REGISTRIES["DATALOADERS"].children["mine"].register_module()
def MyLoader(dataset, batch_size):
    return loops.build_loader(dataset, batch_size=batch_size, train=True)
"""
IN_SCOPE = """\
imports: [points.py, scoped.py]
device: cpu
model:
  type: MySupervisedModel
  _scope_: mine
  net: {type: MyNet, _scope_: mine}
  loss: {type: MyCrossEntropyLoss, _scope_: mine}
wrapper: {type: MySingleDevice, _scope_: mine}
optimizer:
  type: MyAdamW
  _scope_: mine
  lr: 0.01
  paramwise: {custom_keys: {net: {betas: [0.8, 0.9]}}}
optim_wrapper: {type: MyAmpOptimWrapper, _scope_: mine, dtype: bfloat16}
schedulers: {type: MyCosineAnnealingLR, _scope_: mine, T_max: 4}
data:
  train:
    type: MyLoader
    _scope_: mine
    dataset: {type: MyPoints, _scope_: mine}
    batch_size: 4
  val: {dataset: {type: MyPoints, _scope_: mine, size: 20}, batch_size: 8}
train: {type: MyEpochTrainLoop, _scope_: mine, max_epochs: 1}
val: {type: MyValLoop, _scope_: mine}
metrics: {accuracy: {type: MyMulticlassAccuracy, _scope_: mine, num_classes: 2}}
hooks: {progress: false, mine: {type: MyEMAHook, _scope_: mine}}
"""
SCOPES = (
    "model", "model.net", "wrapper", "optimizer", "optim_wrapper", "schedulers", "data.train",
    "data.train.dataset", "train", "val", "metrics.accuracy", "hooks.mine",
)  # fmt: skip


@pytest.fixture
def scoped(run: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (run / "scoped.py").write_text(SCOPED)
    (run / "scoped.yaml").write_text(IN_SCOPE)
    for module in ("points", "scoped"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    yield run / "scoped.yaml"
    for registry in REGISTRIES.values():
        registry.children.pop("mine", None)
        registry.children.pop("hooks", None)


def test_each_section_may_name_a_scope(scoped: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["check"], ["train", "--dry-run"], ["train"], ["validate"]):
        assert main([words[0], str(scoped), *words[1:]]) == 0, capsys.readouterr().err
    runner = Runner.from_config(load_config(scoped, [f"run_dir={scoped.parent / 'other'}"]))
    state = runner.state
    names = [type(member).__name__ for member in (state.model, state.optim_wrapper)]
    assert names == ["MySingleDevice", "MyAmpOptimWrapper"]
    assert type(state.optim_wrapper.optimizer).__name__ == "MyAdamW"


def test_a_nested_scope_may_be_of_another_kind(scoped: Path) -> None:
    """No model wrapper has the scope of the communication hook."""
    hook = "comm_hook={type: MyHook, _scope_: hooks}"
    config = load_config(scoped, ["wrapper={type: ddp}", f"wrapper.{hook}", "launch.nproc=2"])
    assert rehearse(read_sections(config)).model._hook.__class__.__name__ == "MyHook"


def test_an_unknown_scope_is_a_config_error(scoped: Path) -> None:
    for section in SCOPES:
        with pytest.raises(ConfigError) as caught:
            read_sections(load_config(scoped, [f"{section}._scope_=nowhere"]))
        assert len(caught.value.problems) == 1, (section, caught.value)
        (problem,) = caught.value.problems
        assert problem.key == f"{section}._scope_"
        assert "nowhere" in problem.what
        assert "mine" in problem.what


def test_the_batch_sampler_of_a_section_names_what_works(run: Path) -> None:
    """Also next to the sets of a validation, and other arguments of torch's loader."""
    sampler = "{type: torch.utils.data.BatchSampler, batch_size: 1}"
    for name in ("train", "val"):
        text = complaint(run, f"data: {{{name}: {{batch_sampler: {sampler}}}}}")
        assert re.search(rf"run\.yaml:3: data\.{name}\.batch_sampler: .*no such setting", text)
        assert "set batch_size, shuffle and seed" in text
        assert "{type: my_module.make_loader}" in text
        assert "several by name" not in text
    text = complaint(run, "data: {train: {generator: 3}}")
    assert re.search("generator: .*no such .*set seed", text)


def test_workers_that_end_with_the_pass_are_a_setting(run: Path) -> None:
    extra = "data: {train: {num_workers: 1, persistent_workers: false}}"
    loop = Runner.from_config(write(run, extra))._train_loop
    assert not loop.dataloader.persistent_workers  # type: ignore[union-attr]
    # Without workers it has no effect.
    Runner.from_config(write(run, "data: {train: {persistent_workers: true}}"))


OWN_DATA = "_delete_: true, type: loaders.stated, batch_size: 5, dataset: {type: points.Points}"


def _train_with_own_loader(folder: Path, config: Path) -> tuple[int, float]:
    sys.path.insert(0, str(folder))
    os.chdir(folder)
    for name in ("points", "loaders"):
        sys.modules.pop(name, None)
    runner = Runner.from_config(config)
    runner.train()
    sys.path.remove(str(folder))
    loss = runner._val_loop.metrics["n"]  # type: ignore[union-attr]
    return runner.state.step, float(loss.samples)


@pytest.mark.parametrize(
    ("per_rank", "steps", "samples"), [("", 5, 48), (", per_rank: true", 10, 96)]
)
def test_an_own_loader_is_divided_unless_it_says_per_rank(
    run: Path, per_rank: str, steps: int, samples: int
) -> None:
    """Of 48 samples in ten batches, both in training and in validation."""
    extra = f"imports: [points.py, loaders]\ndata: {{train: {{{OWN_DATA}{per_rank}}}, val: {{"
    extra += f"{OWN_DATA}{per_rank}}}}}\nmetrics: {{_delete_: true, n: {{type: MeanLoss}}}}\n"
    extra += "hooks: {_delete_: true, progress: false, checkpoint: false}\ntrain: {max_epochs: 1}"
    # Written before the ranks start, so that none reads a file that another one writes.
    config = write(run, extra)
    for done, evaluated in run_ranks(_train_with_own_loader, 2, run, config):
        assert (done, evaluated) == (steps, samples)


def test_per_rank_must_be_true_or_false(run: Path) -> None:
    text = complaint(run, f"data: {{train: {{{OWN_DATA}, per_rank: 2}}}}")
    assert re.search(r"data\.train\.per_rank: .*true or false, got 2", text)
