"""The PostgreSQL server of a run: it is restarted during the run, and disconnected from single processes."""

import asyncio
import signal
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from tools.torture.history import BEGINS, ENDS, EventFile, Kind
from tools.torture.plan import (
    DATABASE_PAUSE_SECONDS,
    DatabaseFault,
    DatabaseFaultKind,
    Plan,
    database_faults,
)
from weft_testing.cut_socket import CutSocket, cut_socket
from weft_testing.postgres_server import PostgresServer, PostgresStartError

START_ATTEMPTS = 10


class RunDatabase:
    """The server, and a socket to it for each process. `close` closes the sockets."""

    def __init__(self, server: PostgresServer, name: str) -> None:
        """`name`: an empty database."""
        self._server = server
        self._name = name
        self._sockets: dict[str, CutSocket] = {}
        self._opened = ExitStack()

    @property
    def url(self) -> str:
        """The URL of the database, bypassing all sockets."""
        return self._server.url(self._name)

    def url_of(self, process: str, folder: Path) -> str:
        """Returns the URL for a process, over a socket in a separate folder."""
        folder.mkdir(parents=True, exist_ok=True)
        if process not in self._sockets:
            socket = cut_socket(folder / self._server.socket.name, self._server.socket)
            self._sockets[process] = self._opened.enter_context(socket)
        return self._server.url(self._name, folder)

    @property
    def processes(self) -> Sequence[str]:
        """Names of the processes that can be disconnected."""
        return sorted(self._sockets)

    async def cut(self, process: str, seconds: float, *, forgets: bool) -> None:
        """Disconnects a process for a while; `forgets`: see CutSocket.heal."""
        socket = self._sockets[process]
        socket.cut()
        try:
            await asyncio.sleep(seconds)
        finally:
            socket.heal(forgets=forgets)

    async def restart(self, seconds: float, how: signal.Signals) -> None:
        """Ends the server, and restarts it after a while. Raises PostgresStartError."""
        await asyncio.to_thread(self._server.stop, how)
        try:
            await asyncio.sleep(seconds)
        finally:
            # In this thread, because the server ends with the thread that started it.
            self._server.start()
        for _ in range(START_ATTEMPTS - 1):
            try:
                return await asyncio.to_thread(self._server.await_ready)
            except PostgresStartError:
                # After SIGKILL its other processes end by themselves, and until then it refuses to start.
                await asyncio.sleep(DATABASE_PAUSE_SECONDS)
                self._server.start()
        return await asyncio.to_thread(self._server.await_ready)

    def close(self) -> None:
        """Closes all sockets."""
        self._opened.close()


class DatabaseFaults:
    """The planned faults, one at a time, spread over a run's kills."""

    def __init__(self, plan: Plan, database: RunDatabase | None, file: EventFile) -> None:
        self._faults = database_faults(plan)
        self._database = database
        self._file = file
        self._begun = 0
        self._running: asyncio.Task[None] | None = None
        self.done: Counter[DatabaseFaultKind] = Counter()
        """Finished faults."""

    def begin_due(self, share: float) -> None:
        """Starts the next fault, if it is due after this share of the kills and no other one is active.

        Raises the error of the previous one.
        """
        if self._running is not None:
            if not self._running.done():
                return
            self._running.result()
        if self._begun < len(self._faults) and share >= (self._begun + 1) / (len(self._faults) + 1):
            self._running = asyncio.create_task(self._run(self._faults[self._begun]))
            self._begun += 1

    async def finish(self) -> None:
        """Waits for the active fault, and runs the remaining ones. Raises PostgresStartError."""
        if self._running is not None:
            await self._running
        for fault in self._faults[self._begun :]:
            await asyncio.sleep(DATABASE_PAUSE_SECONDS)
            await self._run(fault)

    async def stop(self) -> None:
        """Ends the active fault; then the server runs and every process can reach it."""
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
            abrupt = signal.SIGKILL if fault.kind is DatabaseFaultKind.KILL else signal.SIGQUIT
            is_abrupt = fault.is_abrupt or fault.kind is DatabaseFaultKind.KILL
            await database.restart(fault.seconds, abrupt if is_abrupt else signal.SIGINT)
        self._file.write(Kind.DATABASE_FAULT, key=process, note=f"{fault.kind} {ENDS}")
        self.done[fault.kind] += 1
