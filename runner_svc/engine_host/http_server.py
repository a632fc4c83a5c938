"""An HTTP server over an engine that is a library: llama.cpp's routes and words, one request at a time.

It needs the standard library alone. Chats come as rendered prompts, by /v1/completions.
"""

import hmac
import json
import os
import select
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NoReturn, Protocol

KEY_VARIABLE = "WEFT_ENGINE_KEY"
"""Environment variable with the key of the server's callers."""
NO_LIBRARY = "the library cannot be imported:"
"""How the line begins that says so."""
TOO_LONG = "exceed_context_size_error"
UNSUPPORTED = "not_supported_error"
MAX_BODY_BYTES = 64 * 1024 * 1024
LOOK_SECONDS = 0.02
"""Shortest interval in which it is looked whether a caller has left."""
_STATUS = {UNSUPPORTED: 501}


class GoneError(Exception):
    """The caller has left."""


class RefusedError(Exception):
    """A request that is not served."""

    def __init__(self, message: str, kind: str = "invalid_request_error") -> None:
        super().__init__(message)
        self.kind = kind


class Caller:
    """Who asked for an answer: its stream, and whether it is still there."""

    def __init__(self, handler: "Handler") -> None:
        self._handler = handler
        self._looked, self._gone = 0.0, False
        self.has_begun = False
        """Whether a part of the stream was sent."""

    def is_gone(self) -> bool:
        """Whether the caller has left."""
        if not self._gone and (now := time.monotonic()) - self._looked >= LOOK_SECONDS:
            self._looked, connection = now, self._handler.connection
            try:
                readable = select.select([connection], [], [], 0)[0]
                self._gone = bool(readable) and not connection.recv(1, socket.MSG_PEEK)
            except OSError:
                self._gone = True
        return self._gone

    def raise_if_gone(self) -> None:
        """Raise GoneError if the caller has left."""
        if self.is_gone():
            raise GoneError

    def send_choice(self, index: int, text: str, finish_reason: str | None) -> None:
        """Send the next text of a choice."""
        self.send({"choices": [{"index": index, "text": text, "finish_reason": finish_reason}]})

    def send(self, event: dict[str, Any]) -> None:
        """Send an event of the stream."""
        self._write(b"data: " + json.dumps(event).encode() + b"\n\n")

    def end(self) -> None:
        """End the stream."""
        self._write(b"data: [DONE]\n\n")
        self._handler.wfile.write(b"0\r\n\r\n")

    def _write(self, data: bytes) -> None:
        try:
            if not self.has_begun:
                self.has_begun = True
                self._handler.send_response(200)
                self._handler.send_header("Content-Type", "text/event-stream")
                self._handler.send_header("Transfer-Encoding", "chunked")
                self._handler.end_headers()
            self._handler.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))
        except OSError as error:
            self._gone = True
            raise GoneError from error


class Engine(Protocol):
    """A loaded model. Only one thread at a time generates, embeds or forgets."""

    context_tokens: int

    def complete(self, body: dict[str, Any], caller: Caller) -> None:
        """Stream the continuations of the prompts of a request."""

    def embed(self, texts: list[str], caller: Caller) -> dict[str, Any]:
        """Returns the answer to a request for embeddings."""

    def tokens_of(self, text: str, *, add_special: bool) -> list[int]:
        """Returns the tokens of a text; called in any thread."""

    def piece_of(self, token: int) -> bytes:
        """Returns the bytes of a token; called in any thread."""

    def forget(self) -> int:
        """Erase the cached prompt; returns its number of tokens."""


class Server(ThreadingHTTPServer):
    """The server of a loaded engine."""

    daemon_threads = True

    def __init__(self, engine: Engine, port: int) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.engine, self.key, self.turn = engine, os.environ.get(KEY_VARIABLE, ""), threading.Lock()

    def handle_error(self, request: object, client_address: object) -> None:
        """Say nothing of connections that break."""


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: Server

    def log_message(self, *_: object) -> None:
        """Say nothing of requests."""

    def do_GET(self) -> None:
        """Answer whether the engine works, and what it has."""
        if self.path == "/health":
            self._answer(200, {"status": "ok"})
        elif self.path == "/props":
            settings = {"n_ctx": self.server.engine.context_tokens}
            self._answer(200, {"total_slots": 1, "default_generation_settings": settings})
        else:
            self._refuse(404, "there is no such route", "not_found_error")

    def do_POST(self) -> None:
        """Serve a request."""
        length = int(self.headers.get("Content-Length") or 0)
        if length > MAX_BODY_BYTES:
            self.close_connection = True
            self._refuse(413, f"a request has at most {MAX_BODY_BYTES} bytes", "invalid_request_error")
            return
        raw = self.rfile.read(length)
        if not hmac.compare_digest(
            self.headers.get("Authorization", "").encode(), f"Bearer {self.server.key}".encode()
        ):
            self._refuse(401, "the key is wrong", "authentication_error")
            return
        caller = Caller(self)
        try:
            self._serve(self.path.partition("?")[0], json.loads(raw or b"{}"), caller)
        except GoneError:
            self.close_connection = True
        except RefusedError as refused:
            self._refuse(_STATUS.get(refused.kind, 400), str(refused), refused.kind)
        except Exception as error:  # noqa: BLE001 - whatever the library raises; a caller who left may have ended its work
            self._fail(caller, error)

    def _serve(self, path: str, body: dict[str, Any], caller: Caller) -> None:
        engine = self.server.engine
        if path == "/tokenize":
            self._answer(200, {"tokens": _tokens(engine, body)})
            return
        while not self.server.turn.acquire(timeout=LOOK_SECONDS):
            caller.raise_if_gone()
        try:
            if path == "/v1/completions":
                engine.complete(body, caller)
                caller.end()
            elif path == "/v1/embeddings":
                given = body["input"]
                self._answer(200, engine.embed([given] if isinstance(given, str) else given, caller))
            elif path == "/slots/0":
                self._answer(200, {"n_erased": engine.forget()})
            else:
                self._refuse(404, "there is no such route", "not_found_error")
        finally:
            self.server.turn.release()

    def _fail(self, caller: Caller, error: Exception) -> None:
        message = " ".join(str(error).split()) or type(error).__name__
        if caller.is_gone():
            self.close_connection = True
            return
        traceback.print_exception(error)
        if caller.has_begun:
            self.close_connection = True
            caller.send({"error": {"code": 500, "message": message, "type": "server_error"}})
        else:
            self._refuse(500, message, "server_error")

    def _refuse(self, status: int, message: str, kind: str) -> None:
        self._answer(status, {"error": {"code": status, "message": message, "type": kind}})

    def _answer(self, status: int, document: dict[str, Any]) -> None:
        data = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def _tokens(engine: Engine, body: dict[str, Any]) -> list[Any]:
    ids = engine.tokens_of(body["content"], add_special=bool(body.get("add_special")))
    return [{"id": token, "piece": list(engine.piece_of(token))} for token in ids] if body.get("with_pieces") else ids


def say(line: str) -> None:
    """Write a line of output at once."""
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def serve(load: Callable[[], Engine], port: int) -> NoReturn:
    """Load the engine, say where the server listens, and serve until the process ends."""
    try:
        engine = load()
    except ImportError as error:
        sys.exit(f"{NO_LIBRARY} {error}")
    server = Server(engine, port)
    say(f"listening on http://127.0.0.1:{server.server_port}")
    say("the engine is ready")
    server.serve_forever()
    sys.exit()
