"""The ordered server compared with reference models, from one process and from several."""

import time
from typing import Any, NamedTuple

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from worlds import ordered_server, run_group

from stepwrap.rpc import OrderedServerSimpleImpl, RpcGroup, World

KEYS = ("a", "b")

versions = st.integers(0, 4)
pushes = st.tuples(st.sampled_from(KEYS), versions, versions)


@settings(deadline=None)
@given(st.lists(pushes, max_size=30), st.integers(1, 3))
def test_alone_it_is_a_list_of_versions(script: list[tuple[str, int, int]], depth: int) -> None:
    server = ordered_server(depth)
    chains: dict[str, list[tuple[int, int]]] = {key: [] for key in KEYS}
    for value, (key, version, previous) in enumerate(script):
        chain = chains[key]
        versions = [version for _, version in chain]
        is_next = not versions or (versions[-1] == previous and version not in versions[:-1])
        assert server._push_service(key, value, version, previous) == is_next
        if is_next:
            if versions and versions[-1] == version:
                chain.pop()
            chain.append((value, version))
            del chain[: -depth - 1]
        for asked_version in range(5):
            expected = next((entry for entry in chain if entry[1] == asked_version), None)
            assert server._pull_service(key, asked_version) == expected
        assert server._pull_service(key) == (chain[-1] if chain else None)


class Event(NamedTuple):
    """A call of a process, its result, and its start and end on the machine's clock."""

    what: str
    key: str
    version: Any
    previous: Any
    result: Any
    started: float
    ended: float


# "push" follows the newest version that the process knows, "stale" the one before it; "look"
# pulls the newest version, "back" the one that the process knew before the last one.
steps = st.tuples(st.sampled_from(["push", "push", "stale", "look", "back"]), st.sampled_from(KEYS))
scripts = st.lists(st.lists(steps, max_size=25), min_size=3, max_size=3)


def _play(
    world: World, group: RpcGroup, all_scripts: list[list[tuple[str, str]]], depth: int
) -> list[Event]:
    rank = world.rank
    if rank == 0:
        OrderedServerSimpleImpl("server", group, depth)
    group.barrier()
    server = group.get_paired("server").to_here()
    history: dict[str, list[Any]] = {key: [None, None] for key in KEYS}
    events = []
    group.barrier()
    for number, (action, key) in enumerate(all_scripts[rank]):
        version: Any = (rank, number)
        previous = history[key][-2 if action in ("stale", "back") else -1]
        started = time.monotonic()
        if action in ("push", "stale"):
            result = server.push(key, f"value of {version}", version, previous)
            news = version if result else None
        else:
            version = previous if action == "back" else None
            result = server.pull(key, version)
            news = result[1] if result and action == "look" else None
        ended = time.monotonic()
        events.append(Event(action, key, version, previous, result, started, ended))
        if news is not None and news != history[key][-1]:
            history[key].append(news)
    return events


@settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)
@given(scripts, st.integers(1, 2))
def test_from_several_processes_it_is_one_chain(
    all_scripts: list[list[tuple[str, str]]], depth: int
) -> None:
    events = sum(run_group(_play, 3, all_scripts, depth), [])
    for key in KEYS:
        Judge([event for event in events if event.key == key], depth).judge()


class Judge:
    """Find one order of all calls on a key that explains every result.

    A call took effect between its start and its end, so a version is the newest from some moment
    of its push to some moment of the next one's.
    """

    def __init__(self, events: list[Event], depth: int) -> None:
        self.depth = depth
        pushed = [event for event in events if event.what in ("push", "stale")]
        self.taken = [push for push in pushed if push.result]
        self.refused = [push for push in pushed if not push.result]
        self.pulls = [event for event in events if event.what in ("look", "back")]
        self.chain = self._chain()
        self.places = {push.version: position for position, push in enumerate(self.chain)}

    def judge(self) -> None:
        for earlier, later in zip(self.chain, self.chain[1:], strict=False):
            assert earlier.started < later.ended
        for push in self.refused:
            oldest, newest = self._bounds(push)
            assert newest >= 0
            assert not oldest == newest == self.places.get(push.previous)
        for pull in self.pulls:
            oldest, newest = self._bounds(pull)
            if pull.result is None:
                self._judge_nothing(pull, oldest, newest)
                continue
            value, version = pull.result
            assert value == f"value of {version}"
            position = self.places[version]
            assert pull.version in (None, version)
            assert oldest - (0 if pull.version is None else self.depth) <= position <= newest

    def _judge_nothing(self, pull: Event, oldest: int, newest: int) -> None:
        if pull.version is None:
            assert oldest == -1
            return
        position = self.places[pull.version]
        assert position > oldest or position < newest - self.depth

    def _chain(self) -> list[Event]:
        """Return the accepted pushes as a chain that must include all of them."""
        versions = {push.version for push in self.taken}
        follows = {push.previous: push for push in self.taken if push.previous in versions}
        roots = [push for push in self.taken if push.previous not in versions]
        assert len(roots) == (1 if self.taken else 0)
        assert len(follows) == len(self.taken) - len(roots), "two successors of one version"
        chain = roots
        while chain and chain[-1].version in follows:
            chain.append(follows[chain[-1].version])
        assert len(chain) == len(self.taken)
        return chain

    def _bounds(self, event: Event) -> tuple[int, int]:
        """Return which places may have been the newest during a call; -1 if none."""
        before = [self.places[push.version] for push in self.taken if push.ended < event.started]
        during = [self.places[push.version] for push in self.taken if push.started < event.ended]
        return max(before, default=-1), max(during, default=-1)
