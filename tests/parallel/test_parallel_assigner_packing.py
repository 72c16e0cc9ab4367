"""Whether models fit is certain if all placements can be tried."""

import itertools
import random

import pytest

from stepwrap.parallel.placement.search import pack


def fits(placed: tuple[int, ...], sizes: list[float], room: list[float]) -> bool:
    used = [0.0] * len(room)
    for size, device in zip(sizes, placed, strict=True):
        used[device] += size
    return all(used_size <= most for used_size, most in zip(used, room, strict=True))


@pytest.mark.parametrize("seed", range(3))
def test_the_result_agrees_with_an_exhaustive_search(seed: int) -> None:
    draw = random.Random(seed)
    verdicts = set()
    for _ in range(60):
        sizes = [float(draw.randint(1, 9)) for _ in range(draw.randint(1, 6))]
        devices = draw.randint(1, 3)
        mean = round(sum(sizes) / devices)
        room = [float(max(0, mean + draw.randint(-2, 2))) for _ in range(devices)]
        packed, certain = pack(sizes, room)
        every = itertools.product(range(devices), repeat=len(sizes))
        assert certain
        assert (packed is not None) == any(fits(placed, sizes, room) for placed in every)
        assert packed is None or fits(tuple(packed), sizes, room)
        verdicts.add(packed is None)
    assert verdicts == {True, False}


def test_the_search_backtracks() -> None:
    # If the two largest are placed together, the last one does not fit.
    sizes, room = [4.0, 4.0, 3.0, 3.0, 3.0, 3.0], [10.0, 10.0]
    packed, _ = pack(sizes, room)
    assert packed is not None
    assert fits(tuple(packed), sizes, room)


def test_it_gives_up_in_time() -> None:
    # Odd capacities and even sizes: nothing fits, but proving it takes long.
    sizes = [float(2 * (20 + index % 17)) for index in range(60)]
    assert pack(sizes, [sum(sizes) / 6 + (1 if index else -5) for index in range(6)]) == (
        None,
        False,
    )
