"""Free ports for servers that start later, or restart on the same port."""

import random
import socket
from contextlib import ExitStack

FIRST_PORT = 20_000
LAST_PORT = 31_999
"""Below the ephemeral ports (Linux begins at 32,768, macOS at 49,152), which another program may take before the server
starts."""
MAX_TRIES = 100


def free_port() -> int:
    """Returns a free TCP port of this machine. Raises OSError after MAX_TRIES taken ones."""
    return free_ports(1)


def free_ports(count: int) -> int:
    """Returns the first of `count` consecutive free ports. Raises OSError as `free_port` does."""
    # Not the shared generator: test processes that seed it alike would all try the same ports.
    for first in random.SystemRandom().sample(range(FIRST_PORT, LAST_PORT + 2 - count), MAX_TRIES):
        if _are_free(range(first, first + count)):
            return first
    raise OSError(f"{MAX_TRIES} times, a port between {FIRST_PORT} and {LAST_PORT} was taken")


def _are_free(ports: range) -> bool:
    with ExitStack() as stack:
        try:
            for port in ports:
                stack.enter_context(socket.create_server(("127.0.0.1", port)))
        except OSError:
            return False
        return True
