"""A client as `docker run`: another process starts the command, and the client stays until it has ended.

    python container_client.py SOCKET COMMAND...

SIGTERM is passed on, as Docker does. `ContainerDaemon` of test_external_listeners.py is the other process.
"""

import json
import signal
import socket
import sys


def main() -> None:
    address, *command = sys.argv[1:]
    with socket.socket(socket.AF_UNIX) as daemon:
        daemon.connect(address)
        signal.signal(signal.SIGTERM, lambda *_: daemon.sendall(b"TERM\n"))
        daemon.sendall(json.dumps(command).encode() + b"\n")
        while daemon.recv(1024):
            pass


if __name__ == "__main__":
    main()
