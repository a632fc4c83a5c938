"""Reports of runners about attempts that proxies carried to them: which of them count."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, cast

import grpc
import pytest

from router_svc.lane_servicer import MAX_REPORTS, LaneServicer
from weft.api.common.v1 import receipt_pb2
from weft.api.router.v1 import lane_service_pb2 as pb
from weft.api.router.v1 import lane_service_pb2_grpc
from weft.api.runner.v1 import ticket_pb2
from weft.dispatch.fleet import FleetView, RunnerView
from weft.dispatch.tickets import sign
from weft.kernel.reasons import Reason
from weft.kernel.rpc import error_from_call, new_server, open_channel

if TYPE_CHECKING:
    from weft.api.router.v1.lane_service_pb2_grpc import LaneServiceAsyncStub

KEYS = {"gpu-1": b"1" * 32, "gpu-2": b"2" * 32, "keyless": b""}
Outcome = pb.ReportAttemptsResponse.Outcome


class EachTicketOnce:
    """Counts each ticket of a known request once."""

    def __init__(self) -> None:
        self.noted: list[tuple[ticket_pb2.TicketClaims, pb.AttemptReport]] = []

    def note_attempt(self, claims: ticket_pb2.TicketClaims, report: pb.AttemptReport) -> bool:
        if claims.ticket_id in {each.ticket_id for each, _ in self.noted} or claims.request_id != "known":
            return False
        self.noted.append((claims, report))
        return True


def _view(revision: int = 1) -> FleetView:
    return FleetView(revision, {name: _runner(name, key) for name, key in KEYS.items()})


def _runner(name: str, key: bytes) -> RunnerView:
    return RunnerView(
        name=name,
        incarnation="1",
        address="",
        host="",
        runtime="fake",
        active=True,
        draining=False,
        ticket_key=key,
        instances={},
    )


def _report(runner: str = "gpu-1", *, key: bytes | None = None, request_id: str = "known") -> pb.AttemptReport:
    claims = ticket_pb2.TicketClaims(ticket_id="t-1", request_id=request_id, runner=runner).SerializeToString()
    ticket = ticket_pb2.Ticket(claims=claims, mac=sign(claims, KEYS.get(runner, b"") if key is None else key))
    return pb.AttemptReport(ticket=ticket, receipt=receipt_pb2.Receipt(outcome=receipt_pb2.OUTCOME_COMPLETED))


@asynccontextmanager
async def _router(
    folder: Path, view: Callable[[], FleetView] = _view
) -> AsyncIterator[tuple[EachTicketOnce, "LaneServiceAsyncStub"]]:
    reports, server = EachTicketOnce(), new_server()
    lane_service_pb2_grpc.add_LaneServiceServicer_to_server(LaneServicer(reports, view), server)
    address = f"unix:{folder / 'router.sock'}"
    server.add_insecure_port(address)
    await server.start()
    async with open_channel(address) as channel:
        yield reports, cast("LaneServiceAsyncStub", lane_service_pb2_grpc.LaneServiceStub(channel))
    await server.stop(grace=None)


async def test_a_report_under_a_ticket_of_the_runner_counts_and_only_once(tmp_path: Path) -> None:
    async with _router(tmp_path) as (reports, router):
        first = await router.ReportAttempts(pb.ReportAttemptsRequest(reports=[_report(), _report()]))
        again = await router.ReportAttempts(pb.ReportAttemptsRequest(reports=[_report()]))
    assert list(first.outcomes) == [Outcome.OUTCOME_ACCEPTED, Outcome.OUTCOME_UNKNOWN]
    assert list(again.outcomes) == [Outcome.OUTCOME_UNKNOWN]
    assert [report.receipt.outcome for _, report in reports.noted] == [receipt_pb2.OUTCOME_COMPLETED]


@pytest.mark.parametrize(
    "report",
    [
        pytest.param(_report(key=b"x" * 32), id="forged"),
        pytest.param(_report("gpu-1", key=KEYS["gpu-2"]), id="signed with the key of another runner"),
        pytest.param(_report("gone"), id="of an unknown runner"),
        pytest.param(_report("keyless"), id="of a runner whose key is not known"),
        pytest.param(pb.AttemptReport(ticket=ticket_pb2.Ticket(claims=b"\xff", mac=b"m")), id="no claims"),
        pytest.param(pb.AttemptReport(), id="no ticket"),
    ],
)
async def test_a_report_without_a_ticket_of_the_mesh_is_refused_and_the_others_count(
    tmp_path: Path, report: pb.AttemptReport
) -> None:
    async with _router(tmp_path) as (reports, router):
        answer = await router.ReportAttempts(pb.ReportAttemptsRequest(reports=[report, _report()]))
    assert list(answer.outcomes) == [Outcome.OUTCOME_REFUSED, Outcome.OUTCOME_ACCEPTED]
    assert len(reports.noted) == 1


async def test_a_report_of_a_request_that_the_router_does_not_know_is_unknown(tmp_path: Path) -> None:
    async with _router(tmp_path) as (reports, router):
        answer = await router.ReportAttempts(pb.ReportAttemptsRequest(reports=[_report(request_id="other")]))
    assert list(answer.outcomes) == [Outcome.OUTCOME_UNKNOWN]
    assert reports.noted == []


async def test_more_reports_than_one_call_may_have_are_refused(tmp_path: Path) -> None:
    async with _router(tmp_path) as (reports, router):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await router.ReportAttempts(pb.ReportAttemptsRequest(reports=[_report()] * (MAX_REPORTS + 1)))
    assert error_from_call(refused.value, Reason.INTERNAL).reason is Reason.INVALID_ARGUMENT
    assert reports.noted == []


async def test_a_router_that_does_not_know_the_mesh_yet_refuses_no_report(tmp_path: Path) -> None:
    views = [FleetView(), _view()]
    async with _router(tmp_path, lambda: views[0]) as (reports, router):
        with pytest.raises(grpc.aio.AioRpcError) as early:
            await router.ReportAttempts(pb.ReportAttemptsRequest(reports=[_report()]))
        # A runner repeats its reports after an error, and drops those that are refused.
        assert error_from_call(early.value, Reason.INTERNAL).reason is Reason.SERVICE_UNAVAILABLE
        del views[0]
        answer = await router.ReportAttempts(pb.ReportAttemptsRequest(reports=[_report()]))
    assert list(answer.outcomes) == [Outcome.OUTCOME_ACCEPTED]
    assert len(reports.noted) == 1
