"""The publisher protocol over HTTP: register, event stream, heartbeat, results, leave (docs/publishers.md)."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from hashlib import sha256
from typing import Protocol

import msgspec
from aiohttp import web

from runner_svc.publishers.messages import (
    PROTOCOL_VERSION,
    ROOT,
    SESSION_HEADER,
    Chunk,
    Leave,
    Piece,
    Registration,
    read_leave,
    read_piece,
    read_registration,
)
from runner_svc.publishers.session import PublisherSession
from runner_svc.publishers.settings import PublisherLimits
from runner_svc.publishers.task import PublisherTask
from weft.kernel.clock import Clock
from weft.kernel.errors import FieldError, WeftError
from weft.kernel.log import get_logger
from weft.kernel.reasons import Reason

log = get_logger("weft.publishers")

MAX_HEADER_BYTES = 8190
MAX_LEAVE_BYTES = 4096
PING_SECONDS = 10.0
"""Interval of comments on an event stream that has nothing to say."""
SHUTDOWN_SECONDS = 1.0
_LINES = "application/x-ndjson"
_PING = b": ping\n\n"
_BACKLOG = 128


class Publishers(Protocol):
    """What the protocol does."""

    async def open(self, registration: Registration, *, token: str, peer: str, earlier_secret: str) -> PublisherSession:
        """Registers a publisher as a runner. Raises UNAUTHENTICATED, and what the mesh refuses."""
        ...

    def session(self, secret: str) -> PublisherSession:
        """Returns a session by its secret. Raises SESSION_UNKNOWN."""
        ...

    def leave(self, session: PublisherSession, grace_seconds: float) -> None:
        """Begins to drain a publisher, whose session ends after its tasks."""
        ...


class PublisherApi:
    """The listener of the protocol. Life cycle: `start`, `stop`."""

    def __init__(self, publishers: Publishers, limits: PublisherLimits, clock: Clock) -> None:
        self._publishers = publishers
        self._limits = limits
        self._clock = clock
        self._runner: web.AppRunner | None = None
        self._server: asyncio.Server | None = None

    async def start(self, host: str, port: int, tls: ssl.SSLContext | None) -> int:
        """Listens; returns the port. Raises OSError."""
        app = web.Application(middlewares=[_answering])
        app.add_routes(
            [
                web.post(f"{ROOT}/register", self._register),
                web.get(f"{ROOT}/stream", self._stream),
                web.post(f"{ROOT}/heartbeat", self._heartbeat),
                web.post(f"{ROOT}/tasks/{{task}}/result", self._result),
                web.post(f"{ROOT}/leave", self._leave),
            ]
        )
        app.on_response_prepare.append(_name_server)
        runner = self._runner = web.AppRunner(
            app,
            handler_cancellation=True,
            access_log=None,
            shutdown_timeout=SHUTDOWN_SECONDS,
            max_line_size=MAX_HEADER_BYTES,
            max_field_size=MAX_HEADER_BYTES,
        )
        await runner.setup()
        http = runner.server
        assert http is not None, "after setup"

        def connected() -> asyncio.BaseProtocol:
            return http() if len(http.connections) < self._limits.max_connections else _Refusing()

        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(connected, host, port, ssl=tls, backlog=_BACKLOG)
        found: int = self._server.sockets[0].getsockname()[1]
        return found

    async def stop(self) -> None:
        """Closes the port and its connections. Idempotent."""
        server, self._server = self._server, None
        runner, self._runner = self._runner, None
        if server is not None:
            server.close()
        if runner is not None:
            await runner.cleanup()

    def _session(self, request: web.Request) -> PublisherSession:
        secret = request.headers.get(SESSION_HEADER, "")
        if not secret:
            raise WeftError(Reason.UNAUTHENTICATED, f"the header {SESSION_HEADER} is required; register first")
        session = self._publishers.session(secret)
        session.note_request()
        return session

    async def _register(self, request: web.Request) -> web.Response:
        try:
            async with asyncio.timeout(self._limits.open_timeout_seconds):
                raw = await _read_within(request, self._limits.max_registration_bytes, "max_registration_bytes")
                registration = read_registration(raw, self._limits.max_models)
                session = await self._publishers.open(
                    registration,
                    token=_token(request),
                    peer=request.remote or "",
                    earlier_secret=request.headers.get(SESSION_HEADER, ""),
                )
        except TimeoutError:
            limit = f"publishers.open_timeout_seconds, {self._limits.open_timeout_seconds:g} s"
            raise WeftError(Reason.DEADLINE_EXCEEDED, f"the mesh took no session in time ({limit})") from None
        limits = self._limits
        answer = {
            "session": session.secret,
            "runner": session.runner,
            "protocol": PROTOCOL_VERSION,
            "heartbeat_interval_seconds": limits.heartbeat_interval_seconds,
            "silence_timeout_seconds": limits.silence_timeout_seconds,
            "reconnect_seconds": limits.reconnect_seconds,
            "task_silence_seconds": limits.task_silence_seconds,
            "max_chunk_bytes": limits.max_chunk_bytes,
            "max_answer_bytes": limits.max_answer_bytes,
        }
        return web.Response(status=201, body=msgspec.json.encode(answer), content_type="application/json")

    async def _heartbeat(self, request: web.Request) -> web.Response:
        session = self._session(request)
        answer = {"tasks": session.task_count, "streaming": session.streaming.is_set()}
        return web.Response(body=msgspec.json.encode(answer), content_type="application/json")

    async def _leave(self, request: web.Request) -> web.Response:
        session = self._session(request)
        wanted: Leave = read_leave(await _read_within(request, MAX_LEAVE_BYTES, "the body of leave"))
        self._publishers.leave(session, wanted.grace_seconds)
        return web.Response(status=202, body=b"{}", content_type="application/json")

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        session = self._session(request)
        response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream", "Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        )
        stream = session.open_stream()
        try:
            await response.prepare(request)
            await self._write(response, _PING)
            while True:
                try:
                    async with asyncio.timeout(PING_SECONDS):
                        events = await stream.take()
                except TimeoutError:
                    events = _PING
                if events:
                    await self._write(response, events)
                if stream.is_over and not stream.waiting:
                    break
            await response.write_eof()
        except (OSError, TimeoutError):
            log.debug("the connection of an event stream was lost", runner=session.runner)
        finally:
            session.close_stream(stream)
        return response

    async def _write(self, response: web.StreamResponse, data: bytes) -> None:
        """Writes to a publisher, for as long as it may be silent."""
        async with asyncio.timeout(self._limits.silence_timeout_seconds):
            await response.write(data)

    async def _result(self, request: web.Request) -> web.Response:
        session = self._session(request)
        task = session.task(request.match_info["task"])
        try:
            if request.content_type == _LINES:
                await self._take_lines(session, task, request)
            else:
                raw = await _read_within(request, self._limits.max_answer_bytes, "max_answer_bytes")
                await self._take(session, task, raw)
        except (asyncio.CancelledError, OSError):
            task.fail(WeftError(Reason.WORKER_LOST, "the publisher broke off its result"))
            raise
        except WeftError as error:
            if error.reason is not Reason.NOT_FOUND:
                task.fail(WeftError(Reason.BACKEND_PROTOCOL_ERROR, f"the publisher's result: {error.message}"))
            raise
        return web.Response(status=204)

    async def _take_lines(self, session: PublisherSession, task: PublisherTask, request: web.Request) -> None:
        """Takes the lines of a post until it ends, or the task does. Raises NOT_FOUND when the task fails meanwhile."""
        try:
            async with asyncio.timeout(None) as until_failure:
                with task.calling_on_failure(lambda: until_failure.reschedule(0.0)):
                    async for line in self._lines(request):
                        await self._take(session, task, line)
                        if task.has_ended:
                            break
        except TimeoutError:
            task.require_open()
            raise

    async def _take(self, session: PublisherSession, task: PublisherTask, line: bytes) -> None:
        session.note_request()
        task.received_bytes += len(line)
        if task.received_bytes > self._limits.max_answer_bytes:
            raise _too_large("the answer", self._limits.max_answer_bytes, "max_answer_bytes")
        piece: Piece = read_piece(line)
        if isinstance(piece, Chunk) and len(piece.data) > self._limits.max_chunk_bytes:
            raise _too_large("a chunk", self._limits.max_chunk_bytes, "max_chunk_bytes")
        await task.put(piece, self._clock.monotonic())

    async def _lines(self, request: web.Request) -> AsyncIterator[bytes]:
        """Yields the lines of a body as they arrive. Raises REQUEST_TOO_LARGE for a longer one than a chunk may be."""
        limit, kept = self._limits.max_chunk_bytes, b""
        async for data in request.content.iter_any():
            *lines, kept = (kept + data).split(b"\n")
            if max(map(len, (*lines, kept))) > limit:
                raise _too_large("a line", limit, "max_chunk_bytes")
            for line in lines:
                if line.strip():
                    yield line
        if kept.strip():
            yield kept


def secret_hash(secret: str) -> str:
    """Returns the name under which a session's secret is kept."""
    return sha256(secret.encode()).hexdigest()


def _token(request: web.Request) -> str:
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


async def _read_within(request: web.Request, limit: int, name: str) -> bytes:
    body = bytearray()
    async for data in request.content.iter_any():
        body += data
        if len(body) > limit:
            raise _too_large("the body", limit, name)
    return bytes(body)


def _too_large(what: str, limit: int, name: str) -> WeftError:
    return WeftError(Reason.REQUEST_TOO_LARGE, f"{what} is over {limit} bytes (publishers.{name})")


@web.middleware
async def _answering(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Answers errors with their reason as JSON."""
    try:
        return await handler(request)
    except WeftError as error:
        return _refusal(error)
    except web.HTTPException as error:
        reason = Reason.METHOD_NOT_ALLOWED if error.status == 405 else Reason.NOT_FOUND
        return _refusal(WeftError(reason, f"there is no {request.method} {request.path}; see docs/publishers.md"))
    except (OSError, TimeoutError):
        return _refusal(WeftError(Reason.CANCELLED, "the publisher closed the connection"))
    except Exception:
        log.exception("a request of a publisher failed", path=request.path)
        return _refusal(WeftError(Reason.INTERNAL, "an internal error; the log of the mesh has the details"))


async def _name_server(_: web.Request, response: web.StreamResponse) -> None:
    response.headers["Server"] = "weft"


def _refusal(error: WeftError) -> web.Response:
    body: dict[str, object] = {"message": error.message, "code": error.reason.name.lower()}
    if isinstance(error, FieldError):
        body["param"] = error.field
    headers = {}
    if error.retry_after_seconds is not None:
        headers["Retry-After"] = str(min(60, max(1, round(error.retry_after_seconds))))
    if error.traits.http_status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return web.Response(
        status=error.traits.http_status,
        body=msgspec.json.encode({"error": body}),
        content_type="application/json",
        headers=headers,
    )


class _Refusing(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.close()
