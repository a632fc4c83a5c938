"""HTTP server around an engine that is a library, with vLLM's routes for sleep. Standard library only.

`text_routes` and `media_routes` define the routes for requests.
"""

import argparse
import hmac
import json
import os
import re
import select
import socket
import sys
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from enum import Enum, auto
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

KEY_VARIABLE = "WEFT_ENGINE_KEY"
NO_LIBRARY = "the library cannot be imported:"
"""Start of the log line for a library that cannot be imported."""
NO_MODEL = "the model cannot be loaded"
"""Start of the log line for a failed load; the type of the error in brackets, a colon and the message follow."""
INVALID_REQUEST = "invalid_request_error"
INVALID_FIELD = "invalid_field"
"""The request is invalid; the message starts with the name of the field and a colon."""
TOO_LONG = "exceed_context_size_error"
UNSUPPORTED = "not_supported_error"
BUSY = "unavailable_error"
FAILED = "server_error"
OUT_OF_MEMORY = "out_of_memory"
LOOP = "repeated_line_loop"
"""The engine has ended an answer that repeats itself."""
MAX_BODY_BYTES = 80 * 1024 * 1024
"""Above the mesh's message limit of 64 MiB."""
LOOK_SECONDS = 0.02
"""Minimum interval between checks whether a caller has disconnected."""
LOAD_STEP = 0.05
"""Loaded share of the model between two progress lines."""
_STATUS = {UNSUPPORTED: 501, BUSY: 503, FAILED: 500, OUT_OF_MEMORY: 500}
_FIELD = re.compile(rb'; name="([^"]*)"')


class GoneError(Exception):
    """The caller has disconnected."""


class RefusedError(Exception):
    """A rejected request."""

    def __init__(self, message: str, kind: str = INVALID_REQUEST) -> None:
        super().__init__(message)
        self.kind = kind


class FieldRefusedError(RefusedError):
    """A request rejected because of one of its fields."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}", INVALID_FIELD)


class Caller:
    """The caller of a request: its response stream, and whether it is still connected."""

    def __init__(self, handler: "Handler") -> None:
        self._handler = handler
        self._looked, self._gone = 0.0, False
        self.has_begun = False
        """Whether a part of the stream was sent."""

    def is_gone(self) -> bool:
        """Whether the caller has disconnected."""
        if not self._gone and (now := time.monotonic()) - self._looked >= LOOK_SECONDS:
            self._looked, connection = now, self._handler.connection
            try:
                readable = select.select([connection], [], [], 0)[0]
                self._gone = bool(readable) and not connection.recv(1, socket.MSG_PEEK)
            except OSError:
                self._gone = True
        return self._gone

    def raise_if_gone(self) -> None:
        """Raises GoneError if the caller has disconnected."""
        if self.is_gone():
            raise GoneError

    def send(self, event: dict[str, Any]) -> None:
        """Sends an event of the stream."""
        self._write(b"data: " + json.dumps(event).encode() + b"\n\n")

    def end(self) -> None:
        """Ends the stream."""
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


class Turn(Enum):
    """The engine slots that a request occupies."""

    NONE = auto()
    ONE = auto()
    ALL = auto()


@dataclass(frozen=True, slots=True)
class Route:
    """The handler of a path."""

    answer: Callable[[dict[str, Any], Caller], dict[str, Any] | None]
    """Returns the response to a request body; None: it was streamed to the caller. Files of a form are bytes."""
    turn: Turn = Turn.ONE


class Engine(ABC):
    """A loaded model."""

    slots = 1
    """Number of concurrent requests, each in a thread."""

    @property
    @abstractmethod
    def routes(self) -> Mapping[str, Route]:
        """The handlers of requests by path."""

    def props(self) -> dict[str, Any]:
        """Returns properties to report in addition to its slots."""
        return {}

    def sleep(self) -> None:
        """Frees the memory of the model. Called without running requests."""
        raise RefusedError("this engine frees its memory only when it ends", UNSUPPORTED)

    def wake(self) -> None:
        """Loads the model again after `sleep`."""
        raise RefusedError("this engine does not sleep", UNSUPPORTED)


class _Turns:
    """The slots of the engine: a request occupies one, a change of the whole engine all of them."""

    def __init__(self, slots: int) -> None:
        self._slots, self._free, self._whole = slots, threading.Semaphore(slots), threading.Semaphore(1)

    @contextmanager
    def hold(self, turn: Turn, caller: Caller) -> Iterator[None]:
        """Occupies the slots that a request needs. Raises GoneError if the caller disconnects before they are free."""
        with ExitStack() as held:
            if turn is not Turn.NONE:
                with ExitStack() as queued:
                    # Queue behind a request that waits for all slots, or it might never get them.
                    _acquire(self._whole, caller)
                    queued.callback(self._whole.release)
                    for _ in range(self._slots if turn is Turn.ALL else 1):
                        _acquire(self._free, caller)
                        held.callback(self._free.release)
                    if turn is Turn.ALL:
                        held.push(queued.pop_all())
            yield


def _acquire(lock: threading.Semaphore, caller: Caller) -> None:
    while not lock.acquire(timeout=LOOK_SECONDS):
        caller.raise_if_gone()


class Server(ThreadingHTTPServer):
    """The server of a loaded engine."""

    daemon_threads = True

    def __init__(self, engine: Engine, port: int) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.engine, self.key, self.turns = engine, os.environ.get(KEY_VARIABLE, ""), _Turns(engine.slots)
        self.routes = {
            **engine.routes,
            "/sleep": Route(_answer_of(engine.sleep), Turn.ALL),
            "/wake_up": Route(_answer_of(engine.wake), Turn.ALL),
        }

    def handle_error(self, request: object, client_address: object) -> None:
        """Does not log broken connections."""


class Handler(BaseHTTPRequestHandler):
    """Handles one connection."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: Server

    def log_message(self, *_: object) -> None:
        """Does not log requests."""

    def do_GET(self) -> None:
        """Reports health and properties of the engine."""
        if self.path == "/health":
            self._answer(200, {"status": "ok"})
        elif self.path == "/props":
            engine = self.server.engine
            self._answer(200, {"total_slots": engine.slots, **engine.props()})
        else:
            self._refuse(404, "there is no such route", "not_found_error")

    def do_POST(self) -> None:
        """Serves a request."""
        length = int(self.headers.get("Content-Length") or 0)
        if length > MAX_BODY_BYTES:
            self.close_connection = True
            self._refuse(413, f"a request has at most {MAX_BODY_BYTES} bytes", INVALID_REQUEST)
            return
        raw = self.rfile.read(length)
        if not hmac.compare_digest(
            self.headers.get("Authorization", "").encode(), f"Bearer {self.server.key}".encode()
        ):
            self._refuse(401, "the key is wrong", "authentication_error")
            return
        caller = Caller(self)
        try:
            self._serve(_body(raw, self.headers.get("Content-Type", "")), caller)
        except GoneError:
            self.close_connection = True
        except RefusedError as refused:
            self._end(caller, _STATUS.get(refused.kind, 400), str(refused), refused.kind)
        except Exception as error:  # noqa: BLE001 - any error of the library; a disconnect may have aborted its work
            self._fail(caller, error)

    def _serve(self, body: dict[str, Any], caller: Caller) -> None:
        route = self.server.routes.get(self.path)
        if route is None:
            self._refuse(404, "there is no such route", "not_found_error")
            return
        with self.server.turns.hold(route.turn, caller):
            document = route.answer(body, caller)
        if document is None:
            caller.end()
        else:
            self._answer(200, document)

    def _fail(self, caller: Caller, error: Exception) -> None:
        message = " ".join(str(error).split()) or type(error).__name__
        if caller.is_gone():
            self.close_connection = True
            return
        traceback.print_exception(error)
        self._end(caller, 500, message, FAILED)

    def _end(self, caller: Caller, status: int, message: str, kind: str) -> None:
        """Sends an error as the response, or as the last event of a stream."""
        if not caller.has_begun:
            self._refuse(status, message, kind)
            return
        self.close_connection = True
        with suppress(GoneError):
            caller.send({"error": {"code": status, "message": message, "type": kind}})

    def _refuse(self, status: int, message: str, kind: str) -> None:
        self._answer(status, {"error": {"code": status, "message": message, "type": kind}})

    def _answer(self, status: int, document: dict[str, Any]) -> None:
        data = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def _answer_of(work: Callable[[], None]) -> Callable[[dict[str, Any], Caller], dict[str, Any]]:
    def answer(_: dict[str, Any], __: Caller) -> dict[str, Any]:
        work()
        return {}

    return answer


def _body(raw: bytes, content_type: str) -> dict[str, Any]:
    """Parses a request body: JSON, or a form with texts, bytes for files, and lists for names like `NAME[]`."""
    _, is_form, boundary = content_type.partition("multipart/form-data; boundary=")
    if not is_form:
        body: dict[str, Any] = json.loads(raw or b"{}")
        return body
    fields: dict[str, Any] = {}
    mark, begin = b"\r\n--" + boundary.encode(), raw.find(b"\r\n")
    while (end := raw.find(mark, begin)) >= 0:
        content = raw.index(b"\r\n\r\n", begin)
        head, data = raw[begin:content], raw[content + 4 : end]
        found = _FIELD.search(head)
        name = found[1].decode() if found is not None else ""
        value = data if b"; filename=" in head else data.decode()
        if name.endswith("[]"):
            fields.setdefault(name, []).append(value)
        else:
            fields[name] = value
        begin = end + len(mark)
    return fields


def say(line: str) -> None:
    """Writes a line of output immediately."""
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


class LoadReports:
    """Prints how much of the model is loaded."""

    def __init__(self) -> None:
        self._said = -1.0

    def report(self, share: float) -> None:
        """Prints the loaded share, 0 to 1, if it has grown by LOAD_STEP or loading is complete."""
        if share - self._said >= LOAD_STEP or share >= 1.0 > self._said:
            self._said = share
            say(f"loaded {share:.2f} of the model")


def import_library(name: str) -> Any:
    """Imports a library. Raises ImportError for an OSError or RuntimeError too."""
    try:
        return import_module(name)
    except (OSError, RuntimeError) as error:
        raise ImportError(f"{type(error).__name__}: {error}") from error


def program_parser(name: str, description: str | None, *, needs_model: bool = True) -> argparse.ArgumentParser:
    """Returns the argument parser of a server program with the common flags."""
    parser = argparse.ArgumentParser(prog=name, description=description)
    parser.add_argument("--port", type=int, default=0, help="0: a free one")
    parser.add_argument("--threads", type=positive, default=1, help="threads per request")
    parser.add_argument("--slots", type=positive, default=1, help="concurrent requests")
    parser.add_argument("--model", required=needs_model, type=Path, help="file or folder of the model")
    return parser


def positive(text: str) -> int:
    """Parses an integer of at least 1."""
    if (number := int(text)) < 1:
        raise ValueError(text)
    return number


def numbers(text: str) -> tuple[float, ...]:
    """Parses comma-separated numbers."""
    return tuple(map(float, text.split(",")))


def serve(load: Callable[[argparse.Namespace], Engine], options: argparse.Namespace) -> NoReturn:
    """Loads the engine, prints the server's address, and serves until the process ends."""
    try:
        engine = load(options)
    except ImportError as error:
        sys.exit(f"{NO_LIBRARY} {' '.join(str(error).split())}")
    except RefusedError as error:
        sys.exit(f"{NO_MODEL} [{error.kind}]: {' '.join(str(error).split())}")
    server = Server(engine, options.port)
    say(f"listening on http://127.0.0.1:{server.server_port}")
    say("the engine is ready")
    server.serve_forever()
    sys.exit()
