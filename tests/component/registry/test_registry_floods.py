"""More of everything than anybody needs: refused at a bound, and the others do not notice."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from gated_store import GatedStore
from kit.messages import changed
from roster_harness import BareRegistry

from registry_svc.registry_config import RegistryConfig
from weft.api.registry.v1.model_pb2 import MODEL_OPERATION_CHAT, ModelManifest
from weft.api.registry.v1.runner_pb2 import Capability, InstanceState, Runner
from weft.api.registry.v1.runner_session_service_pb2 import HeartbeatRequest, OpenSessionRequest
from weft.documents.resource_kinds import ResourceKind
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft_testing.fake_clock import FakeClock

WAITING = 3


@pytest.fixture
async def store() -> AsyncIterator[GatedStore]:
    store = GatedStore()
    yield store
    await store.really_close()


@pytest.fixture
async def registry(store: GatedStore) -> AsyncIterator[BareRegistry]:
    config = RegistryConfig(database_url="sqlite://", max_waiting_writes=WAITING, max_detail_bytes=100)
    registry = BareRegistry(store, FakeClock(), config)
    await registry.start()
    yield registry
    await registry.stop()


def opening(number: int, *models: str, report: Capability | None = None) -> OpenSessionRequest:
    return OpenSessionRequest(
        request_id=f"open-{number}",
        runner=Runner(name=f"r{number}", incarnation="life-1", address="a", capability=report),
        models=[ModelManifest(name=each, operations=[MODEL_OPERATION_CHAT]) for each in models],
    )


def failed(model: str, detail: str) -> InstanceState:
    return InstanceState(model=model, phase=InstanceState.PHASE_FAILED, detail=detail)


async def flood(registry: BareRegistry, store: GatedStore) -> list[asyncio.Task[object]]:
    """One opening that is being written and as many more as may wait."""
    store.gate = asyncio.Event()
    writing: list[asyncio.Task[object]] = [asyncio.create_task(registry.roster.open_session(opening(0)))]
    await store.waiting.wait()
    waiting = range(1, WAITING + 1)
    writing.extend(asyncio.create_task(registry.roster.open_session(opening(number))) for number in waiting)
    await asyncio.sleep(0)
    return writing


async def test_registrations_over_the_queue_limit_are_rejected_immediately(
    registry: BareRegistry, store: GatedStore
) -> None:
    writing = await flood(registry, store)
    with pytest.raises(WeftError) as refusal:
        await registry.roster.open_session(opening(99))
    assert (refusal.value.reason, refusal.value.retry_after_seconds) == (Reason.QUEUE_FULL, 1.0)
    assert store.gate is not None
    store.gate.set()
    await asyncio.gather(*writing)
    assert len(registry.core.mesh) == WAITING + 1
    await registry.roster.open_session(opening(99))


async def test_cancelled_registration_is_not_written_and_makes_room(registry: BareRegistry, store: GatedStore) -> None:
    writing = await flood(registry, store)
    writing[2].cancel()
    with pytest.raises(asyncio.CancelledError):
        await writing.pop(2)
    await asyncio.sleep(0)
    another = asyncio.create_task(registry.roster.open_session(opening(99)))
    await asyncio.sleep(0)
    assert store.gate is not None
    store.gate.set()
    await asyncio.gather(*writing, another)
    assert sorted(registry.core.mesh.names_of(ResourceKind.RUNNER)) == ["r0", "r1", "r3", "r99"]


async def test_flood_does_not_block_heartbeats_or_sweeps(registry: BareRegistry, store: GatedStore) -> None:
    session = await registry.roster.open_session(opening(50))
    writing = await flood(registry, store)
    beat = HeartbeatRequest(session_id=session.id, incarnation="life-1", sequence=1)
    others = [asyncio.create_task(registry.roster.heartbeat(beat)), asyncio.create_task(registry.expiry.sweep())]
    await asyncio.sleep(0)
    assert store.gate is not None
    store.gate.set()
    await asyncio.gather(*writing, *others)
    found = registry.core.mesh.of_session(session.id)
    assert found is not None
    assert found.sequence == 1


async def test_tools_are_stored_while_their_names_fit(registry: BareRegistry) -> None:
    few = Capability(instances=[failed("m1", "x" * 95)], tool_names=["files.read"])
    await registry.roster.open_session(opening(1, "m1", report=few))
    assert _kept(registry, 1) == [("m1", "")], "words about models go first"
    assert _tools(registry, 1) == ("files.read",)
    many = Capability(instances=[failed("m2", "")], tool_names=[f"tool-{number:05}" for number in range(10)])
    await registry.roster.open_session(opening(2, "m2", report=many))
    assert _tools(registry, 2) == ()


async def test_oversized_report_text_is_dropped_and_the_rest_stored(registry: BareRegistry) -> None:
    first = await registry.roster.open_session(opening(1, "m1", report=Capability(instances=[failed("m1", "x" * 60)])))
    second = opening(2, "m2", report=Capability(instances=[failed("m2", "\u00e9" * 30)]))
    await registry.roster.open_session(second)
    assert _kept(registry, 1) == [("m1", "x" * 60)]
    assert _kept(registry, 2) == [("m2", "")]
    shorter = Capability(instances=[failed("m1", "x" * 40)])
    beat = HeartbeatRequest(session_id=first.id, incarnation="life-1", sequence=1, capability=shorter)
    await registry.roster.heartbeat(beat)
    await registry.roster.heartbeat(changed(beat, sequence=2))
    await registry.roster.close_session(first.id, "life-1")
    again = changed(second, request_id="again", session_id=_session(registry, 2))
    await registry.roster.open_session(again)
    assert _kept(registry, 2) == [("m2", "\u00e9" * 30)]
    assert registry.core.mesh.detail_bytes == 100


def _kept(registry: BareRegistry, number: int) -> list[tuple[str, str]]:
    runner = registry.catalogue.find(ResourceKind.RUNNER, f"r{number}")
    assert runner is not None
    return [(instance.model, instance.detail) for instance in runner.capability.instances]


def _tools(registry: BareRegistry, number: int) -> tuple[str, ...]:
    runner = registry.catalogue.find(ResourceKind.RUNNER, f"r{number}")
    assert runner is not None
    return tuple(runner.capability.tool_names)


def _session(registry: BareRegistry, number: int) -> str:
    member = registry.core.mesh.of_runner(f"r{number}")
    assert member is not None
    return member.session.id
