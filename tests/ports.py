"""Ports for tests that name one, where several test processes share the machine."""

import contextlib
import random
import socket

# Below the ports that the system assigns itself, for instance to every group's listeners. So no
# other process gets this one between the test's asking and its listening.
_FIRST, _LAST = 20000, 28999


def free_port() -> int:
    """Return a free port of this machine."""
    # The module's generator would give every process the same port after a test set the seed.
    chance = random.SystemRandom()
    while True:
        port = chance.randint(_FIRST, _LAST)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
