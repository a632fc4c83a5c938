"""The PostgreSQL server of a run: restarted under everything, and cut off from one process at a time."""

import asyncio
import signal
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from weft_testing.cut_socket import CutSocket, cut_socket
from weft_testing.postgres_server import PostgresServer
from weft_testing.torture.history import EventFile, Kind
from weft_testing.torture.plan import (
    DATABASE_PAUSE_SECONDS,
    DatabaseFault,
    DatabaseFaultKind,
    Plan,
    database_faults,
)

BEGINS, ENDS = "begins", "is over"


class RunDatabase:
    """The server, and a socket of each process that leads there. `close` closes the sockets."""

    def __init__(self, server: PostgresServer, name: str) -> None:
        """`name`: of an empty database."""
        self._server = server
        self._name = name
        self._sockets: dict[str, CutSocket] = {}
        self._opened = ExitStack()

    @property
    def url(self) -> str:
        """The URL of the database, past all sockets."""
        return self._server.url(self._name)

    def url_of(self, process: str, folder: Path) -> str:
        """Returns the URL for a process, over a socket in a folder of its own."""
        folder.mkdir(parents=True, exist_ok=True)
        if process not in self._sockets:
            socket = cut_socket(folder / self._server.socket.name, self._server.socket)
            self._sockets[process] = self._opened.enter_context(socket)
        return self._server.url(self._name, folder)

    @property
    def processes(self) -> Sequence[str]:
        """Names of those that can be cut off."""
        return sorted(self._sockets)

    async def cut(self, process: str, seconds: float, *, forgets: bool) -> None:
        """Cuts a process off for a while; `forgets`: as CutSocket.heal."""
        socket = self._sockets[process]
        socket.cut()
        try:
            await asyncio.sleep(seconds)
        finally:
            socket.heal(forgets=forgets)

    async def restart(self, seconds: float, how: signal.Signals) -> None:
        """Ends the server, and starts it again after a while. Raises PostgresStartError."""
        await asyncio.to_thread(self._server.stop, how)
        try:
            await asyncio.sleep(seconds)
        finally:
            # In this thread: the server ends with the one that has started it.
            self._server.start()
        await asyncio.to_thread(self._server.await_ready)

    def close(self) -> None:
        """Closes all sockets."""
        self._opened.close()


class DatabaseFaults:
    """The planned faults, one at a time, spread over the kills of a run."""

    def __init__(self, plan: Plan, database: RunDatabase | None, file: EventFile) -> None:
        self._faults = database_faults(plan)
        self._database = database
        self._file = file
        self._begun = 0
        self._running: asyncio.Task[None] | None = None
        self.done: Counter[DatabaseFaultKind] = Counter()
        """Faults that are over."""

    def begin_due(self, share: float) -> None:
        """Begins the next fault, if it is its turn after this share of the kills and no other one is under way.

        Raises what ended the one before it.
        """
        if self._running is not None:
            if not self._running.done():
                return
            self._running.result()
        if self._begun < len(self._faults) and share >= (self._begun + 1) / (len(self._faults) + 1):
            self._running = asyncio.create_task(self._run(self._faults[self._begun]))
            self._begun += 1

    async def finish(self) -> None:
        """Waits for the one that is under way, and runs those that are left. Raises PostgresStartError."""
        if self._running is not None:
            await self._running
        for fault in self._faults[self._begun :]:
            await asyncio.sleep(DATABASE_PAUSE_SECONDS)
            await self._run(fault)

    async def stop(self) -> None:
        """Ends the one that is under way; the server runs and everything reaches it when this returns."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)

    async def _run(self, fault: DatabaseFault) -> None:
        database = self._database
        assert database is not None, "faults of the database need a server that this run may restart"
        if fault.kind is DatabaseFaultKind.CUT:
            process = database.processes[int(fault.choice * len(database.processes))]
            self._file.write(Kind.DATABASE_FAULT, key=process, note=f"{fault.kind} {BEGINS}")
            await database.cut(process, fault.seconds, forgets=fault.is_abrupt)
        else:
            process = ""
            self._file.write(Kind.DATABASE_FAULT, note=f"{fault.kind} {BEGINS}")
            await database.restart(fault.seconds, signal.SIGQUIT if fault.is_abrupt else signal.SIGINT)
        self._file.write(Kind.DATABASE_FAULT, key=process, note=f"{fault.kind} {ENDS}")
        self.done[fault.kind] += 1
