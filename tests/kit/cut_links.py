"""Cuts the links of a torture network, and prints who reaches whom: `unshare --net python -m kit.cut_links FOLDER`.

A line per kind of cut, in JSON: its name, whether "a" reached "b" and "b" reached "a" under it, and both afterwards.
"""

import json
import subprocess
import sys
import time
from pathlib import Path

from tools.torture.network import CutKind, Network, Place, joined

PORT = 7400
SENT_BYTES = 20_000
"""So many that a slow link does not carry them in time."""
LIMIT_SECONDS = 0.4
_SERVE = f"""
import socket
server = socket.create_server(("0.0.0.0", {PORT}))
print(flush=True)
while True:
    connection, _ = server.accept()
    connection.sendall(bytes({SENT_BYTES}))
    connection.close()
"""
_REACH = f"""
import socket, sys
connection = socket.create_connection((sys.argv[1], {PORT}), {LIMIT_SECONDS})
connection.settimeout({LIMIT_SECONDS})
received = 0
while received < {SENT_BYTES}:
    received += len(connection.recv(65536))
"""


def _serve(place: Place) -> "subprocess.Popen[bytes]":
    server = subprocess.Popen([*place.within, sys.executable, "-I", "-c", _SERVE], stdout=subprocess.PIPE)
    assert server.stdout is not None
    server.stdout.readline()
    return server


def _reaches(place: Place, other: Place) -> bool:
    command = [*place.within, sys.executable, "-I", "-c", _REACH, other.address]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def _both(network: Network) -> list[bool]:
    first, second = network.places["a"], network.places["b"]
    return [_reaches(first, second), _reaches(second, first)]


def _until_healed(network: Network) -> list[bool]:
    """A link that was down carries packets only some time after it is up."""
    deadline = time.monotonic() + 5.0
    while not all(found := _both(network)) and time.monotonic() < deadline:
        pass
    return found


def main(folder: Path) -> None:
    """Tries every kind."""
    with joined(["a", "b"], folder) as network:
        servers = [_serve(place) for place in network.places.values()]
        try:
            for kind in CutKind:
                network.cut(kind, "a", "b")
                during = _both(network)
                network.heal(kind, "a", "b")
                sys.stdout.write(json.dumps([kind.value, during, _until_healed(network)]) + "\n")
        finally:
            for server in servers:
                server.kill()
                server.communicate()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
