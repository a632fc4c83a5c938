"""A network that is cut between two routers, each of which then owns the same domain for its side."""

import asyncio
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from mesh_process import POOL, eventually, run_weft
from partitioned_mesh import ROUTERS, SLOTS, PartitionedMesh, running_partitioned_mesh

from weft_testing.postgres_server import PostgresServer
from weft_testing.torture.checker import STREAM_PREFIX, check, rules_broken
from weft_testing.torture.final_state import read_database
from weft_testing.torture.history import (
    COMPLETED,
    TERMINAL,
    Event,
    History,
    Kind,
    expected_text,
    read_backend_log,
    read_router_log,
)

pytest_plugins = ("database_fixtures",)
pytestmark = pytest.mark.nightly("repeats kills, cuts or swaps of a whole mesh")

WAIT_SECONDS = 60.0
CALLERS = 2
"""Of each side: with those of the other one more than the slots of the runner ..."""
PAUSES_SECONDS = (0.1, 0.25, 0.4)
"""... which they leave to the other side at times."""
TASKS = 12
RETRY_SECONDS = 0.2
TOKENS = (3, 8, 15)
CUT_SECONDS = 15.0
"""Longer than the session of a router that the registry does not hear from."""


@pytest.fixture
def mesh(tmp_path: Path, postgres: PostgresServer, postgres_database: str) -> Iterator[PartitionedMesh]:
    with running_partitioned_mesh(tmp_path, postgres, postgres_database) as mesh:
        yield mesh


@dataclass
class Callers:
    """Those who chat on both sides, and what they have had."""

    clients: tuple[aiohttp.ClientSession, aiohttp.ClientSession]
    ended: list[tuple[int, float, str]] = field(default_factory=list)
    """Side, moment, and what was wrong; empty: the answer was whole."""
    events: list[Event] = field(default_factory=list)
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    numbers: Iterator[int] = field(default_factory=count)

    async def chat_on(self, side: int) -> None:
        while not self.stopping.is_set():
            number = next(self.numbers)
            await asyncio.sleep(PAUSES_SECONDS[number // len(TOKENS) % len(PAUSES_SECONDS)])
            self.ended.append((side, *await self._chat(side, f"{STREAM_PREFIX}{number}", TOKENS[number % len(TOKENS)])))

    async def _chat(self, side: int, request_id: str, tokens: int) -> tuple[float, str]:
        body = {"model": POOL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": tokens}
        headers = {"X-Request-Id": request_id}
        async with self.clients[side].post("/v1/chat/completions", json=body, headers=headers) as response:
            answer = await response.json()
        text = answer["choices"][0]["message"]["content"] if response.status == 200 else ""
        wrong = "" if text == expected_text(tokens) else f"{request_id}: {response.status} {json.dumps(answer)[:600]}"
        return time.time(), wrong

    async def submit(self, number: int) -> None:
        """Submits one task on both sides at once, under one key."""
        key = f"task-{number}"
        self.events.append(Event(kind=Kind.INTENT, at=time.time(), key=key))
        first, second = await asyncio.gather(*(self._submit(side, key) for side in (0, 1)))
        assert first == second

    async def _submit(self, side: int, key: str) -> str:
        chat = {"model": POOL, "messages": [{"role": "user", "content": key}], "max_tokens": 8}
        body, headers = {"endpoint": "/v1/chat/completions", "body": chat}, {"Idempotency-Key": key}
        while True:
            async with self.clients[side].post("/api/v1/inference-tasks", json=body, headers=headers) as response:
                answer = await response.json()
                if response.status != 503:
                    break
                # Its gateway has not noticed yet which router it does not reach.
                assert answer["error"]["code"] == "service_unavailable", answer
            await asyncio.sleep(RETRY_SECONDS)
        assert response.status in (200, 202), answer
        self.events.append(Event(kind=Kind.ACKED, at=time.time(), key=key, task=answer["id"], source=f"side {side}"))
        return str(answer["id"])

    def wrong(self) -> list[str]:
        return [wrong for _, _, wrong in self.ended if wrong]

    def count(self, side: int, begin: float, end: float) -> int:
        """How many chats of a side ended within a time."""
        return sum(begin <= at <= end for found, at, _ in self.ended if found == side)


@asynccontextmanager
async def calling(mesh: PartitionedMesh) -> AsyncIterator[Callers]:
    timeout = aiohttp.ClientTimeout(total=WAIT_SECONDS)
    first, second = (
        aiohttp.ClientSession("http://localhost", connector=aiohttp.UnixConnector(str(side.socket)), timeout=timeout)
        for side in mesh.sides
    )
    async with first, second:
        callers = Callers((first, second))
        for http in callers.clients:
            await eventually(partial(_is_healthy, http), WAIT_SECONDS, "a gateway does not become healthy")
        await eventually(lambda: _has_routers(mesh, list(ROUTERS)), WAIT_SECONDS, "not both routers are registered")
        yield callers


async def _is_healthy(http: aiohttp.ClientSession) -> bool:
    async with http.get("/health") as response:
        return response.status == 200


async def _has_routers(mesh: PartitionedMesh, names: list[str]) -> bool:
    code, out, _ = await run_weft("get", "routers", "-o", "json", home=mesh.common.home)
    return code == 0 and sorted(each["name"] for each in json.loads(out)["items"]) == names


async def _all_ended(url: str) -> bool:
    stored, _ = await read_database(url)
    return len(stored) == TASKS and all(task.state in TERMINAL for task in stored.values())


async def _history(mesh: PartitionedMesh, callers: Callers, url: str) -> History:
    stored, damage = await read_database(url)
    routers = [event for side in mesh.sides for event in read_router_log(side.router_log)]
    events = [*callers.events, *routers, *read_backend_log(mesh.backend_log)]
    return History(events=events, served=stored, stored=stored, slots=SLOTS, damage=damage)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("keeps_registry", [True, False])
async def test_two_routers_that_own_one_domain_book_no_slot_twice_and_end_nothing_twice(
    mesh: PartitionedMesh, postgres_url: str, keeps_registry: bool
) -> None:
    async with calling(mesh) as callers:
        chats = [asyncio.create_task(callers.chat_on(side)) for side in (0, 1) for _ in range(CALLERS)]
        await eventually(lambda: _count(callers, 6), WAIT_SECONDS, "no chat ends")
        mesh.world.cut()
        if not keeps_registry:
            mesh.registry_of_side_0.cut()
        begin = time.time()
        for number in range(TASKS):
            await callers.submit(number)
            await asyncio.sleep(CUT_SECONDS / TASKS)
        if not keeps_registry:
            await eventually(lambda: _has_routers(mesh, [ROUTERS[1]]), WAIT_SECONDS, "a router that is cut off stays")
        end = time.time()
        mesh.world.heal()
        mesh.registry_of_side_0.heal()
        await eventually(lambda: _has_routers(mesh, list(ROUTERS)), WAIT_SECONDS, "a router does not come back")
        after = len(callers.ended)
        await eventually(lambda: _count(callers, after + 12), WAIT_SECONDS, "no chat ends when it is healed")
        callers.stopping.set()
        await asyncio.gather(*chats)
        await eventually(lambda: _all_ended(postgres_url), WAIT_SECONDS, "tasks do not end")
    assert callers.wrong() == []
    # Neither side can have asked the router of the other one.
    assert min(callers.count(side, begin + 3.0, end) for side in (0, 1)) >= 3
    history = await _history(mesh, callers, postgres_url)
    assert check(history) == []
    assert {task.state for task in history.stored.values()} == {COMPLETED}
    ends = Counter(event.task for event in history.of_kind(Kind.LEFT) if event.note == "finished")
    assert set(ends.values()) == {1}
    assert len(ends) == len(callers.ended) + TASKS
    # The negative control: with one slot less, the same history is overbooked, and the checker says so.
    assert rules_broken(check(replace(history, slots=SLOTS - 1)))["overbooked"]


async def _count(callers: Callers, wanted: int) -> Any:
    return len(callers.ended) >= wanted
