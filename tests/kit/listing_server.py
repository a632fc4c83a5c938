"""A server like Ollama that lists and serves models; a test can change the list. It runs in a thread."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

OLLAMA_VERSION = "0.12.3"
WORDS = ("Hello", " from", " a", " server")


class ListingServer:
    """The state of the server; a test may change `models` while it runs."""

    def __init__(self, *models: str, is_ollama: bool) -> None:
        self.models = list(models)
        self.is_ollama = is_ollama
        self.port = 0

    @property
    def address(self) -> str:
        """HOST:PORT."""
        return f"127.0.0.1:{self.port}"

    def page(self, path: str) -> Any:
        """Returns the response to a GET; None: 404."""
        if path == "/v1/models":
            owner = "library" if self.is_ollama else "somebody"
            return {"object": "list", "data": [{"id": name, "owned_by": owner} for name in self.models]}
        return {"version": OLLAMA_VERSION} if path == "/api/version" and self.is_ollama else None


def _handler(server: ListingServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.0"

        def log_message(self, *_: Any) -> None:
            """Does not log requests."""

        def do_GET(self) -> None:
            page = server.page(self.path)
            self._answer(404 if page is None else 200, page)

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or b"{}")
            if self.path != "/v1/chat/completions" or body["model"] not in server.models:
                self._answer(404, {"error": {"message": f"model '{body.get('model')}' not found"}})
                return
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.end_headers()
            for word in WORDS:
                self._event(body["model"], {"content": word}, None)
            self._event(
                body["model"], {}, "stop", usage={"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}
            )
            self.wfile.write(b"data: [DONE]\n\n")

        def _event(self, model: str, delta: dict[str, str], reason: str | None, **more: Any) -> None:
            choice = {"index": 0, "delta": delta, "finish_reason": reason}
            event = {"id": "c", "object": "chat.completion.chunk", "model": model, "choices": [choice], **more}
            self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())

        def _answer(self, status: int, document: Any) -> None:
            body = json.dumps(document).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    return Handler


@contextmanager
def listing_server(*models: str, is_ollama: bool = True, port: int = 0) -> Iterator[ListingServer]:
    """Serves within the block; `port` 0: any free one."""
    server = ListingServer(*models, is_ollama=is_ollama)
    http = ThreadingHTTPServer(("127.0.0.1", port), _handler(server))
    http.daemon_threads = True
    server.port = http.server_address[1]
    thread = threading.Thread(target=http.serve_forever, daemon=True, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield server
    finally:
        http.shutdown()
        thread.join()
        http.server_close()
