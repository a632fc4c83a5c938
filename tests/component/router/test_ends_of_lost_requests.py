"""The end of a request whose router was lost is recorded by the router that leads next, once."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
from kit.refusals import refused
from kit.waiting import until
from leader_mesh import CLOCK, Mesh, Router, a_request, granted, running

from router_svc.request_record import EndedRequest
from weft.api.common.v1 import receipt_pb2
from weft.api.router.v1 import placement_service_pb2 as pb
from weft.api.router.v1.request_pb2 import RequestRecord
from weft.dispatch.end_reporter import EndReporter, ReportLimits
from weft.dispatch.reconnecting_placement import ReconnectConfig, ReconnectingPlacement
from weft.dispatch.remote_router import RemoteRouter
from weft.kernel.channels.rpc import open_channel
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.requests.placement_request import PlacementRequest
from weft_testing.carried import CarriedStub

TOKENS = 7


def a_receipt(request: PlacementRequest, *, reason: Reason = Reason.UNSPECIFIED) -> receipt_pb2.Receipt:
    outcome = receipt_pb2.OUTCOME_FAILED if reason else receipt_pb2.OUTCOME_COMPLETED
    receipt = receipt_pb2.Receipt(request_id=request.request_id, outcome=outcome, model="m")
    receipt.reason = reason.value  # type: ignore[assignment]  # same numbers
    receipt.attempts.add(runner="a", model="m")
    receipt.usage.prompt_tokens, receipt.usage.completion_tokens = 3, TOKENS
    receipt.total_time.FromMilliseconds(2)
    return receipt


@asynccontextmanager
async def reporting(there: Mesh) -> AsyncGenerator[EndReporter]:
    reporter = EndReporter(there.placement, CLOCK, ReportLimits(retry_seconds=0.02))
    try:
        yield reporter
    finally:
        await reporter.stop(0.0)


def place(there: Mesh, request: PlacementRequest, ends: EndReporter) -> ReconnectingPlacement:
    config = ReconnectConfig(router_outage_limit_seconds=0.0)
    return ReconnectingPlacement(there.placement, request, CLOCK, config, ends=ends)


def known(router: Router, request: PlacementRequest) -> RequestRecord | None:
    """The record of a request that has ended."""
    found = router.records.requests.find(request.request_id, CLOCK.monotonic(), request.tenant)
    return found.read() if isinstance(found, EndedRequest) else None


def counted(router: Router) -> tuple[int, int]:
    """What its usage has counted: completed requests and their tokens."""
    sums = list(router.records.usage.take().values())
    return sum(each.get("completed_count", 0) for each in sums), sum(each.get("completion_tokens", 0) for each in sums)


@pytest.mark.slow("kills or restarts a service")
async def test_stream_end_after_a_router_death_is_recorded_by_the_next_leader(tmp_path: Path) -> None:
    async with running(tmp_path) as there, reporting(there) as ends:
        dead, request = there.routers["r1"], replace(a_request(), client_id="laptop", caller="key:k")
        heir = there.routers["r2"]
        heir.records.usage.keep(100)
        async with place(there, request, ends) as placed:
            await granted(placed)
            await dead.kill()
            assert not await placed.report_finished(Reason.UNSPECIFIED, a_receipt(request))
        assert ends.held == 1, "none leads that could record it"
        await there.lead("r2")
        await until(lambda: ends.held == 0)
        found = known(heir, request)
        assert found is not None
        assert (found.reason, found.client_id, found.target) == (Reason.UNSPECIFIED.value, "laptop", "m")
        assert found.receipt.usage.completion_tokens == TOKENS
        assert found.end_time.ToDatetime() - found.arrive_time.ToDatetime() == timedelta(milliseconds=2)
        assert counted(heir) == (1, TOKENS)
        assert heir.loop.scheduler.running == heir.loop.scheduler.waiting == 0


async def test_duplicate_end_report_changes_nothing_including_fair_share(tmp_path: Path) -> None:
    async with running(tmp_path) as there:
        owner, request = there.routers["r1"], replace(a_request(), age_seconds=9.0)
        owner.records.usage.keep(100)
        async with open_channel(owner.address) as channel:
            port = RemoteRouter(channel, CLOCK)
            before = owner.loop.scheduler.fair_share("t")
            assert await port.report_end(request, a_receipt(request))
            first = known(owner, request)
            assert counted(owner) == (1, TOKENS)
            assert not await port.report_end(request, a_receipt(request, reason=Reason.WORKER_LOST))
            assert known(owner, request) == first
            assert counted(owner) == (0, 0)
            assert owner.loop.scheduler.fair_share("t") == before
            assert owner.records.clients.records() == []


@pytest.mark.slow("waits as long as a request looks for a router that leads")
async def test_end_of_a_request_no_router_answered_is_recorded_with_its_reason(tmp_path: Path) -> None:
    async with running(tmp_path) as there, reporting(there) as ends:
        request = a_request()
        await there.routers["r1"].lead(False)
        await until(lambda: there.placement.leader is None)
        async with place(there, request, ends) as placed:
            with refused(Reason.NO_ROUTER_AVAILABLE):
                await placed.next_decision()
            receipt = receipt_pb2.Receipt(
                request_id=request.request_id, outcome=receipt_pb2.OUTCOME_FAILED, model="m", lacked_router=True
            )
            receipt.reason = Reason.NO_ROUTER_AVAILABLE.value  # type: ignore[assignment]  # same numbers
            await placed.report_finished(Reason.NO_ROUTER_AVAILABLE, receipt)
        await there.lead("r1")
        await until(lambda: ends.held == 0)
        found = known(there.routers["r1"], request)
        assert found is not None
        assert found.reason == Reason.NO_ROUTER_AVAILABLE.value
        assert found.receipt.lacked_router


async def test_end_already_known_to_the_router_is_not_reported_again(tmp_path: Path) -> None:
    async with running(tmp_path) as there, reporting(there) as ends:
        async with place(there, a_request(1), ends) as placed:
            await granted(placed)
            assert await placed.report_finished(Reason.UNSPECIFIED, a_receipt(a_request(1)))
        unknown = replace(a_request(2), model="nothing")
        async with place(there, unknown, ends) as placed:
            with pytest.raises(WeftError, match="nothing"):
                await placed.next_decision()
            assert await placed.report_finished(Reason.MODEL_NOT_FOUND, a_receipt(unknown))
        assert ends.held == 0


async def test_late_end_report_replaces_an_assumed_cancellation(tmp_path: Path) -> None:
    """As one whose report took too long: the router saw the stream close, and nothing else."""
    async with running(tmp_path) as there:
        owner, request = there.routers["r1"], a_request()
        owner.records.usage.keep(100)
        async with there.place(request) as placed:
            await granted(placed)
            with pytest.raises(WeftError, match="is running"):
                await there.placement.report_end(request, a_receipt(request))
        await until(lambda: known(owner, request) is not None)
        left = known(owner, request)
        assert left is not None
        assert left.reason == Reason.CANCELLED.value
        counted(owner)
        assert await there.placement.report_end(request, a_receipt(request))
        found = known(owner, request)
        assert found is not None
        assert found.reason == Reason.UNSPECIFIED.value
        assert counted(owner) == (0, TOKENS), "the request was counted when its stream closed"
        assert not await there.placement.report_end(request, a_receipt(request))


async def test_cancellation_with_a_receipt_is_not_replaced(tmp_path: Path) -> None:
    async with running(tmp_path) as there:
        owner, request = there.routers["r1"], a_request()
        async with there.place(request) as placed:
            await granted(placed)
            await placed.report_finished(Reason.CANCELLED, a_receipt(request, reason=Reason.CANCELLED))
        assert not await there.placement.report_end(request, a_receipt(request))
        found = known(owner, request)
        assert found is not None
        assert found.reason == Reason.CANCELLED.value


async def test_end_without_a_receipt_is_rejected_and_error_names_the_field(tmp_path: Path) -> None:
    async with running(tmp_path) as there, open_channel(there.routers["r1"].address) as channel:
        with pytest.raises(WeftError, match=r"finished\.receipt"):
            await CarriedStub(channel, pb).ReportEnd(pb.ReportEndRequest(finished=pb.PlaceFinished()))


async def test_concurrent_end_reports_of_one_request_are_recorded_once(tmp_path: Path) -> None:
    async with running(tmp_path) as there:
        owner, request = there.routers["r1"], a_request()
        owner.records.usage.keep(100)
        both = await asyncio.gather(
            *(there.placement.report_end(request, a_receipt(request)) for _ in range(2)),
        )
        assert sorted(both) == [False, True]
        assert counted(owner) == (1, TOKENS)
