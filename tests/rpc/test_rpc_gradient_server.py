"""Gradient servers in three processes: pushes, pulls and steps."""

import copy
import os
import queue
import signal
import threading
from typing import Any

import pytest
import torch
from torch import nn
from worlds import run_group

from stepwrap.rpc import (
    OrderedServerBase,
    PushPullGradServer,
    PushPullGradServerImpl,
    ReduceType,
    RpcError,
    RpcGroup,
    World,
)


def one_weight(value: float = 1.0, *, dtype: torch.dtype = torch.float64) -> nn.Linear:
    model = nn.Linear(1, 1, bias=False, dtype=dtype)
    nn.init.constant_(model.weight, value)
    return model


def unit_gradients(model: nn.Module, value: float = 1.0) -> nn.Module:
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, value)
    return model


def error_if_any(fn: Any, *args: Any, **kwargs: Any) -> tuple[str, str]:
    """Return the type and text of the error that a call raises, or two empty strings."""
    try:
        fn(*args, **kwargs)
    except BaseException as error:
        return type(error).__name__, str(error)
    return "", ""


def make_server(group: RpcGroup, **options: Any) -> PushPullGradServerImpl:
    """Make a server whose primary is w0, with one weight trained by SGD of rate 0.1."""
    options = {"reduce_batch_size": 2, "max_queue_size": 8} | options
    server = PushPullGradServerImpl("server", group, **options)
    if server.primary_reducer == group.get_cur_name():
        model = one_weight()
        server.manage_model(model, torch.optim.SGD(model.parameters(), lr=0.1))
    group.barrier()
    return server


def accessor(group: RpcGroup) -> PushPullGradServer:
    server = group.get_paired("server").to_here()
    assert isinstance(server, PushPullGradServer)
    return server


def wait_for_version(server: PushPullGradServer, version: int) -> torch.Tensor:
    while True:
        answer = server.o_server.pull(server.model_name)
        if answer is not None and answer[1] >= version:
            return answer[0]["weight"].clone()


def _twelve_pushes(world: World, group: RpcGroup) -> Any:
    server = make_server(group, secondary_reducers=["w1"])
    server.start()
    results: dict[str, Any] = {}
    if group.get_cur_name() == "w2":
        model = one_weight()
        client = accessor(group)
        is_accepted = client.push(unit_gradients(model))
        for _ in range(11):
            client.push(unit_gradients(model))
        results["published"] = wait_for_version(client, 3).item()
        unit_gradients(model)
        results |= {
            "first": is_accepted,
            "pulled": client.pull(model),
            "weight": model.weight.item(),
        }
        results["grad"] = model.weight.grad.tolist()
        results["attributes"] = sorted(set(vars(model)) - set(vars(one_weight())))
    group.barrier()
    server.watch()
    server.stop()
    server.stop()
    results |= {"dropped": server.dropped, "pending": server.pending}
    return results


@pytest.mark.slow
def test_twelve_pushes_are_three_steps() -> None:
    """Two levels with batches of two make a step of four pushes; an earlier pull returns False."""
    results = run_group(_twelve_pushes, 3)
    expected = {"first": False, "pulled": True, "grad": [[0.0]], "attributes": []}
    assert expected.items() <= results[2].items()
    assert results[2]["published"] == results[2]["weight"] == pytest.approx(-0.2, abs=1e-12)
    assert all((result["dropped"], result["pending"]) == (0, 0) for result in results)


def _all_push(world: World, group: RpcGroup, method: str) -> Any:
    server = make_server(group, reduce_method=method)
    server.start()
    model = one_weight()
    client = accessor(group)
    for _ in range(20):
        client.push(unit_gradients(model, 1.0))
    group.barrier()
    pending = group.get_cur_name(), server.pending
    group.barrier()
    server.stop()
    weight = wait_for_version(client, 1).item()
    group.barrier()
    server.close()
    server.close()
    # Wait until the other members have closed theirs.
    group.barrier()
    return pending[1], weight, group.is_paired("server"), group.is_registered("server_o_server")


@pytest.mark.parametrize("method", ["sum", "mean"])
def test_every_member_reduces_and_pushes(method: str) -> None:
    """By default all members are secondary reducers; gradients in no step count as pending."""
    results = run_group(_all_push, 3, method)
    scale = 0.1 if method == "sum" else 0.1 / 4
    weight = results[0][1]
    applied = round((1 - weight) / scale)
    assert weight == pytest.approx(1 - scale * applied, abs=1e-12)
    # A reducer may count a batch as pending that is already on its way.
    assert applied % 4 == 0
    assert 60 - 2 * sum(result[0] for result in results) <= applied <= 60
    assert not any(result[2] or result[3] for result in results)


def _refusals(world: World, group: RpcGroup) -> Any:
    server = make_server(group, secondary_reducers=["w1"])
    server.start()
    errors: dict[str, Any] = {}
    if group.get_cur_name() == "w2":
        client, model = accessor(group), one_weight()
        errors["none"] = error_if_any(client.push, one_weight())
        errors["shape"] = error_if_any(client.push, unit_gradients(nn.Linear(2, 1, bias=False)))
        errors["extra"] = error_if_any(client.push, unit_gradients(nn.Linear(1, 1)))
        errors["missing"] = error_if_any(client.push, nn.Identity())
        wrong = unit_gradients(nn.Linear(2, 1, bias=False))
        error_if_any(client.push, wrong)
        errors["kept"] = wrong.weight.grad.tolist()
        for _ in range(4):
            client.push(unit_gradients(model))
        errors["weight"] = wait_for_version(client, 1).item()
    group.barrier()
    server.watch()
    server.stop()
    return errors


def test_only_the_client_gets_the_errors_of_its_wrong_pushes() -> None:
    errors = run_group(_refusals, 3)[2]
    assert errors["none"] == (
        "RuntimeError",
        "Parameter weight doesn't have gradient to push!",
    )
    assert errors["shape"][0] == errors["extra"][0] == errors["missing"][0] == "ValueError"
    assert "'weight' has shape (1, 2) instead of (1, 1)" in errors["shape"][1]
    assert "'bias' unexpected" in errors["extra"][1]
    assert "'weight' missing" in errors["missing"][1]
    assert errors["kept"] == [[1.0, 1.0]]
    assert errors["weight"] == pytest.approx(0.6, abs=1e-12)


def _serve_no_model(world: World, group: RpcGroup) -> Any:
    options = {"primary_reducer": "w0", "secondary_reducers": ["w1"], "reduce_batch_size": 2}
    server = PushPullGradServerImpl("server", group, **options)
    server.start()
    group.barrier()
    name, error = group.get_cur_name(), ""
    model, other = one_weight(), nn.Linear(1, 1)
    client = accessor(group)
    if name == "w2":
        client.push(unit_gradients(model))
    group.barrier()
    # The first push is in the sum, and the queue is empty.
    while name == "w1" and server._secondary.level.items:
        server.watch()
    group.barrier()
    if name == "w2":
        error = error_if_any(client.push, unit_gradients(other))
        client.push(unit_gradients(model))
    while name == "w0" and server.pending < 2:
        server.watch()
    group.barrier()
    if name == "w2":
        # Nothing is at the secondary reducer, but the batch does not fit the primary's sum.
        client.push(unit_gradients(other))
        client.push(unit_gradients(other))
    while name == "w1" and server.dropped < 2:
        server.watch()
    group.barrier()
    if name == "w2":
        client.push(unit_gradients(model))
        client.push(unit_gradients(model))
    while name == "w0" and server.pending:
        server.watch()
    group.barrier()
    server.watch()
    server.stop()
    return error, client.dropped, server.pending


def test_without_a_model_pushes_must_fit_the_sum_in_progress() -> None:
    results = run_group(_serve_no_model, 3)
    text = (
        "gradients must fit the managed model (without one, the pushes before): 'bias' unexpected"
    )
    assert results[2][:2] == (("ValueError", text), 2)
    assert [pending for *_, pending in results] == [0, 0, 0]


def _arguments(world: World, group: RpcGroup) -> Any:
    make: Any = PushPullGradServerImpl
    wrong = [
        {"reduce_method": "max"},
        {"max_queue_size": 1},
        {"max_queue_size": "8"},
        {"reduce_batch_size": 1},
        {"reduce_batch_size": 2.5},
        {"reduce_batch_size": 8, "max_queue_size": 8},
        {"on_full": "wait"},
        {"primary_reducer": "w9"},
        {"secondary_reducers": ["w9"]},
        {"secondary_reducers": []},
    ]
    errors = [error_if_any(make, "server", group, **options) for options in wrong]
    server = make("server", group)
    twice = error_if_any(make, "server", group)
    is_whole = group.is_registered(f"server/{group.get_cur_name()}/_push_service")
    group.barrier()
    server.close()
    second = make("server", group)
    model = one_weight()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    managed = error_if_any(second.manage_model, model, optimizer)
    second.start()
    second.start()
    late = error_if_any(second.manage_model, model, optimizer)
    second.stop()
    return errors, twice, is_whole, managed, late, getattr(model, "pp_version", None)


def test_arguments_are_checked_before_services_are_registered() -> None:
    for rank, (wrong, twice, is_whole, managed, late, version) in enumerate(
        run_group(_arguments, 3)
    ):
        assert [kind for kind, _ in wrong] == ["AssertionError"] * 6 + ["ValueError"] * 4
        assert twice[0] == "KeyError"
        assert is_whole
        assert managed[0] == ("RuntimeError" if rank else "")
        assert late[0] == "RuntimeError"
        assert version == (None if rank else 0)
    assert [member.value for member in ReduceType] == [0, 1]
    assert (PushPullGradServerImpl.REDUCE_MASTER, PushPullGradServerImpl.REDUCE_SLAVE) == (0, 1)


def _full(world: World, group: RpcGroup, policy: str) -> Any:
    server = make_server(
        group, secondary_reducers=["w0"], on_full=policy, max_queue_size=4, reduce_batch_size=2
    )
    results: dict[str, Any] = {}
    if group.get_cur_name() == "w1":
        client, model = accessor(group), one_weight()
        # The reducers have not started, so the queue takes four: enough for one step.
        results["pushes"] = [
            error_if_any(client.push, unit_gradients(model, i))[0] for i in range(5)
        ]
        results["dropped_here"] = client.dropped
    group.barrier(timeout=30)
    results |= {"dropped": server.dropped, "pending": server.pending}
    group.barrier(timeout=30)
    server.start()
    if group.get_cur_name() == "w1":
        results["weight"] = wait_for_version(client, 1).item()
        results["pushes"].append(error_if_any(client.push, unit_gradients(model))[0])
    group.barrier(timeout=30)
    server.stop()
    return results


@pytest.mark.parametrize("policy", ["block", "drop_oldest", "error"])
def test_full_queues(policy: str) -> None:
    primary, client, _ = run_group(_full, 3, policy, rpc_timeout=4)
    assert primary["pending"] == 4
    is_dropping = policy == "drop_oldest"
    assert client["pushes"] == [*[""] * 4, "" if is_dropping else queue.Full.__name__, ""]
    assert primary["dropped"] == client["dropped_here"] == (1 if is_dropping else 0)
    total = 1 + 2 + 3 + 4 if is_dropping else 0 + 1 + 2 + 3
    assert client["weight"] == pytest.approx(1 - 0.1 * total, abs=1e-12)


def _failing_step(world: World, group: RpcGroup) -> Any:
    server = make_server(group, secondary_reducers=["w1"])
    if group.get_cur_name() == "w0":
        model = one_weight()
        optimizer = _Failing(model.parameters(), lr=0.1)
        server.manage_model(model, optimizer)
    server.start()
    group.barrier()
    results: dict[str, Any] = {}
    if group.get_cur_name() == "w2":
        client, model = accessor(group), one_weight()
        for _ in range(4):
            client.push(unit_gradients(model))
        errors = [("", "")]
        while not errors[-1][0]:
            errors.append(error_if_any(client.push, unit_gradients(model)))
        results["error"] = errors[-1]
        results["next"] = error_if_any(client.push, unit_gradients(model))
    group.barrier()
    results["watch"] = error_if_any(server.watch)
    results["dropped"] = server.dropped
    if group.get_cur_name() == "w0":
        optimizer.is_failing = False
        server.stop()
        server.start()
        server.watch()
    group.barrier()
    if group.get_cur_name() == "w2":
        for _ in range(4):
            client.push(unit_gradients(model))
        # Gradients that were acknowledged before the error are kept and applied now.
        steps = (len(errors) - 2 + 4) // 4
        results["steps"], results["weight"] = steps, wait_for_version(client, steps).item()
    group.barrier()
    server.stop()
    return results


class _Failing(torch.optim.SGD):
    is_failing = True

    def step(self, closure: Any = None) -> Any:
        if self.is_failing:
            raise ArithmeticError("this step fails")
        return super().step(closure)


def test_a_failed_step_raises_everywhere_and_training_can_continue() -> None:
    primary, secondary, client = run_group(_failing_step, 3)
    assert primary["watch"] == ("ArithmeticError", "this step fails")
    assert primary["dropped"] == 4
    assert secondary["watch"] == ("", "")
    for error in client["error"], client["next"]:
        assert error[0] == RpcError.__name__
        assert "ArithmeticError: this step fails" in error[1]
    assert client["weight"] == pytest.approx(1 - 0.4 * client["steps"], abs=1e-12)


def _reduce_and_close(group: RpcGroup, closing: str) -> Any:
    """Be a reducer of 12 pushes that fill all queues, because the primary starts later."""
    name, model = group.get_cur_name(), one_weight()
    server = PushPullGradServerImpl(
        "server", group, secondary_reducers=["w1"], reduce_batch_size=2, max_queue_size=3
    )
    if name == "w0":
        server.manage_model(model, torch.optim.SGD(model.parameters(), lr=0.1))
    else:
        server.start()
    group.barrier()
    group.barrier()
    server.start()
    if closing not in (name, "both"):
        group.barrier()
    server.close()
    if closing == name:
        group.barrier()
    server.watch()
    return server.pending, server.dropped, model.weight.item()


def _close_in_every_order(world: World, group: RpcGroup) -> list[Any]:
    answers = []
    for closing in ("w0", "w1", "both"):
        if group.get_cur_name() != "w2":
            answers.append(_reduce_and_close(group, closing))
        else:
            group.barrier()
            client = accessor(group)
            for _ in range(12):
                client.push(unit_gradients(one_weight()))
            group.barrier()
            if closing != "both":
                group.barrier()
        group.barrier()
    return answers


def test_close_uses_the_pushes_that_fill_batches() -> None:
    primary, secondary, _ = run_group(_close_in_every_order, 3)
    assert primary == [(0, 0, pytest.approx(-0.2, abs=1e-12))] * 3
    assert [result[:2] for result in secondary] == [(0, 0)] * 3


class _Waiting(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        _may_step.wait(20)
        return super().step(closure)


_may_step = threading.Event()


def _let_step() -> None:
    _may_step.set()


def _push_while_closing(world: World, group: RpcGroup) -> Any:
    server = make_server(group, secondary_reducers=["w1"])
    name, pushes, answer = group.get_cur_name(), 0, ("", "")
    model = one_weight()
    if name == "w0":
        _may_step.clear()
        server.manage_model(model, _Waiting(model.parameters(), lr=0.1))
    server.start()
    client = accessor(group)
    group.barrier()
    while name == "w2" and pushes < 4:
        client.push(unit_gradients(one_weight()))
        pushes += 1
    # From now on the primary is in a step, and closes.
    group.barrier()
    while name == "w2" and not answer[0]:
        answer = error_if_any(client.push, unit_gradients(one_weight()))
        pushes += not answer[0]
    if name == "w2":
        group.rpc_sync("w0", _let_step)
    if name == "w0":
        server.close()
    group.barrier()
    server.close()
    return pushes, answer, model.weight.item()


def test_a_client_that_pushes_while_the_server_closes() -> None:
    """Pushes that have returned are used, and the first one after that is an error."""
    primary, _, client = run_group(_push_while_closing, 3)
    pushes, answer, _ = client
    assert answer == ("RpcError", "the server 'server' is closing")
    assert primary[2] == pytest.approx(1 - 0.4 * (pushes // 4), abs=1e-12)


def _close_with_a_frozen_reducer(world: World, group: RpcGroup) -> Any:
    server = make_server(group, secondary_reducers=["w1"])
    server.start()
    group.barrier()
    answer = None
    if group.get_cur_name() == "w0":
        frozen = group.rpc_sync("w1", os.getpid)
        os.kill(frozen, signal.SIGSTOP)
        try:
            answer = error_if_any(server.close), group.is_paired("server")
        finally:
            os.kill(frozen, signal.SIGCONT)
    group.barrier(timeout=30)
    return answer


@pytest.mark.slow
def test_close_has_a_time_limit() -> None:
    answer = run_group(_close_with_a_frozen_reducer, 3, rpc_timeout=3)[0]
    text = "close() of 'server': 'w1' has not reduced all full batches within 3 s"
    assert answer == (("RpcError", text), False)


class _Refusing(OrderedServerBase):
    """Refuses the second version once, as if another process had been faster."""

    def __init__(self) -> None:
        self.seen: list[tuple[Any, Any]] = []

    def push(self, key: Any, value: Any, version: Any, prev_version: Any) -> bool:
        self.seen.append((version, prev_version))
        return len(self.seen) != 2

    def pull(self, key: Any, version: Any = None) -> None:
        return None


def _refused_publish(world: World, group: RpcGroup) -> Any:
    if group.get_cur_name() != "w0":
        group.barrier()
        return None
    o_server = _Refusing()
    server = PushPullGradServerImpl(
        "server", group, secondary_reducers=["w0"], o_server=o_server, reduce_batch_size=2
    )
    model, frozen = one_weight(), nn.BatchNorm1d(1)
    frozen.requires_grad_(False)
    both = nn.Sequential(model, frozen)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
    server.manage_model(both, optimizer, schedule)
    server.start()
    client, mine = accessor(group), copy.deepcopy(both)
    for _ in range(12):
        mine[0].weight.grad = torch.ones(1, 1, dtype=torch.float64)
        client.push(mine)
    while server.pending:
        server.watch()
    server.stop()
    group.barrier()
    return o_server.seen, both.pp_version, model.weight.item(), schedule.last_epoch


def test_refused_publish_schedule_and_frozen_parameters() -> None:
    """A refused version is offered again; each step of the optimizer halves the rate."""
    states, version, weight, steps = run_group(_refused_publish, 3)[0]
    assert states == [(1, 0), (2, 1), (2, 1)]
    assert version == 2
    assert steps == 3
    assert weight == pytest.approx(1 - 4 * (1 + 0.5 + 0.25), abs=1e-12)
