"""The whole check of a run config."""

import re
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from stepwrap.registry import ConfigError, check_config, load_config, name_problems
from stepwrap.registry.checks.other_trainers import SETTINGS_BY_NAME

Write = Callable[[str, str], Path]

MODULE = """\
from torch import nn
from stepwrap.registry import MODELS


@MODELS.register_module()
class Net(nn.Module):
    def __init__(self, width, depth=2):
        super().__init__()


def digits(part):
    return [part]


def stack(samples):
    return samples
"""

GOOD = """\
imports: [nets]
model: {type: SupervisedModel, net: {type: nets.Net, width: 3}, loss: {type: CrossEntropyLoss}}
optimizer: {type: AdamW, lr: 1e-3}
optim_wrapper: {accumulative_counts: 3}
schedulers: {type: CosineAnnealingLR, T_max: 3, by: step}
data:
  train: {dataset: {type: nets.digits, part: train}, batch_size: 4, collate: nets.stack}
  val: {dataset: {type: nets.digits, part: val}, batch_size: 4}
train: {type: EpochTrainLoop, max_epochs: 3}
metrics: {accuracy: {type: MulticlassAccuracy, num_classes: 10}, loss: {type: MeanLoss}}
hooks: {progress: false, checkpoint: {keep_last: 3}, mine: {type: EMAHook, decay: 0.9}}
"""


@pytest.fixture
def good(write: Write) -> str:
    write("nets.py", MODULE)
    write("good.yaml", GOOD)
    return "good.yaml"


def problems(name: str, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        check_config(load_config(name, overrides))
    return str(caught.value).splitlines()


def problem(name: str, *overrides: str) -> str:
    (only,) = problems(name, *overrides)
    return only


def test_a_good_config_gives_typed_sections(good: str) -> None:
    run = check_config(load_config(good))
    assert (run.name, run.run_dir, run.seed, run.device) == ("good", "runs/good", 0, "auto")
    assert run.data.train is not None
    assert (run.data.train.batch_size, run.data.train.num_workers) == (4, 0)
    assert run.optim_wrapper == {"type": "OptimWrapper", "accumulative_counts": 3}
    assert run.schedulers[0].by == "step"
    assert run.schedulers[0].scheduler == {"type": "CosineAnnealingLR", "T_max": 3}
    assert run.val == {"type": "ValLoop"}
    assert run.test is None
    assert run.wrapper is None
    assert run.hooks == {
        "log": {"type": "LogHook"},
        "checkpoint": {"type": "CheckpointHook", "keep_last": 3},
        "throughput": {"type": "ThroughputHook"},
        "nan_guard": {"type": "NanGuardHook"},
        "run_info": {"type": "RunInfoHook"},
        "mine": {"type": "EMAHook", "decay": 0.9},
    }


def test_plain_dicts_are_checked_as_well(good: str) -> None:
    values = load_config(good).to_dict()
    assert check_config(values) == check_config(load_config(good))
    with pytest.raises(ConfigError, match="^modle: .*did you mean model"):
        check_config({**values, "modle": 1})


def test_all_problems_come_at_once_with_their_places(good: str, write: Write) -> None:
    write(
        "bad.yaml",
        "_base_: good.yaml\nseed: zero\nmodle: 3\nwrapper:\n  type: ddp\n"
        "  find_unused: true\noptimizer:\n  lrr: 0.1\nhooks:\n  progres: true\n",
    )
    expected = [
        "bad.yaml:2: seed: must .*whole number, got 'zero'",
        r"bad.yaml:3: modle: .*did you mean model\?",
        "bad.yaml:6: wrapper.find_unused: StepDistributedDataParallel .*no such argument.*"
        r"did you mean find_unused_parameters\?",
        r"bad.yaml:8: optimizer.lrr: AdamW .*no such argument.*did you mean lr\?",
        "bad.yaml:10: hooks.progres: .*type.*progress, log, checkpoint, throughput, "
        "early_stop, ema, swa, grad_norm, nan_guard, spike_guard, grad_guard, profile, "
        "step_blocks, system, time_limit, tensorboard, wandb, mlflow, trackio, ledger, "
        "run_info .*default.*"
        r"did you mean progress\?",
        "override launch.nproc=0: launch.nproc: must .* 1, got 0",
    ]
    for message, pattern in zip(problems("bad.yaml", "launch.nproc=0"), expected, strict=True):
        assert re.fullmatch(pattern, message)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("device=gpu", "must be auto, cpu, cuda, xpu or mps, got 'gpu'; did you mean cuda?"),
        ("seed='3'", "seed: must be a whole number, got '3'; write 3 without quotes"),
        ("optimizer.lr='1e-3'", "got '1e-3' (AdamW); write 1e-3 without quotes"),
        ("optimizer.fused='true'", "got 'true' (AdamW); write true without quotes"),
        ("optimizer.betas=[0.9, '0.99']", "must be numbers, got [0.9, '0.99'] (AdamW); write them"),
        ("optim_wrapper.clip_grad=0.5", "got 0.5; write {max_norm: 0.5}"),
        ("model.loss=CrossEntropyLoss", "(SupervisedModel); write {type: CrossEntropyLoss}"),
        ("model.net=Net", "model.net: must be a section with a type, got 'Net' (SupervisedModel)"),
        ("hooks=[ema, {type: LogHook}]", "write {ema: true, log: true}"),
        ("hooks=[{type: a.Hook, x: 1}]", "write {hook: {type: a.Hook, x: 1}}"),
        ("metrics=[{type: MeanLoss}]", "write {meanloss: {type: MeanLoss}}"),
        ("hooks.checkpoint.keep_best=f1", "no metric 'f1'; the run's metrics are: accuracy, loss"),
        ("seed=true", "seed: must be a whole number, got true"),
        ("deterministic=1", "deterministic: must be true or false, got 1"),
        ("launch.timeout_s=soon", "launch.timeout_s: must be a number, got 'soon'"),
        ("launch=3", "launch: must be a section of settings, got 3"),
        ("imports=nets", "imports: must be a list of text, got 'nets'"),
        ("imports.0=netts", "imports.0: the module netts was not found in"),
        ("imports.0=lost.py", "imports.0: the file "),
        ("resume=3", "resume: must be true or false or text, got 3"),
        ("optimizer=AdamW", "must be a section of settings, got 'AdamW'; write {type: AdamW}"),
        ("optimizer={lr: 1}", "optimizer: needs a type: a name of OPTIMIZERS or an import path"),
        ("optimizer.tyype=AdamW", "has no such argument; did you mean type?"),
        ("optimizer.params=[]", "optimizer.params: is supplied by the run"),
        ("optimizer=null", "optimizer: this setting is missing: train needs an optimizer"),
        ("model=null", "model: this setting is required and missing"),
        ("model.net.type=Nett", "model.net.type: Nett is not in the stepwrap::MODELS registry"),
        ("model.net={type: nets.Net}", "model.net.width: is missing, Net needs it"),
        ("schedulers.by=steps", "schedulers.by: must be batch, step or epoch, got 'steps'"),
        ("schedulers.until=0", "schedulers.until: must be at least 1, got 0"),
        (
            "schedulers={type: StepLR, step_size: 1, after: 3, until: 3}",
            "must be greater than after",
        ),
        ("schedulers.T_maxx=1", "schedulers.T_maxx: CosineAnnealingLR has no such argument"),
        ("schedulers=[3]", "schedulers.0: must be a dict with a type, got 3"),
        ("data.train.batch_size=0", "data.train.batch_size: must be at least 1, got 0"),
        ("data.train.pin_memory=x", "must be true or false or auto, got 'x'"),
        ("data.train.in_memory=cuda", "must be true or false, auto or device, got 'cuda'"),
        ("data.val.batchsize=1", "data.val.batchsize: there is no such setting; did you mean b"),
        ("data.trian={}", "data.trian: there is no such setting; did you mean train?"),
        ("data.train=null", "data.train: this setting is missing: train needs data"),
        ("data.val.dataset=null", "data.val.dataset: must be a section of settings, got null"),
        ("data.train.collate=nets.stak", "nets has no stak; did you mean stack?"),
        ("data.train.dataset.type=mmdet.Coco", "package mmdet is not installed"),
        ("test={}", "data.test: this setting is missing: test needs data"),
        ("train.val_loop=1", "train.val_loop: is supplied by the run"),
        (
            "train.epochs=1",
            "train.epochs: EpochTrainLoop has no such argument; did you mean train.max",
        ),
        ("metrics=accuracy", "metrics: must be metrics by name, got 'accuracy'"),
        ("metrics.x=1", "metrics.x: must be a dict with a type, got 1"),
        (
            "metrics.x.type=Acuracy",
            "metrics.x.type: Acuracy is not in the stepwrap::METRICS registry",
        ),
        ("hooks=3", "hooks: must be hooks by name, or false for none, got 3"),
        ("hooks.log=3", "hooks.log: must be true, false or the hook's settings, got 3"),
        (
            "hooks.checkpoint.keep_best=[accuracy, loss]",
            "keep_best: must be the name of one metric, got ['accuracy', 'loss']; choose one",
        ),
        ("hooks.early_stop={metric: 3, patience: 1}", "hooks.early_stop.metric: must be the name"),
        ("schedulers={type: ReduceLROnPlateau, metric: [loss]}", "schedulers.metric: must be text"),
        ("hooks.checkpoint.keep_lst=1", "hooks.checkpoint.keep_lst: CheckpointHook has no such"),
    ],
)
def test_one_wrong_setting_is_one_problem(good: str, override: str, said: str) -> None:
    assert said in problem(good, override).replace(f"override {override}: ", "", 1)


@pytest.mark.parametrize(
    ("override", "ours"),
    [
        ("precision=bf16", "write optim_wrapper: {type: AmpOptimWrapper, dtype: bfloat16}"),
        ("train.gradient_checkpointing=true", "did you mean activation_checkpointing?"),
        ("train.max_time=00:12:00:00", "write hooks: {time_limit: {max_seconds: 3600}}"),
        ("model.lr=1", "did you mean optimizer.lr?"),
        ("train.seed=1", "did you mean seed at the top level?"),
        ("accumulate_grad_batches=2", "did you mean optim_wrapper.accumulative_counts?"),
        ("train.gradient_accumulation_steps=2", "did you mean optim_wrapper.accumulative_counts?"),
        ("optimizer.max_grad_norm=1", "write optim_wrapper: {clip_grad: {max_norm: 1.0}}"),
        ("mixed_precision=fp16", "write optim_wrapper: {type: AmpOptimWrapper, dtype: bfloat16}"),
        ("train_dataloader={}", "did you mean data.train?"),
        ("param_scheduler=[]", "did you mean schedulers?"),
        ("hooks.checkpoint.monitor=loss", "did you mean hooks.checkpoint.keep_best?"),
        ("data.val.per_device_eval_batch_size=1", "did you mean data.val.batch_size?"),
        ("launch.gpus=2", "did you mean launch.nproc?"),
        ("lr=1", "did you mean optimizer.lr?"),
    ],
)
def test_settings_of_other_trainers_name_ours(good: str, override: str, ours: str) -> None:
    assert problem(good, override).endswith(f"; {ours}")


def test_each_proposed_setting_exists(good: str) -> None:
    for ours in SETTINGS_BY_NAME.values():
        section, is_form, value = ours.partition(": ")
        if is_form:
            check_config(load_config(good, [f"{section}={value}"]))
        elif not ours.startswith("stepwrap "):
            for path in re.split(", | or ", ours):
                with suppress(ConfigError):
                    check_config(load_config(good, [f"{path}=[[1]]"]))
                    continue
                assert "no such" not in str(problems(good, f"{path}=[[1]]")), path


LONG = "x" * 5000
NAMED = [
    *("seed", "device", "imports.0", "name", "model.net.type", "model.net.depth._ref_", "wrapper"),
    *("wrapper.type", "optimizer.type", "optimizer.paramwise", "schedulers.by"),
    *("schedulers.metric", "train_step", "data.train.collate", "data.train.dataset.type"),
    *("metrics.x", "metrics.accuracy.type", "hooks.log", "hooks.checkpoint.keep_best"),
    "optim_wrapper.type",
]


@pytest.mark.parametrize("key", NAMED)
@pytest.mark.parametrize("value", [LONG, f"os.{LONG}", f"{LONG}.x", f"/{LONG}.x", f"${{{LONG}}}"])
def test_of_a_long_value_only_the_beginning_is_repeated(good: str, key: str, value: str) -> None:
    value = f"[{value}]" if key == "name" and "$" not in value else value
    override = f"override {key}={value}"
    origin, message = problem(good, f"{key}={value}").split(f": {key}: ")
    assert origin == f"{override[:297]}..."
    repeated = [len(run) for run in re.findall("x{8,}", message)]
    assert repeated
    assert max(repeated) <= 80


@pytest.mark.parametrize(
    "section",
    [
        *("", "hooks.", "model.", "model.net.", "optimizer.", "optim_wrapper.", "schedulers."),
        *("data.", "data.train.", "metrics.", "launch.", "train.", "imports."),
        *("optimizer.paramwise.", "optimizer.paramwise.custom_keys."),
    ],
)
def test_of_a_long_key_only_the_beginning_is_repeated(good: str, section: str) -> None:
    override = f"override {section}{LONG}=1"
    key = f"{section}{LONG}"[:297]
    origin, message = problem(good, f"{section}{LONG}=1").split(f": {key}...: ")
    assert origin == f"{override[:297]}..."
    assert "x" * 81 not in message


MISSPELT = {
    "optimizer: {": "optimzer: {",
    "data:": "dat:",
    "  train: {dataset": "  trian: {dataset",
    "train: {type": "trian: {type",
    "{dataset: {type: nets.digits, part: train}": "{datset: {type: nets.digits, part: train}",
    "batch_size: 4, collate": "batchsize: 4, collate",
    "max_epochs": "max_epoch",
    "width: 3": "widht: 3",
    "{type: CosineAnnealingLR, T_max: 3": "{type: ReduceLROnPlateau, metrc: loss",
    "model: {": "modle: {",
}


@pytest.mark.parametrize("correct", MISSPELT)
def test_a_misspelt_key_is_not_reported_as_missing_too(write: Write, correct: str) -> None:
    write("nets.py", MODULE)
    text = GOOD.replace("train: {type", "val: {type: ValLoop}\ntrain: {type")
    wrong = MISSPELT[correct]
    write("a.yaml", text.replace(correct, wrong, 1))
    (only,) = problems("a.yaml")
    assert "no such" in only
    assert "did you mean" in only


def test_a_setting_that_is_missing_points_to_its_section(good: str) -> None:
    text = problem(good, "train={type: EpochTrainLoop}")
    assert re.search(r"train\.max_epochs: .*missing, .*EpochTrainLoop", text)


def test_nothing_to_run_is_a_problem(write: Write) -> None:
    write("a.yaml", "model: {type: Identity}\n")
    assert re.match(r"a\.yaml:1: nothing to run: .*train.*val.*test$", problem("a.yaml"))


def test_settings_left_by_a_base_are_explained(good: str, write: Write) -> None:
    write("child.yaml", "_base_: good.yaml\nschedulers:\n  type: StepLR\n  step_size: 1\n")
    remedy = r"inherited, `_delete_: true` .*\(child\.yaml:3\)"
    assert re.search(remedy, problem("child.yaml"))
    remedy = "no such argument; .*inherited, 'schedulers={type: ConstantLR}' replaces"
    assert re.search(remedy, problem(good, "schedulers.type=ConstantLR"))


TYPED = """\
model:
  type: SupervisedModel
  net: {type: Identity}
  loss: {type: CrossEntropyLoss}
optimizer: {type: AdamW}
optim_wrapper: {type: AmpOptimWrapper, accumulative_counts: 2}
schedulers: [{type: StepLR, step_size: 1}]
data:
  train: {dataset: {type: nets.digits, part: train}, batch_size: 4}
  val: {type: nets.loader}
train: {type: EpochTrainLoop, max_epochs: 3}
val: {type: ValLoop}
metrics: {loss: {type: MeanLoss}}
hooks: {mine: {type: EMAHook}, log: {type: LogHook}}
train_step: {type: nets.step}
"""


LOADER_AND_STEP = """

def loader():
    return []


def step(wrapper, data, optim_wrapper):
    return {}
"""


def test_the_config_with_all_types_is_right(write: Write) -> None:
    write("nets.py", MODULE + LOADER_AND_STEP)
    write("a.yaml", TYPED)
    check_config(load_config("a.yaml"))


@pytest.mark.parametrize("at", range(TYPED.count("type: ")))
@pytest.mark.parametrize("wrong", ["typezq", "Type", "tpye"])
def test_a_misspelt_type_is_named_at_its_line(write: Write, at: int, wrong: str) -> None:
    segments = TYPED.split("type: ")
    text = f"{'type: '.join(segments[: at + 1])}{wrong}: {'type: '.join(segments[at + 1 :])}"
    write("nets.py", MODULE + LOADER_AND_STEP)
    write("a.yaml", text)
    line = text[: text.index(f"{wrong}:")].count("\n") + 1
    messages = problems("a.yaml")
    assert any(re.search(rf"\.{wrong}: .*did you mean type\?", message) for message in messages)
    assert all(message.startswith(f"a.yaml:{line}: ") for message in messages)


def test_a_key_similar_to_type_does_not_count_as_type(write: Write) -> None:
    write("a.yaml", "model: {dtype: float32}\n")
    assert any("model: needs a type" in message for message in problems("a.yaml"))


def test_mistakes_that_need_no_class_are_found_without_the_classes(good: str, write: Write) -> None:
    wrong = ["optimizer.lrr=1", "seed=x", "model.net.type=Nett", "imports=[nets, netts]"]
    found_problems = name_problems(load_config(good, [*wrong, "hooks.checkpoint.keep_best=lost"]))
    assert [problem.key for problem in found_problems] == [
        "imports.1",
        "hooks.checkpoint.keep_best",
        "seed",
    ]
    assert "nets" not in sys.modules


def test_a_failing_module_is_reported_first_with_the_users_line(good: str, write: Write) -> None:
    write("own_hooks.py", "import own_parts\n")
    write("own_parts.py", "def make():\n    return 1 / 0\n\n\nmake()\n")
    failed = "ZeroDivisionError: division by zero (own_parts.py:2)"
    with pytest.raises(ConfigError) as caught:
        check_config(load_config(good, ["hooks.mine.type=own_hooks.Mine"]))
    pattern = (
        rf"hooks\.mine\.type: own_hooks .*imported: {re.escape(failed)}; "
        r"own_hooks\.Mine .*not in .*stepwrap::HOOKS"
    )
    assert re.search(pattern, str(caught.value))
    text = "".join(traceback.format_exception(caught.value))
    assert 'own_parts.py", line 2, in make' in text
    wrong = ["hooks.mine.type=Mine", "imports=[nets, own_hooks]"]
    message, second = problems(good, *wrong)
    assert message.endswith(f"imports.1: own_hooks failed to import: {failed}")
    assert re.search(r"hooks\.mine\.type: Mine .*not in .*stepwrap::HOOKS", second)


def test_a_syntax_error_in_a_module_is_reported_with_its_line(good: str, write: Write) -> None:
    write("nets.py", "x = 1\ndef f(:\n")
    actual = problems(good)[0]
    message = (
        "good.yaml:1: imports.0: nets failed to import: SyntaxError: invalid syntax (nets.py:2)"
    )
    assert actual == message


def test_a_class_that_was_not_imported_is_located(good: str) -> None:
    text = problem(good, "imports=[]", "model.net.type=Net")
    assert re.search(r"Net .*nets\.py:6 .*imported: add nets", text)


def test_a_file_and_its_package_can_be_imported(good: str, write: Write) -> None:
    write("conf/own/__init__.py", "")
    write("conf/own/net.py", MODULE.replace("class Net", "class Own"))
    write("conf/a.yaml", "_base_: ../good.yaml\nimports: [own/net.py, nets]\n")
    run = check_config(load_config("conf/a.yaml", ["model.net.type=own.net.Own"]))
    assert run.model["net"]["type"] == "own.net.Own"


def test_two_files_of_one_name_are_distinguished(good: str, write: Write) -> None:
    write("conf/nets.py", MODULE)
    check_config(load_config(good))
    text = problem(good, "imports.0=conf/nets.py")
    assert re.search(r"nets\.py .*imported as nets, ", text)
