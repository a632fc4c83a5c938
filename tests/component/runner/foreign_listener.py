"""Another program on an engine's port: it accepts connections and records what it receives.

    python foreign_listener.py PORT RECORD

It prints a line once it listens and one per connection, and answers everything with 200.
"""

import socket
import sys
from pathlib import Path

ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"


def main() -> None:
    port, record = int(sys.argv[1]), Path(sys.argv[2])
    with socket.socket() as listener, record.open("ab", buffering=0) as received:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind(("127.0.0.1", port))
        listener.listen(128)
        print("listening", flush=True)  # noqa: T201 - the line that the test awaits
        while True:
            connection, _ = listener.accept()
            print("accepted", flush=True)  # noqa: T201 - as above
            with connection:
                connection.settimeout(10.0)
                while data := connection.recv(65536):
                    received.write(data)
                    connection.sendall(ANSWER)


if __name__ == "__main__":
    main()
