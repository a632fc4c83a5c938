"""The edge's private socket: a small OpenAI-compatible server for the runners of publishers, whose answers they post.

Each model of a publisher is a server that runs already, to its runner: requests, streams, errors and cancellation are
those of any other such server, and this module alone knows that somebody else answers.
"""

import asyncio
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web

from runner_svc.publishers.messages import OPERATIONS, Chunk, Failed, Whole, read_task_request
from runner_svc.publishers.session import PublisherSession
from runner_svc.publishers.task import PublisherTask
from weft.kernel.errors import WeftError
from weft.kernel.log import get_logger
from weft.kernel.names import new_id

log = get_logger("weft.publishers")

HOST = "publishers.invalid"
MAX_TASK_BYTES = 256 * 1024 * 1024
"""Size of a request on the socket: the runner's own bounds are smaller."""
_JSON = "application/json"
_DONE = b"data: [DONE]\n\n"


class EngineSocket:
    """Serves the requests of the runners of publishers. Life cycle: `start`, `stop`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._sessions: dict[str, PublisherSession] = {}
        """By a part of the URL that nobody else can guess."""
        self._runner: web.AppRunner | None = None

    def add(self, session: PublisherSession) -> str:
        """Adds a session; returns the base URL of its models."""
        key = new_id("pse")
        self._sessions[key] = session
        return f"http://{HOST}/{key}"

    def remove(self, session: PublisherSession) -> None:
        """Removes a session."""
        self._sessions = {key: each for key, each in self._sessions.items() if each is not session}

    async def start(self) -> None:
        """Listens."""
        app = web.Application(client_max_size=MAX_TASK_BYTES)
        app.router.add_post("/{session}{path:/v1/.*}", self._serve)
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=1.0)
        await self._runner.setup()
        self.path.unlink(missing_ok=True)
        await web.UnixSite(self._runner, str(self.path)).start()
        self.path.chmod(0o600)

    async def stop(self) -> None:
        """Closes the socket and its connections. Idempotent."""
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()
            self.path.unlink(missing_ok=True)

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        session, path = self._sessions.get(request.match_info["session"]), request.match_info["path"]
        if session is None or path not in OPERATIONS:
            return _error(404, "there is no such publisher")
        wanted = read_task_request(path, request.headers.get("X-Request-Id", ""), await request.read())
        try:
            task = session.submit(wanted)
        except WeftError as error:
            return _error(503, error.message)
        response: web.StreamResponse | None = None
        try:
            first = await task.next()
            if isinstance(first, Failed):
                return _error(first.status, first.message)
            if isinstance(first, Whole) and not (wanted.stream and first.status == 200):
                return web.Response(status=first.status, body=first.body, content_type=_JSON)
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await response.prepare(request)
            await _stream(response, task, first)
        except WeftError as error:
            # The runner asks the session for the failure itself.
            if response is None:
                return _error(500, error.message)
            _break_off(request)
        except OSError:
            # The runner has closed the connection: its caller has left.
            if response is None:
                raise
        finally:
            session.close_task(task)
        return response


async def _stream(response: web.StreamResponse, task: PublisherTask, piece: Chunk | Whole | Failed) -> None:
    while True:
        match piece:
            case Whole():
                await response.write(b"data: %s\n\n" % as_chunk(piece.body))
                break
            case Failed():
                error = {"error": {"message": piece.message, "code": piece.status}}
                await response.write(b"data: %s\n\n" % msgspec.json.encode(error))
                break
            case Chunk():
                if piece.data:
                    await response.write(b"data: %s\n\n" % piece.data)
                if piece.done:
                    break
        piece = await task.next()
    with suppress(OSError):
        await response.write(_DONE)
        await response.write_eof()


def as_chunk(body: bytes) -> bytes:
    """Returns a whole answer as the only chunk of a stream: its message is the delta. Anything else is kept."""
    try:
        answer: Any = msgspec.json.decode(body)
        choices = answer["choices"]
        for choice in choices:
            message = choice.pop("message", None)
            if message is not None:
                choice["delta"] = message
                for index, call in enumerate(message.get("tool_calls") or ()):
                    call.setdefault("index", index)
        if "chat.completion" in str(answer.get("object", "chat.completion")):
            answer["object"] = "chat.completion.chunk"
        return msgspec.json.encode(answer)
    except (msgspec.DecodeError, LookupError, TypeError, AttributeError, ValueError):
        return body


def _error(status: int, message: str) -> web.Response:
    return web.Response(status=status, body=msgspec.json.encode({"error": {"message": message}}), content_type=_JSON)


def _break_off(request: web.Request) -> None:
    transport = request.transport
    if isinstance(transport, asyncio.WriteTransport):
        transport.abort()
