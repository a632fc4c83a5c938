"""HTTP listener of the publisher protocol (docs/laptops.md): register, event stream, heartbeat, results, leave."""

import asyncio
import ssl
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from http import HTTPMethod

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send
from typing_extensions import override

from gateway.answers.sse_writer import SlowReaderError, SseWriter
from gateway.errors import ClientGoneError
from gateway.gateway_config import ConnectionLimits, EdgeTls, Exposure, GatewayConfig
from gateway.http.disconnect import WhileConnected, abort_connection
from gateway.http.server import AppServer
from gateway.http.tls import following_context
from weft.kernel.channels.tls import TlsSource
from weft.kernel.errors.error_tree import FieldError, WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.telemetry.log import get_logger
from weft.kernel.time.cancellation import Interruptible
from weft.kernel.time.clock import SystemClock
from weft.kernel.values.address import split_address
from weft_app.compose.join_listeners import JoinListener, JoinParts
from weft_app.compose.relay import relay_certificate, shown_host
from weft_extensions.publishers.messages import Chunk, Leave, read, read_piece, read_registration
from weft_extensions.publishers.publisher_runners import Publishers
from weft_extensions.publishers.session import PublisherSession, PublisherTask

log = get_logger("weft.publishers")

ROOT = "/publisher/v1"
SESSION_HEADER = "weft-publisher-session"
PROTOCOL_VERSION = 1
OF_ANSWERS = "an answer (max_answer_bytes)"
MAX_LEAVE_BYTES = 4096
MAX_WHOLE_BYTES = 256 * 1024**2
"""Maximum size of all answers that are being read whole."""
SMALL_BYTES = 1024**2
PING_SECONDS = 10.0
"""Interval of comments on an idle event stream."""
_LINES = "application/x-ndjson"
_PING = b": ping\n\n"
_TOLD_LIMITS = (
    *("heartbeat_interval_seconds", "silence_timeout_seconds", "reconnect_seconds", "task_silence_seconds"),
    *("max_chunk_bytes", "max_answer_bytes"),
)


class WholeAnswers:
    """Reads bodies of results whole. Their total size is limited; small ones are always accepted."""

    def __init__(self) -> None:
        self._held_bytes = 0

    @asynccontextmanager
    async def body(self, request: Request, limit: int) -> AsyncGenerator[bytes]:
        """Reads a body. Raises REQUEST_TOO_LARGE over its limit, and NO_SLOT_AVAILABLE if others hold too much."""
        body = bytearray()
        try:
            async for data in request.stream():
                self._held_bytes += len(data)
                body += data
                if len(body) > limit:
                    raise _too_large(OF_ANSWERS, limit)
                if self._held_bytes > MAX_WHOLE_BYTES and len(body) > SMALL_BYTES:
                    message = "the answers of all publishers are too large together; send lines (application/x-ndjson)"
                    raise WeftError(Reason.NO_SLOT_AVAILABLE, message)
            yield bytes(body)
        finally:
            self._held_bytes -= len(body)


class PublisherListener(JoinListener):
    """The HTTP listener for publishers."""

    def __init__(self, parts: JoinParts) -> None:
        self._listen = parts.config.publishers.listen or ""
        self._relay_section = parts.config.relay
        self._home = parts.home
        self._publishers = Publishers(parts)
        self._limits = limits = self._publishers.limits
        self._stream_config = GatewayConfig(
            sse_keepalive_seconds=PING_SECONDS, write_timeout_seconds=limits.silence_timeout_seconds
        )
        self._whole = WholeAnswers()
        self._server: AppServer | None = None

    @override
    async def start(self) -> None:
        """Starts listening. Raises ALREADY_EXISTS if the address is taken, INVALID_ARGUMENT for invalid settings."""
        host, port = split_address(self._listen, "publishers.listen")
        context = self._tls(host)
        limits = self._limits
        self._server = AppServer(
            self._app(),
            exposure=Exposure(
                host=host,
                port=port,
                tls=None if context is None else EdgeTls(),
                tls_context=context,
                # Every request carries a join token or a session secret.
                has_keys=True,
            ),
            limits=ConnectionLimits(
                max_connections=limits.max_connections,
                max_connections_per_address=limits.max_connections,
                max_body_pieces=limits.max_answer_bytes,
            ),
            on_refused=lambda _: None,
            name="publishers",
            port_option="publishers.listen",
        )
        await self._server.start()
        self.url = f"{'http' if context is None else 'https'}://{shown_host(host)}:{self._server.port}"

    @override
    async def stop(self, grace_seconds: float) -> None:
        """Drains all sessions within the grace and stops listening."""
        await self._publishers.drain(grace_seconds)
        if self._server is not None:
            # This cancels registrations in progress, which leave nothing behind.
            self._server.request_stop(0.0)
            await self._server.wait_stopped()
        self._publishers.close()

    def _app(self) -> ASGIApp:
        get, post = [HTTPMethod.GET], [HTTPMethod.POST]
        return Starlette(
            routes=[
                Route(f"{ROOT}/register", self._register, methods=post),
                Route(f"{ROOT}/stream", self._stream, methods=get),
                Route(f"{ROOT}/heartbeat", self._heartbeat, methods=post),
                Route(f"{ROOT}/tasks/{{task}}/result", self._result, methods=post),
                Route(f"{ROOT}/leave", self._leave, methods=post),
            ],
            exception_handlers=dict.fromkeys((WeftError, HTTPException, ClientDisconnect, Exception), _refuse),
        )

    def _tls(self, host: str) -> ssl.SSLContext | None:
        """Returns TLS with the relay's certificate; None on loopback without a configured one."""
        certificate = relay_certificate(self._relay_section, self._home, host)
        if certificate is None:
            return None
        if certificate.files is not None:
            return following_context(TlsSource(certificate.files))
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(self._home.state / "relay" / "cert.pem", self._home.state / "relay" / "key.pem")
        return context

    def _session(self, request: Request) -> PublisherSession:
        secret = request.headers.get(SESSION_HEADER, "")
        if not secret:
            raise WeftError(Reason.UNAUTHENTICATED, f"the header {SESSION_HEADER} is required; register first")
        session = self._publishers.session(secret)
        session.note_request()
        return session

    async def _register(self, request: Request) -> Response:
        limits = self._limits
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        try:
            async with asyncio.timeout(limits.open_timeout_seconds):
                raw = await _read_within(request, limits.max_registration_bytes, "a registration")
                session = await self._publishers.open(
                    read_registration(raw, limits.max_models),
                    token=token.strip() if scheme.lower() == "bearer" else "",
                    peer=request.client.host if request.client else "",
                    earlier_secret=request.headers.get(SESSION_HEADER, ""),
                )
        except TimeoutError:
            message = f"the mesh took no session within {limits.open_timeout_seconds:g} s"
            raise WeftError(Reason.DEADLINE_EXCEEDED, message) from None
        except asyncio.CancelledError:
            raise WeftError(Reason.SHUTTING_DOWN, "the mesh is shutting down") from None
        told = {name: getattr(limits, name) for name in _TOLD_LIMITS}
        return _json({"session": session.secret, "runner": session.runner, "protocol": PROTOCOL_VERSION, **told}, 201)

    async def _heartbeat(self, request: Request) -> Response:
        session = self._session(request)
        return _json({"tasks": len(session.tasks), "streaming": session.streaming.is_set()})

    async def _leave(self, request: Request) -> Response:
        session = self._session(request)
        raw = await _read_within(request, MAX_LEAVE_BYTES, "the body of leave")
        self._publishers.leave(session, read(raw or b"{}", Leave, "the request").grace_seconds)
        return _json({}, 202)

    async def _stream(self, request: Request) -> ASGIApp:
        return partial(self._send_events, self._session(request))

    async def _send_events(self, session: PublisherSession, scope: Scope, receive: Receive, send: Send) -> None:
        stream = session.open_stream()
        writer = SseWriter(send, self._stream_config, SystemClock(), keepalive=_PING)
        try:
            with WhileConnected(scope, receive) as block:
                block.run_beside(writer.keep_up(block))
                await writer.write(_PING)
                while event := await stream.get():
                    await writer.write(event)
                await writer.finish(b"")
        except SlowReaderError:
            await abort_connection(scope, receive)
        except ClientGoneError:
            log.debug("the connection of an event stream was lost", runner=session.runner)
        finally:
            session.close_stream(stream)

    async def _result(self, request: Request) -> Response:
        session = self._session(request)
        task = session.tasks.get(request.path_params["task"])
        if task is None:
            raise WeftError(Reason.NOT_FOUND, "there is no such task: it has ended, or its caller has left")
        try:
            await self._take_result(session, task, request)
        except (asyncio.CancelledError, ClientDisconnect):
            task.fail(WeftError(Reason.WORKER_LOST, "the publisher interrupted its result"))
            raise
        except WeftError as error:
            if error.reason is not Reason.NOT_FOUND:
                task.fail(WeftError(Reason.BACKEND_PROTOCOL_ERROR, f"the publisher's result: {error.message}"))
            raise
        return Response(status_code=204)

    async def _take_result(self, session: PublisherSession, task: PublisherTask, request: Request) -> None:
        """Processes a result's lines until the request or the task ends. Raises NOT_FOUND if the task fails first."""
        with Interruptible() as block:

            def give_up() -> None:
                block.interrupt(task.refusal())

            task.on_failure.append(give_up)
            try:
                async for line in self._lines(request):
                    await self._take(session, task, line)
                    if task.has_ended:
                        break
            finally:
                task.on_failure.remove(give_up)

    async def _take(self, session: PublisherSession, task: PublisherTask, line: bytes) -> None:
        session.note_request()
        task.received_bytes += len(line)
        if task.received_bytes > self._limits.max_answer_bytes:
            raise _too_large(OF_ANSWERS, self._limits.max_answer_bytes)
        piece = read_piece(line)
        if isinstance(piece, Chunk) and len(piece.data) > self._limits.max_chunk_bytes:
            raise _too_large("a chunk (max_chunk_bytes)", self._limits.max_chunk_bytes)
        await task.put(piece, session.clock.monotonic())

    async def _lines(self, request: Request) -> AsyncIterator[bytes]:
        """Yields the lines of a result as they arrive; a body of another type is one line.

        Raises REQUEST_TOO_LARGE for a line longer than the maximum chunk.
        """
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != _LINES:
            async with self._whole.body(request, self._limits.max_answer_bytes) as body:
                yield body
            return
        limit, kept = self._limits.max_chunk_bytes, b""
        async for data in request.stream():
            *lines, kept = (kept + data).split(b"\n")
            if max(map(len, (*lines, kept))) > limit:
                raise _too_large("a line (max_chunk_bytes)", limit)
            for line in lines:
                if line.strip():
                    yield line
        if kept.strip():
            yield kept


def publisher_listener(parts: JoinParts) -> PublisherListener:
    """Returns the listener of a router."""
    return PublisherListener(parts)


async def _read_within(request: Request, limit: int, what: str) -> bytes:
    body = bytearray()
    async for data in request.stream():
        body += data
        if len(body) > limit:
            raise _too_large(what, limit)
    return bytes(body)


def _too_large(what: str, limit: int) -> WeftError:
    return WeftError(Reason.REQUEST_TOO_LARGE, f"{what} is over {limit} bytes")


async def _refuse(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):
        reason = Reason.METHOD_NOT_ALLOWED if error.status_code == 405 else Reason.NOT_FOUND
        error = WeftError(reason, f"there is no {request.method} {request.url.path}; see docs/laptops.md")
    elif isinstance(error, ClientDisconnect):
        error = WeftError(Reason.CANCELLED, "the publisher closed the connection")
    elif not isinstance(error, WeftError):
        log.error("a request of a publisher failed", path=request.url.path, exc_info=error)
        error = WeftError(Reason.INTERNAL, "an internal error; the log of the mesh has the details")
    status = error.traits.http_status
    body = {"message": error.message, "code": error.reason.name.lower()}
    response = _json({"error": body | ({"param": error.field} if isinstance(error, FieldError) else {})}, status)
    if error.retry_after_seconds is not None:
        response.headers["Retry-After"] = str(min(60, max(1, round(error.retry_after_seconds))))
    if status == 401:
        response.headers["WWW-Authenticate"] = "Bearer"
    return response


def _json(body: dict[str, object], status: int = 200) -> Response:
    return Response(msgspec.json.encode(body), status, media_type="application/json")
