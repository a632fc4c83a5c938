"""A router that leads and its standbys, each a process: what the loss of the leader means to requests."""

import asyncio
import json
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml
from apart_mesh import Apart, running_apart
from mesh_process import POOL, eventually, fake_runner, run_weft, running_mesh, write_config

from weft.dispatch.remote_router import RemoteRouter
from weft.kernel.channels.rpc import open_channel
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.time.clock import SystemClock

pytestmark = pytest.mark.slow("starts five processes and PostgreSQL")

pytest_plugins = ("database_fixtures",)

ROUTERS = ("r1", "r2", "r3")
CHAT: dict[str, Any] = {"model": POOL, "messages": [{"role": "user", "content": "hi"}]}
OUTAGE_SECONDS = 30.0
RECORDS_SECONDS = 3.0
"""After this time the end of a request is in the database: `router.records.flush_interval_seconds`."""


@dataclass
class Routers:
    """A mesh, and its routers, each with a home of its own."""

    mesh: Apart
    homes: dict[str, Apart]

    @property
    def url(self) -> str:
        return self.mesh.url

    def start(self, name: str) -> None:
        self.homes[name].start("router")

    async def listed(self) -> list[dict[str, Any]]:
        """The routers as `weft get routers` lists them."""
        out = await self.mesh.weft("get", "routers", "-o", "json")
        items: list[dict[str, Any]] = json.loads(out)["items"]
        return items

    async def names(self) -> list[str]:
        return [each["name"] for each in await self.listed()]

    async def leaders(self) -> list[str]:
        return [str(each["name"]) for each in await self.listed() if each["leading"]]

    async def leader(self) -> str:
        (leader,) = await self.leaders()
        return leader

    def send(self, name: str, number: signal.Signals) -> None:
        self.homes[name]._processes["router"].send_signal(number)

    def end(self, name: str, number: signal.Signals) -> None:
        self.homes[name].end("router", number)


@contextmanager
def running_routers(folder: Path, database_url: str, **switches: Any) -> Iterator[Routers]:
    config = write_config(folder, fake_runner("a", slots=2, **switches))
    with running_apart(folder, config, ("registry", "runner", "gateway")) as mesh:
        homes: dict[str, Apart] = {}
        try:
            for name in ROUTERS:
                own = folder / name
                own.mkdir()
                settings = {
                    "addresses": {"registry": f"unix:{mesh.home}/run/registry.sock"},
                    "router": {"name": name, "database_url": database_url},
                    "drain_seconds": 5.0,
                }
                (own / "weft.yaml").write_text(yaml.safe_dump(settings))
                homes[name] = Apart(own / "home", own / "weft.yaml")
                homes[name].start("router")
            yield Routers(mesh, homes)
        finally:
            for each in homes.values():
                for process in each._processes.values():
                    process.send_signal(signal.SIGCONT)
                each.end_all()


@asynccontextmanager
async def caller(routers: Routers) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(routers.url, timeout=aiohttp.ClientTimeout(OUTAGE_SECONDS)) as http:

        async def healthy() -> bool:
            async with http.get("/health") as response:
                return response.status == 200 and await routers.names() == list(ROUTERS)

        await eventually(healthy, OUTAGE_SECONDS, "the mesh does not become healthy with three routers")
        yield http


async def chat(http: aiohttp.ClientSession, request_id: str, tokens: int = 2) -> tuple[int, dict[str, Any]]:
    async with http.post(
        "/v1/chat/completions", json=CHAT | {"max_tokens": tokens}, headers={"X-Request-Id": request_id}
    ) as response:
        return response.status, await response.json()


@pytest.fixture
def routers(tmp_path: Path, postgres_url: str) -> Iterator[Routers]:
    with running_routers(tmp_path, postgres_url, answer_tokens=0, tokens_per_second=20) as routers:
        yield routers


async def refusal_of(address: str) -> WeftError:
    """What a router answers to a call of another one, once it has read in the database where the leader serves."""
    async with open_channel(address) as channel, asyncio.timeout(10):
        while True:
            with pytest.raises(WeftError) as refused:
                await RemoteRouter(channel, SystemClock()).queues()
            if "address" in refused.value.metadata:
                return refused.value
            await asyncio.sleep(0.05)


async def test_one_router_leads_and_the_others_report_standby(routers: Routers) -> None:
    async with caller(routers) as http:
        assert (await chat(http, "first"))[0] == 200
        listed = {each["name"]: each for each in await routers.listed()}
        leader = listed.pop(await routers.leader())
        assert [each["leading"] for each in listed.values()] == [False, False]
        for standby in listed.values():
            refused = await refusal_of(standby["address"])
            assert refused.reason is Reason.ROUTER_STANDBY
            assert refused.metadata["address"] == leader["address"]
        code, out, _ = await run_weft("get", "routers", "-o", "wide", home=routers.mesh.home)
        assert code == 0
        assert out.splitlines()[0].split() == ["ROUTER", "STATE", "ADDRESS", "AGE", "VERSION"]
        assert sorted(line.split()[1] for line in out.splitlines()[1:]) == ["leader", "standby", "standby"]


async def _loaded(
    http: aiohttp.ClientSession, count: int, tokens: int
) -> list[asyncio.Task[tuple[int, dict[str, Any]]]]:
    """More requests than there are slots, some of which run by now."""
    tasks = [asyncio.create_task(chat(http, f"load-{number}", tokens)) for number in range(count)]

    async def waiting() -> bool:
        async with http.get("/v1/requests") as response:
            states = [each["state"] for each in (await response.json())["items"]]
            return states.count("running") == 2 and states.count("queued") == count - 2

    await eventually(waiting, OUTAGE_SECONDS, "the requests do not fill the queue")
    return tasks


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGKILL,
        *(
            pytest.param(number, marks=pytest.mark.nightly("another loss of a router"))
            for number in (signal.SIGSTOP, signal.SIGTERM)
        ),
    ],
)
async def test_queued_requests_of_a_lost_leader_are_placed_by_the_next_while_running_ones_continue(
    routers: Routers, number: signal.Signals
) -> None:
    async with caller(routers) as http:
        leader = await routers.leader()
        tasks = await _loaded(http, 6, 30)
        if number is signal.SIGSTOP:
            routers.send(leader, number)
        else:
            routers.end(leader, number)
        answers = await asyncio.gather(*tasks)
        found = [(status, body.get("usage", body).get("completion_tokens", body)) for status, body in answers]
        assert found == [(200, 30)] * 6
        assert (await chat(http, "afterwards"))[0] == 200
        assert await routers.leader() != leader
        if number is signal.SIGSTOP:
            # It thaws, finds that another one leads, and ends; its supervisor starts it again.
            routers.send(leader, signal.SIGCONT)
            assert await asyncio.to_thread(routers.homes[leader].wait, "router") == 1
        routers.start(leader)

        async def is_back() -> bool:
            listed = {each["name"]: each["leading"] for each in await routers.listed()}
            return len(listed) == len(ROUTERS) and not listed[leader]

        await eventually(is_back, OUTAGE_SECONDS, f"{leader} does not come back as a standby")
        assert (await chat(http, "with-the-second-leader"))[0] == 200


async def test_restarted_registry_keeps_its_routers_and_requests_continue(routers: Routers) -> None:
    async with caller(routers) as http:
        leader = await routers.leader()
        routers.mesh.end("registry", signal.SIGKILL)
        assert (await chat(http, "without-registry"))[0] == 200
        routers.mesh.start("registry")
        assert await routers.names() == list(ROUTERS)

        async def leads() -> bool:
            return await routers.leaders() == [leader]

        await eventually(leads, OUTAGE_SECONDS, f"{leader} does not say that it leads")
        assert (await chat(http, "with-registry"))[0] == 200


async def test_next_leader_explains_placements_of_the_previous_leader(routers: Routers) -> None:
    async with caller(routers) as http:
        assert (await chat(http, "before"))[0] == 200
        await asyncio.sleep(RECORDS_SECONDS)
        routers.end(await routers.leader(), signal.SIGKILL)
        assert (await chat(http, "after"))[0] == 200
        async with http.get("/v1/requests/before") as response:
            assert (await response.json())["receipt"]["outcome"] == "completed"
        async with http.get("/v1/requests?state=ended") as response:
            assert [each["requestId"] for each in (await response.json())["items"]] == ["after", "before"]


async def test_router_beside_weft_up_stands_by_and_a_second_weft_up_reports_why_it_fails(
    tmp_path: Path, postgres_url: str
) -> None:
    config = write_config(tmp_path, fake_runner("a"), router={"database_url": postgres_url})
    with running_mesh(tmp_path / "home", "--config", str(config)) as mesh:
        registry = json.loads((mesh.home / "run" / "up.json").read_text("utf-8"))["grpc"]
        host = tmp_path / "host"
        host.mkdir()
        settings = {"router": {"name": "spare", "database_url": postgres_url}}
        beside = write_config(host, addresses={"registry": registry}, **settings)
        with running_apart(host, beside, ("router",)):

            async def states() -> list[str]:
                code, out, error = await run_weft("get", "routers", home=mesh.home)
                assert code == 0, error
                return sorted(line.split()[1] for line in out.splitlines()[1:])

            async def is_listed() -> bool:
                return await states() == ["leader", "standby"]

            await eventually(is_listed, OUTAGE_SECONDS, "the router beside weft up does not stand by")
        code, _, error = await run_weft("up", "--config", str(config), home=tmp_path / "second")
        assert code != 0
        assert "another router runs on this database" in error
