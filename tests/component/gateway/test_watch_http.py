"""GET /api/v1/watch: kinds, rights, outages of a source, slow readers and the limit of streams."""

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import replace

from gateway_script import serving
from kit.keys import PEPPER, Keys, bearer
from typing_extensions import override
from watch_script import QUICK, WATCH, ScriptedSource, brief, thing, watching

from gateway.gateway_config import GatewayConfig
from gateway.watch.source import Change, WatchCaller, delete, synced
from weft.kernel.access.principal import (
    VIEW_MODELS,
    Access,
    KeyRing,
    Resource,
    Role,
)
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason

VIEW_RUNNERS = Access(Resource.RUNNERS, Role.VIEW)


def keys() -> Keys:
    scopes = {
        "models000000": ("models:view",),
        "team00000000": ("models/team-*:view",),
        "asker0000000": ("inference:create",),
    }
    return Keys(scopes)


def models(*steps: Change | Exception | asyncio.Event) -> ScriptedSource:
    return ScriptedSource("model", [list(steps)], by_name=True)


def runners(*steps: Change | Exception | asyncio.Event) -> ScriptedSource:
    return ScriptedSource("runner", [list(steps)], access=VIEW_RUNNERS)


async def test_each_kind_is_sent_fully_then_synced_then_as_changes() -> None:
    gate = asyncio.Event()
    sources = [models(thing("tiny", size=1), synced(), gate, delete("tiny")), runners(thing("titan"), synced())]
    async with serving(config=QUICK, watched=sources) as gateway, watching(gateway, "model,runner") as stream:
        assert "text/event-stream" in stream.head
        found = [await stream.next() for _ in range(4)]
        gate.set()
        found.append(await stream.next())
    assert [brief(each) for each in found if each["kind"] == "runner"] == [
        ("runner", "put", "titan"),
        ("runner", "synced"),
    ]
    assert [each for each in found if each["kind"] == "model"] == [
        {"kind": "model", "change": "put", "name": "tiny", "object": {"name": "tiny", "size": 1}},
        {"kind": "model", "change": "synced"},
        {"kind": "model", "change": "delete", "name": "tiny"},
    ]


async def test_unknown_kind_is_rejected_with_the_available_kinds() -> None:
    async with serving(watched=[models(), runners()]) as gateway:
        for kinds in ("demon", "", "model,", "model, runner", "Model"):
            response = await gateway.request("GET", f"{WATCH}?kinds={kinds.replace(' ', '%20')}")
            error = response.error
            place = 0 if "," not in kinds else 1
            assert (response.status, error["code"], error["param"]) == (400, "invalid_argument", f"kinds[{place}]")
    assert "model, runner" in error["message"]


async def test_comments_are_sent_while_nothing_changes() -> None:
    async with serving(config=QUICK, watched=[models(synced())]) as gateway, watching(gateway, "model") as stream:
        await stream.next()
        await stream.reader.readuntil(b": keepalive\n\n")


async def test_kind_outside_the_keys_scopes_returns_403_by_name() -> None:
    async with serving(watched=[models(), runners()], keys=keys()) as gateway:
        refused = await gateway.request("GET", f"{WATCH}?kinds=model,runner", headers=bearer("models000000"))
        keyless = await gateway.request("GET", f"{WATCH}?kinds=model")
        nothing = await gateway.request("GET", WATCH, headers=bearer("asker0000000"))
    error = refused.error
    assert (refused.status, error["code"], error["param"]) == (403, "permission_denied", "kinds[1]")
    assert error["message"] == "kinds[1]: runner: the key lacks the scope runners:view"
    assert (keyless.status, nothing.status) == (401, 403)


async def test_stream_ends_with_an_error_when_its_key_is_revoked() -> None:
    all_keys, config = keys(), replace(QUICK, key_check_seconds=0.01)
    async with (
        serving(config=config, watched=[models(synced(), asyncio.Event())], keys=all_keys) as gateway,
        watching(gateway, "model", bearer("models000000")) as stream,
    ):
        assert brief(await stream.next()) == ("model", "synced")
        all_keys.ring = KeyRing(pepper=PEPPER, keys={})
        assert (await stream.next())["error"]["code"] == "invalid_api_key"
        await stream.reader.readuntil(b"\r\n0\r\n\r\n")


async def test_default_kinds_are_those_the_key_can_see() -> None:
    sources = [models(synced()), runners(synced())]
    async with serving(config=QUICK, watched=sources, keys=keys()) as gateway:
        async with watching(gateway, headers=bearer("models000000")) as stream:
            assert brief(await stream.next()) == ("model", "synced")
        async with watching(gateway, headers=bearer("team00000000")) as stream:
            assert brief(await stream.next()) == ("model", "synced")
    assert sources[1].callers == []
    assert [caller.tenant for caller in sources[0].callers] == ["ann", "ann"]


async def test_name_limited_scope_is_accepted_only_by_sources_that_filter_by_name() -> None:
    whole = ScriptedSource("figures", [[synced()]], access=VIEW_MODELS)
    async with serving(config=QUICK, watched=[models(synced()), whole], keys=keys()) as gateway:
        refused = await gateway.request("GET", f"{WATCH}?kinds=figures", headers=bearer("team00000000"))
        async with watching(gateway, "model", bearer("team00000000")) as stream:
            assert brief(await stream.next()) == ("model", "synced")
    assert refused.status == 403


async def test_lost_source_is_unavailable_until_resent_and_others_continue() -> None:
    gone = WeftError(Reason.SERVICE_UNAVAILABLE, "the router cannot be reached")
    away, go_on = asyncio.Event(), asyncio.Event()
    requests = ScriptedSource("request", [[thing("r1"), synced(), away, gone], [gone], [thing("r2"), synced()]])
    other = models(synced(), go_on, thing("tiny"))
    sources = [requests, other]
    async with serving(config=QUICK, watched=sources) as gateway, watching(gateway, "request,model") as stream:
        await stream.until("request", "synced")
        away.set()
        lost = (await stream.until("request", "unavailable"))[-1]
        go_on.set()
        assert brief((await stream.until("model", "put"))[-1]) == ("model", "put", "tiny")
        found = await stream.until("request", "synced")
    assert lost == {"kind": "request", "change": "unavailable", "message": "the router cannot be reached"}
    assert [brief(each) for each in found] == [("request", "reset"), ("request", "put", "r2"), ("request", "synced")]
    assert len(requests.callers) == 3


async def test_lagged_source_is_reset_without_an_unavailable_event() -> None:
    lagged = WeftError(Reason.WATCH_LAGGED, "watch again")
    source = ScriptedSource("model", [[thing("a"), synced(), lagged], [thing("b"), synced()]])
    async with serving(config=QUICK, watched=[source]) as gateway, watching(gateway, "model") as stream:
        await stream.until("model", "synced")
        found = await stream.until("model", "synced")
    assert [brief(each) for each in found] == [("model", "reset"), ("model", "put", "b"), ("model", "synced")]


async def test_source_that_crashes_or_ends_is_restarted() -> None:
    source = ScriptedSource("model", [[synced(), ZeroDivisionError("a bug")], [synced()]])
    async with serving(config=QUICK, watched=[source]) as gateway, watching(gateway, "model") as stream:
        found = await stream.until("model", "reset")
    assert [each["change"] for each in found] == ["synced", "unavailable", "reset"]
    assert "a bug" not in found[1]["message"]


async def test_slow_reader_gets_the_newest_state_of_each_name() -> None:
    rounds, names = 200, [f"m{each:02}" for each in range(40)]
    steps = [thing(name, round=each, filler="x" * 2000) for each in range(rounds) for name in names]
    done = asyncio.Event()

    class Told(ScriptedSource):
        """Yields to the event loop after each round, so that the stream can write between."""

        @override
        async def _changes(self, caller: WatchCaller) -> AsyncGenerator[Change]:
            yield synced()
            for index, step in enumerate(steps):
                yield step
                if index % len(names) == 0:
                    await asyncio.sleep(0)
            yield thing("last")
            done.set()
            await asyncio.Event().wait()

    async with serving(config=QUICK, watched=[Told("model", [])]) as gateway, watching(gateway, "model") as stream:
        await stream.next()
        async with asyncio.timeout(60):
            # The source never waits for this reader, which reads nothing until all has happened.
            await done.wait()
            newest, count = dict[str, int](), 0
            while (change := await stream.next())["name"] != "last":
                newest[change["name"]] = change["object"]["round"]
                count += 1
            # The place of `last` may be before names that wait: those are read, too.
            while len(newest) < len(names) or set(newest.values()) != {rounds - 1}:
                change = await stream.next()
                newest[change["name"]] = change["object"]["round"]
                count += 1
    assert count < rounds * len(names) / 2


async def test_source_with_too_many_pending_names_waits_for_its_reader() -> None:
    config = GatewayConfig(port=0, max_watch_names=16, watch_interval_seconds=0.001)
    source = models(*(thing(f"m{each}") for each in range(1000)), synced())
    async with serving(config=config, watched=[source]) as gateway, watching(gateway, "model") as stream:
        found = await stream.until("model", "synced")
    assert [each["name"] for each in found[:-1]] == [f"m{each}" for each in range(1000)]


async def test_watch_streams_count_toward_the_event_watch_limit() -> None:
    source = models(synced())
    config = GatewayConfig(port=0, max_event_watches=1)
    async with serving(config=config, watched=[source]) as gateway:
        async with watching(gateway, "model") as stream:
            await stream.next()
            refused = await gateway.request("GET", WATCH)
        await source.was_closed.wait()
        async with watching(gateway, "model") as stream:
            await stream.next()
    assert refused.status == 429
    assert refused.headers["retry-after"]
