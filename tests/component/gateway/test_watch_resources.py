"""Resources and events on /api/v1/watch, over a scripted registry."""

import asyncio

from gateway_script import serving
from kit.keys import bearer
from kit.resources import gone, put
from kit.resources import snapshot as carrying
from registry_script import ScriptedRegistry, event
from test_watch_http import keys
from watch_script import QUICK, brief, watching

from gateway.watch.resources import resource_sources
from gateway.watch.sources import event_source
from weft.api.registry.v1.model_pb2 import Model, ModelManifest
from weft.api.registry.v1.registry_service_pb2 import WatchResponse
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason


def model(name: str, pool: str = "", status: Model.Status.ValueType = Model.STATUS_ACTIVE) -> Model:
    return Model(manifest=ModelManifest(name=name, pool_name=pool), status=status)


def snapshot(*models: Model) -> WatchResponse:
    return WatchResponse(revision=1, snapshot=carrying(*models))


def changed(found: Model) -> WatchResponse:
    return WatchResponse(revision=2, change=put(found))


async def test_pool_changes_with_its_members_and_is_deleted_with_the_last() -> None:
    gate, end = asyncio.Event(), asyncio.Event()
    deleted = WatchResponse(revision=3, change=gone("model", "a"))
    registry = ScriptedRegistry(resources=[snapshot(model("a", "chat")), gate, deleted, end])
    sources = resource_sources(registry)
    async with serving(config=QUICK, watched=sources) as gateway, watching(gateway, "model,pool") as stream:
        first = await stream.snapshot("model", "pool")
        gate.set()
        last = [await stream.next(), await stream.next()]
    pool = next(each["object"] for each in first if each["kind"] == "pool" and each["change"] == "put")
    assert (pool["kind"], pool["name"], pool["members"]) == ("pool", "chat", ["a"])
    assert sorted(map(brief, last)) == [("model", "delete", "a"), ("pool", "delete", "chat")]
    assert registry.watches == 1


async def test_all_streams_share_one_registry_watch_that_ends_with_the_last() -> None:
    registry = ScriptedRegistry(resources=[snapshot(model("a")), asyncio.Event()])
    async with serving(config=QUICK, watched=resource_sources(registry)) as gateway:
        async with watching(gateway, "model,pool,route") as one:
            await one.until("model", "synced")
            async with watching(gateway, "model") as two:
                assert [brief(each) for each in await two.until("model", "synced")] == [
                    ("model", "put", "a"),
                    ("model", "synced"),
                ]
        assert registry.watches == 1
        # The next one finds no watch that is about to end.
        async with watching(gateway, "route") as three:
            await three.next()
    assert registry.watches <= 2


async def test_name_limited_key_gets_only_its_models_and_pools_with_those_members() -> None:
    gate, end = asyncio.Event(), asyncio.Event()
    there = snapshot(model("team-a", "team-pool"), model("other", "team-pool"), model("secret"))
    registry = ScriptedRegistry(resources=[there, gate, changed(model("secret")), changed(model("team-b")), end])
    async with (
        serving(config=QUICK, watched=resource_sources(registry), keys=keys()) as gateway,
        watching(gateway, "model,pool", bearer("team00000000")) as stream,
    ):
        first = await stream.snapshot("model", "pool")
        gate.set()
        later = [await stream.next(), await stream.next()]
    names = {brief(each) for each in first if each["change"] == "put"}
    assert names == {("model", "put", "team-a"), ("pool", "put", "team-pool")}
    (pool,) = (each["object"] for each in first if brief(each) == ("pool", "put", "team-pool"))
    assert [member["name"] for member in pool["status"]["members"]] == ["team-a"]
    assert [each["name"] for each in later] == ["team-b", "team-b"]


async def test_registry_restart_resends_everything_except_deleted_resources() -> None:
    lost = asyncio.Event()
    away = WeftError(Reason.SERVICE_UNAVAILABLE, "the registry cannot be reached")
    registry = ScriptedRegistry(
        resources=[snapshot(model("a"), model("b")), lost, away],
        resources_again=[snapshot(model("b")), asyncio.Event()],
    )
    sources = resource_sources(registry)
    async with serving(config=QUICK, watched=sources) as gateway, watching(gateway, "model") as stream:
        await stream.until("model", "synced")
        lost.set()
        found = [brief(each) for each in await stream.until("model", "synced")]
    assert found == [("model", "unavailable"), ("model", "reset"), ("model", "put", "b"), ("model", "synced")]


async def test_newest_events_are_sent_first_then_each_new_one() -> None:
    gate = asyncio.Event()
    registry = ScriptedRegistry(events=[event(1), event(2)], watch_steps=[gate, event(3), asyncio.Event()])
    sources = [event_source(registry)]
    async with serving(config=QUICK, watched=sources) as gateway, watching(gateway, "event") as stream:
        first = await stream.until("event", "synced")
        gate.set()
        last = await stream.next()
    assert [each.get("name") for each in first] == ["1", "2", None]
    assert brief(last) == ("event", "put", "3")
    assert (last["object"]["kind"], last["object"]["resourceName"]) == ("event", "tiny")
