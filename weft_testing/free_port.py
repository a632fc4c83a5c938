"""Ports for servers that are started later, or ended and started again on the same port."""

import random
import socket
from contextlib import ExitStack

FIRST_PORT = 20_000
LAST_PORT = 31_999
"""Below what the kernel gives to connections and to whoever asks for any port: Linux begins at 32,768, macOS at 49,152.
A port from there may be somebody else's by the time that the server starts."""
MAX_TRIES = 100


def free_port() -> int:
    """A TCP port of this machine on which nobody listens. Raises OSError when MAX_TRIES of them were taken."""
    return free_ports(1)


def free_ports(count: int) -> int:
    """The first of that many ports in a row on which nobody listens. Raises OSError as `free_port` does."""
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
