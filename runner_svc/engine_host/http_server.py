"""An HTTP server over an engine that is a library: llama.cpp's routes and words, and vLLM's for sleep.

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
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import import_module
from typing import Any, NoReturn

KEY_VARIABLE = "WEFT_ENGINE_KEY"
"""Environment variable with the key of the server's callers."""
NO_LIBRARY = "the library cannot be imported:"
"""How the line begins that says so."""
NO_MODEL = "the model cannot be loaded:"
"""How the line begins that says why a load was refused."""
TOO_LONG = "exceed_context_size_error"
UNSUPPORTED = "not_supported_error"
BUSY = "unavailable_error"
LOOP = "repeated_line_loop"
"""The engine has ended an answer that repeats itself."""
MAX_BODY_BYTES = 64 * 1024 * 1024
LOOK_SECONDS = 0.02
"""Shortest interval in which it is looked whether a caller has left."""
LOAD_STEP = 0.05
"""Shares of the model after which a line says how much is loaded."""
REQUEST_FIELDS = frozenset({
    *("prompt", "n", "max_tokens", "seed", "stop", "logit_bias", "grammar", "json_schema", "add_special", "stream"),
    *("stream_options", "return_progress", "cache_prompt", "cache_salt", "id_slot", "model", "ends_loops"),
})  # fmt: skip
"""Fields of a completion; the others are parameters of the library's sampling."""
COMPLETIONS = "/v1/completions"
EMBEDDINGS = "/v1/embeddings"
_OF_REQUESTS = frozenset({COMPLETIONS, EMBEDDINGS})
_STATUS = {UNSUPPORTED: 501, BUSY: 503}


class GoneError(Exception):
    """The caller has left."""


class RefusedError(Exception):
    """A request that is not served."""

    def __init__(self, message: str, kind: str = "invalid_request_error") -> None:
        super().__init__(message)
        self.kind = kind


@dataclass(slots=True)
class Usage:
    """The figures of a request."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    tokenize_seconds: float = 0.0
    """For turning the prompts into tokens."""
    prompt_seconds: float = 0.0
    """To the first token of each choice, from the engine's first work on it."""
    decode_seconds: float = 0.0
    """From there to the last token."""
    is_undivided: bool = False
    """Whether a choice came in one piece, so that `decode_seconds` has the time of its prompt too."""


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

    def send_progress(self, total: int, processed: int, cached: int = 0) -> None:
        """Send the progress of a prefill, in tokens."""
        self.send({"choices": [], "prompt_progress": {"total": total, "cache": cached, "processed": processed}})

    def send_usage(self, usage: Usage) -> None:
        """Send the figures of the request."""
        tokens: dict[str, Any] = {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        }
        timings = {"tokenize_ms": usage.tokenize_seconds * 1e3}
        if usage.is_undivided:
            timings["undivided_ms"] = (usage.prompt_seconds + usage.decode_seconds) * 1e3
        else:
            timings |= {"prompt_ms": usage.prompt_seconds * 1e3, "predicted_ms": usage.decode_seconds * 1e3}
        self.send({"choices": [], "usage": tokens, "timings": timings})

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


class Engine(ABC):
    """A loaded model. No more threads generate, embed, forget or sleep at a time than it has slots."""

    context_tokens: int
    slots = 1
    """Number of requests that it works on at once."""

    @abstractmethod
    def complete(self, body: dict[str, Any], caller: Caller) -> None:
        """Stream the continuations of the prompts of a request, and its usage."""

    @abstractmethod
    def tokens_of(self, text: str, *, add_special: bool) -> list[int]:
        """Returns the tokens of a text; called in any thread."""

    @abstractmethod
    def piece_of(self, token: int) -> bytes:
        """Returns the bytes of a token; called in any thread."""

    @abstractmethod
    def forget(self) -> int:
        """Erase the cached prompts; returns their number of tokens. No request runs."""

    def embed(self, texts: list[str], caller: Caller) -> dict[str, Any]:
        """Returns the answer to a request for embeddings."""
        del texts, caller
        raise RefusedError("this engine gives no embeddings", UNSUPPORTED)

    def sleep(self) -> None:
        """Free the memory of the model. No request runs."""
        raise RefusedError("the memory of this engine is freed by ending it", UNSUPPORTED)

    def wake(self) -> None:
        """Load the model again after `sleep`."""
        raise RefusedError("this engine does not sleep", UNSUPPORTED)


class _Turns:
    """The slots of the engine: a request has one, what changes the whole engine has all."""

    def __init__(self, slots: int) -> None:
        self._slots, self._free, self._whole = slots, threading.Semaphore(slots), threading.Semaphore(1)

    @contextmanager
    def one(self, caller: Caller) -> Iterator[None]:
        """Hold a slot. Raises GoneError where the caller leaves before there is one."""
        # Behind one who waits for all of them, who might never get them otherwise.
        _acquire(self._whole, caller)
        try:
            _acquire(self._free, caller)
        finally:
            self._whole.release()
        try:
            yield
        finally:
            self._free.release()

    @contextmanager
    def all(self, caller: Caller) -> Iterator[None]:
        """Hold every slot, once the running requests have ended. Raises as `one`."""
        with ExitStack() as held:
            _acquire(self._whole, caller)
            held.callback(self._whole.release)
            for _ in range(self._slots):
                _acquire(self._free, caller)
                held.callback(self._free.release)
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
            engine = self.server.engine
            settings = {"n_ctx": engine.context_tokens}
            self._answer(200, {"total_slots": engine.slots, "default_generation_settings": settings})
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
            self._end(caller, _STATUS.get(refused.kind, 400), str(refused), refused.kind)
        except Exception as error:  # noqa: BLE001 - whatever the library raises; a caller who left may have ended its work
            self._fail(caller, error)

    def _serve(self, path: str, body: dict[str, Any], caller: Caller) -> None:
        engine = self.server.engine
        if path == "/tokenize":
            self._answer(200, {"tokens": _tokens(engine, body)})
            return
        turns = self.server.turns
        with turns.one(caller) if path in _OF_REQUESTS else turns.all(caller):
            if path == COMPLETIONS:
                engine.complete(body, caller)
                caller.end()
            elif path == EMBEDDINGS:
                given = body["input"]
                self._answer(200, engine.embed([given] if isinstance(given, str) else given, caller))
            elif path == "/slots/0":
                self._answer(200, {"n_erased": engine.forget()})
            elif path == "/sleep":
                engine.sleep()
                self._answer(200, {})
            elif path == "/wake_up":
                engine.wake()
                self._answer(200, {})
            else:
                self._refuse(404, "there is no such route", "not_found_error")

    def _fail(self, caller: Caller, error: Exception) -> None:
        message = " ".join(str(error).split()) or type(error).__name__
        if caller.is_gone():
            self.close_connection = True
            return
        traceback.print_exception(error)
        self._end(caller, 500, message, "server_error")

    def _end(self, caller: Caller, status: int, message: str, kind: str) -> None:
        """Answer with an error, or end the answer by it."""
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


def _tokens(engine: Engine, body: dict[str, Any]) -> list[Any]:
    ids = engine.tokens_of(body["content"], add_special=bool(body.get("add_special")))
    return [{"id": token, "piece": list(engine.piece_of(token))} for token in ids] if body.get("with_pieces") else ids


def say(line: str) -> None:
    """Write a line of output at once."""
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


class LoadReports:
    """Lines that say how much of the model is loaded."""

    def __init__(self) -> None:
        self._said = -1.0

    def report(self, share: float) -> None:
        """Say the loaded share, 0 to 1, where it has grown by LOAD_STEP or is the whole."""
        if share - self._said >= LOAD_STEP or share >= 1.0 > self._said:
            self._said = share
            say(f"loaded {share:.2f} of the model")


def prompts_of(body: dict[str, Any]) -> list[str | list[int]]:
    """Returns the prompts of a completion: texts, or the ids of tokens."""
    given = body["prompt"] if isinstance(body["prompt"], list) else [body["prompt"]]
    return [given] if given and isinstance(given[0], int) else given


def check_prompt(tokens: Sequence[object], context_tokens: int, vocabulary: int | None = None) -> None:
    """Raise RefusedError for a prompt that is empty, has ids that are no token's, or fills the context."""
    if not tokens:
        raise RefusedError("prompt: must have at least one token")
    if vocabulary is not None and not all(isinstance(token, int) and 0 <= token < vocabulary for token in tokens):
        raise RefusedError(f"prompt: token ids must be 0 to {vocabulary - 1}")
    if len(tokens) >= context_tokens:
        message = f"the prompt has {len(tokens)} tokens; the context of this model has {context_tokens}"
        raise RefusedError(message, TOO_LONG)


def sampling_of(body: dict[str, Any], known: frozenset[str], library: str) -> dict[str, Any]:
    """Returns the parameters of sampling in a completion. Raises RefusedError for one that the library lacks."""
    sampling = {name: value for name, value in body.items() if name not in REQUEST_FIELDS}
    for name in sampling.keys() - known:
        raise RefusedError(f"{name}: {library} has no such parameter")
    return sampling


def token_limit(body: dict[str, Any], prompt_tokens: int, context_tokens: int) -> int:
    """Returns the most tokens of an answer."""
    room = context_tokens - prompt_tokens
    return room if body.get("max_tokens") is None else min(int(body["max_tokens"]), room)


def import_library(name: str) -> Any:
    """Returns the module of a library. Raises ImportError."""
    try:
        return import_module(name)
    except (OSError, RuntimeError) as error:
        raise ImportError(f"{type(error).__name__}: {error}") from error


def serve(load: Callable[[], Engine], port: int) -> NoReturn:
    """Load the engine, say where the server listens, and serve until the process ends."""
    try:
        engine = load()
    except ImportError as error:
        sys.exit(f"{NO_LIBRARY} {' '.join(str(error).split())}")
    except RefusedError as error:
        sys.exit(f"{NO_MODEL} {' '.join(str(error).split())}")
    server = Server(engine, port)
    say(f"listening on http://127.0.0.1:{server.server_port}")
    say("the engine is ready")
    server.serve_forever()
    sys.exit()
