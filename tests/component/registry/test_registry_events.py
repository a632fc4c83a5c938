"""What happened lately, in a log that has an end."""

import asyncio
from pathlib import Path

from kit.refusals import refused
from kit.resources import declared
from registry_harness import (
    AGENT,
    MODEL,
    READ_LIMIT_SECONDS,
    RUNNER,
    RunningRegistry,
    SomeRunner,
    an_agent,
    declare,
    event_in_words,
    in_phase,
    ready,
    running_registry,
)

from weft.api.registry.v1 import registry_service_pb2, runner_pb2
from weft.kernel.errors.reasons import Reason
from weft_testing.fake_clock import FakeClock

FOUR_HOURS = 4 * 3600.0
ListEvents = registry_service_pb2.ListEventsRequest
WatchEvents = registry_service_pb2.WatchEventsRequest
InstanceState = runner_pb2.InstanceState


async def test_complete_life_cycle_is_recorded_in_order(mesh: RunningRegistry) -> None:
    runner = await SomeRunner(mesh, agents=(an_agent("a1"),)).open()
    await mesh.advance(90.0)
    await runner.beat()
    await runner.close()
    await runner.open()
    await runner.close()
    await mesh.advance(FOUR_HOURS)
    words = ["registered", "silent", "revived", "closed", "revived", "closed", "expired"]
    assert await mesh.events(RUNNER, "r1") == [f"runner r1 {word}" for word in words]
    assert await mesh.events(MODEL, "m1") == [f"model m1 {word}" for word in words]
    assert await mesh.events(AGENT) == [f"agent a1 {word}" for word in words]
    assert (await mesh.events())[-3:] == ["agent a1 expired", "model m1 expired", "runner r1 expired"]


async def test_first_report_after_a_restart_is_recorded_only_for_failures(tmp_path: Path) -> None:
    clock = FakeClock()
    async with running_registry(tmp_path, clock=clock) as before:
        runner = await SomeRunner(before).open()
        await runner.beat(ready())
    async with running_registry(tmp_path, clock=clock) as after:
        runner.registry = after
        earlier = await after.events()
        await runner.beat(ready())
        assert await after.events() == earlier
        await runner.beat(in_phase(InstanceState.PHASE_FAILED))
        assert await after.events() == [*earlier, "model m1 failed"]


async def test_operator_actions_are_recorded(mesh: RunningRegistry) -> None:
    runner = await SomeRunner(mesh, models=("m1", "m2")).open()
    await mesh.apply(declare("m1"), declare("m3"), declared(agent=an_agent("a1")), adopt=True)
    await mesh.apply(declare("m3"))
    await SomeRunner(mesh, incarnation="life-2", session_id=runner.session_id).open()
    await mesh.delete(AGENT, "a1")
    assert (await mesh.events(MODEL, "m1"))[1] == "model m1 configured"
    assert await mesh.events(MODEL, "m3") == ["model m3 created"]
    assert await mesh.events(MODEL, "m2") == ["model m2 registered", "model m2 withdrawn"]
    assert await mesh.events(AGENT) == ["agent a1 created", "agent a1 deleted"]


async def test_only_the_newest_events_are_kept_and_sequences_have_no_gaps(tmp_path: Path) -> None:
    async with running_registry(tmp_path, max_events=10) as mesh:
        runner = await SomeRunner(mesh, models=()).open()
        for _ in range(20):
            await runner.close()
            await runner.open()
        events = (await mesh.registry.ListEvents(ListEvents(limit=1000))).events
        assert [event.sequence for event in events] == list(range(32, 42))
        newest = (await mesh.registry.ListEvents(ListEvents(limit=3))).events
        assert [event.sequence for event in newest] == [39, 40, 41]


async def test_events_and_their_numbering_survive_a_restart(tmp_path: Path) -> None:
    clock = FakeClock()
    async with running_registry(tmp_path, clock=clock, max_events=3) as before:
        runner = await SomeRunner(before, models=()).open()
        await before.advance(10.0)
        await runner.close()
        await runner.open()
        earlier = (await before.registry.ListEvents(ListEvents())).events
    async with running_registry(tmp_path, clock=clock, max_events=3) as after:
        assert (await after.registry.ListEvents(ListEvents())).events == earlier
        runner.registry = after
        await runner.close()
        events = (await after.registry.ListEvents(ListEvents())).events
        assert [event.sequence for event in events] == [2, 3, 4]


async def test_name_without_a_kind_and_unknown_kinds_are_rejected(mesh: RunningRegistry) -> None:
    for request_ in (
        ListEvents(name="m1"),
        ListEvents(kind="models"),
        ListEvents(kind=MODEL, name="../x"),
        ListEvents(limit=-1),
    ):
        with refused(Reason.INVALID_ARGUMENT):
            await mesh.registry.ListEvents(request_)


async def test_listener_receives_only_new_events_that_match_its_filter(mesh: RunningRegistry) -> None:
    runner = await SomeRunner(mesh).open()
    call = mesh.registry.WatchEvents(WatchEvents(kind=MODEL, name="m1"))
    await call.initial_metadata()
    await SomeRunner(mesh, name="r2", models=("m2",)).open()
    await runner.close()
    async with asyncio.timeout(READ_LIMIT_SECONDS):
        response = await call.read()
    assert isinstance(response, registry_service_pb2.WatchEventsResponse)
    assert event_in_words(response.event) == "model m1 closed"
    call.cancel()
