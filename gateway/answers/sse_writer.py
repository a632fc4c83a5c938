"""Streamed responses with keepalives, a timeout for slow readers, and error events.

`StreamedAnswer` sends a generation, `EventStream` a watch of resources, operations or tasks.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from typing_extensions import override

from gateway.answers.answer_builder import unfinished_answer
from gateway.answers.sse import EVENT_STREAM, KEEPALIVE, StreamEncoder
from gateway.deps import GatewayDeps, InferenceDeps
from gateway.errors import ClientGoneError, cancellation, envelope, internal_error, rate_limit_headers
from gateway.gateway_config import GatewayConfig
from gateway.http.disconnect import WhileConnected, abort_connection
from gateway.http.event_watches import EventWatches
from gateway.intake.headers import shows_receipt
from gateway.request_facts import RequestFacts, facts_of
from gateway.visible_names import with_visible_names
from weft.api.registry.v1.event_pb2 import Event
from weft.dispatch.call import Call
from weft.dispatch.frames import Frame
from weft.documents.codec import document_of
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.telemetry.log import get_logger
from weft.kernel.text.json_lines import encode_json
from weft.kernel.time.cancellation import Interruptible
from weft.kernel.time.clock import Clock, within

_HEADERS = (
    # no-transform and no buffering: proxies must forward each event immediately.
    (b"cache-control", b"no-cache, no-transform"),
    (b"x-accel-buffering", b"no"),
)


class SlowReaderError(ClientGoneError):
    """The caller is connected but does not read."""

    def __init__(self, kind: str = "stream") -> None:
        super().__init__(f"the client did not read its {kind}")


class SseWriter:
    """Writes a stream for two tasks: the one that produces events, and `keep_up`, which sends keepalives."""

    def __init__(
        self,
        send: Send,
        config: GatewayConfig,
        clock: Clock,
        *,
        keepalive: bytes = KEEPALIVE,
        content_type: bytes = EVENT_STREAM,
        headers: Callable[[], Sequence[tuple[bytes, bytes]]] = tuple,
    ) -> None:
        """`headers` returns additional headers when the status line is sent."""
        self._headers = headers
        self._keepalive = keepalive
        self._content_type = content_type
        self._send = send
        self._config = config
        self._clock = clock
        # Writes of the two tasks must not interleave, and nothing may precede the status line.
        self._lock = asyncio.Lock()
        self._held: list[bytes] = []
        self._last_write = clock.monotonic()
        self._writing_since: float | None = None
        self.is_committed = False
        """Whether the status line has been sent, after which a failure is an event."""

    def hold(self, data: bytes) -> None:
        """Keeps `data` until the status line is sent."""
        self._held.append(data)

    async def write(self, data: bytes, *, last: bool = False) -> None:
        """Sends `data`, after the status line if that has not been sent; `last` ends the body."""
        self._writing_since = self._clock.monotonic()
        async with self._lock:
            if not self.is_committed:
                data = await self._commit() + data
            await self._send({"type": "http.response.body", "body": data, "more_body": not last})
        self._writing_since = None
        self._last_write = self._clock.monotonic()

    async def finish(self, data: bytes) -> None:
        """Sends the last bytes. Raises SlowReaderError if that takes too long."""
        try:
            await within(self._config.write_timeout_seconds, self.write(data, last=True))
        except TimeoutError:
            raise SlowReaderError from None

    async def keep_up(self, block: Interruptible) -> None:
        """Sends the status line in time, then keepalives; interrupts `block` if a write takes too long."""
        try:
            await self._clock.sleep(self._config.headers_within_seconds)
            if not self.is_committed:
                await self._write_aside(b"")
            while True:
                await self._clock.sleep(await self._check(block))
        except TimeoutError:
            block.interrupt(SlowReaderError())

    async def _check(self, block: Interruptible) -> float:
        """Checks the stream once; returns the seconds until the next check."""
        now, limit = self._clock.monotonic(), self._config.write_timeout_seconds
        if self._writing_since is not None:
            left = self._writing_since + limit - now
            if left <= 0:
                block.interrupt(SlowReaderError())
        else:
            left = self._last_write + self._config.sse_keepalive_seconds - now
            if left <= 0:
                await self._write_aside(self._keepalive)
                left = self._config.sse_keepalive_seconds
        return min(max(left, 0.0), limit)

    async def _write_aside(self, data: bytes) -> None:
        await within(self._config.write_timeout_seconds, self.write(data))

    async def _commit(self) -> bytes:
        headers = [(b"content-type", self._content_type), *_HEADERS, *self._headers()]
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        self.is_committed = True
        held = b"".join(self._held)
        self._held.clear()
        return held


log = get_logger("weft.gateway")


class SseResponse(Response, ABC):
    """Sends server-sent events.

    A failure before the status line becomes an HTTP status. A later one becomes an error event, the last of the
    stream. A caller that does not read is disconnected.
    """

    _keepalive = KEEPALIVE
    _content_type = EVENT_STREAM

    def __init__(self, deps: InferenceDeps) -> None:
        self.status_code = 200
        self.background: Any = None
        self._deps = deps

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Streams until the events end or fail, the caller disconnects, or the gateway stops."""
        writer = SseWriter(
            send,
            self._deps.config,
            self._deps.clock,
            keepalive=self._keepalive,
            content_type=self._content_type,
            headers=self._added_headers,
        )
        try:
            await self._pump(scope, receive, writer)
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - each becomes an answer
            try:
                await self._end(error, writer, facts_of(scope))
            except SlowReaderError:
                await abort_connection(scope, receive)
                raise

    async def _end(self, error: BaseException, writer: SseWriter, facts: RequestFacts) -> None:
        """Ends the stream with an error event, or raises the error if that is not possible."""
        match error:
            case ClientGoneError():
                raise error
            case WeftError():
                await self._fail(error, writer, facts)
            case asyncio.CancelledError():
                await self._fail(cancellation(), writer, facts)
            case _:
                if not writer.is_committed:
                    raise error
                log.error("stream failed unexpectedly", exc_info=error, request_id=facts.request_id)
                await self._fail(internal_error(), writer, facts)

    def _added_headers(self) -> Sequence[tuple[bytes, bytes]]:
        """Returns additional headers when the status line is sent."""
        return ()

    @abstractmethod
    async def _pump(self, scope: Scope, receive: Receive, writer: SseWriter) -> None:
        """Writes all events, and finishes the stream."""

    @abstractmethod
    def _last_event(self, error: WeftError, request_id: str) -> bytes:
        """Returns the last event of a failed stream."""

    async def _fail(self, error: WeftError, writer: SseWriter, facts: RequestFacts) -> None:
        if not writer.is_committed:
            raise error
        facts.error = error = with_visible_names(error, self._deps.fleet.view, facts.principal)
        await writer.finish(self._last_event(error, facts.request_id))


class StreamedAnswer(SseResponse):
    """Sends a generation. A stream that ends without `[DONE]` or an error event was cut; its connection is aborted."""

    def __init__(
        self, deps: InferenceDeps, generation: Call[Frame], encoder: StreamEncoder, *, cut_off_seconds: float
    ) -> None:
        super().__init__(deps)
        self._keepalive, self._content_type = encoder.keepalive, encoder.content_type
        self._generation = generation
        self._encoder = encoder
        self._cut_off_seconds = cut_off_seconds

    @override
    def _added_headers(self) -> Sequence[tuple[bytes, bytes]]:
        return rate_limit_headers(self._generation.rate_limits)

    @override
    async def _pump(self, scope: Scope, receive: Receive, writer: SseWriter) -> None:
        encoder, facts, metrics = self._encoder, facts_of(scope), self._deps.metrics
        encoder.shows_receipt = shows_receipt(scope, self._deps.config)
        metrics.active_streams += 1
        try:
            with WhileConnected(scope, receive, cut_off_seconds=self._cut_off_seconds) as block:
                block.run_beside(writer.keep_up(block))
                async with aclosing(self._generation.chunks()) as frames:
                    async for frame in frames:
                        began = encoder.has_content
                        data = encoder.encode(frame)
                        if encoder.is_done:
                            # A disconnect loses nothing now, and a finished answer must not count as cancelled.
                            block.dismiss_guards()
                            await writer.finish(data)
                        elif not (encoder.has_content or writer.is_committed):
                            writer.hold(data)
                        elif data:
                            await writer.write(data)
                        if encoder.has_content and not began:
                            metrics.first_token(facts, self._deps.age_seconds(facts))
                if not encoder.is_done:
                    raise unfinished_answer()
        finally:
            metrics.active_streams -= 1
            metrics.tokens_used(facts, encoder.usage)

    @override
    async def _fail(self, error: WeftError, writer: SseWriter, facts: RequestFacts) -> None:
        if self._encoder.is_done:
            # The caller has the complete answer, which did not fail.
            log.warning("failure after a complete answer", request_id=facts.request_id, reason=error.reason.name)
            return
        if writer.is_committed and not facts.was_dispatched:
            log.info(
                "refused", request_id=facts.request_id, reason=error.reason.name.lower(), message=error.log_message
            )
        await super()._fail(error, writer, facts)

    @override
    def _last_event(self, error: WeftError, request_id: str) -> bytes:
        return self._encoder.failure(error, request_id)


_KEY_REFUSALS = frozenset({Reason.UNAUTHENTICATED, Reason.PERMISSION_DENIED})


def failure_event(error: WeftError, request_id: str) -> bytes:
    """Returns the error envelope as the last event of a stream."""
    return b"data: " + envelope(error, request_id) + b"\n\n"


class EventStream(SseResponse):
    """Sends events as they happen.

    Nothing is buffered for slow readers: the registry ends a watch that falls behind, and a write that takes too long
    closes the connection.
    """

    def __init__(
        self,
        deps: GatewayDeps,
        events: AsyncGenerator[bytes],
        *,
        watches: EventWatches | None = None,
        failure: Callable[[WeftError, str], bytes] = failure_event,
    ) -> None:
        """`events` yields complete server-sent events; `watches`: None: the limit of resource watches.

        `failure` returns the last event of a failed stream.
        """
        super().__init__(deps)
        self._events = events
        self._watches = watches or deps.watches
        self._failure = failure

    @override
    async def _pump(self, scope: Scope, receive: Receive, writer: SseWriter) -> None:
        with WhileConnected(scope, receive) as block, self._watches.joined(block):
            block.run_beside(writer.keep_up(block))
            block.run_beside(self._check_key(scope, block))
            async with aclosing(self._events) as events:
                async for event in events:
                    await writer.write(event)
            await writer.finish(b"")

    async def _check_key(self, scope: Scope, block: Interruptible) -> None:
        """Interrupts `block` when the key is revoked or expires, since a stream may never end."""
        deps = self._deps
        while deps.gate.needs_keys:
            await deps.clock.sleep(deps.config.key_check_seconds)
            try:
                deps.gate.admit(scope)
            except WeftError as error:
                if error.reason in _KEY_REFUSALS:
                    block.interrupt(error)

    @override
    def _last_event(self, error: WeftError, request_id: str) -> bytes:
        return self._failure(error, request_id)


async def encoded_events(events: AsyncGenerator[Event]) -> AsyncGenerator[bytes]:
    """Yields events of resources as server-sent events."""
    async with aclosing(events):
        async for event in events:
            yield b"id: %d\ndata: %b\n\n" % (event.sequence, encode_json(document_of(event)))


async def encoded_records(records: AsyncGenerator[Any]) -> AsyncGenerator[bytes]:
    """Yields messages as documents, one server-sent event each."""
    async with aclosing(records):
        async for record in records:
            yield b"data: %b\n\n" % encode_json(document_of(record))
