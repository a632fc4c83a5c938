"""A package index for tests: serves a folder of wheels, or fails on demand."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from enum import Enum, auto
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

DRIP_BYTES = 1024
ENDLESS_BYTES = 10**9
DRIP_SECONDS = 0.2


class Behaviour(Enum):
    """How the index answers."""

    SERVES = auto()
    CUTS = auto()
    """Closes the connection in the middle of a wheel."""
    DRIPS = auto()
    """Sends a wheel so slowly that it never ends."""
    LACKS = auto()
    """Has no packages."""


class PackageIndex:
    """The index; `behaviour` may change while it runs."""

    def __init__(self, wheels: Path, url: str) -> None:
        self.wheels = wheels
        self.url = url
        self.behaviour = Behaviour.SERVES
        self.asked: list[str] = []
        """Paths of the requests."""
        self.dripping = threading.Event()
        """Set once a wheel is being sent slowly."""
        self.closing = threading.Event()

    def variables(self) -> dict[str, str]:
        """Returns environment variables that make pip use only this index, without a cache."""
        return {
            "PIP_CONFIG_FILE": "/dev/null",
            "PIP_INDEX_URL": f"{self.url}/simple",
            "PIP_EXTRA_INDEX_URL": "",
            "PIP_FIND_LINKS": "",
            "PIP_NO_CACHE_DIR": "1",
        }


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    index: PackageIndex


class _Handler(BaseHTTPRequestHandler):
    server: _Server

    @property
    def index(self) -> PackageIndex:
        return self.server.index

    def do_GET(self) -> None:
        index = self.index
        index.asked.append(self.path)
        name = self.path.rpartition("/")[2]
        wheel = index.wheels / name
        if index.behaviour is Behaviour.LACKS:
            self.send_error(404)
        elif name.endswith(".whl") and wheel.is_file():
            self._send_wheel(wheel.read_bytes())
        else:
            links = "".join(f'<a href="/files/{each.name}">{each.name}</a>' for each in index.wheels.glob("*.whl"))
            self._send(f"<!DOCTYPE html><html><body>{links}</body></html>".encode(), "text/html")

    def _send(self, body: bytes, kind: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _send_wheel(self, body: bytes) -> None:
        match self.index.behaviour:
            case Behaviour.CUTS:
                self._begin(len(body))
                self.wfile.write(body[: len(body) // 2])
                self.close_connection = True
            case Behaviour.DRIPS:
                self._begin(ENDLESS_BYTES)
                with suppress(ConnectionError):
                    self._drip(body)
            case _:
                self._send(body, "application/octet-stream")

    def _begin(self, size: int) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(size))
        self.end_headers()

    def _drip(self, body: bytes) -> None:
        while not self.index.closing.is_set():
            self.wfile.write(body[:DRIP_BYTES])
            self.wfile.flush()
            self.index.dripping.set()
            self.index.closing.wait(DRIP_SECONDS)

    def log_message(self, *_: object) -> None:
        """Does not log requests."""


@contextmanager
def package_index(wheels: Path) -> Iterator[PackageIndex]:
    """Serves a folder of wheels within the block."""
    server = _Server(("127.0.0.1", 0), _Handler)
    server.index = index = PackageIndex(wheels, f"http://127.0.0.1:{server.server_port}")
    serving = threading.Thread(target=server.serve_forever, daemon=True)
    serving.start()
    try:
        yield index
    finally:
        index.closing.set()
        server.shutdown()
        server.server_close()
        serving.join()
