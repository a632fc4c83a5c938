"""Several routers as processes under one registry: what the loss of the one that owns a pool means to its requests."""

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
from mesh_process import POOL, eventually, fake_runner, run_weft, write_config

pytestmark = pytest.mark.nightly("active-active routers, removed in the redesign")

ROUTERS = ("r1", "r2", "r3")
CHAT: dict[str, Any] = {"model": POOL, "messages": [{"role": "user", "content": "hi"}]}
OUTAGE_SECONDS = 30.0


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
        code, out, error = await run_weft("get", "routers", "-o", "json", home=self.mesh.home)
        assert code == 0, error
        items: list[dict[str, Any]] = json.loads(out)["items"]
        return items

    async def names(self) -> list[str]:
        return [each["name"] for each in await self.listed()]

    async def owner(self) -> str:
        (owner,) = [each["name"] for each in await self.listed() if POOL in each["domains"]]
        return str(owner)

    def send(self, name: str, number: signal.Signals) -> None:
        self.homes[name]._processes["router"].send_signal(number)

    def end(self, name: str, number: signal.Signals) -> None:
        self.homes[name].end("router", number)


@contextmanager
def running_routers(folder: Path, **switches: Any) -> Iterator[Routers]:
    config = write_config(folder, fake_runner("a", slots=2, **switches))
    with running_apart(folder, config, ("registry", "runner", "gateway")) as mesh:
        homes: dict[str, Apart] = {}
        try:
            for name in ROUTERS:
                own = folder / name
                own.mkdir()
                settings = {
                    "addresses": {"registry": f"unix:{mesh.home}/run/registry.sock"},
                    "router": {"name": name},
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
def routers(tmp_path: Path) -> Iterator[Routers]:
    with running_routers(tmp_path, answer_tokens=0, tokens_per_second=20) as routers:
        yield routers


async def test_each_router_says_what_it_owns_and_one_domain_has_one_owner(routers: Routers) -> None:
    async with caller(routers) as http:
        assert (await chat(http, "first"))[0] == 200
        listed = await routers.listed()
        assert [(each["name"], each["draining"]) for each in listed] == [(name, False) for name in ROUTERS]
        assert sorted(len(each["domains"]) for each in listed) == [0, 0, 1]
        code, out, _ = await run_weft("get", "routers", "-o", "wide", home=routers.mesh.home)
        assert code == 0
        assert out.splitlines()[0].split() == ["ROUTER", "STATE", "DOMAINS", "ADDRESS", "AGE", "VERSION", "OWNS"]


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


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM])
async def test_requests_that_wait_at_a_lost_owner_are_placed_by_another_and_running_ones_end_there(
    routers: Routers, number: signal.Signals
) -> None:
    async with caller(routers) as http:
        owner = await routers.owner()
        tasks = await _loaded(http, 6, 30)
        if number is signal.SIGSTOP:
            routers.send(owner, number)
        else:
            routers.end(owner, number)
        answers = await asyncio.gather(*tasks)
        found = [(status, body.get("usage", body).get("completion_tokens", body)) for status, body in answers]
        assert found == [(200, 30)] * 6
        assert (await chat(http, "afterwards"))[0] == 200

        async def is_gone() -> bool:
            return owner not in await routers.names()

        await eventually(is_gone, OUTAGE_SECONDS, f"{owner} stays registered")
        assert await routers.owner() != owner
        if number is signal.SIGSTOP:
            routers.send(owner, signal.SIGCONT)
        else:
            routers.start(owner)

        async def is_back() -> bool:
            return await routers.names() == list(ROUTERS)

        await eventually(is_back, OUTAGE_SECONDS, f"{owner} does not come back")
        assert await routers.owner() == owner
        assert (await chat(http, "with-the-first-owner"))[0] == 200


async def test_a_registry_that_restarts_keeps_its_routers_and_requests_go_on(routers: Routers) -> None:
    async with caller(routers) as http:
        owner = await routers.owner()
        routers.mesh.end("registry", signal.SIGKILL)
        assert (await chat(http, "without-registry"))[0] == 200
        routers.mesh.start("registry")
        assert await routers.names() == list(ROUTERS)
        assert await routers.owner() == owner
        assert (await chat(http, "with-registry"))[0] == 200


async def test_a_list_names_the_routers_that_do_not_answer_and_a_request_is_explained_by_any(routers: Routers) -> None:
    async with caller(routers) as http:
        assert (await chat(http, "mine"))[0] == 200
        owner = await routers.owner()
        other = next(name for name in ROUTERS if name != owner)
        async with http.get("/v1/requests/mine") as response:
            assert (await response.json())["receipt"]["outcome"] == "completed"
        routers.end(other, signal.SIGKILL)

        async def is_named() -> bool:
            async with http.get("/v1/requests?state=ended") as response:
                listed = await response.json()
                is_said: bool = listed.get("unreachableRouters") == [other]
                return is_said and [each["requestId"] for each in listed["items"]][:1] == ["mine"]

        await eventually(is_named, 8.0, "the list does not name the router that is lost")
        routers.start(other)
