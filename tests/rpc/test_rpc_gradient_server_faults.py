"""Gradient servers whose services fail once: at a resend, and when the primary is watched."""

import re
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from worlds import catch_error, run_world

from stepwrap.rpc import PushPullGradServerImpl, RpcGroup, World
from stepwrap.rpc.calls import node as node_of


def push(group: RpcGroup, value: float = 1.0) -> None:
    """Push the gradient of one weight."""
    model = nn.Linear(1, 1, bias=False)
    model.weight.grad = torch.full_like(model.weight, value)
    group.get_paired("server").to_here().push(model)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "waited for too long"
        time.sleep(0.01)


@run_world(3)
def test_a_push_that_cannot_be_sent_again_is_counted_and_the_others_are_sent(
    world: World, group: RpcGroup
) -> None:
    server = PushPullGradServerImpl("server", group, secondary_reducers=["w1"])
    server.start()
    address: Any = ("service", "all", "server/_push_service")
    if world.rank == 0:
        take, calls = node_of.current().offers[address], []

        def fail_once(*args: Any) -> Any:
            calls.append(args)
            if len(calls) == 1:
                raise ValueError("broken")
            return take(*args)

        node_of.current().offers[address] = fail_once
    group.barrier()
    if world.rank == 2:
        client = group.get_paired("server").to_here()
        for _ in range(3):
            push(group)
        # The primary excludes the reducer, which then sends its clients away.
        group.registered_sync("server/_fence_service", ("w1", "another", []))
        until(lambda: client.dropped == 1)
        push(group)
    if world.rank == 0:
        # Of four pushes, one was dropped.
        until(lambda: server.pending == 3)
    group.barrier()
    if world.rank == 2:
        assert client.dropped == 1


@run_world(2)
def test_the_primary_is_watched_after_a_first_attempt_has_failed(
    world: World, group: RpcGroup
) -> None:
    server = PushPullGradServerImpl("server", group, secondary_reducers=["w1"])
    key = "server/_alive_service"
    if world.rank == 0:
        model = nn.Linear(1, 1, bias=False)
        server.manage_model(model, torch.optim.SGD(model.parameters(), lr=0.1))
        alive = node_of.current().offers["service", "all", key]
        group.deregister(key)
    server.start()
    group.barrier()
    if world.rank == 1:
        assert "primary reducer cannot be asked" in catch_error(push, group)
    group.barrier()
    if world.rank == 0:
        group.register(key, alive)
    group.barrier()
    if world.rank == 1:
        # One push makes no batch.
        push(group)
        server.watch()
        group.registered_sync("server/_shut_out_service", ("excluded",))
        until(lambda: server._secondary.lost is not None)
        assert re.match("RpcError: .*primary reducer .*gone$", catch_error(server.watch))
