"""Head and body of an answer in one write: each write is a system call of its own, and often a packet."""

import asyncio
from typing import Protocol


class Writes(Protocol):
    """What of a transport an answer needs."""

    def write(self, data: bytes) -> None:
        """Send some bytes."""
        ...

    def close(self) -> None:
        """Close it once everything is sent."""
        ...

    def is_closing(self) -> bool:
        """Whether it is closed, or about to be."""
        ...


class HeadWriter:
    """Holds the first write of one answer until its second, but at most until the event loop's next turn."""

    __slots__ = ("_head", "_is_first", "_loop", "_transport")

    def __init__(self, transport: Writes, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._is_first = True
        self._head = b""

    def write(self, data: bytes) -> None:
        """See Writes.write."""
        if self._is_first:
            self._is_first, self._head = False, data
            self._loop.call_soon(self._flush)
        elif self._head:
            head, self._head = self._head, b""
            self._transport.write(head + data)
        else:
            self._transport.write(data)

    def is_closing(self) -> bool:
        """See Writes.is_closing."""
        return self._transport.is_closing()

    def close(self) -> None:
        """See Writes.close."""
        self._flush()
        self._transport.close()

    def _flush(self) -> None:
        if self._head:
            head, self._head = self._head, b""
            self._transport.write(head)
