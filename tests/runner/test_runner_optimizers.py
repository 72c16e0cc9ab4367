"""Options by parameter and several optimizers, from a config's text to a resumed run."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from marks import slow
from ranks import run_ranks
from runner_parts import assert_identical, final_weights, records, write_run

from stepwrap.registry import ConfigError, config_from_dict, load_config
from stepwrap.runner import Runner
from stepwrap.runner.command.cli import main
from stepwrap.runner.failure import BuildError, as_mistakes_in
from stepwrap.runner.parts import build_parts
from stepwrap.runner.sections import read_sections

MODELS = '''
import torch
from torch import nn
from torch.nn.functional import linear

from stepwrap.loops import Hook
from stepwrap.wrappers import BaseModel


class Gan(BaseModel):
    """Two players that step one after the other."""

    def __init__(self):
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(2, 4), nn.LayerNorm(4), nn.Linear(4, 2))
        self.discriminator = nn.Linear(2, 1)

    def forward(self, inputs, labels, mode="tensor"):
        loss = (self.discriminator(inputs)[:, 0] - labels).square().mean()
        return {"loss": loss, "num_samples": len(inputs)}

    def train_step(self, data, optim_wrapper):
        inputs, _ = data
        judge = optim_wrapper["discriminator"]
        with judge.optim_context(self.discriminator):
            with torch.no_grad():
                fake = self.generator(inputs)
            scores = self.discriminator(torch.cat([fake, inputs]))
            caught = scores[: len(fake)].square().mean() + (scores[len(fake) :] - 1).square().mean()
        judge.update_params(caught)
        maker = optim_wrapper["generator"]
        with maker.optim_context(self.generator):
            fixed = [one.detach() for one in self.discriminator.parameters()]
            fooled = (linear(self.generator(inputs), *fixed) - 1).square().mean()
        maker.update_params(fooled)
        return {"caught": caught.detach(), "fooled": fooled.detach()}


class Stop(Hook):
    def __init__(self, step):
        self.step = step

    def on_batch_end(self, state, batch, logs):
        if state.iteration == self.step:
            state.request_stop("for a resume")
'''

GAN = """\
_base_: points.yaml
imports: [points.py, gans.py]
model: {_delete_: true, type: gans.Gan}
wrapper: {type: separate}
optimizer:
  _delete_: true
  generator: {type: AdamW, lr: 0.01, paramwise: {norm_decay_mult: 0.0}}
  discriminator: {type: SGD, lr: 0.05, momentum: 0.9}
optim_wrapper: {accumulative_counts: 1}
schedulers:
  - {type: CosineAnnealingLR, T_max: 9, by: step, optimizer: generator}
  - {type: StepLR, step_size: 2, optimizer: discriminator}
train: {max_epochs: 4, log_every_steps: 3}
metrics: {_delete_: true, loss: {type: MeanLoss}}
hooks: {progress: false, checkpoint: {every_steps: 1, keep_best: null}}
"""


def write_gan(folder: Path, extra: str = "", name: str = "gan") -> Path:
    write_run(folder)
    (folder / "gans.py").write_text(MODELS)
    config = folder / f"{name}.yaml"
    config.write_text(GAN + extra)
    return config


@pytest.fixture
def gan(run: Path) -> Path:
    sys.modules.pop("gans", None)
    write_gan(run)
    return run


def make_runner(folder: Path, run_dir: str, *overrides: str) -> Runner:
    settings = (f"run_dir={folder / run_dir}", *overrides)
    return Runner.from_config(load_config(folder / "gan.yaml", settings))


SINGLE = "wrapper={type: single}"


@pytest.mark.slow
def test_two_optimizers_train_as_by_hand(gan: Path) -> None:
    runner = make_runner(gan, "out", SINGLE)
    from gans import Gan

    hand = Gan()
    hand.load_state_dict(runner.state.model.module.state_dict())
    parts = build_parts(read_sections(load_config(gan / "gan.yaml", [SINGLE])))
    loader = parts.train_loop.dataloader
    norms = [*hand.generator[1].parameters()]
    other_params = [*hand.generator[0].parameters(), *hand.generator[2].parameters()]
    maker = torch.optim.AdamW(
        [{"params": other_params}, {"params": norms, "weight_decay": 0}], lr=0.01
    )
    judge = torch.optim.SGD(hand.discriminator.parameters(), lr=0.05, momentum=0.9)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(maker, 9)
    halving = torch.optim.lr_scheduler.StepLR(judge, 2)
    for epoch in range(4):
        loader.batch_sampler.set_position(epoch)
        for inputs, _ in loader:
            judge.zero_grad()
            fake, real = hand.discriminator(hand.generator(inputs)), hand.discriminator(inputs)
            (fake.square().mean() + (real - 1).square().mean()).backward()
            judge.step()
            maker.zero_grad()
            (hand.discriminator(hand.generator(inputs)) - 1).square().mean().backward()
            maker.step()
            cosine.step()
        halving.step()
    runner.train()
    for name, value in runner.state.model.module.state_dict().items():
        torch.testing.assert_close(value, hand.state_dict()[name], rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.slow
def test_rates_are_logged_by_optimizer_and_group(gan: Path) -> None:
    make_runner(gan, "out", SINGLE).train()
    logged = [record for record in records(gan / "out") if "lr/discriminator" in record]
    assert logged[0]["lr/discriminator"] == pytest.approx(0.05)
    assert logged[-1]["lr/discriminator"] == pytest.approx(0.005)
    assert {"lr/generator", "lr/generator/norm"} <= logged[0].keys()


def _stopped_and_resumed(folder: str, wrapper: str, counts: int) -> bool:
    for module in ("points", "gans"):
        # Warm ranks have imported them in an earlier test.
        sys.modules.pop(module, None)
    settings = (f"wrapper={{type: {wrapper}}}", f"optim_wrapper.accumulative_counts={counts}")
    path = Path(folder)
    make_runner(path, "whole", *settings).train()
    stopped = make_runner(path, "parts", *settings, "hooks.stop={type: gans.Stop, step: 7}")
    stopped.train()
    second = make_runner(path, "parts", *settings)
    second.train(resume=True)
    assert stopped.state.iteration < second.state.iteration
    assert_identical(final_weights(path / "whole"), final_weights(path / "parts"))
    return True


@pytest.mark.parametrize("counts", [*slow(1), 5])
def test_resume_is_exact(gan: Path, counts: int) -> None:
    assert _stopped_and_resumed(str(gan), "single", counts)


@pytest.mark.parametrize("counts", [5, *slow(1)])
def test_resume_is_exact_on_two_ranks(gan: Path, counts: int) -> None:
    assert run_ranks(_stopped_and_resumed, 2, str(gan), "separate", counts) == [True, True]


def complaints(folder: Path, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        read_sections(load_config(folder / "gan.yaml", (SINGLE, *overrides)))
    return [str(problem) for problem in caught.value.problems]


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("optimizer.judge=3", "optimizer.judge: must be a dict with a type, got 3"),
        ("optimizer.judge={lr: 3}", "optimizer.judge: needs a type: a name of OPTIMIZERS"),
        ("optimizer.generator.lrr=3", "optimizer.generator.lrr: AdamW has no such argument; did"),
        ("optimizer.generator.params=disc", "must be a list of name patterns or paths of modules"),
        (
            "optimizer.generator.paramwise.norm_decay=0",
            "optimizer.generator.paramwise.norm_decay: there is no such setting; did you mean no",
        ),
        (
            "optimizer.generator.paramwise={custom_keys: {a.b: {lr_mul: 2}}}",
            "paramwise.custom_keys.a.b.lr_mul: there is no such option of AdamW; did you mean lr_m",
        ),
        (
            "optimizer.generator={type: Sdg, paramwise: {custom_keys: {generator: {nesterov: 1}}}}",
            "optimizer.generator.type: Sdg is not in the stepwrap::OPTIMIZERS registry; did you",
        ),
        ("optim_wrapper={generater: {}}", "optim_wrapper.generater: there is no such optimizer; d"),
        (
            "optim_wrapper={generator: 3}",
            "optim_wrapper.generator: must be a dict with a type, got",
        ),
        (
            "optim_wrapper={generator: {accumulative_count: 2}}",
            "optim_wrapper.generator.accumulative_count: OptimWrapper has no such argument; did",
        ),
        ("optim_wrapper.clip=1", "optim_wrapper.clip: OptimWrapper has no such argument; did you"),
        (
            "schedulers.0.optimizer=null",
            "schedulers.0.optimizer: is missing: a scheduler steps one",
        ),
        (
            "schedulers.0.optimizer=gen",
            "there is no optimizer 'gen'; did you mean generator?; it must be one",
        ),
        ("schedulers.1.T_maxx=gen", "schedulers.1.T_maxx: StepLR has no such argument"),
    ],
)
def test_one_mistake_is_one_problem(gan: Path, override: str, said: str) -> None:
    messages = complaints(gan, override)
    assert len(messages) == 1
    assert said in messages[0]


def test_one_optimizer_is_not_named(gan: Path) -> None:
    messages = complaints(gan, "optimizer={type: SGD, lr: 1}")
    assert len(messages) == 2
    for index, text in enumerate(messages):
        assert f": schedulers.{index}.optimizer: remove this setting" in text
    assert messages[0].startswith("gan.yaml:11: ")


def test_options_of_the_class_that_steps_are_checked(run: Path) -> None:
    zero = "{type: ZeroRedundancyOptimizer, optimizer_class: SGD, lr: 1, paramwise: {custom_keys: "
    with pytest.raises(ConfigError, match="SGD; did you mean momentum"):
        read_sections(load_config("points.yaml", [f"optimizer={zero}{{net: {{momentm: 1}}}}}}}}"]))


def test_a_mistake_below_a_key_with_dots_has_its_line(run: Path) -> None:
    (run / "own.yaml").write_text(
        "_base_: points.yaml\noptimizer:\n  paramwise:\n    custom_keys:\n"
        "      net.0: {lr_mult: 2}\n      net.0.bias:\n        lr_mul: 2\n"
    )
    with pytest.raises(ConfigError, match=r"^own.yaml:7: optimizer.paramwise.custom_keys.net.0.b"):
        read_sections(load_config("own.yaml"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            "paramwise={custom_keys: {net.3: {lr_mult: 2}, nett: {}}}",
            "nett: no parameter matches; did",
        ),
        ("paramwise={bias_decay_mult: -1}", "bias_decay_mult: must be at least 0, got -1"),
    ],
)
def test_mistakes_that_need_the_model_are_reported_when_it_is_built(
    run: Path, settings: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", "points.yaml", f"optimizer.{settings}"]) == 2
    assert message in capsys.readouterr().err


def test_uneven_shares_are_reported_with_the_section(gan: Path) -> None:
    config = load_config("gan.yaml", [SINGLE, "optimizer.generator.params=[generator.0]"])
    with pytest.raises(ConfigError) as caught, as_mistakes_in(config):
        build_parts(read_sections(config))
    text = str(caught.value)
    assert re.match(r"gan\.yaml:5: optimizer: .*ValueError: no optimizer .*generator", text)


def test_several_optimizers_need_a_step_of_the_models_own(gan: Path) -> None:
    model = (
        "{_delete_: true, type: SupervisedModel, net: {type: points.Net}, loss: {type: MSELoss}}"
    )
    config = load_config("gan.yaml", [SINGLE, f"model={model}"])
    with pytest.raises(BuildError, match="SupervisedModel must define train_step"):
        build_parts(read_sections(config))


def test_settings_of_wrappers_by_name(gan: Path) -> None:
    by_name = "optim_wrapper={generator: {accumulative_counts: 2}, discriminator: null}"
    wrapper = make_runner(gan, "out", SINGLE, by_name).state.optim_wrapper
    assert [member._accumulative_counts for member in wrapper.values()] == [2, 1]
    common = "optim_wrapper={type: AmpOptimWrapper, dtype: bfloat16, clip_grad: {max_norm: 1}}"
    wrapper = make_runner(gan, "out", SINGLE, common).state.optim_wrapper
    assert {type(member).__name__ for member in wrapper.values()} == {"AmpOptimWrapper"}
    common = "optim_wrapper={clip_grad: {max_norm: 1}}"
    assert all(
        member.clip
        for member in make_runner(gan, "out", SINGLE, common).state.optim_wrapper.values()
    )


def test_accumulation_counts_reach_every_member(gan: Path) -> None:
    runner = make_runner(gan, "out", SINGLE, "optim_wrapper.accumulative_counts=5")
    state = runner.train()
    # 48 batches are nine windows of five and one of three.
    assert (state.iteration, state.step) == (48, 10)
    assert [member.inner_count for member in state.optim_wrapper.values()] == [48, 48]
    assert [member.max_counts for member in state.optim_wrapper.values()] == [48, 48]


def test_paramwise_of_a_single_optimizer(run: Path) -> None:
    settings = [
        "optimizer.paramwise={bias_lr_mult: 2}",
        "hooks.progress=false",
        f"run_dir={run}/out",
    ]
    runner = Runner.from_config(load_config("points.yaml", settings))
    runner.train()
    rates = {name: value for name, value in records(run / "out")[0].items() if name[:2] == "lr"}
    assert rates == pytest.approx({"lr": 0.01, "lr/bias": 0.02})


def test_a_renamed_key_of_paramwise_has_no_effect_on_a_resumed_run(run: Path) -> None:
    """Rates and moments stay with the parameters that had them."""

    def train(folder: str, key: str, epochs: int, resume: bool = False) -> Runner:
        paramwise = f"optimizer.paramwise={{custom_keys: {{{key}: {{lr_mult: 5}}}}}}"
        overrides = [paramwise, "hooks.progress=false", f"run_dir={run / folder}"]
        config = load_config("points.yaml", [*overrides, f"train.max_epochs={epochs}"])
        runner = Runner.from_config(config)
        runner.train(resume=resume)
        return runner

    uninterrupted = train("whole", "net.0", 4)
    train("parts", "net.0", 2)
    resumed = train("parts", "net.3", 4, resume=True)
    weights = [one.state.model.module.state_dict() for one in (uninterrupted, resumed)]
    assert_identical(*weights)
    rates = [one.state.optim_wrapper.get_lr() for one in (uninterrupted, resumed)]
    assert rates[0] == rates[1]


def test_a_dict_is_a_config_too(gan: Path) -> None:
    plain = load_config("gan.yaml", [SINGLE]).to_dict()
    assert len(build_parts(read_sections(config_from_dict(plain))).optim_wrapper) == 2


def _groups_of_a_resumed_run(folder: str) -> list[list[Any]]:
    sys.modules.pop("points", None)
    path = Path(folder)
    paramwise = "optimizer.paramwise={bias_decay_mult: 0, custom_keys: {net.0: {lr_mult: 2}}}"
    fixed = (paramwise, "hooks.progress=false", "model.net.type=points.Net")

    def run(name: str, wrapper: str, epochs: int, resume: bool) -> Any:
        settings = (f"run_dir={path / name}", f"wrapper={{type: {wrapper}}}")
        config = load_config(
            path / "points.yaml", (*fixed, *settings, f"train.max_epochs={epochs}")
        )
        runner = Runner.from_config(config)
        runner.train(resume=resume)
        return runner

    run("parts", "ddp", 2, False)
    results = []
    for trained in (run("whole", "fsdp", 4, False), run("parts", "fsdp", 4, True)):
        groups = trained.state.optim_wrapper.optimizer.param_groups
        options = [(group["name"], group["lr"], group["weight_decay"]) for group in groups]
        results.append([options, trained.state.metrics])
    return results


@pytest.mark.slow
def test_groups_resume_under_another_wrapper(run: Path) -> None:
    for uninterrupted, resumed in run_ranks(_groups_of_a_resumed_run, 2, str(run)):
        assert uninterrupted[0] == resumed[0]
        assert uninterrupted[1] == pytest.approx(resumed[1], rel=1e-4)


def test_clipping_by_value_given_by_name(gan: Path) -> None:
    clipped = "optim_wrapper={generator: {clip_grad: {type: value, clip_value: 0.1}}}"
    wrappers = make_runner(gan, "out", SINGLE, clipped).state.optim_wrapper
    assert "kind='value'" in repr(wrappers["generator"])
    assert "clip_grad=None" in repr(wrappers["discriminator"])


def test_a_scale_by_name_and_for_all(gan: Path) -> None:
    scale = "loss_scale: {init_scale: 2.0, growth_interval: 7}"
    amp = f"type: AmpOptimWrapper, dtype: float16, {scale}"
    for text in (f"{{{amp}}}", f"{{generator: {{{amp}}}, discriminator: {{{amp}}}}}"):
        wrappers = make_runner(gan, "out", SINGLE, f"optim_wrapper={text}").state.optim_wrapper
        for wrapper in wrappers.values():
            assert wrapper.loss_scaler.get_growth_interval() == 7
