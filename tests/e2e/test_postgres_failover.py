"""The primary of two PostgreSQL servers dies under load: the mesh finds the new one, and loses nothing acknowledged."""

import asyncio
import json
import signal
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import aiohttp
import pytest
from filled_mesh import weft
from mesh_process import MeshProcess, fake_runner, running_mesh, write_config

from weft_testing.postgres_server import SETTINGS, PostgresServer, running_postgres

pytestmark = [pytest.mark.slow("starts meshes and two PostgreSQL servers"), pytest.mark.timeout(240)]

BACK_SECONDS = 60.0
KEYS, TASKS = "/api/v1/keys", "/api/v1/inference-tasks"
CALLERS = 3


@pytest.fixture
def servers() -> Iterator[tuple[PostgresServer, PostgresServer]]:
    """A primary that acknowledges nothing that its standby has not received, and the standby."""
    settings = {**SETTINGS, "synchronous_standby_names": "*", "hot_standby": "on", "wal_keep_size": "64MB"}
    with running_postgres(settings) as primary, primary.replica() as standby:
        yield primary, standby


class Load:
    """Callers that change the mesh, and what was acknowledged to them."""

    def __init__(self, url: str, key: str) -> None:
        self._url = url
        self._headers = {"Authorization": f"Bearer {key}"}
        self.acknowledged: dict[str, list[str]] = {"keys": [], "tasks": []}
        self.failures = list[str]()
        self._ends = asyncio.Event()

    async def run(self, name: str, path: str, body: Callable[[int], object]) -> None:
        async with aiohttp.ClientSession(self._url, headers=self._headers) as session:
            number = 0
            while not self._ends.is_set():
                number += 1
                try:
                    async with session.post(path, json=body(number), timeout=aiohttp.ClientTimeout(90)) as answer:
                        found = await answer.json()
                except (aiohttp.ClientError, TimeoutError, json.JSONDecodeError) as error:
                    self.failures.append(repr(error))
                    continue
                if answer.ok:
                    self.acknowledged[name].append(found["id"])
                else:
                    self.failures.append(str(found))
                    await asyncio.sleep(0.1)

    def end(self) -> None:
        self._ends.set()


async def within(seconds: float, load: Load, condition: Callable[[], object]) -> None:
    try:
        async with asyncio.timeout(seconds):
            while not condition():  # noqa: ASYNC110 - changed by tasks
                await asyncio.sleep(0.1)
    except TimeoutError:
        raise AssertionError(load.failures[-5:], {name: len(ids) for name, ids in load.acknowledged.items()}) from None


def ids_of(load: Load) -> list[list[str]]:
    return list(load.acknowledged.values())


def keys_shown(mesh: MeshProcess) -> set[str]:
    return {each["id"] for each in json.loads(weft(mesh.home, "keys", "list", "-o", "json"))["items"]}


async def test_mesh_follows_a_failover_under_load_and_agrees_with_its_database(
    servers: tuple[PostgresServer, PostgresServer], tmp_path: Path
) -> None:
    primary, standby = servers
    url = f"postgresql://postgres@/postgres?host={primary.socket_folder},{standby.socket_folder}"
    databases = {name: {"database_url": url} for name in ("registry", "router")}
    config = write_config(tmp_path, fake_runner("a"), auth={"required": True}, **databases)
    with running_mesh(tmp_path / "home", "--config", str(config)) as mesh:
        key = await asyncio.to_thread(weft, mesh.home, "keys", "create", "--role", "admin", "-o", "name")
        load = Load(mesh.url, key.strip())
        task = {"model": "m-a", "body": {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1}}
        callers: list[Awaitable[None]] = []
        for caller in range(CALLERS):
            callers += [
                load.run("keys", KEYS, lambda number, caller=caller: {"description": f"{caller}-{number}"}),  # type: ignore[misc]
                load.run("tasks", TASKS, lambda _: task),
            ]
        running = asyncio.gather(*callers)
        await within(BACK_SECONDS, load, lambda: all(len(ids) > 5 for ids in ids_of(load)))
        await asyncio.to_thread(primary.stop, signal.SIGQUIT)
        await asyncio.to_thread(standby.promote)
        before = [len(ids) for ids in ids_of(load)]
        await within(
            BACK_SECONDS, load, lambda: all(len(ids) > n + 5 for ids, n in zip(ids_of(load), before, strict=True))
        )
        load.end()
        await running
        seen = await asyncio.to_thread(keys_shown, mesh)
    for name, table in (("keys", "api_keys"), ("tasks", "tasks")):
        stored = set((await asyncio.to_thread(standby.sql, f"SELECT id FROM {table}")).split())
        assert set(load.acknowledged[name]) <= stored, load.failures
    assert seen == set((await asyncio.to_thread(standby.sql, "SELECT id FROM api_keys")).split())
    with running_mesh(tmp_path / "home", "--config", str(config)) as mesh:
        assert await asyncio.to_thread(keys_shown, mesh) == seen
