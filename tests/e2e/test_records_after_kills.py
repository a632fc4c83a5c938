"""What a router knows of requests, clients, accounts and figures, after it was killed, over real processes."""

import asyncio
import signal
import sqlite3
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import aiohttp
from apart_mesh import running_apart
from mesh_process import POOL, eventually, fake_runner, run_weft, write_config

from weft.api.router.v1.figure_step_pb2 import FigureStep
from weft.api.router.v1.request_pb2 import ClientRecord

WAIT_SECONDS = 30.0
QUICK = {
    "records": {"flush_interval_seconds": 0.1},
}
CHAT: dict[str, Any] = {"model": POOL, "messages": [{"role": "user", "content": "a secret word"}], "max_tokens": 7}
LONG = CHAT | {"max_tokens": 4_000, "stream": True}


async def has_router(http: aiohttp.ClientSession) -> bool:
    async with http.get("/health") as response:
        return response.status == 200


async def chat(http: aiohttp.ClientSession, request_id: str) -> None:
    headers = {"X-Request-Id": request_id, "X-Client-Id": "laptop"}
    async with http.post("/v1/chat/completions", json=CHAT, headers=headers) as response:
        assert response.status == 200, await response.text()


async def stream(http: aiohttp.ClientSession, request_id: str, began: asyncio.Event) -> None:
    """A stream that goes on while its router dies; it is read to its end, whatever that is."""
    async with http.post("/v1/chat/completions", json=LONG, headers={"X-Request-Id": request_id}) as response:
        async for _ in response.content:
            began.set()


async def request(http: aiohttp.ClientSession, request_id: str) -> Mapping[str, Any]:
    async with http.get(f"/v1/requests/{request_id}") as response:
        found: Mapping[str, Any] = await response.json()
        return found


async def listed(http: aiohttp.ClientSession, state: str) -> set[str]:
    async with http.get("/v1/requests", params={"state": state}) as response:
        assert response.status == 200, await response.text()
        return {item["requestId"] for item in (await response.json())["items"]}


async def completed_in_figures(http: aiohttp.ClientSession) -> int:
    async with http.get("/v1/admin/figures") as response:
        assert response.status == 200, await response.text()
        return sum((await response.json())["all"]["completed"])


async def until_figures(http: aiohttp.ClientSession, completed: int) -> None:
    async def are_so() -> bool:
        return await completed_in_figures(http) == completed

    await eventually(are_so, WAIT_SECONDS, f"the figures never have {completed} requests")


async def clients(http: aiohttp.ClientSession) -> Mapping[str, int]:
    async with http.get("/v1/clients") as response:
        return {item["clientId"]: item["requestCount"] for item in (await response.json())["items"]}


def rows(home: Path, query: str) -> list[tuple[Any, ...]]:
    """What the database under a home has."""
    with closing(sqlite3.connect(f"file:{home}/state/router.db?mode=ro", uri=True)) as connection:
        return connection.execute(query).fetchall()


async def until_written(home: Path, *, ended: int, under_way: int) -> None:
    async def is_written() -> bool:
        found = rows(home, "SELECT ended_at IS NULL, count(*) FROM request_records GROUP BY 1")
        steps = [FigureStep.FromString(step) for (step,) in rows(home, "SELECT step FROM figure_steps")]
        known = [ClientRecord.FromString(record) for (record,) in rows(home, "SELECT record FROM known_clients")]
        counts = {sum(step.all.completed for step in steps), *(client.request_count for client in known)}
        is_charged = bool(rows(home, "SELECT 1 FROM fair_accounts"))
        return is_charged and counts == {ended} and dict(found) == {0: ended} | ({1: under_way} if under_way else {})

    await eventually(is_written, WAIT_SECONDS, "the records are not written")


async def test_records_metrics_clients_and_accounts_survive_a_router_kill(tmp_path: Path) -> None:
    config = write_config(tmp_path, fake_runner("a", tokens_per_second=200.0, answer_tokens=0), router=QUICK)
    with running_apart(tmp_path, config) as mesh:
        async with aiohttp.ClientSession(mesh.url) as http:
            await eventually(lambda: has_router(http), WAIT_SECONDS, "there is no router")
            for number in range(5):
                await chat(http, f"r-{number}")
            began = asyncio.Event()
            cut_off = asyncio.create_task(stream(http, "r-long", began))
            await began.wait()
            await until_written(mesh.home, ended=5, under_way=1)
            before, [account] = await request(http, "r-3"), rows(mesh.home, "SELECT tokens FROM fair_accounts")
            mesh.end("router", signal.SIGKILL)
            mesh.start("router")
            await eventually(lambda: has_router(http), WAIT_SECONDS, "there is no router")
            assert await request(http, "r-3") == before
            assert before["receipt"]["completionTokens"] == 7
            lost = await request(http, "r-long")
            assert (lost["state"], lost["reason"]) == ("ended", "router_lost")
            assert await listed(http, "completed") == {f"r-{number}" for number in range(5)}
            assert await listed(http, "failed") == {"r-long"}
            assert await listed(http, "ended") == {*(f"r-{number}" for number in range(5)), "r-long"}
            await until_figures(http, 5)
            assert await clients(http) == {"laptop": 5}
            code, out, error = await run_weft("explain", "r-long", home=mesh.home)
            assert code == 0, error
            assert "router lost" in out.replace("_", " ")
            code, out, error = await run_weft("get", "requests", "--state", "ended", "-o", "name", home=mesh.home)
            assert code == 0, error
            assert len(out.split()) == 6
            # The account of before is the one that is kept from now on: the only one is the lowest.
            assert account[0] > 0.0
            await chat(http, "r-5")

            async def is_charged() -> bool:
                return bool(0.0 < rows(mesh.home, "SELECT tokens FROM fair_accounts")[0][0] < account[0])

            await eventually(is_charged, WAIT_SECONDS, "the account of after the restart is not written")
            cut_off.cancel()
            # No word of a caller, and none of a model, is in the database.
            content = b"".join(each.read_bytes() for each in (mesh.home / "state").glob("router.db*"))
            assert b"secret word" not in content
            assert b"r-long" in content
            await asyncio.gather(cut_off, return_exceptions=True)
