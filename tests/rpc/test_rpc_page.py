"""The page on RPC: its code runs, and its names exist."""

import inspect
import re
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import nn
from warm import run_script

import stepwrap.rpc
from stepwrap.rpc import PushPullGradServerImpl, RpcError, RpcGroup, World, get_world

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/rpc.md").read_text()


def codes(title: str) -> list[str]:
    section = PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]
    return re.findall(r"```python\n(.*?)```", section, flags=re.DOTALL)


@pytest.mark.slow
def test_the_first_world(tmp_path: Path) -> None:
    assert run_script(codes("A world")[0], tmp_path) == "42\n"


def _world_by_address(code: str, address: str) -> tuple[list[str], int]:
    rank = dist.get_rank()
    dist.barrier()
    dist.destroy_process_group()
    code = re.sub(r"tcp://[\d.:]+", address, code)
    exec(code if rank == 0 else f"World('actor{rank}', {rank}, 3, dist_init_method='{address}')")
    world = get_world()
    assert world is not None
    world.stop()
    return world.get_members(), world.rank


def test_a_world_by_its_address(tmp_path: Path) -> None:
    code = codes("A world")[1]
    results = run_ranks(_world_by_address, 3, code, f"file://{tmp_path}/store")
    assert results == [(["actor1", "actor2", "learner"], rank) for rank in range(3)]


@pytest.mark.slow
def test_processes_that_outlive_each_other(tmp_path: Path) -> None:
    (code,) = codes("Errors")
    printed = run_script(
        code.replace("tcp://127.0.0.1:29400", f"file://{tmp_path}/store"), tmp_path
    )
    names = [f"worker{rank}" for rank in range(3)]
    assert all(f"{name} is one of {names}" in printed for name in names)


class Policy:
    """The service of the page's group."""

    def act(self, observation: torch.Tensor) -> torch.Tensor:
        return observation + 1


def function(tensor: torch.Tensor | None = None) -> str:
    return stepwrap.rpc.get_cur_name()


NAMES = ["learner", "actor0", "actor1"]


def _groups(code: str) -> dict[str, Any]:
    with World(NAMES[dist.get_rank()]) as world:
        names: dict[str, Any] = {"world": world, "policy": Policy(), "function": function}
        names |= {"tensor": torch.ones(2), "observation": torch.zeros(2)}
        if world.name == "learner":
            exec(code, names)
        else:
            group = world.create_rpc_group("players", NAMES)
            group.barrier()
            group.destroy()
        dist.barrier()
        return {"groups": list(world.groups), "names": sorted(names)}


def test_the_calls_of_a_group() -> None:
    for result in run_ranks(_groups, 3, codes("Groups")[0]):
        assert result["groups"] == []


def split_lines(code: str, names: dict[str, Any]) -> list[str]:
    """Run code line by line; return the `repr` of each expression."""
    values = []
    for line in code.splitlines():
        statement = line.partition("#")[0].strip()
        try:
            values.append(repr(eval(statement, names)))
        except SyntaxError:
            exec(statement, names)
    return values


def _servers(code: str, names: dict[str, Any]) -> list[str]:
    with World(NAMES[dist.get_rank()]) as world:
        group = world.create_rpc_group("all", NAMES)
        values = []
        if world.name == "learner":
            values = split_lines(code, {"group": group, **names})
        group.barrier()
        return values


def test_the_ordered_server() -> None:
    values = run_ranks(_servers, 3, codes("An ordered server")[0], {"value": 1, "other": 2})[0]
    assert values[-4:] == ["True", "False", "(1, 1)", "None"]


def test_the_model_server() -> None:
    values = run_ranks(_servers, 3, codes("A model server")[0], {"model": nn.Linear(2, 2)})[0]
    assert values[-2:] == ["True", "True"]


def _gradient_server(code: str) -> float:
    members = ["primary", "reducer0", "reducer1", "client"]
    with World(members[dist.get_rank()]) as world:
        group = world.create_rpc_group("all", members)
        on_server, on_client = code.split("# On a client:\n")
        model = nn.Linear(1, 1, bias=False)
        nn.init.ones_(model.weight)
        names: dict[str, Any] = {"group": group, "model": model}
        if world.name == "client":
            group.barrier()
            has_stepped = False
            while not has_stepped:
                names["loss"] = model(torch.ones(1, 1)).sum()
                names["accessor"] = None
                exec(on_client, names)
                has_stepped = names["accessor"].pull(model)
            group.barrier()
            return model.weight.item()
        names["optimizer"] = torch.optim.SGD(model.parameters(), lr=0.5)
        names["lr_scheduler"] = torch.optim.lr_scheduler.StepLR(names["optimizer"], 1)
        exec(on_server, names)
        group.barrier()
        group.barrier()
        names["server"].watch()
        names["server"].close()
        return model.weight.item()


def test_the_gradient_server() -> None:
    primary, *_, client = run_ranks(_gradient_server, 4, codes("A gradient server")[0])
    assert primary == client == 0.5


released = threading.Event()


def error_shown(fn: Any, *args: Any, **kwargs: Any) -> str:
    """Return the RpcError that a call raises, as the page writes it."""
    with pytest.raises(RpcError) as caught:
        fn(*args, **kwargs)
    text = re.sub(r"within \S+ s", "within N s", f"RpcError: {caught.value}")
    return text.partition(" no answer: ")[0] + " no answer" * (" no answer: " in text)


def release() -> None:
    released.set()


def _mistakes(address: str) -> list[str]:
    rank = dist.get_rank()
    dist.barrier()
    dist.destroy_process_group()
    world = World(NAMES[rank], rank, 3, dist_init_method=address)
    group = world.create_rpc_group("all", NAMES)
    if rank == 1:
        group.register("act", time.sleep)
    else:
        pair = world.create_rpc_group("players", ["learner", "actor1"])
    group.barrier()
    if rank > 0:
        released.wait(60)
        released.clear()
        world.stop(graceful=False)
        return []
    texts = [error_shown(pair.barrier, timeout=0.5)]
    texts.append(error_shown(group.registered_sync, "act", args=(1,), timeout=0.3))
    in_flight = group.registered_async("act", args=(3,))
    group.rpc_async("actor1", release)
    texts.append(error_shown(pair.barrier, timeout=60))
    group.rpc_async("actor0", release)
    texts += [error_shown(in_flight.wait), error_shown(group.registered_sync, "act", args=(0,))]
    world.stop()
    return texts


def test_the_texts_of_errors(tmp_path: Path) -> None:
    section = PAGE.split("\n## Errors")[1].split("\n## ")[0]
    shown = re.findall(r"`(RpcError: .+?)`", section)
    assert len(shown) == 4
    texts = run_ranks(_mistakes, 3, f"file://{tmp_path}/store")[0]
    assert len(texts) == 5
    assert set(texts) == {re.sub(r"within \S+ s", "within N s", text) for text in shown}


def test_the_names_of_the_page() -> None:
    for code in re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL):
        compile(code, "docs/rpc.md", "exec")
    arguments = set(inspect.signature(World).parameters)
    rows = re.findall(r"^\| (`.+?) \| ", PAGE.split("\n## Groups")[0], flags=re.MULTILINE)
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row)} <= arguments
    groups = set(re.findall(r"\bgroup\.(\w+)\(", PAGE))
    assert len(groups) >= 9
    assert all(hasattr(RpcGroup, name) for name in groups)
    imported = set(re.findall(r"from stepwrap\.rpc import (.+)", PAGE))
    assert set(", ".join(imported).split(", ")) <= set(stepwrap.rpc.__all__)
    options = inspect.signature(PushPullGradServerImpl).parameters
    assert {"reduce_batch_size", "max_queue_size", "on_full"} <= set(options)
    for file in re.findall(r"`(examples/\w+\.py)`", PAGE):
        assert (ROOT / file).exists()


SHARDED = """
import gc
import os
from pathlib import Path

import torch
from ports import free_port

from stepwrap.rpc import World
from stepwrap.wrappers import StepFullyShardedDataParallel


def threads():
    names = [file.read_text() for file in Path("/proc/self/task").glob("*/comm")]
    return sum("gloo" in name for name in names)


def train():
    with World("alone", rank=0, world_size=1):
        model = StepFullyShardedDataParallel(torch.nn.Linear(3, 2))
        model(torch.ones(4, 3)).sum().backward()
        del model
        return threads()


os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
had = train()
# A sharded model is in a cycle.
gc.collect()
print(had > 0, threads())
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="the system counts no threads")
def test_the_group_of_a_world_ends_with_its_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """References that torch keeps to a sharded model would keep them alive."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    assert run_script(SHARDED, tmp_path) == "True 0\n"
