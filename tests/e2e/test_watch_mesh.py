"""GET /api/v1/watch of a mesh in processes of its own: its objects are those of the lists, also after a restart."""

import asyncio
import json
import signal
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
from apart_mesh import Apart, running_apart
from mesh_process import POOL, eventually, fake_runner, write_config

DEVICES = {"declared": [{"name": "budget", "memory_mb": 3000}]}
LISTS = {
    "model": "/api/v1/models",
    "agent": "/api/v1/agents",
    "runner": "/api/v1/runners",
    "pool": "/api/v1/pools",
    "route": "/api/v1/routes",
    "alias": "/api/v1/aliases",
    "operation": "/v1/admin/operations",
    "memory": "/v1/admin/gpu-memory",
    "event": "/api/v1/events",
}
READ_SECONDS = 30.0
ALWAYS_NEW = frozenset({"lastHeartbeatAt", "seenAt", "etaSeconds", "power", "usedBytes", "sampledAt"})
DOCUMENTS = [
    {"kind": "agent", "name": "reviewer", "pool": POOL, "systemPrompt": "Be terse."},
    {"kind": "route", "name": "summaries", "candidates": ["m-a"]},
    {"kind": "alias", "name": "gpt-4o", "target": POOL},
]


class Copy:
    """What a page knows of the mesh: it applies each change of the stream."""

    def __init__(self, lines: aiohttp.StreamReader) -> None:
        self._lines = lines
        self.things: dict[str, dict[str, Any]] = {}
        self.synced: set[str] = set()
        self.changes: list[tuple[str, str]] = []

    async def next(self) -> None:
        while True:
            line = await self._lines.readline()
            assert line, "the stream ended"
            if line.startswith(b"data: "):
                break
        change = json.loads(line.removeprefix(b"data: "))
        kind, name = change["kind"], change.get("name", "")
        self.changes.append((kind, change["change"]))
        match change["change"]:
            case "put":
                self.things.setdefault(kind, {})[name] = change["object"]
            case "delete":
                self.things.get(kind, {}).pop(name, None)
            case "reset":
                self.things[kind] = {}
                self.synced.discard(kind)
            case "unavailable":
                self.synced.discard(kind)
            case "synced":
                self.synced.add(kind)

    async def until_synced(self) -> None:
        async with asyncio.timeout(READ_SECONDS):
            while self.synced != set(LISTS):
                await self.next()


@asynccontextmanager
async def watched(http: aiohttp.ClientSession, mesh: Apart) -> AsyncIterator[Copy]:
    wait = aiohttp.ClientTimeout(total=None)
    async with http.get(f"{mesh.url}/api/v1/watch?kinds={','.join(LISTS)}", timeout=wait) as response:
        assert response.status == 200, await response.text()
        yield Copy(response.content)


def steady(found: Any) -> Any:
    """A document without what changes by itself."""
    if isinstance(found, Mapping):
        return {key: steady(value) for key, value in found.items() if key not in ALWAYS_NEW}
    return [steady(each) for each in found] if isinstance(found, list) else found


async def listed(http: aiohttp.ClientSession, mesh: Apart, kind: str) -> dict[str, Any]:
    async with http.get(f"{mesh.url}{LISTS[kind]}") as got:
        page = await got.json()
    items = page["hosts"] if kind == "memory" else page["items"]
    names = {"memory": "host", "event": "sequence"}
    return {str(each[names.get(kind, "name")]): steady(each) for each in items}


async def same_as_the_lists(http: aiohttp.ClientSession, mesh: Apart, copy: Copy) -> None:
    """Reads the stream until each kind is what its list says."""
    async with asyncio.timeout(READ_SECONDS):
        for kind in LISTS:
            while (found := steady(copy.things.get(kind, {}))) != (wanted := await listed(http, mesh, kind)):
                try:
                    async with asyncio.timeout(2.0):
                        await copy.next()
                except TimeoutError:
                    assert found == wanted, kind


async def ready(http: aiohttp.ClientSession, mesh: Apart) -> None:
    async def has_model() -> bool:
        async with http.get(f"{mesh.url}/api/v1/models/m-a") as response:
            return response.status == 200 and "instance" in (await response.json())["status"]

    await eventually(has_model, 30.0, "the runner's model does not appear")


async def test_watch_stream_matches_the_lists_across_a_registry_restart(tmp_path: Path) -> None:
    config = write_config(tmp_path, fake_runner("a"), accelerators=DEVICES)
    with running_apart(tmp_path, config) as mesh:
        async with aiohttp.ClientSession() as http:
            await ready(http, mesh)
            async with watched(http, mesh) as copy:
                await copy.until_synced()
                await same_as_the_lists(http, mesh, copy)
                async with http.post(f"{mesh.url}/api/v1/apply", json={"documents": DOCUMENTS}) as applied:
                    assert applied.status == 200, await applied.text()
                async with http.post(f"{mesh.url}/v1/admin/models/m-a/load", json={}) as begun:
                    assert begun.status == 202, await begun.text()
                    name = (await begun.json())["name"]
                async with asyncio.timeout(READ_SECONDS):
                    while copy.things.get("operation", {}).get(name, {}).get("state") != "succeeded":
                        await copy.next()
                await same_as_the_lists(http, mesh, copy)
                assert list(copy.things["alias"]) == ["gpt-4o"]
                assert ("memory", "put") in copy.changes

                copy.changes.clear()
                mesh.end("registry", signal.SIGKILL)
                mesh.start("registry")
                async with asyncio.timeout(READ_SECONDS):
                    while {kind for kind, change in copy.changes if change == "unavailable"} != set(LISTS):
                        await copy.next()
                await copy.until_synced()
                await same_as_the_lists(http, mesh, copy)
                for kind in LISTS:
                    of_kind = [change for each, change in copy.changes if each == kind]
                    assert of_kind.index("unavailable") < of_kind.index("reset") < of_kind.index("synced")
