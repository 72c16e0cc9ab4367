"""The examples run by the commands in their first lines."""

import re
import runpy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from warm import run

EXAMPLES = Path(__file__).parents[2] / "examples"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
TRAIN = ("-m", "stepwrap.runner", "train", str(EXAMPLES / "own_train_step.yaml"))


def last_number(out: str, of: str) -> float:
    """Return the number at the end of the only line that contains a text."""
    (line,) = [line for line in out.splitlines() if of in line]
    return float(line.split()[-1])


def check_metric_backends(out: str) -> None:
    """Each back-end has the same result as one process."""
    module = runpy.run_path(str(EXAMPLES / "metric_backends.py"))
    alone = module["accuracy_of_nearest_mean"]("non_dist")
    assert 0.8 < alone < 1.0
    assert out.splitlines() == [
        f"torch: {alone:.4f} on 2 ranks",
        f"torch_cpu: {alone:.4f} on 2 ranks",
        f"counting: {alone:.4f} on 2 ranks, 4 states carried",
    ]


def check_meta_device_fsdp(out: str) -> None:
    lines = [line for line in out.splitlines() if line.startswith("rank ")]
    assert [line.split()[1] for line in lines] == ["0:", "1:"]
    assert all(": 50% of the parameters" in line for line in lines)
    assert all(float(line.split()[-1]) > 0.93 for line in lines)


def check_place_actor_critic(out: str) -> None:
    heading, *devices, crossing = out.splitlines()
    assert heading.split() == ["device", "size", "allowed", "computes", "target", "models"]
    assert crossing.endswith("of the connections cross")
    models = [name.strip(",") for line in devices for name in line.split()[7:] if name != "-"]
    assert len(models) == len(set(models)) == 8
    for name in ("actor", "critic1", "critic2"):
        # A target reads all weights of its model at every step, so both are on one device.
        assert any(f" {name}" in line and f"target_{name}" in line for line in devices)


def check_context_pool(out: str) -> None:
    assert float(re.fullmatch(r"accuracy (0\.\d+|1\.0+)\n", out)[1]) > 0.93


def check_replication_callback(out: str) -> None:
    line = r"accuracy (0\.\d+); (\S+) from the mean of one copy\n"
    accuracy, difference = re.fullmatch(line, out).groups()
    assert float(accuracy) > 0.9
    assert float(difference) < 1e-6


def check_parameter_server(out: str) -> None:
    assert last_number(out, "test accuracy") >= 0.95


def check_model_server(out: str) -> None:
    """Both evaluators load the trainer's versions."""
    for name in ("validator", "tester"):
        matches = re.findall(rf"^{name}: version (\d), accuracy (\S+)$", out, flags=re.MULTILINE)
        versions = [int(version) for version, _ in matches]
        assert versions == sorted(set(versions))
        assert versions[0] >= 1
        assert versions[-1] == 8
        assert float(matches[-1][1]) > 0.9
    line = re.compile(r"(validator|tester): version \d, accuracy \S+")
    assert all(map(line.fullmatch, out.splitlines()))


def check_own_loop(out: str) -> None:
    assert last_number(out, "test accuracy") > 0.9
    assert out.count("epoch 1:") == 1


def check_own_train_step(out: str) -> None:
    """Only the wrapper of the example logs a second loss."""
    assert "loss_second" in out
    assert "test" in out


PROGRAMS: dict[Callable[[str], None], list[str]] = {
    check_metric_backends: ["metric_backends.py"],
    check_meta_device_fsdp: ["meta_device_fsdp.py"],
    check_place_actor_critic: ["place_actor_critic.py", "placement.png"],
    check_context_pool: ["context_pool.py"],
    check_replication_callback: ["replication_callback.py"],
    check_parameter_server: [*TORCHRUN, "4", "parameter_server.py"],
    check_model_server: ["model_server.py"],
    check_own_loop: [*TORCHRUN, "2", "own_loop.py"],
    check_own_train_step: [*TRAIN, "--nproc", "2", "train.max_epochs=3", "--run-dir", "run"],
}


@pytest.mark.slow
@pytest.mark.parametrize("check", PROGRAMS)
def test_an_example_as_a_program(check: Callable[[str], None], tmp_path: Path) -> None:
    words = PROGRAMS[check]
    if "placement.png" in words:
        pytest.importorskip("matplotlib")
    words = [str(EXAMPLES / word) if word.endswith(".py") else word for word in words]
    check(run(*words, cwd=tmp_path))
    assert all(picture.stat().st_size > 10_000 for picture in tmp_path.glob("*.png"))
    assert bool(list(tmp_path.glob("*.png"))) == ("placement.png" in words)


def test_the_loop_in_one_process() -> None:
    assert runpy.run_path(str(EXAMPLES / "own_loop.py"))["main"](epochs=4) > 0.9


def test_the_statistic_of_the_replication_callback_is_of_the_whole_batch() -> None:
    train = runpy.run_path(str(EXAMPLES / "replication_callback.py"))["train"]
    three, _ = train(["cpu"] * 3, steps=5)
    alone, _ = train(["cpu"], steps=5)
    assert three.abs().max() > 0.1
    assert torch.allclose(three, alone, atol=1e-6, rtol=0)
