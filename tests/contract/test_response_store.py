"""Answers that are kept, on every kind of database that a router may have."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from kit.refusals import refusal_of

from router_svc.durable.limits import ResponseLimits
from router_svc.durable.stored_responses import ResponseService
from router_svc.store.database import RouterDatabase
from weft.api.router.v1 import stored_response_service_pb2
from weft.durable.responses import MAX_CHAIN, ResponseClient
from weft.kernel.errors.reasons import Reason
from weft.kernel.time.timestamps import stamp_of
from weft_testing.fake_clock import FakeClock

pytest_plugins = ("database_fixtures",)

MADE = datetime(2026, 11, 20, 12, 0, 0, 123456, tzinfo=UTC)


def response(
    name: str, *, tenant: str = "ann", previous: str = "", size: int = 10
) -> stored_response_service_pb2.StoredResponse:
    return stored_response_service_pb2.StoredResponse(
        id=name, tenant=tenant, previous_id=previous, create_time=stamp_of(MADE), body=b"b" * size, items=b"[]"
    )


def held(holder: str) -> stored_response_service_pb2.StoredResponse:
    found = response("conv_1")
    found.holder = holder
    return found


def built(database_url: str, clock: FakeClock | None = None, **limits: Any) -> ResponseService:
    return ResponseService(RouterDatabase(database_url), ResponseLimits(**limits), clock=clock)


@asynccontextmanager
async def keeping(database_url: str, **limits: Any) -> AsyncIterator[ResponseClient]:
    service = built(database_url, **limits)
    await service.start()
    yield service.store
    await service.stop(0)


@pytest.fixture
async def kept(database_url: str) -> AsyncIterator[ResponseClient]:
    """Open, empty, closed afterwards."""
    async with keeping(database_url) as kept:
        yield kept


async def test_response_round_trips_byte_for_byte_over_a_restart(database_url: str) -> None:
    saved = stored_response_service_pb2.StoredResponse(
        id="resp_1",
        tenant="ann",
        previous_id="",
        create_time=stamp_of(MADE),
        body=b'{"x": "\xc3\xa4\\u0000"}\x00',
        items=b"[1]",
    )
    for life in range(2):
        service = built(database_url)
        await service.start()
        if life == 0:
            await service.store.save(saved)
        assert await service.store.get("ann", "resp_1") == saved
        await service.stop(0)


async def test_tenant_reads_overwrites_and_deletes_only_its_own_responses(kept: ResponseClient) -> None:
    await kept.save(response("resp_1"))
    await kept.save(response("resp_1", size=20))
    for asked in (kept.get, kept.chain, kept.delete):
        await refusal_of(Reason.NOT_FOUND, asked("bob", "resp_1"))
    await refusal_of(Reason.ALREADY_EXISTS, kept.save(response("resp_1", tenant="bob")))
    assert await kept.get("ann", "resp_1") == response("resp_1", size=20)
    await kept.delete("ann", "resp_1")
    await refusal_of(Reason.NOT_FOUND, kept.get("ann", "resp_1"))
    await refusal_of(Reason.NOT_FOUND, kept.delete("ann", "resp_1"))


async def test_conversation_is_read_oldest_first_and_stops_at_a_deleted_response(kept: ResponseClient) -> None:
    await kept.save(response("resp_1"))
    await kept.save(response("resp_2", previous="resp_1"))
    await kept.save(response("resp_b", tenant="bob", previous="resp_2"))
    assert [step.id for step in await kept.chain("ann", "resp_2")] == ["resp_1", "resp_2"]
    await refusal_of(Reason.NOT_FOUND, kept.chain("bob", "resp_b"))
    await kept.delete("ann", "resp_1")
    words = await refusal_of(Reason.NOT_FOUND, kept.chain("ann", "resp_2"))
    assert words == "there is no response resp_1: it was deleted or has expired, and resp_2 continues it"


async def test_expired_responses_are_deleted_and_the_rest_counted(database_url: str) -> None:
    clock = FakeClock()
    service = built(database_url, clock, keep_seconds=3600.0, max_per_tenant=2)
    await service.start()
    store = service.store
    born = clock.utc_now()
    for name, age in (("resp_old", 1800), ("resp_new", 0)):
        made = born - timedelta(seconds=age)
        await store.save(
            stored_response_service_pb2.StoredResponse(
                id=name, tenant="ann", previous_id="", create_time=stamp_of(made), body=b"b", items=b"[]"
            )
        )
    await refusal_of(Reason.TOO_MANY_RESOURCES, store.save(response("resp_3")))
    await clock.advance(2101, sleepers=1)
    await refusal_of(Reason.NOT_FOUND, store.get("ann", "resp_old"))
    assert (await store.get("ann", "resp_new")).id == "resp_new"
    await store.save(response("resp_3"))
    await service.stop(0)


async def test_tenant_quota_is_enforced_but_replacing_and_deleting_still_work(sqlite_url: str) -> None:
    async with keeping(sqlite_url, max_per_tenant=2) as store:
        await store.save(response("resp_1"))
        await store.save(response("resp_2"))
        await refusal_of(Reason.TOO_MANY_RESOURCES, store.save(response("resp_3")))
        await store.save(response("resp_2", size=20))
        await store.save(response("resp_b", tenant="bob"))
        await store.delete("ann", "resp_1")
        await store.save(response("resp_3"))
    # The next life counts what is there.
    async with keeping(sqlite_url, max_per_tenant=2) as store:
        await refusal_of(Reason.TOO_MANY_RESOURCES, store.save(response("resp_4")))


async def test_size_is_limited_per_response_tenant_and_conversation(sqlite_url: str) -> None:
    async with keeping(sqlite_url, max_bytes=100, max_tenant_bytes=300, max_chain_bytes=150) as store:
        await refusal_of(Reason.REQUEST_TOO_LARGE, store.save(response("resp_0", size=99)))
        await store.save(response("resp_1", size=98))
        await store.save(response("resp_2", size=98, previous="resp_1"))
        words = await refusal_of(Reason.INVALID_ARGUMENT, store.chain("ann", "resp_2"))
        assert "previous_response_id" in words
        await store.save(response("resp_3", size=98))
        await refusal_of(Reason.TOO_MANY_RESOURCES, store.save(response("resp_4", size=98)))
        await store.save(response("resp_3", size=50))


async def test_total_size_across_tenants_is_limited(sqlite_url: str) -> None:
    async with keeping(sqlite_url, max_total_bytes=250) as store:
        await store.save(response("resp_1", size=98))
        await store.save(response("resp_b", tenant="bob", size=98))
        words = await refusal_of(Reason.TOO_MANY_RESOURCES, store.save(response("resp_c", tenant="cid", size=98)))
        assert "router.responses.max_total_bytes" in words
        await store.save(response("resp_1", size=90))
        await store.delete("bob", "resp_b")
        await store.save(response("resp_c", tenant="cid", size=98))
    # The next life counts what is there.
    async with keeping(sqlite_url, max_total_bytes=250) as store:
        await refusal_of(Reason.TOO_MANY_RESOURCES, store.save(response("resp_d", tenant="dan", size=98)))


@pytest.mark.slow("floods a service")
async def test_endless_conversation_is_rejected_before_it_is_read(sqlite_url: str) -> None:
    async with keeping(sqlite_url) as store:
        for number in range(MAX_CHAIN + 1):
            await store.save(response(f"resp_{number}", previous=f"resp_{number - 1}" if number else ""))
        assert len(await store.chain("ann", f"resp_{MAX_CHAIN - 1}")) == MAX_CHAIN
        await refusal_of(Reason.INVALID_ARGUMENT, store.chain("ann", f"resp_{MAX_CHAIN}"))
        # One that names itself as its own past cannot hold anybody up either.
        await store.save(response("resp_loop", previous="resp_loop"))
        await refusal_of(Reason.INVALID_ARGUMENT, store.chain("ann", "resp_loop"))


async def test_one_writer_at_a_time_holds_a_conversation_and_its_save_ends_the_hold(kept: ResponseClient) -> None:
    await kept.save(response("conv_1"))
    for _ in range(2):
        await kept.hold("ann", "conv_1", "resp_1", 60.0)
        assert await kept.get("ann", "conv_1") == held("resp_1")
    await refusal_of(Reason.RESOURCE_IN_USE, kept.hold("ann", "conv_1", "resp_2", 60.0))
    await refusal_of(Reason.RESOURCE_IN_USE, kept.save(response("conv_1", size=20), holder="resp_2"))
    await refusal_of(Reason.NOT_FOUND, kept.hold("bob", "conv_1", "resp_2", 60.0))
    await refusal_of(Reason.NOT_FOUND, kept.save(response("conv_1", tenant="bob"), holder="resp_1"))
    await kept.save(response("conv_1", size=20), holder="resp_1")
    assert await kept.get("ann", "conv_1") == response("conv_1", size=20)
    await refusal_of(Reason.RESOURCE_IN_USE, kept.save(response("conv_1"), holder="resp_1"))


async def test_hold_ends_by_its_writer_or_passes_to_the_one_that_names_it(kept: ResponseClient) -> None:
    await kept.save(response("conv_1"))
    await kept.hold("ann", "conv_1", "resp_1", 60.0)
    await kept.hold("ann", "conv_1", "task-1", None, former="resp_1")
    await refusal_of(Reason.RESOURCE_IN_USE, kept.hold("ann", "conv_1", "resp_1", 0.0))
    assert await kept.get("ann", "conv_1") == held("task-1")
    await kept.hold("ann", "conv_1", "task-1", 0.0)
    assert await kept.get("ann", "conv_1") == response("conv_1")
    await kept.hold("ann", "conv_1", "resp_2", 60.0)
    assert await kept.get("ann", "conv_1") == held("resp_2")


async def test_deleted_conversation_is_not_stored_again_by_its_holder(kept: ResponseClient) -> None:
    await kept.save(response("conv_1"))
    await kept.hold("ann", "conv_1", "resp_1", 60.0)
    await kept.delete("ann", "conv_1")
    await refusal_of(Reason.NOT_FOUND, kept.save(response("conv_1"), holder="resp_1"))
    await refusal_of(Reason.NOT_FOUND, kept.get("ann", "conv_1"))


async def test_hold_of_a_writer_that_died_expires_and_outlives_a_restart(database_url: str) -> None:
    clock = FakeClock()
    for life in range(2):
        service = built(database_url, clock)
        await service.start()
        store = service.store
        if life == 0:
            made = response("conv_1")
            made.create_time.CopyFrom(stamp_of(clock.utc_now()))
            await store.save(made)
            await store.hold("ann", "conv_1", "resp_1", 30.0)
            await refusal_of(Reason.RESOURCE_IN_USE, store.hold("ann", "conv_1", "resp_2", 30.0))
        else:
            await refusal_of(Reason.RESOURCE_IN_USE, store.hold("ann", "conv_1", "resp_2", 30.0))
            await clock.advance(31)
            assert (await store.get("ann", "conv_1")).holder == ""
            await store.hold("ann", "conv_1", "resp_2", 30.0)
            await refusal_of(Reason.RESOURCE_IN_USE, store.save(made, holder="resp_1"))
        await service.stop(0)
