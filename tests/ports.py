"""Ports for tests that name one, where several test processes share the machine."""

import contextlib
import random
import socket

# Below what the system gives to whoever asks for any port, such as every group's listeners: no
# other process is given this one between the test's asking and its listening.
_FIRST, _LAST = 20000, 28999


def free_port() -> int:
    """Return a port of this machine that nobody listens at."""
    # Not the module's generator: a seed that a test sets would lead every process to one port.
    chance = random.SystemRandom()
    while True:
        port = chance.randint(_FIRST, _LAST)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
