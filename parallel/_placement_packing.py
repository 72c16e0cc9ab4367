"""Whether sizes fit into capacities at all, by a bounded search."""

from __future__ import annotations

from collections.abc import Iterator

# How many ways of putting one model somewhere are looked at: a third of a second.
_TRIES = 100_000


def pack(sizes: list[float], capacities: list[float]) -> tuple[list[int] | None, bool]:
    """Return the device of each model in some placement that fits, and whether that is certain.

    Largest first, each into the fullest device that takes it; where that ends nowhere, the last
    choices are undone. None with True means that nothing fits; None with False that the search
    was given up.
    """
    if sum(sizes) > sum(capacities) + 1e-7:
        return None, True
    order = sorted(range(len(sizes)), key=lambda model: -sizes[model])
    free = list(capacities)
    chosen: list[int] = []
    choices = [_choices(sizes[order[0]], free)] if order else []
    tries = 0
    while len(chosen) < len(order):
        size = sizes[order[len(chosen)]]
        device = next(choices[-1], None)
        tries += 1
        if tries > _TRIES:
            return None, False
        if device is not None:
            free[device] -= size
            chosen.append(device)
            if len(chosen) < len(order):
                choices.append(_choices(sizes[order[len(chosen)]], free))
            continue
        choices.pop()
        if not chosen:
            return None, True
        undone = chosen.pop()
        free[undone] += sizes[order[len(chosen)]]
    placed = dict(zip(order, chosen, strict=True))
    return [placed[model] for model in range(len(sizes))], True


def _choices(size: float, free: list[float]) -> Iterator[int]:
    """Yield the devices that take `size`, fullest first, one of those that are equally full."""
    # Undoing leaves rounding errors; they are far below one byte of a MiB.
    fitting = {round(room, 7): device for device, room in enumerate(free) if size <= room + 1e-7}
    return iter([fitting[room] for room in sorted(fitting)])
