"""Functions that use tensors in shared memory in other processes."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn

from stepwrap.parallel import dumps, loads


def add_one(inbox: Any, back: Any) -> None:
    """Add 1 to tensors in place and send them back, until None comes."""
    while (tensors := inbox.get()) is not None:
        for tensor in tensors:
            tensor.add_(1)
        back.put(tensors)


def are_same_memory(inbox: Any, back: Any) -> None:
    """Send whether the tensors of two messages have the same addresses."""
    tensors, other = inbox.get(), inbox.get()
    back.put([a.data_ptr() == b.data_ptr() for a, b in zip(tensors, other, strict=True)])


def train_tied(inbox: Any, back: Any) -> None:
    """Change a module with tied weights, and send whether they are still tied."""
    model: nn.Sequential = inbox.get()
    layer, second = model[0], model[1]
    assert isinstance(layer, nn.Linear)
    assert isinstance(second, nn.Linear)
    with torch.no_grad():
        layer.weight.fill_(7)
    back.put(layer.weight is second.weight)


def dump_to(tensor: torch.Tensor, shared: str, copied: str) -> None:
    """Write the tensor to files, by reference and by copy."""
    for path, copy_tensor in ((shared, False), (copied, True)):
        with open(path, "wb") as file:
            file.write(dumps(tensor, copy_tensor=copy_tensor))


def load_from(path: str, back: Any) -> None:
    """Load a file's tensors, add 1 in place, and send the first numbers."""
    with open(path, "rb") as file:
        tensors = loads(file.read())
    for tensor in tensors:
        tensor.add_(1)
    back.put([tensor.reshape(-1)[0].item() for tensor in tensors])


def exhaust_and_share(back: Any) -> None:
    """Share tensors until descriptors run out; send the error."""
    import resource

    highest = max(map(int, os.listdir("/proc/self/fd")))
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 40, highest + 40))
    from stepwrap.parallel import SimpleQueue

    queue = SimpleQueue()
    tensors = [torch.zeros(3) for _ in range(100)]
    try:
        queue.put(tensors)
        back.put("sent")
    except OSError as error:
        # The failure must leave enough free descriptors to send this.
        del tensors
        back.put(str(error))
