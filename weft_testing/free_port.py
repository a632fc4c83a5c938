"""Free ports for servers that start later, or restart on the same port."""

import os
import random
import socket
import tempfile
from contextlib import ExitStack
from pathlib import Path

from weft.kernel.machine.file_replacement import lock_file

FIRST_PORT = 10_000
LAST_PORT = 19_999
"""Below the ephemeral ports (from 32,768 on Linux, from 49,152 on macOS), which another program may take before the
server starts, and below those that a runner uses for its engines (`runner_svc.backend.engine_process.FREE_PORTS`)."""
MAX_TRIES = 100


def free_port() -> int:
    """Returns a free TCP port of this machine. Raises OSError after MAX_TRIES taken ones."""
    return free_ports(1)


def free_ports(count: int) -> int:
    """Returns the first of `count` consecutive free ports, which are not reused by this user until all others were.

    Raises OSError as `free_port` does.
    """
    # A port stays free until its server starts, so random choices would occasionally give two servers the same one.
    with _given_file().open("a+") as given:
        lock_file(given, waits=True)
        given.seek(0)
        text = given.read()
        first = int(text) if text.isdigit() else random.SystemRandom().randint(FIRST_PORT, LAST_PORT)
        for _ in range(MAX_TRIES):
            if not FIRST_PORT <= first <= LAST_PORT + 1 - count:
                first = FIRST_PORT
            if _are_free(range(first, first + count)):
                given.truncate(0)
                given.write(str(first + count))
                return first
            first += 1
    raise OSError(f"{MAX_TRIES} times, a port between {FIRST_PORT} and {LAST_PORT} was taken")


def _given_file() -> Path:
    """Returns the file with the port to try next."""
    return Path(tempfile.gettempdir()) / f"weft-testing-ports-{os.getuid()}"


def _are_free(ports: range) -> bool:
    with ExitStack() as stack:
        try:
            for port in ports:
                stack.enter_context(socket.create_server(("127.0.0.1", port)))
        except OSError:
            return False
        return True
