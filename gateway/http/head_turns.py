"""The order in which a server reads connections that have not sent a complete head, or that it has refused."""

import asyncio
from collections import deque
from collections.abc import Callable

MAX_WAITING_BYTES = 16 * 1024 * 1024
"""Received bytes that wait for their turn, of all connections; with more, connections are read in any order."""
TURNS = 4
"""One connection is read in this many turns of the event loop. An accepted request needs about eight."""


class HeadTurns:
    """Lets one connection be read every TURNS turns of the event loop.

    Between two of them, the loop serves all connections whose requests have been accepted. Otherwise, a flood of heads
    that arrives together is parsed and refused in a single turn, and every request waits for all of it. Networks take
    turns, so that a new connection waits for one head of each other network.
    """

    def __init__(self) -> None:
        self._waiting: dict[str, deque[tuple[Callable[[], None], int]]] = {}
        """By network (see `network_of`), the next one first."""
        self._waiting_bytes = 0
        self._is_taken = False
        self._has_ended = False

    def take(self, loop: asyncio.AbstractEventLoop) -> bool:
        """Takes the current turn; returns whether it was free."""
        if self._has_ended:
            return True
        if self._is_taken:
            return False
        self._is_taken = True
        loop.call_soon(self._next, loop, TURNS - 1)
        return True

    def wait(self, network: str, serve: Callable[[], None], size_bytes: int) -> bool:
        """Calls `serve` in a later turn, in the order of its network; returns whether there is room for its bytes."""
        if self._waiting_bytes + size_bytes > MAX_WAITING_BYTES:
            return False
        self._waiting_bytes += size_bytes
        self._waiting.setdefault(network, deque()).append((serve, size_bytes))
        return True

    def end(self) -> None:
        """Serves all that wait; from now on, every connection is read immediately. Used when the server stops."""
        self._has_ended = True
        while self._waiting:
            self._serve_first()

    def _next(self, loop: asyncio.AbstractEventLoop, turns_left: int) -> None:
        if turns_left:
            loop.call_soon(self._next, loop, turns_left - 1)
        elif self._waiting:
            loop.call_soon(self._next, loop, TURNS - 1)
            self._serve_first()
        else:
            self._is_taken = False

    def _serve_first(self) -> None:
        network = next(iter(self._waiting))
        waiting = self._waiting.pop(network)
        serve, size_bytes = waiting.popleft()
        if waiting:
            self._waiting[network] = waiting
        self._waiting_bytes -= size_bytes
        serve()
