"""Free ports for tests, also if several test processes share the machine."""

import contextlib
import random
import socket

# Below the ports that the system assigns, for example to every group's listeners, so that no other
# process gets a port between the request and the test's use of it.
_FIRST, _LAST = 20000, 28999


def free_port() -> int:
    # After a test set the seed, the module's generator would return the same port in every process.
    chance = random.SystemRandom()
    while True:
        port = chance.randint(_FIRST, _LAST)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
