"""Ends of requests whose router was lost are held for the next one, within bounds."""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from structlog.testing import capture_logs

from weft.api.common.v1 import receipt_pb2
from weft.dispatch.end_reporter import MAX_RETRY_SECONDS, EndFate, EndReporter, ReportLimits
from weft.dispatch.placement import EndPort
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.requests.placement_request import PlacementRequest
from weft.kernel.requests.request_values import Operation
from weft_testing.fake_clock import FakeClock, let_all_run

AWAY = WeftError(Reason.NO_ROUTER_AVAILABLE, "the router is gone")
LIMITS = ReportLimits(max_held=3, give_up_seconds=60.0, retry_seconds=1.0)


def a_request(request_id: str, model: str = "m") -> PlacementRequest:
    return PlacementRequest(
        request_id=request_id,
        tenant="t",
        model=model,
        operation=Operation.CHAT,
        client_id="laptop",
        caller="key:k",
        asked_model="alias",
        prefix_digests=(1, 2, 3),
    )


class ScriptedRouters(EndPort):
    """Answers for each request what is scripted for its id, else that its end is recorded."""

    def __init__(self) -> None:
        self.answers: dict[str, bool | WeftError] = {}
        self.tried: list[PlacementRequest] = []

    async def report_end(self, request: PlacementRequest, receipt: receipt_pb2.Receipt) -> bool:
        assert receipt.request_id == request.request_id
        self.tried.append(request)
        answer = self.answers.get(request.request_id, True)
        if isinstance(answer, WeftError):
            raise answer
        return answer


class Stage:
    """An EndReporter on a stepped clock, and what became of its ends."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.routers = ScriptedRouters()
        self.fates: Counter[str] = Counter()
        self.reporter = EndReporter(self.routers, self.clock, LIMITS)
        self.reporter.on_fate = lambda fate: self.fates.update([fate.value])

    def send(self, request: PlacementRequest) -> None:
        receipt = receipt_pb2.Receipt(request_id=request.request_id, outcome=receipt_pb2.OUTCOME_COMPLETED)
        self.reporter.send(request, receipt, arrived_at=self.clock.monotonic() - 5.0)


@asynccontextmanager
async def stage() -> AsyncGenerator[Stage]:
    made = Stage()
    try:
        yield made
    finally:
        await made.reporter.stop(0.0)


async def test_end_report_has_the_names_and_age_of_its_request_and_no_prompt() -> None:
    async with stage() as there:
        there.send(a_request("r"))
        await let_all_run()
        assert there.routers.tried == [replace(a_request("r"), prefix_digests=(), age_seconds=5.0)]
        assert (there.reporter.held, there.fates) == (0, {"accepted": 1})


@pytest.mark.parametrize(
    "failure",
    [
        AWAY,
        WeftError(Reason.SERVICE_UNAVAILABLE, "the database is away"),
        WeftError(Reason.DEADLINE_EXCEEDED, "Deadline Exceeded"),
        WeftError(Reason.ROUTER_STANDBY, "another router leads"),
    ],
)
async def test_end_report_is_retried_with_doubling_bounded_backoff(
    failure: WeftError,
) -> None:
    async with stage() as there:
        there.routers.answers["r"] = failure
        there.send(a_request("r"))
        for pause in (1.0, 2.0, 4.0, MAX_RETRY_SECONDS, MAX_RETRY_SECONDS):
            await there.clock.wait_for_sleepers(1)
            tried = len(there.routers.tried)
            await there.clock.advance(pause - 0.1)
            assert len(there.routers.tried) == tried
            await there.clock.advance(0.1)
            assert len(there.routers.tried) == tried + 1
        del there.routers.answers["r"]
        await there.clock.advance(MAX_RETRY_SECONDS)
        assert there.routers.tried[-1].age_seconds == 5.0 + 1.0 + 2.0 + 4.0 + 3 * MAX_RETRY_SECONDS
        assert (there.reporter.held, there.fates) == (0, {"accepted": 1})


async def test_known_and_refused_end_reports_are_counted_and_not_resent() -> None:
    async with stage() as there:
        there.routers.answers["known"] = False
        there.routers.answers["refused"] = WeftError(Reason.UNSUPPORTED_OPERATION, "an earlier release")
        there.send(a_request("known"))
        there.send(a_request("refused"))
        await let_all_run()
        assert (there.reporter.held, there.fates) == (0, {"unknown": 1, "refused": 1})


async def test_end_report_beyond_the_bound_is_dropped_counted_and_logged() -> None:
    with capture_logs() as lines:
        async with stage() as there:
            for number in range(5):
                there.routers.answers[f"r{number}"] = AWAY
                there.send(a_request(f"r{number}"))
            await let_all_run()
            assert (there.reporter.held, there.fates) == (3, {"overflow": 2})
            there.routers.answers.clear()
            await there.clock.advance(1.0)
            assert (there.reporter.held, there.fates) == (0, {"overflow": 2, "accepted": 3})
    dropped = [(line["why"], line["count"]) for line in lines if line["event"] == "ends of requests dropped"]
    assert dropped == [("overflow", 2)]


async def test_end_report_is_dropped_after_its_timeout_and_logged() -> None:
    with capture_logs() as lines:
        async with stage() as there:
            there.routers.answers["r"] = AWAY
            there.send(a_request("r"))
            await there.clock.advance(LIMITS.give_up_seconds - 1.0)
            assert there.reporter.held == 1
            await there.clock.advance(MAX_RETRY_SECONDS)
            assert (there.reporter.held, there.fates) == (0, {"gave_up": 1})
    assert [line["why"] for line in lines if line["event"] == "ends of requests dropped"] == ["gave_up"]


async def test_waiting_end_report_does_not_delay_those_of_other_models() -> None:
    async with stage() as there:
        there.routers.answers["r1"] = WeftError(Reason.SERVICE_UNAVAILABLE, "a request with this id is running")
        for request in (a_request("r1"), a_request("r2"), a_request("r3", model="other")):
            there.send(request)
        await let_all_run()
        assert there.fates == {"accepted": 1}, "of the other model"
        await there.clock.advance(1.0)
        assert (there.reporter.held, there.fates) == (1, {"accepted": 2})


async def test_pending_end_reports_are_dropped_and_counted_when_the_gateway_stops() -> None:
    async with stage() as there:
        there.routers.answers["r"] = AWAY
        there.send(a_request("r"))
        await let_all_run()
        await there.reporter.stop(0.0)
        assert (there.reporter.held, there.fates) == (0, {EndFate.GAVE_UP.value: 1})


class FrozenRouter(EndPort):
    """Answers nothing."""

    async def report_end(self, request: PlacementRequest, receipt: receipt_pb2.Receipt) -> bool:
        await asyncio.Event().wait()
        raise AssertionError("nothing sets it")


async def test_unresponsive_router_costs_at_most_one_call_timeout() -> None:
    clock, limits = FakeClock(), replace(LIMITS, call_timeout_seconds=0.01)
    reporter = EndReporter(FrozenRouter(), clock, limits)
    reporter.send(a_request("r"), receipt_pb2.Receipt(request_id="r"), clock.monotonic())
    await clock.wait_for_sleepers(1)
    assert reporter.held == 1
    await reporter.stop(0.0)
