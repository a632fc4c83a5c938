"""A proxy in front of PostgreSQL's Unix socket: it moves to another server, and cuts connections at a COMMIT."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from weft_testing.postgres_server import SOCKET_NAME

CHUNK_BYTES = 65536
CARRY_OUT_SECONDS = 0.3
"""Time for a server to carry out a COMMIT whose answer is not passed on."""


class PostgresProxy:
    """Forwards connections to the server whose socket is in `target`."""

    def __init__(self, folder: Path, target: Path) -> None:
        self.folder = folder
        self.target: Path | None = target
        """None: no server answers."""
        self.cut: str = ""
        """Cuts the next connection that commits: `before` the server gets the COMMIT, or `after`."""
        self.cuts = 0
        self._open: set[asyncio.StreamWriter] = set()

    def url(self, database: str) -> str:
        return f"postgresql://postgres@/{database}?host={self.folder}"

    def drop(self) -> None:
        """Cuts every connection."""
        for each in self._open:
            each.close()

    async def forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.add(writer)
        with suppress(OSError):
            if self.target is not None:
                behind, to_server = await asyncio.open_unix_connection(str(self.target / SOCKET_NAME))
                self._open.add(to_server)
                answers = asyncio.ensure_future(self._copy(behind, writer))
                await self._copy(reader, to_server, answers)
                answers.cancel()
                to_server.close()
                self._open.discard(to_server)
        writer.close()
        self._open.discard(writer)

    async def _copy(
        self, source: asyncio.StreamReader, to: asyncio.StreamWriter, answers: "asyncio.Future[None] | None" = None
    ) -> None:
        with suppress(OSError):
            while data := await source.read(CHUNK_BYTES):
                if answers is not None and b"COMMIT" in data and self.cut:
                    cut, self.cut = self.cut, ""
                    self.cuts += 1
                    answers.cancel()
                    if cut == "after":
                        to.write(data)
                        await asyncio.sleep(CARRY_OUT_SECONDS)
                    return
                to.write(data)
                await to.drain()
        to.close()


@asynccontextmanager
async def postgres_proxy(folder: Path, target: Path) -> AsyncIterator[PostgresProxy]:
    """Yields a running proxy with its socket in `folder`."""
    proxy = PostgresProxy(folder, target)
    async with await asyncio.start_unix_server(proxy.forward, str(folder / SOCKET_NAME)):
        yield proxy
        proxy.drop()
