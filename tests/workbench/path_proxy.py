"""A reverse proxy that publishes a mesh under paths, as nginx does: `location /weft/ { proxy_pass http://mesh/; }`."""

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from socketserver import StreamRequestHandler, ThreadingTCPServer
from threading import Thread
from urllib.parse import urlsplit


class _Server(ThreadingTCPServer):
    daemon_threads = True


@contextmanager
def publishing(url: str, *paths: str) -> Iterator[str]:
    """Publishes the mesh of that URL below each path, such as `/weft/`, and nothing else; the URL of the proxy."""
    mesh = urlsplit(url)

    class Handler(StreamRequestHandler):
        def handle(self) -> None:
            method, asked, version = self.rfile.readline().decode("latin-1").split() or ("", "", "")
            fields = list(iter(self.rfile.readline, b"\r\n")) if method else []
            path = next((path for path in paths if asked.startswith(path)), None)
            if path is None:
                self.wfile.write(b"HTTP/1.1 404 Not Found\r\nConnection: close\r\nContent-Length: 0\r\n\r\n")
                return
            # A connection has one request: the path of a second one would not be changed.
            kept = [field for field in fields if not field.lower().startswith(b"connection:")]
            head = f"{method} /{asked.removeprefix(path)} {version}\r\nConnection: close\r\n".encode("latin-1")
            with socket.create_connection((str(mesh.hostname), mesh.port)) as upstream:
                upstream.sendall(b"".join((head, *kept, b"\r\n")))
                Thread(target=_copy, args=(self.rfile.read1, upstream), daemon=True).start()
                _copy(upstream.recv, self.connection)

    with _Server(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def _copy(read: Callable[[int], bytes], sink: socket.socket) -> None:
    """Sends on what is read; at its end, which is also that of a caller who goes away, nothing more is sent."""
    with suppress(OSError):
        while data := read(65_536):
            sink.sendall(data)
    with suppress(OSError):
        sink.shutdown(socket.SHUT_RDWR)
