"""A runner follows what a server lists: with a real server whose list changes, breaks off, hangs or lies."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from kit.failures import fails
from kit.http_server import http_server
from kit.presence import present
from kit.waiting import until

from runner_svc.followed_servers import SETTLE_CHECK_SECONDS, FollowedServers
from runner_svc.instance.instance_settings import ServedModel
from runner_svc.openai_upstream import probe
from runner_svc.openai_upstream.server_probes import ServerProbes
from runner_svc.policy.followed_models import LOOKS_UNTIL_GONE
from runner_svc.runtimes.openai_http.runtime import ATTACHED_SLOTS
from weft.documents.left_out import left_out
from weft_app.compose import followed_servers
from weft_app.compose.followed_servers import ServerAddress, followed_server, list_of_followed, why_none_served
from weft_app.compose.served_models import served_model
from weft_app.config.loader import parse_section
from weft_app.config.runners import ConfiguredRunner
from weft_testing.fake_clock import FakeClock

INTERVAL_SECONDS = 5.0


class Host:
    def __init__(self, *taken: str) -> None:
        self.models: dict[str, ServedModel] = {}
        self._taken = taken

    def is_served(self, name: str) -> bool:
        return name in self.models or name in self._taken

    async def serve(self, model: ServedModel) -> None:
        self.models[model.name] = model

    def withdraw(self, name: str) -> None:
        del self.models[name]

    async def remove(self, name: str) -> int:
        del self.models[name]
        return 0


class Server:
    """A server whose answer to GET /v1/models is what a test says."""

    def __init__(self) -> None:
        self.url = ""
        self.body: bytes | None = listing()
        self.status = 200

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        if self.body is None:
            response = web.StreamResponse()
            await response.prepare(request)
            await asyncio.Event().wait()
        return web.Response(status=self.status, body=self.body, headers={"Location": "http://127.0.0.1:1/"})


def listing(*names: str, owner: str = "library") -> bytes:
    return json.dumps({"object": "list", "data": [{"id": name, "owned_by": owner} for name in names]}).encode()


@asynccontextmanager
async def serving() -> AsyncIterator[Server]:
    server = Server()
    async with http_server(server.answer) as url:
        server.url = f"{url}/v1"
        yield server


def section_of(**settings: Any) -> ConfiguredRunner:
    runner = {"name": "box", "runtime": "openai_http", "models": [], "url": "http://127.0.0.1:1", **settings}
    return parse_section(ConfiguredRunner, runner)


class Following:
    """One server that is followed, with a clock that a test moves."""

    def __init__(self, host: Host, url: str, **settings: Any) -> None:
        self.host = host
        self.clock = FakeClock()
        self.servers = FollowedServers(host, self.clock)
        section = section_of(probe_interval_seconds=INTERVAL_SECONDS, **settings)
        address = ServerAddress(name="box", url=url)
        self.server = followed_server(
            section,
            address,
            "runners.box",
            lambda own, model: served_model(own, model, drain_seconds=1.0),
            {},
            ServerProbes(self.clock),
        )

    async def start(self) -> str:
        """Looks for the first time; returns why nothing is known."""
        return (await self.servers.follow(self.server)).why

    async def look(self, times: int = 1) -> None:
        """Looks at the list again, so many times, each to its end."""
        await self.clock.advance(times * INTERVAL_SECONDS, sleepers=1)


@asynccontextmanager
async def following(url: str, *taken: str, **settings: Any) -> AsyncIterator[Following]:
    found = Following(Host(*taken), url, **settings)
    try:
        yield found
    finally:
        await found.servers.stop()


async def test_every_listed_model_is_served_under_the_servers_name_for_it() -> None:
    async with serving() as server:
        server.body = listing("llama3.2:3b", "Qwen/Qwen3-8B")
        async with following(server.url) as box:
            assert await box.start() == ""
            assert {name: model.upstream_name for name, model in box.host.models.items()} == {
                "llama3.2:3b": "llama3.2:3b",
                "Qwen/Qwen3-8B": "Qwen/Qwen3-8B",
            }
            assert all(model.server == "box" and model.slots == ATTACHED_SLOTS for model in box.host.models.values())


async def test_models_added_to_the_server_are_served_and_removed_ones_are_not() -> None:
    async with serving() as server:
        server.body = listing("a", "b")
        async with following(server.url) as box:
            await box.start()
            server.body = listing("b", "c")
            await box.look()
            assert sorted(box.host.models) == ["a", "b", "c"]
            await box.look(LOOKS_UNTIL_GONE - 1)
            assert sorted(box.host.models) == ["b", "c"]


@pytest.mark.parametrize(
    ("status", "body"),
    [(200, b"<html>"), (200, b'{"data": {"a": 1}}'), (302, b"[]"), (401, b"[]"), (500, b"\xff" * 64)],
)
async def test_invalid_list_response_changes_nothing(status: int, body: bytes) -> None:
    async with serving() as server:
        server.body = listing("a")
        async with following(server.url) as box:
            await box.start()
            server.status, server.body = status, body
            await box.look(LOOKS_UNTIL_GONE + 1)
            assert sorted(box.host.models) == ["a"]


async def test_empty_list_is_accepted() -> None:
    async with serving() as server:
        server.body = listing("a")
        async with following(server.url) as box:
            await box.start()
            server.body = b'{"object": "list", "data": null}'
            await box.look(LOOKS_UNTIL_GONE)
            assert not box.host.models


async def test_hanging_server_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(followed_servers, "LIST_SECONDS", 0.2)
    async with serving() as server:
        server.body = None
        async with following(server.url) as box:
            assert await box.start() == "it did not answer within 0.2 s"
            server.body = listing("a")
            await box.look()
            assert sorted(box.host.models) == ["a"]


async def test_endless_list_is_not_read_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "MAX_ANSWER_BYTES", 64 * 1024)
    async with serving() as server:
        server.body = listing(*(f"model-{number}" for number in range(10_000)))
        async with following(server.url) as box:
            assert "its answer is longer than" in await box.start()
            assert not box.host.models


async def test_weft_mesh_is_not_followed() -> None:
    async with serving() as server:
        server.body = listing("a", owner="weft")
        async with following(server.url) as box:
            assert "it is a weft mesh" in await box.start()
            assert not box.host.models
        said = present(await list_of_followed(section_of(url=server.url)))
        # `weft up` said that the server does not answer, and the doctor that it is to be started.
        assert why_none_served(said) == (
            "serves no model of its server: it is a weft mesh; list its models one by one; "
            "list them beside its url, such as models: [{name: qwen}]"
        )


async def test_reason_a_server_has_no_served_models_is_reported_with_a_fix() -> None:
    async with serving() as server:
        section = section_of(url=server.url)

        async def why() -> str:
            said = await list_of_followed(section)
            return "" if said is None else why_none_served(said)

        server.body = listing()
        assert await why() == "its server lists no models; what it lists later is served"
        server.status = 401
        assert await why() == (
            "serves no model of its server: it refuses the key (status 401); correct api_key_env, or its value"
        )
        server.body, server.status = b"{}", 200
        assert (
            await why() == "serves no model of its server: its answer is not a list of models; start it, or correct url"
        )
    assert await why() == "serves no model of its server: it does not answer; start it, or correct url"


async def test_detached_server_serves_nothing() -> None:
    async with serving() as server:
        server.body = listing("a", "b")
        async with following(server.url) as box:
            await box.start()
            await box.servers.forget("box")
            assert (box.host.models, box.servers.names, box.clock.sleepers) == ({}, (), 0)


def test_server_on_another_network_needs_the_remote_setting() -> None:
    with fails(field="runners.box.remote"):
        Following(Host(), "https://models.example.com/v1")


async def test_names_of_the_runner_and_its_agents_are_not_used_for_listed_models() -> None:
    async with serving() as server:
        server.body = listing("box", "helper", "other")
        async with following(server.url) as found:
            found.servers.is_reserved = {"box", "helper"}.__contains__
            await found.start()
            assert list(found.host.models) == ["box-box", "box-helper", "other"]


async def test_unusable_names_are_left_out_with_the_reason_and_the_others_are_served() -> None:
    async with serving() as server:
        server.body = listing("bad\x00name", "other")
        async with following(server.url) as found:
            await found.start()
            assert list(found.host.models) == ["other"]
            assert [(item.name, item.server) for item in found.servers.left_out] == [("bad name", "box")]
            [counts] = found.servers.counts
            assert (counts.served_count, counts.listed_count, counts.left_out_count) == (1, 2, 1)


async def test_model_whose_name_is_taken_gets_another_one_before_the_next_look() -> None:
    async with serving() as server:
        server.body = listing("good", "other")
        async with following(server.url) as found:
            await found.start()
            found.servers.note_left_out([left_out("model", "good", "taken", is_name_taken=True)])
            settled = asyncio.create_task(found.servers.settle("box"))
            while not settled.done():
                await found.clock.advance(SETTLE_CHECK_SECONDS)
                await asyncio.sleep(SETTLE_CHECK_SECONDS)
            await settled
            assert list(found.host.models) == ["other", "box-good"]
            assert found.servers.counts[0].served_count == 2
            assert not found.servers.left_out


async def test_name_that_is_taken_while_the_list_is_applied_is_replaced_right_after() -> None:
    """The removal of a model waits for its requests; the other model was not served until the next look."""
    async with serving() as server:
        server.body = listing("good", "gone")
        async with following(server.url) as found:
            await found.start()
            removing, ended = asyncio.Event(), asyncio.Event()

            async def remove(name: str) -> int:
                del found.host.models[name]
                removing.set()
                await ended.wait()
                return 0

            found.host.remove = remove  # type: ignore[method-assign]
            server.body = listing("good")
            await found.look(LOOKS_UNTIL_GONE - 1)
            await found.clock.wait_for_sleepers(1)
            looking = asyncio.create_task(found.clock.advance(INTERVAL_SECONDS, sleepers=0))
            await asyncio.wait_for(removing.wait(), 10)
            found.servers.note_left_out([left_out("model", "good", "taken", is_name_taken=True)])
            ended.set()
            await looking
            await until(lambda: bool(found.host.models))
            assert list(found.host.models) == ["box-good"]


async def test_model_that_the_registry_leaves_out_counts_as_left_out() -> None:
    async with serving() as server:
        server.body = listing("good", "other")
        async with following(server.url) as found:
            await found.start()
            found.servers.note_left_out([left_out("model", "good", "the mesh may have 2 models")])
            [counts] = found.servers.counts
            assert (counts.served_count, counts.left_out_count) == (1, 1)
            assert [model.name for model in found.servers.published("box")] == ["other"]
