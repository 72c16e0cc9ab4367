"""Whether sizes fit into capacities at all, by a bounded search."""

from __future__ import annotations

from collections.abc import Iterator

# How many steps are made, onwards and back: about a third of a second.
_TRIES = 100_000
# In MiB: a tenth of a byte.
_NOTHING = 1e-7


def pack(sizes: list[float], capacities: list[float]) -> tuple[list[int] | None, bool]:
    """Return the device of each model in some placement that fits, and whether that is certain.

    Largest first, each into the fullest device that takes it; where that ends nowhere, the last
    choices are undone. None with True means that nothing fits; None with False that the search
    was given up.
    """
    order = sorted(range(len(sizes)), key=lambda model: -sizes[model])
    wanted = [sizes[model] for model in order]
    spare = sum(capacities) - sum(sizes)
    if spare < -_NOTHING:
        return None, True
    free = list(capacities)
    chosen: list[int] = []
    choices = [_choices(wanted, 0, free, spare)]
    for _ in range(_TRIES):
        device = next(choices[-1], None)
        if device is not None:
            free[device] -= wanted[len(chosen)]
            chosen.append(device)
            if len(chosen) == len(order):
                placed = dict(zip(order, chosen, strict=True))
                return [placed[model] for model in range(len(sizes))], True
            choices.append(_choices(wanted, len(chosen), free, spare))
            continue
        choices.pop()
        if not chosen:
            return None, True
        undone = chosen.pop()
        free[undone] += wanted[len(chosen)]
    return None, False


def _choices(wanted: list[float], model: int, free: list[float], spare: float) -> Iterator[int]:
    """Yield the devices that take a model, fullest first, one of those that are equally full."""
    size, least = wanted[model], wanted[-1] - _NOTHING
    # What no model can use any more is lost, and no more than what is spare may be lost.
    lost = sum(room for room in free if room < least)
    fitting = {}
    for device, room in enumerate(free):
        rest = room - size
        gone = rest if rest < least and model < len(wanted) - 1 else 0.0
        if rest >= -_NOTHING and lost + gone <= spare + _NOTHING:
            # Undoing leaves rounding errors.
            fitting[round(room, 7)] = device
    return iter([fitting[room] for room in sorted(fitting)])
