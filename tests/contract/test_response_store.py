"""Answers that are kept, on every kind of database that a router may have."""

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from router_svc.durable.limits import ResponseLimits
from router_svc.durable.stored_responses import ResponseService
from router_svc.store.database import RouterDatabase
from weft.api.router.v1 import stored_response_service_pb2
from weft.durable.responses import ResponseClient
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason
from weft.kernel.timestamps import stamp_of
from weft_testing.fake_clock import FakeClock
from weft_testing.postgres_server import PostgresServer

pytest_plugins = ("database_fixtures",)

MADE = datetime(2026, 11, 20, 12, 0, 0, 123456, tzinfo=UTC)


def response(
    name: str, *, tenant: str = "ann", previous: str = "", size: int = 10
) -> stored_response_service_pb2.StoredResponse:
    return stored_response_service_pb2.StoredResponse(
        id=name, tenant=tenant, previous_id=previous, create_time=stamp_of(MADE), body=b"b" * size, items=b"[]"
    )


def built(database_url: str, clock: FakeClock | None = None, **limits: Any) -> ResponseService:
    return ResponseService(RouterDatabase(database_url), ResponseLimits(**limits), clock=clock)


@pytest.fixture
async def kept(database_url: str) -> AsyncIterator[ResponseClient]:
    """Open, empty, closed afterwards."""
    service = built(database_url)
    await service.start()
    yield service.store
    await service.stop(0)


async def refused(reason: Reason, awaited: Any) -> str:
    with pytest.raises(WeftError) as found:
        await awaited
    assert found.value.reason is reason
    return found.value.message


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
        await refused(Reason.NOT_FOUND, asked("bob", "resp_1"))
    await refused(Reason.ALREADY_EXISTS, kept.save(response("resp_1", tenant="bob")))
    assert await kept.get("ann", "resp_1") == response("resp_1", size=20)
    await kept.delete("ann", "resp_1")
    await refused(Reason.NOT_FOUND, kept.get("ann", "resp_1"))
    await refused(Reason.NOT_FOUND, kept.delete("ann", "resp_1"))


async def test_conversation_is_read_oldest_first_and_stops_at_a_deleted_response(kept: ResponseClient) -> None:
    await kept.save(response("resp_1"))
    await kept.save(response("resp_2", previous="resp_1"))
    await kept.save(response("resp_b", tenant="bob", previous="resp_2"))
    assert [step.id for step in await kept.chain("ann", "resp_2")] == ["resp_1", "resp_2"]
    await refused(Reason.NOT_FOUND, kept.chain("bob", "resp_b"))
    await kept.delete("ann", "resp_1")
    await refused(Reason.NOT_FOUND, kept.chain("ann", "resp_2"))


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
    await refused(Reason.TOO_MANY_RESOURCES, store.save(response("resp_3")))
    await clock.advance(2101, sleepers=1)
    await refused(Reason.NOT_FOUND, store.get("ann", "resp_old"))
    assert (await store.get("ann", "resp_new")).id == "resp_new"
    await store.save(response("resp_3"))
    await service.stop(0)


async def test_concurrent_saves_are_all_stored_and_counted(kept: ResponseClient) -> None:
    await asyncio.gather(*(kept.save(response(f"resp_{number}", tenant=f"t{number % 3}")) for number in range(30)))
    found = await asyncio.gather(*(kept.get(f"t{number % 3}", f"resp_{number}") for number in range(30)))
    assert [each.id for each in found] == [f"resp_{number}" for number in range(30)]


async def test_two_routers_share_one_postgres_and_one_history(postgres_url: str) -> None:
    first, second = built(postgres_url), built(postgres_url)
    await asyncio.gather(first.start(), second.start())
    await first.store.save(response("resp_1"))
    await second.store.save(response("resp_2", previous="resp_1"))
    assert [step.id for step in await first.store.chain("ann", "resp_2")] == ["resp_1", "resp_2"]
    await first.stop(0)
    await second.store.delete("ann", "resp_1")
    await second.stop(0)


async def test_query_is_retried_after_postgres_drops_the_connection(
    postgres: PostgresServer, postgres_database: str
) -> None:
    service = built(postgres.url(postgres_database))
    await service.start()
    await service.store.save(response("resp_1"))
    await asyncio.to_thread(
        postgres.sql,
        "SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity WHERE application_name = 'weft-router'",
    )
    assert (await service.store.get("ann", "resp_1")).id == "resp_1"
    await service.stop(0)


async def test_unreachable_or_refusing_postgres_is_unavailable_and_error_quotes_nothing(
    postgres: PostgresServer, postgres_database: str
) -> None:
    for url in (
        postgres.url("no_such_database"),
        f"postgresql://nobody_here:hunter2@/{postgres_database}?host={postgres.socket_folder}",
        f"postgresql://ann:hunter2@/{postgres_database}?host={postgres.socket_folder}/nowhere",
    ):
        words = await refused(Reason.SERVICE_UNAVAILABLE, built(url).start())
        assert "hunter2" not in words


async def test_postgres_lost_later_is_unavailable_and_nothing_is_reported_stored(
    postgres: PostgresServer, postgres_database: str
) -> None:
    service = built(postgres.url(postgres_database))
    await service.start()
    await service.store.save(response("resp_1"))
    postgres.sql(f"ALTER DATABASE {postgres_database} ALLOW_CONNECTIONS false")
    try:
        postgres.sql(
            "SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity WHERE application_name = 'weft-router'"
        )
        await refused(Reason.SERVICE_UNAVAILABLE, service.store.save(response("resp_2")))
        await refused(Reason.SERVICE_UNAVAILABLE, service.store.get("ann", "resp_1"))
    finally:
        postgres.sql(f"ALTER DATABASE {postgres_database} ALLOW_CONNECTIONS true")
    await refused(Reason.NOT_FOUND, service.store.get("ann", "resp_2"))
    assert (await service.store.get("ann", "resp_1")).id == "resp_1"
    await service.stop(0)
