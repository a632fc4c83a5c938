"""Sources of a watch by script, and a reader of its stream."""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from gateway_script import RunningGateway, head
from kit.steps import done

from gateway.gateway_config import GatewayConfig
from gateway.watch.source import Change, WatchCaller, WatchSource, put
from weft.kernel.access.principal import VIEW_MODELS, Access

WATCH = "/api/v1/watch"
QUICK = GatewayConfig(port=0, headers_within_seconds=0.02, sse_keepalive_seconds=0.02, watch_interval_seconds=0.001)
Step = Change | Exception | asyncio.Event


def thing(name: str, **fields: object) -> Change:
    return put(name, lambda: json.dumps({"name": name, **fields}, separators=(",", ":")).encode())


class ScriptedSource(WatchSource):
    """Its n-th reading does the n-th script, and then waits; one that is read more often than that does the last."""

    def __init__(
        self, kind: str, scripts: list[list[Step]], access: Access = VIEW_MODELS, *, by_name: bool = False
    ) -> None:
        super().__init__(kind=kind, access=access, by_name=by_name, changes=self._changes)
        self.scripts = scripts
        self.callers: list[WatchCaller] = []
        self.was_closed = asyncio.Event()

    async def _changes(self, caller: WatchCaller) -> AsyncGenerator[Change]:
        self.callers.append(caller)
        try:
            async for step in done(self.scripts[min(len(self.callers), len(self.scripts)) - 1]):
                yield step
            await asyncio.Event().wait()
        finally:
            self.was_closed.set()


@dataclass
class WatchReader:
    """The reader of one open stream."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    head: str = ""

    async def next(self) -> dict[str, Any]:
        """The next change; comments between are skipped, and so is the framing of the body."""
        while True:
            line = await self.reader.readline()
            if not line:
                raise EOFError
            if line.startswith(b"data: "):
                found: dict[str, Any] = json.loads(line.removeprefix(b"data: "))
                return found

    async def until(self, kind: str, change: str) -> list[dict[str, Any]]:
        """The changes up to the next one of this kind and type, that included."""
        found = [await self.next()]
        while (found[-1].get("kind"), found[-1].get("change")) != (kind, change):
            found.append(await self.next())
        return found

    async def snapshot(self, *kinds: str) -> list[dict[str, Any]]:
        """The changes up to the end of the snapshot of each kind, in whatever order they come."""
        found, missing = list[dict[str, Any]](), set(kinds)
        while missing:
            found.append(await self.next())
            if found[-1].get("change") == "synced":
                missing.discard(found[-1]["kind"])
        return found


@asynccontextmanager
async def watching(
    gateway: RunningGateway, kinds: str = "", headers: Mapping[str, str] | None = None
) -> AsyncIterator[WatchReader]:
    """An open stream of these kinds."""
    async with gateway.connection() as (reader, writer):
        path = f"{WATCH}?kinds={kinds}" if kinds else WATCH
        writer.write(head(f"GET {path} HTTP/1.1", {"Host": "localhost", **(headers or {})}))
        top = (await reader.readuntil(b"\r\n\r\n")).decode()
        yield WatchReader(reader, writer, top)


def brief(change: Mapping[str, Any]) -> tuple[str, ...]:
    """Kind, change and name."""
    return tuple(change[key] for key in ("kind", "change", "name") if key in change)
