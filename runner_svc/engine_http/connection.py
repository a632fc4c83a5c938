"""One connection to a server, for one request after another.

A connection is used again only if the server was silent between two answers. A server that sends a second answer (a
desynchronised proxy, or a malicious one) would so answer another caller: HTTP/1.1 has no identifier by which bytes that
cross the next request on the wire could be told from an answer to it.
"""

import asyncio
import select
from typing import TYPE_CHECKING, cast

from typing_extensions import override

from runner_svc.engine_http.answer import MAX_BUFFERED_BYTES, Answer

if TYPE_CHECKING:
    from collections.abc import Callable

    from runner_svc.engine_http.faults import HttpFaultError


class EngineConnection(asyncio.Protocol):
    """One connection. It is idle while it has no answer."""

    def __init__(
        self, on_rest: "Callable[[EngineConnection], None]", on_end: "Callable[[EngineConnection], None]"
    ) -> None:
        """`on_rest` is called when it becomes idle and can be used again, `on_end` when it has ended."""
        self.idle_since = 0.0
        self._on_rest, self._on_end = on_rest, on_end
        self._transport: asyncio.Transport | None = None
        self._answer: Answer | None = None
        self._poll: select.poll | None = None
        self._is_paused = False

    def ask(self, request: bytes, body: bytes) -> Answer:
        """Send a request; returns its answer, which has not arrived yet."""
        answer = self._answer = Answer(self._resume, self._release)
        transport = self._transport
        if transport is None or transport.is_closing():
            answer.lose(None)
        elif body:
            transport.writelines((request, body))
        else:
            transport.write(request)
        return answer

    @property
    def has_ended(self) -> bool:
        """Whether the connection has ended."""
        return self._transport is None

    def may_be_used(self) -> bool:
        """Whether an idle connection can take a request: it has not ended, and nothing came while it was idle."""
        transport = self._transport
        return transport is not None and not transport.is_closing() and not self._has_unread_bytes()

    def abort(self, fault: "HttpFaultError | None" = None) -> None:
        """Close the connection immediately. `fault` ends an answer that is under way."""
        answer, self._answer = self._answer, None
        if answer is not None and fault is not None:
            answer.fail(fault)
        if self._transport is not None:
            self._transport.abort()

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is no subclass

    @override
    def data_received(self, data: bytes) -> None:
        answer = self._answer
        if answer is None:
            self.abort()  # of no request
            return
        answer.feed(data)
        if answer.buffered > MAX_BUFFERED_BYTES and not self._is_paused and self._transport is not None:
            self._is_paused = True
            self._transport.pause_reading()

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        answer, self._transport = self._answer, None
        if answer is not None:
            answer.lose(exc)
        self._on_end(self)

    def _resume(self) -> None:
        if self._is_paused and self._transport is not None:
            self._is_paused = False
            self._transport.resume_reading()

    def _release(self, answer: Answer) -> None:
        if self._answer is not answer:
            return
        if answer.is_complete and answer.keeps_connection and not answer.is_followed:
            self._answer = None
            self._resume()
            self._on_rest(self)
        else:
            self.abort()

    def _has_unread_bytes(self) -> bool:
        """Whether bytes, or the end of the connection, wait in the kernel that the event loop has not yet read."""
        if self._poll is None:
            found = None if self._transport is None else self._transport.get_extra_info("socket")
            if found is None:
                return False
            self._poll = select.poll()
            self._poll.register(found.fileno(), select.POLLIN)
        return bool(self._poll.poll(0))
