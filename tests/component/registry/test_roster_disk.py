"""What the roster acknowledges is on disk, and what the disk refuses never happened."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from gated_store import GatedStore
from kit.refusals import refused
from roster_harness import BareRegistry

from registry_svc.mesh.requests import Batch
from registry_svc.mesh.states import Outcome
from registry_svc.registry_config import RegistryConfig
from weft.api.registry.v1.join_token_service_pb2 import CreateJoinTokenRequest
from weft.api.registry.v1.model_pb2 import MODEL_OPERATION_CHAT, ModelDeclaration, ModelManifest
from weft.api.registry.v1.runner_pb2 import Capability, Runner
from weft.api.registry.v1.runner_session_service_pb2 import HeartbeatRequest, OpenSessionRequest
from weft.documents.kinds import key_of
from weft.documents.resource_kinds import ResourceKind
from weft.documents.resources import AnyDocument, new_document
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft_testing.fake_clock import FakeClock

OPENING = OpenSessionRequest(
    request_id="open-1",
    runner=Runner(name="r1", incarnation="life-1", address="a", host="h", runtime="fake", version="1"),
    models=[ModelManifest(name="m1", operations=[MODEL_OPERATION_CHAT])],
)


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
async def store() -> AsyncIterator[GatedStore]:
    store = GatedStore()
    yield store
    await store.really_close()


@pytest.fixture
async def registry(store: GatedStore, clock: FakeClock) -> BareRegistry:
    registry = BareRegistry(store, clock, RegistryConfig(database_url="sqlite://", restart_spread_seconds=0))
    await registry.start()
    return registry


def status_of_runner(registry: BareRegistry) -> int:
    runner: Runner = registry.catalogue.get(ResourceKind.RUNNER, "r1")
    return runner.status


async def let_pass(seconds: float, registry: BareRegistry, clock: FakeClock) -> None:
    """Time passes, with a sweep every five seconds but the last: that one is the test's."""
    for _ in range(int(seconds / 5.0) - 1):
        await clock.advance(5.0)
        await registry.expiry.sweep()
    await clock.advance(5.0)


async def test_session_is_on_disk_before_it_is_published(registry: BareRegistry, store: GatedStore) -> None:
    store.gate = asyncio.Event()
    opening = asyncio.create_task(registry.roster.open_session(OPENING))
    await store.waiting.wait()
    assert not opening.done()
    assert registry.catalogue.find(ResourceKind.RUNNER, "r1") is None
    store.gate.set()
    session = await opening
    assert [stored.session for stored in (await store.load()).sessions] == [session]


async def test_session_that_cannot_be_stored_has_no_effect(registry: BareRegistry, store: GatedStore) -> None:
    store.failing = True
    before, _ = registry.core.watch()
    with refused(Reason.SERVICE_UNAVAILABLE):
        await registry.roster.open_session(OPENING)
    assert registry.catalogue.find(ResourceKind.RUNNER, "r1") is None
    assert registry.core.watch()[0].revision == before.revision


async def test_caller_leaving_during_the_commit_keeps_memory_and_disk_consistent(
    registry: BareRegistry, store: GatedStore
) -> None:
    store.gate = asyncio.Event()
    opening = asyncio.create_task(registry.roster.open_session(OPENING))
    await store.waiting.wait()
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    store.gate.set()
    # The next write waits for the one before it, so this repeat finds what the first call did.
    session = await registry.roster.open_session(OPENING)
    assert [stored.session for stored in (await store.load()).sessions] == [session]
    assert registry.catalogue.find(ResourceKind.MODEL, "m1") is not None


async def test_two_concurrent_requests_for_one_name_do_not_both_get_it(registry: BareRegistry) -> None:
    other = OpenSessionRequest(
        request_id="open-2",
        runner=Runner(name="r2", incarnation="life-2", address="a"),
        models=OPENING.models,
    )
    first, second = await asyncio.gather(registry.roster.open_session(OPENING), registry.roster.open_session(other))
    assert not registry.roster.left_out(first)
    assert [item.name for item in registry.roster.left_out(second)] == [model.name for model in OPENING.models]


async def test_close_that_cannot_be_stored_is_not_acknowledged(registry: BareRegistry, store: GatedStore) -> None:
    session = await registry.roster.open_session(OPENING)
    store.failing = True
    with pytest.raises(WeftError):
        await registry.roster.close_session(session.id, session.incarnation)
    assert status_of_runner(registry) == Runner.STATUS_ACTIVE


async def test_heartbeats_write_at_most_once_a_minute(
    registry: BareRegistry, store: GatedStore, clock: FakeClock
) -> None:
    session = await registry.roster.open_session(OPENING)
    store.writes = 0
    for number in range(120):
        await clock.advance(5.0)
        await registry.roster.heartbeat(
            HeartbeatRequest(session_id=session.id, incarnation="life-1", sequence=number, capability=Capability())
        )
        await registry.expiry.sweep()
    assert store.writes == 10
    (stored,) = (await store.load()).sessions
    assert stored.pulse.last_heartbeat_at == clock.utc_now()


async def test_inactivity_is_published_during_a_disk_failure_and_stored_afterwards(
    registry: BareRegistry, store: GatedStore, clock: FakeClock
) -> None:
    await registry.roster.open_session(OPENING)
    store.failing = True
    await let_pass(90.0, registry, clock)
    with pytest.raises(WeftError):
        await registry.expiry.sweep()
    assert status_of_runner(registry) == Runner.STATUS_INACTIVE
    store.failing = False
    await registry.expiry.sweep()
    (stored,) = (await store.load()).sessions
    assert stored.pulse.inactive_since == clock.utc_now()


async def test_runner_is_deleted_later_if_its_deletion_cannot_be_stored(
    registry: BareRegistry, store: GatedStore, clock: FakeClock
) -> None:
    await registry.roster.open_session(OPENING)
    await let_pass(90.0, registry, clock)
    await registry.expiry.sweep()
    await let_pass(14_400.0, registry, clock)
    store.failing = True
    with pytest.raises(WeftError):
        await registry.expiry.sweep()
    assert registry.catalogue.find(ResourceKind.RUNNER, "r1") is not None
    store.failing = False
    await registry.expiry.sweep()
    assert registry.catalogue.find(ResourceKind.RUNNER, "r1") is None
    assert (await store.load()).sessions == ()


async def test_thawed_registry_gives_runners_time_to_report_again(registry: BareRegistry, clock: FakeClock) -> None:
    await registry.roster.open_session(OPENING)
    await clock.advance(600.0)
    await registry.expiry.sweep()
    assert status_of_runner(registry) == Runner.STATUS_ACTIVE
    await let_pass(90.0, registry, clock)
    await registry.expiry.sweep()
    assert status_of_runner(registry) == Runner.STATUS_INACTIVE


async def test_late_sweep_expires_due_runners(registry: BareRegistry, clock: FakeClock) -> None:
    await registry.roster.open_session(OPENING)
    await let_pass(50.0, registry, clock)
    await clock.advance(40.0)
    await registry.expiry.sweep()
    assert status_of_runner(registry) == Runner.STATUS_INACTIVE


async def test_stop_works_with_a_broken_disk(registry: BareRegistry, store: GatedStore) -> None:
    await registry.roster.open_session(OPENING)
    store.failing = True
    await registry.stop(grace_seconds=1.0)
    with refused(Reason.SHUTTING_DOWN):
        registry.catalogue.find(ResourceKind.RUNNER, "r1")


async def test_stop_waits_for_a_write_in_progress_and_cancels_it_after_the_grace(
    registry: BareRegistry, store: GatedStore
) -> None:
    store.gate = asyncio.Event()
    opening = asyncio.create_task(registry.roster.open_session(OPENING))
    await store.waiting.wait()
    stopping = asyncio.create_task(registry.stop(grace_seconds=0.01))
    with refused(Reason.SHUTTING_DOWN):
        await opening
    store.gate.set()
    await stopping
    assert (await store.load()).sessions == ()


def a_model(name: str, context_tokens: int = 0) -> AnyDocument:
    manifest = ModelManifest(name=name, operations=[MODEL_OPERATION_CHAT], context_tokens=context_tokens)
    return new_document(ResourceKind.MODEL, ModelDeclaration(manifest=manifest))


async def test_batch_is_published_only_after_all_of_it_is_on_disk(registry: BareRegistry, store: GatedStore) -> None:
    store.gate, store.writes = asyncio.Event(), 0
    batch = Batch(documents=[a_model("m1"), a_model("m2")])
    applying = asyncio.create_task(registry.declarations.apply(batch))
    await store.waiting.wait()
    assert registry.catalogue.find(ResourceKind.MODEL, "m1") is None
    store.gate.set()
    await applying
    assert [key_of(each)[1] for each in (await store.load()).documents] == ["m1", "m2"]
    assert store.writes == 1


async def test_failed_write_is_not_partially_applied(registry: BareRegistry, store: GatedStore) -> None:
    await registry.roster.open_session(OPENING)
    token, _ = await registry.tokens.create(CreateJoinTokenRequest())
    before = await registry.core.watch()[0].message(with_keys=True)
    stored, events = await store.load(), registry.core.events.newest(None, "", 9)
    store.failing = True
    batch = Batch(documents=[a_model("m2"), a_model("m3")], adopt=True)
    for attempt in (
        registry.declarations.apply(batch),
        registry.declarations.delete(ResourceKind.MODEL, "m1"),
        registry.declarations.delete(ResourceKind.RUNNER, "r1"),
        registry.tokens.create(CreateJoinTokenRequest()),
        registry.tokens.revoke(token.id),
    ):
        with refused(Reason.SERVICE_UNAVAILABLE):
            await attempt
    assert await registry.core.watch()[0].message(with_keys=True) == before
    assert registry.core.events.newest(None, "", 9) == events
    assert registry.tokens.newest_first() == [token]
    assert await store.load() == stored


async def test_dry_run_and_unchanged_batch_do_not_write(registry: BareRegistry, store: GatedStore) -> None:
    await registry.roster.open_session(OPENING)
    store.writes = 0
    batch = Batch(documents=[a_model("m1")])
    assert [Outcome(each.outcome) for each in await registry.declarations.apply(batch)] == [Outcome.UNCHANGED]
    dry = Batch(documents=[a_model("m2")], dry_run=True)
    assert [Outcome(each.outcome) for each in await registry.declarations.apply(dry)] == [Outcome.CREATED]
    assert store.writes == 0


async def test_operator_leaving_during_the_commit_keeps_memory_and_disk_consistent(
    registry: BareRegistry, store: GatedStore
) -> None:
    store.gate = asyncio.Event()
    batch = Batch(documents=[a_model("m1")])
    applying = asyncio.create_task(registry.declarations.apply(batch))
    await store.waiting.wait()
    applying.cancel()
    with pytest.raises(asyncio.CancelledError):
        await applying
    store.gate.set()
    assert [Outcome(each.outcome) for each in await registry.declarations.apply(batch)] == [Outcome.UNCHANGED]


async def test_calls_before_start_are_rejected(store: GatedStore, clock: FakeClock) -> None:
    closed = BareRegistry(store, clock, RegistryConfig(database_url="sqlite://"))
    batch = Batch(documents=[])
    for attempt in (
        lambda: closed.catalogue.find(ResourceKind.POOL, "p"),
        closed.core.watch,
        closed.tokens.newest_first,
        closed.settings.current,
    ):
        with pytest.raises(WeftError, match="SHUTTING_DOWN"):
            attempt()
    for call in (
        closed.declarations.apply(batch),
        closed.declarations.delete(ResourceKind.MODEL, "m1"),
        closed.expiry.sweep(),
        closed.tokens.admit("wjt_a_b", ""),
    ):
        with pytest.raises(WeftError, match="SHUTTING_DOWN"):
            await call
