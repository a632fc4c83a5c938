"""Requests to an engine itself, and the slots that their runner holds: what ends the one ends the other."""

import asyncio
from pathlib import Path

from engine_stage import SECONDS, EngineRunner, ask_engine, end_at_engine, engine_stage

from gateway.picker.lane_requests import SWEEP_SECONDS
from gateway.picker.limits import PickerLimits
from weft.api.common.v1 import receipt_pb2
from weft.kernel.reasons import Reason


def _carried(runner: EngineRunner) -> int:
    return sum(len(link._calls) for link in runner.streams._links)


async def test_the_end_in_the_proxy_s_log_gives_back_the_slot_of_its_request_alone(tmp_path: Path) -> None:
    async with engine_stage(tmp_path) as (stage, runner):
        for number in range(3):
            await ask_engine(stage, runner, f"req-{number}")
        assert (runner.held, _carried(runner)) == (3, 3)
        reason, receipt = await end_at_engine(stage, "req-1")
        assert (reason, receipt.outcome) == (Reason.UNSPECIFIED, receipt_pb2.OUTCOME_COMPLETED)
        await runner.until_held(2)
        for number in (0, 2):
            assert (await end_at_engine(stage, f"req-{number}"))[0] is Reason.UNSPECIFIED
        await runner.until_held(0)


async def test_requests_whose_stream_is_cut_have_lost_their_engine_unless_the_proxy_says_more(tmp_path: Path) -> None:
    async with engine_stage(tmp_path) as (stage, runner):
        for number in range(3):
            await ask_engine(stage, runner, f"req-{number}")
        assert _carried(runner) == 3
        runner.streams.stop()
        await runner.until_held(0)
        requests = stage.picker._lane
        async with asyncio.timeout(SECONDS):
            while not all(lane.is_slot_lost for lane in requests._open.values()):  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        # The answer was whole before its slot was lost.
        reason, receipt = await end_at_engine(stage, "req-1")
        assert (reason, receipt.outcome) == (Reason.UNSPECIFIED, receipt_pb2.OUTCOME_COMPLETED)
        await stage.clock.advance(PickerLimits().report_wait_seconds + SWEEP_SECONDS)
        ends = [await stage.end(), await stage.end()]
        assert [reason for reason, _ in ends] == [Reason.SERVER_DIED] * 2
        assert requests.open_count == 0
        # The next request goes on, by an rpc and then by another stream.
        await ask_engine(stage, runner, "next")
        await runner.until_held(1)


async def test_a_picker_that_stops_gives_all_slots_back(tmp_path: Path) -> None:
    async with engine_stage(tmp_path) as (stage, runner):
        for number in range(3):
            await ask_engine(stage, runner, f"req-{number}")
        await stage.picker.stop(0.0)
        await runner.until_held(0)
        assert [(await stage.end())[0] for _ in range(3)] == [Reason.ROUTER_LOST] * 3
