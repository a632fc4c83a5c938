"""Answers that are kept: whose they are, how many, how long, and in the process."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path

import pytest

from router_svc.durable.limits import ResponseLimits
from router_svc.durable.stored_responses import ResponseService
from router_svc.store.database import RouterDatabase
from weft.api.router.v1 import stored_response_service_pb2
from weft.durable.responses import MAX_CHAIN, ResponseClient
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason
from weft.kernel.timestamps import stamp_of
from weft_testing.fake_clock import FakeClock

MADE = datetime(2026, 11, 20, 12, 0, 0, tzinfo=UTC)


def response(
    name: str, *, tenant: str = "ann", previous: str = "", size: int = 10
) -> stored_response_service_pb2.StoredResponse:
    return stored_response_service_pb2.StoredResponse(
        id=name, tenant=tenant, previous_id=previous, create_time=stamp_of(MADE), body=b"b" * size, items=b"[]"
    )


def url_of(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'router.db'}"


@asynccontextmanager
async def keeping(
    tmp_path: Path, *, limits: ResponseLimits | None = None, clock: FakeClock | None = None
) -> AsyncIterator[ResponseClient]:
    service = ResponseService(RouterDatabase(url_of(tmp_path)), limits or ResponseLimits(), clock=clock)
    await service.start()
    try:
        yield service.store
    finally:
        await service.stop(0)


async def refused(reason: Reason, awaited: object) -> str:
    with pytest.raises(WeftError) as found:
        await awaited  # type: ignore[misc]
    assert found.value.reason is reason
    return found.value.message


async def test_tenant_quota_is_enforced_but_replacing_and_deleting_still_work(tmp_path: Path) -> None:
    async with keeping(tmp_path, limits=ResponseLimits(max_per_tenant=2)) as store:
        await store.save(response("resp_1"))
        await store.save(response("resp_2"))
        await refused(Reason.TOO_MANY_RESOURCES, store.save(response("resp_3")))
        await store.save(response("resp_2", size=20))
        await store.save(response("resp_b", tenant="bob"))
        await store.delete("ann", "resp_1")
        await store.save(response("resp_3"))
    # The next life counts what is there.
    async with keeping(tmp_path, limits=ResponseLimits(max_per_tenant=2)) as store:
        await refused(Reason.TOO_MANY_RESOURCES, store.save(response("resp_4")))


async def test_size_is_limited_per_response_tenant_and_conversation(tmp_path: Path) -> None:
    limits = ResponseLimits(max_bytes=100, max_tenant_bytes=300, max_chain_bytes=150)
    async with keeping(tmp_path, limits=limits) as store:
        await refused(Reason.REQUEST_TOO_LARGE, store.save(response("resp_0", size=99)))
        await store.save(response("resp_1", size=98))
        await store.save(response("resp_2", size=98, previous="resp_1"))
        words = await refused(Reason.INVALID_ARGUMENT, store.chain("ann", "resp_2"))
        assert "previous_response_id" in words
        await store.save(response("resp_3", size=98))
        await refused(Reason.TOO_MANY_RESOURCES, store.save(response("resp_4", size=98)))
        await store.save(response("resp_3", size=50))


async def test_total_size_across_tenants_is_limited(tmp_path: Path) -> None:
    limits = ResponseLimits(max_total_bytes=250)
    async with keeping(tmp_path, limits=limits) as store:
        await store.save(response("resp_1", size=98))
        await store.save(response("resp_b", tenant="bob", size=98))
        words = await refused(Reason.TOO_MANY_RESOURCES, store.save(response("resp_c", tenant="cid", size=98)))
        assert "router.responses.max_total_bytes" in words
        await store.save(response("resp_1", size=90))
        await store.delete("bob", "resp_b")
        await store.save(response("resp_c", tenant="cid", size=98))
    # The next life counts what is there.
    async with keeping(tmp_path, limits=limits) as store:
        await refused(Reason.TOO_MANY_RESOURCES, store.save(response("resp_d", tenant="dan", size=98)))


@pytest.mark.slow("floods a service")
async def test_endless_conversation_is_rejected_before_it_is_read(tmp_path: Path) -> None:
    async with keeping(tmp_path) as store:
        for number in range(MAX_CHAIN + 1):
            await store.save(response(f"resp_{number}", previous=f"resp_{number - 1}" if number else ""))
        assert len(await store.chain("ann", f"resp_{MAX_CHAIN - 1}")) == MAX_CHAIN
        await refused(Reason.INVALID_ARGUMENT, store.chain("ann", f"resp_{MAX_CHAIN}"))
        # One that names itself as its own past cannot hold anybody up either.
        await store.save(response("resp_loop", previous="resp_loop"))
        await refused(Reason.INVALID_ARGUMENT, store.chain("ann", "resp_loop"))
