"""Event streams: watches of resources, operations and tasks as server-sent events until the caller disconnects."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

import structlog
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gateway.answers.sse import encode_json
from gateway.answers.stream import SlowReaderError, SseWriter
from gateway.deps import GatewayDeps
from gateway.errors import ClientGoneError, envelope, internal_error, shutting_down
from gateway.http.disconnect import abort_connection, interrupt_on_disconnect
from gateway.http.event_watches import EventWatches
from gateway.request_facts import RequestFacts, facts_of
from weft.documents.documents import EventDocument
from weft.documents.yaml_nodes import plain
from weft.kernel.errors import WeftError
from weft.kernel.interrupt import Interruptible

log = structlog.get_logger("weft.gateway")


def failure_event(error: WeftError, request_id: str) -> bytes:
    """Returns the error envelope as the last event of a stream."""
    return b"data: " + envelope(error, request_id) + b"\n\n"


class EventStream(Response):
    """Sends each event as it happens. A refusal is a status; a failure after the status line is the last event.

    Nothing is buffered for a slow reader: the registry ends a watch that falls behind, and a write that takes too long
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
        """`events` are encoded as server-sent events, each whole; `watches`: None: counted with those of resources.

        `failure`: the last event of a stream that broke off, given why and the request's id.
        """
        self.status_code = 200
        self.background: Any = None
        self._deps = deps
        self._events = events
        self._watches = watches or deps.watches
        self._failure = failure

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Stream until the caller leaves, the registry ends the watch, or the gateway stops."""
        facts = facts_of(scope)
        writer = SseWriter(send, self._deps.config, self._deps.clock)
        try:
            await self._run(receive, writer)
        except SlowReaderError:
            await abort_connection(scope, receive)
            raise
        except ClientGoneError:
            raise
        except WeftError as error:
            await self._fail(error, writer, facts)
        except asyncio.CancelledError:
            await self._fail(shutting_down(), writer, facts)
        except Exception:
            if not writer.is_committed:
                raise
            log.exception("stream of events failed unexpectedly", request_id=facts.request_id)
            await self._fail(internal_error(), writer, facts)

    async def _run(self, receive: Receive, writer: SseWriter) -> None:
        with Interruptible() as block, self._watches.joined(block):
            guards = [
                asyncio.create_task(interrupt_on_disconnect(receive, block)),
                asyncio.create_task(writer.keep_up(block)),
            ]
            try:
                async with aclosing(self._events) as events:
                    async for event in events:
                        await writer.write(event)
                await writer.finish(b"")
            finally:
                for guard in guards:
                    guard.cancel()

    async def _fail(self, error: WeftError, writer: SseWriter, facts: RequestFacts) -> None:
        if not writer.is_committed:
            raise error
        facts.error = error
        await writer.finish(self._failure(error, facts.request_id))


async def encoded_events(events: AsyncGenerator[EventDocument]) -> AsyncGenerator[bytes]:
    """Events of resources as server-sent events."""
    async with aclosing(events):
        async for event in events:
            yield b"id: %d\ndata: %b\n\n" % (event.sequence, encode_json(plain(event)))
