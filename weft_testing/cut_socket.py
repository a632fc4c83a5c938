"""A Unix socket in front of another one that can interrupt connections, like a network that loses packets."""

import select
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

CHUNK_BYTES = 65_536
POLL_SECONDS = 0.05


class CutSocket:
    """Forwards connections until it is cut; then nothing passes, and new connections get no answer."""

    def __init__(self, listen: Path, target: Path) -> None:
        self._target = target
        self._open = threading.Event()
        self._open.set()
        self._stopped = threading.Event()
        self._forgotten = 0
        """How often the open connections were forgotten."""
        self._threads: list[threading.Thread] = []
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind(str(listen))
        self._server.listen()
        self._server.settimeout(POLL_SECONDS)
        self._begin(self._accept)

    def cut(self) -> None:
        """Blocks both directions from now on."""
        self._open.clear()

    def heal(self, *, forgets: bool = False) -> None:
        """Forwards everything again.

        `forgets`: the interrupted connections end on both sides and lose pending data, as behind a restarted firewall;
        otherwise pending data is delivered.
        """
        if forgets:
            self._forgotten += 1
        self._open.set()

    def stop(self) -> None:
        """Closes every connection, and waits for the threads."""
        self._stopped.set()
        for thread in self._threads:
            thread.join()
        self._server.close()

    def _begin(self, work: Callable[..., None], *arguments: object) -> None:
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        thread = threading.Thread(target=work, args=arguments, daemon=True)
        thread.start()
        self._threads.append(thread)

    def _accept(self) -> None:
        while not self._stopped.is_set():
            if not self._open.wait(POLL_SECONDS):
                continue
            with suppress(TimeoutError):
                client, _ = self._server.accept()
                self._begin(self._forward, client, self._forgotten)

    def _forward(self, client: socket.socket, forgotten: int) -> None:
        """Forwards a connection to its end. A missing target ends it."""
        with client, socket.socket(socket.AF_UNIX) as target, suppress(OSError):
            target.connect(str(self._target))
            other = {client: target, target: client}
            while not self._stopped.is_set() and self._forgotten == forgotten:
                if not self._open.wait(POLL_SECONDS):
                    continue
                for ready in select.select(list(other), [], [], POLL_SECONDS)[0]:
                    if not self._open.is_set() or self._forgotten != forgotten:
                        break
                    data = ready.recv(CHUNK_BYTES)
                    if not data:
                        return
                    other[ready].sendall(data)


@contextmanager
def cut_socket(listen: Path, target: Path) -> Iterator[CutSocket]:
    """Runs a CutSocket at `listen` in front of the socket `target`."""
    found = CutSocket(listen, target)
    try:
        yield found
    finally:
        found.stop()
