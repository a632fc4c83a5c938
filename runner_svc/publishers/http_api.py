"""The publisher protocol over HTTP: register, event stream, heartbeat, results, leave (docs/publishers.md)."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Protocol

import msgspec
from aiohttp import web

from runner_svc.publishers.messages import Chunk, Leave, Registration, read, read_piece, read_registration
from runner_svc.publishers.session import PublisherSession, PublisherTask
from runner_svc.publishers.settings import PublisherLimits
from weft.kernel.errors import FieldError, WeftError
from weft.kernel.log import get_logger
from weft.kernel.reasons import Reason

log = get_logger("weft.publishers")

ROOT = "/publisher/v1"
SESSION_HEADER = "weft-publisher-session"
PROTOCOL_VERSION = 1
MAX_HEADER_BYTES = 8190
MAX_LEAVE_BYTES = 4096
PING_SECONDS = 10.0
"""Interval of comments on an event stream that has nothing to say."""
SHUTDOWN_SECONDS = 1.0
_LINES = "application/x-ndjson"
_PING = b": ping\n\n"
_TOLD_LIMITS = (
    *("heartbeat_interval_seconds", "silence_timeout_seconds", "reconnect_seconds", "task_silence_seconds"),
    *("max_chunk_bytes", "max_answer_bytes"),
)


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

    def __init__(self, publishers: Publishers, limits: PublisherLimits) -> None:
        self._publishers = publishers
        self._limits = limits
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
        self._runner = web.AppRunner(
            app,
            handler_cancellation=True,
            access_log=None,
            shutdown_timeout=SHUTDOWN_SECONDS,
            max_line_size=MAX_HEADER_BYTES,
            max_field_size=MAX_HEADER_BYTES,
        )
        self._server: asyncio.Server | None = None

    async def start(self, host: str, port: int, tls: ssl.SSLContext | None) -> int:
        """Listens; returns the port. Raises OSError."""
        await self._runner.setup()
        http = self._runner.server
        assert http is not None, "after setup"

        def connected() -> asyncio.BaseProtocol:
            return http() if len(http.connections) < self._limits.max_connections else _Refusing()

        self._server = await asyncio.get_running_loop().create_server(connected, host, port, ssl=tls)
        found: int = self._server.sockets[0].getsockname()[1]
        return found

    async def stop(self) -> None:
        """Closes the port and its connections. Idempotent."""
        if self._server is not None:
            self._server.close()
        await self._runner.cleanup()

    def _session(self, request: web.Request) -> PublisherSession:
        secret = request.headers.get(SESSION_HEADER, "")
        if not secret:
            raise WeftError(Reason.UNAUTHENTICATED, f"the header {SESSION_HEADER} is required; register first")
        session = self._publishers.session(secret)
        session.note_request()
        return session

    async def _register(self, request: web.Request) -> web.Response:
        limits = self._limits
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        try:
            async with asyncio.timeout(limits.open_timeout_seconds):
                raw = await _read_within(request, limits.max_registration_bytes, "max_registration_bytes")
                session = await self._publishers.open(
                    read_registration(raw, limits.max_models),
                    token=token.strip() if scheme.lower() == "bearer" else "",
                    peer=request.remote or "",
                    earlier_secret=request.headers.get(SESSION_HEADER, ""),
                )
        except TimeoutError:
            message = f"the mesh took no session within {limits.open_timeout_seconds:g} s"
            raise WeftError(Reason.DEADLINE_EXCEEDED, message) from None
        told = {name: getattr(limits, name) for name in _TOLD_LIMITS}
        return _json({"session": session.secret, "runner": session.runner, "protocol": PROTOCOL_VERSION, **told}, 201)

    async def _heartbeat(self, request: web.Request) -> web.Response:
        session = self._session(request)
        return _json({"tasks": len(session.tasks), "streaming": session.streaming.is_set()})

    async def _leave(self, request: web.Request) -> web.Response:
        session = self._session(request)
        raw = await _read_within(request, MAX_LEAVE_BYTES, "the body of leave")
        self._publishers.leave(session, read(raw or b"{}", Leave, "the request").grace_seconds)
        return _json({}, 202)

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        session = self._session(request)
        response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream", "Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        )
        stream = session.open_stream()
        events = _PING
        try:
            await response.prepare(request)
            while events:
                # A publisher may be silent for as long.
                async with asyncio.timeout(self._limits.silence_timeout_seconds):
                    await response.write(events)
                try:
                    async with asyncio.timeout(PING_SECONDS):
                        events = await stream.take()
                except TimeoutError:
                    events = _PING
            await response.write_eof()
        except (OSError, TimeoutError):
            log.debug("the connection of an event stream was lost", runner=session.runner)
        finally:
            session.close_stream(stream)
        return response

    async def _result(self, request: web.Request) -> web.Response:
        session = self._session(request)
        task = session.tasks.get(request.match_info["task"])
        if task is None:
            raise WeftError(Reason.NOT_FOUND, "there is no such task: it has ended, or its caller has left")
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

                def give_up() -> None:
                    until_failure.reschedule(0.0)

                task.on_failure.append(give_up)
                try:
                    async for line in self._lines(request):
                        await self._take(session, task, line)
                        if task.has_ended:
                            break
                finally:
                    task.on_failure.remove(give_up)
        except TimeoutError:
            task.require_open()
            raise

    async def _take(self, session: PublisherSession, task: PublisherTask, line: bytes) -> None:
        session.note_request()
        task.received_bytes += len(line)
        if task.received_bytes > self._limits.max_answer_bytes:
            raise _too_large("the answer", self._limits.max_answer_bytes, "max_answer_bytes")
        piece = read_piece(line)
        if isinstance(piece, Chunk) and len(piece.data) > self._limits.max_chunk_bytes:
            raise _too_large("a chunk", self._limits.max_chunk_bytes, "max_chunk_bytes")
        await task.put(piece, session.clock.monotonic())

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
    status = error.traits.http_status
    body = {"message": error.message, "code": error.reason.name.lower()}
    response = _json({"error": body | ({"param": error.field} if isinstance(error, FieldError) else {})}, status)
    if error.retry_after_seconds is not None:
        response.headers["Retry-After"] = str(min(60, max(1, round(error.retry_after_seconds))))
    if status == 401:
        response.headers["WWW-Authenticate"] = "Bearer"
    return response


def _json(body: dict[str, object], status: int = 200) -> web.Response:
    return web.Response(status=status, body=msgspec.json.encode(body), content_type="application/json")


class _Refusing(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.close()
