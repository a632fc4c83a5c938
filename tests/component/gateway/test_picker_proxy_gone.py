"""Requests of the lane whose proxy is gone: what has come to no runner ends, and its slot is free."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from engine_stage import ENGINE, ask_engine, engine_stage
from picker_stage import PickerStage, grant, log_entry, picker_stage

from gateway.picker.lane_requests import SWEEP_SECONDS
from gateway.picker.limits import PickerLimits
from weft.api.common.v1 import receipt_pb2
from weft.api.runner.v1 import ticketed_request_service_pb2 as pb
from weft.api.runner.v1 import ticketed_request_service_pb2_grpc
from weft.dispatch.placement import Grant, request_cancelled
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason
from weft.kernel.rpc import answering, new_server

LIMITS = PickerLimits(report_wait_seconds=2.0, end_report_limit_seconds=30.0)
ASKED_AFTER = LIMITS.report_wait_seconds + SWEEP_SECONDS
LOST_AFTER = 10.0 + LIMITS.report_wait_seconds
"""The default interval of signs of life, and a moment for one that is late."""
OWN_CONNECTION = [("grpc.use_local_subchannel_pool", 1)]
"""Channels of one process to one address share a connection otherwise."""


@dataclass
class _Runner(ticketed_request_service_pb2_grpc.TicketedRequestServiceServicer):
    """A runner that says whether a ticket's request had come."""

    address: str
    has_come: bool = False
    is_away: bool = False
    asked: list[Any] = field(default_factory=list)

    async def CancelTicketedRequest(self, request: Any, context: Any) -> Any:  # noqa: N802
        raise AssertionError("nothing is cancelled")

    async def VoidTicket(self, request: pb.VoidTicketRequest, context: Any) -> pb.VoidTicketResponse:  # noqa: N802
        async with answering(context):
            self.asked.append(request.ticket)
            if self.is_away:
                raise WeftError(Reason.SERVICE_UNAVAILABLE, "away")
            return pb.VoidTicketResponse(voided=not self.has_come)
        raise AssertionError("abort has raised")

    def grant(self, attempt: int = 1, *fallbacks: Grant) -> Grant:
        return replace(grant(attempt), address=self.address, fallbacks=fallbacks)


@asynccontextmanager
async def _runner(folder: Path, name: str = "runner") -> AsyncIterator[_Runner]:
    runner, server = _Runner(f"unix:{folder}/{name}.sock"), new_server()
    ticketed_request_service_pb2_grpc.add_TicketedRequestServiceServicer_to_server(runner, server)
    server.add_insecure_port(runner.address)
    await server.start()
    try:
        yield runner
    finally:
        await server.stop(grace=0.0)


@asynccontextmanager
async def _placed(folder: Path, *, is_local: bool = True) -> AsyncIterator[tuple[PickerStage, _Runner]]:
    """A request that is placed, and has come to no runner."""
    async with _runner(folder) as runner, picker_stage(folder, limits=LIMITS, is_local=is_local) as stage:
        stage.scheduler.script.put_nowait(runner.grant())
        await stage.ask()
        yield stage, runner


async def _until(holds: Callable[[], object]) -> None:
    async with asyncio.timeout(5.0):
        while not holds():  # noqa: ASYNC110 - the runner keeps a list
            await asyncio.sleep(0.005)


async def _advance(stage: PickerStage) -> None:
    """The time after which runners are asked, and a moment for a call."""
    await stage.clock.advance(ASKED_AFTER)
    await asyncio.sleep(0.05)


async def _proxy_goes(stage: PickerStage) -> None:
    await stage.log()


@pytest.mark.parametrize("is_local", [True, False], ids=["weft's server", "gRPC's server"])
async def test_what_a_proxy_had_not_sent_on_when_it_went_ends_within_seconds(tmp_path: Path, is_local: bool) -> None:
    async with _placed(tmp_path, is_local=is_local) as (stage, runner):
        await _proxy_goes(stage)
        assert stage.scheduler.finished.empty()
        await stage.clock.advance(ASKED_AFTER)
        reason, receipt = await stage.end()
    assert (reason, receipt.outcome) == (Reason.CANCELLED, receipt_pb2.OUTCOME_CANCELLED)
    assert [ticket.mac for ticket in runner.asked] == [b"mac"]


async def test_while_its_proxy_is_there_no_runner_is_asked(tmp_path: Path) -> None:
    async with _placed(tmp_path) as (stage, runner):
        await _advance(stage)
        assert (runner.asked, stage.scheduler.finished.empty()) == ([], True)


async def test_a_request_that_its_runner_has_goes_on_though_its_proxy_is_gone(tmp_path: Path) -> None:
    async with _placed(tmp_path) as (stage, runner):
        runner.has_come = True
        await _proxy_goes(stage)
        await stage.clock.advance(ASKED_AFTER)
        await _until(lambda: runner.asked)
        await _advance(stage)
        await _advance(stage)
        assert (len(runner.asked), stage.scheduler.finished.empty()) == (1, True)
        assert stage.report(runner.grant(), receipt_pb2.Receipt(reason=Reason.CANCELLED.value))  # type: ignore[arg-type]
        assert (await stage.end())[0] is Reason.CANCELLED


async def test_a_runner_that_does_not_answer_is_asked_again(tmp_path: Path) -> None:
    async with _placed(tmp_path) as (stage, runner):
        runner.is_away = True
        await _proxy_goes(stage)
        await stage.clock.advance(ASKED_AFTER)
        await _until(lambda: runner.asked)
        await _advance(stage)
        assert stage.scheduler.finished.empty()
        runner.is_away = False
        # At most after as long as the proxy has been gone.
        for _ in range(3):
            await _advance(stage)
        assert (await stage.end())[0] is Reason.CANCELLED


async def test_a_request_ends_only_if_none_of_its_runners_has_it(tmp_path: Path) -> None:
    async with (
        _runner(tmp_path, "first") as first,
        _runner(tmp_path, "second") as second,
        picker_stage(tmp_path, limits=LIMITS) as stage,
    ):
        second.has_come = True
        stage.scheduler.script.put_nowait(first.grant(1, second.grant(2)))
        await stage.ask()
        await _proxy_goes(stage)
        await stage.clock.advance(ASKED_AFTER)
        await _until(lambda: first.asked and second.asked)
        await _advance(stage)
        assert stage.scheduler.finished.empty()


async def test_the_requests_of_another_proxy_are_left_alone(tmp_path: Path) -> None:
    async with _placed(tmp_path) as (stage, runner):
        async with grpc.aio.insecure_channel(stage.address, options=OWN_CONNECTION) as stage.channel:
            await _proxy_goes(stage)
        await _advance(stage)
        assert (runner.asked, stage.scheduler.finished.empty()) == ([], True)


def _sign_of_life() -> Any:
    sign = log_entry(endpoint=ENGINE)
    sign.common_properties.intermediate_log_entry = True
    return sign


async def _until_gone(stage: PickerStage) -> None:
    requests = stage.picker._lane
    await _until(lambda: all(each.proxy_gone_at is not None for each in requests._open.values()))


async def test_a_request_of_an_engine_ends_with_its_proxy_and_gives_its_slot_back_within_seconds(
    tmp_path: Path,
) -> None:
    """A killed Envoy kept the slots of engines until the deadlines of its requests."""
    async with engine_stage(tmp_path) as (stage, runner):
        await ask_engine(stage, runner, "req-1")
        await _proxy_goes(stage)
        await stage.clock.advance(LOST_AFTER - 1)
        assert (stage.scheduler.finished.empty(), runner.held) == (True, 1)
        await stage.clock.advance(1 + SWEEP_SECONDS)
        reason, receipt = await stage.end()
        await runner.until_held(0)
    assert (reason, receipt.outcome) == (Reason.CANCELLED, receipt_pb2.OUTCOME_CANCELLED)
    # What its caller got nothing has told.
    assert not receipt.HasField("proxy")
    assert not receipt.HasField("usage")


async def test_a_proxy_that_is_killed_before_its_first_entry_of_the_log_is_gone_with_its_connection(
    tmp_path: Path,
) -> None:
    async with engine_stage(tmp_path) as (stage, runner):
        shared = stage.channel
        async with grpc.aio.insecure_channel(stage.address, options=OWN_CONNECTION) as stage.channel:
            await ask_engine(stage, runner, "req-1")
        await _until_gone(stage)
        stage.channel = shared
        await stage.clock.advance(LOST_AFTER + SWEEP_SECONDS)
        assert (await stage.end())[0] is Reason.CANCELLED
        await runner.until_held(0)


async def test_a_proxy_that_only_connects_again_keeps_its_request_of_an_engine(tmp_path: Path) -> None:
    async with engine_stage(tmp_path) as (stage, runner):
        await ask_engine(stage, runner, "req-1")
        await _proxy_goes(stage)
        (lane,) = stage.picker._lane._open.values()
        async with stage.logging() as write:
            for _ in range(3):
                await write(_sign_of_life())
                await _until(lambda: lane.proxy_gone_at is None)
                await stage.clock.advance(LIMITS.end_report_limit_seconds - 1)
            assert (stage.scheduler.finished.empty(), runner.held) == (True, 1)
            await write(log_entry(usage=(3, 4), endpoint=ENGINE))
            reason, receipt = await stage.end()
        assert (reason, receipt.usage.completion_tokens) == (Reason.UNSPECIFIED, 4)


async def test_a_request_of_an_engine_can_be_cancelled_by_its_id_once_its_proxy_is_gone(tmp_path: Path) -> None:
    async with engine_stage(tmp_path) as (stage, runner):
        await ask_engine(stage, runner, "req-1")
        cancel = stage.scheduler.on_cancelled
        assert cancel is not None
        with pytest.raises(WeftError, match="closing the connection"):
            cancel(request_cancelled("an operator"))
        await _proxy_goes(stage)
        cancel(request_cancelled("an operator"))
        reason, receipt = await stage.end()
        await runner.until_held(0)
    assert (reason, receipt.cancelled_by) == (Reason.CANCELLED, "an operator")


async def test_the_log_of_a_proxy_that_comes_after_its_requests_were_given_up_corrects_the_receipt(
    tmp_path: Path,
) -> None:
    async with engine_stage(tmp_path) as (stage, runner):
        await ask_engine(stage, runner, "req-1")
        await _proxy_goes(stage)
        await stage.clock.advance(LOST_AFTER + SWEEP_SECONDS)
        assert (await stage.end())[0] is Reason.CANCELLED
        await stage.clock.advance(LIMITS.end_report_limit_seconds - 1)
        await stage.log(log_entry(usage=(3, 4), endpoint=ENGINE))
        (amended,) = [each for each in stage.amended if each.request_id == "req-1"]
    assert (amended.outcome, amended.usage.completion_tokens) == (receipt_pb2.OUTCOME_COMPLETED, 4)
    assert (amended.proxy.status, Reason(amended.attempts[0].reason)) == (200, Reason.UNSPECIFIED)
