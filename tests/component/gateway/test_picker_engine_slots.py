"""Requests to an engine itself, and the slots that their runner holds: what ends the one ends the other."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from picker_stage import PickerStage, fleet_view, grant, log_entry, picker_stage

from gateway.picker.lane_requests import SWEEP_SECONDS
from gateway.picker.limits import PickerLimits
from weft.api.common.v1 import receipt_pb2
from weft.api.registry.v1.runner_pb2 import InstanceState
from weft.dispatch.engine_slots import HOLD_SLOT
from weft.kernel.reasons import Reason
from weft.kernel.rpc import add_methods, answering, new_server
from weft.link.carried_calls import CarriedCalls

ENGINE = "127.0.0.1:34567"
SECONDS = 10.0


class Runner:
    """Holds a slot for each call, until the call or the engine ends."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.held = 0
        self.streams = CarriedCalls()
        self._changed = asyncio.Condition()

    async def hold(self, _: Any, context: Any) -> None:
        async with answering(context):
            await self._note(1)
            try:
                await context.write(HOLD_SLOT.response(url=f"http://{ENGINE}", api_key="secret"))
                await asyncio.Event().wait()
            finally:
                await asyncio.shield(self._note(-1))

    async def until_held(self, count: int) -> None:
        async with asyncio.timeout(SECONDS), self._changed:
            await self._changed.wait_for(lambda: self.held == count)

    async def _note(self, more: int) -> None:
        async with self._changed:
            self.held += more
            self._changed.notify_all()


@asynccontextmanager
async def _engine_stage(folder: Path) -> AsyncIterator[tuple[PickerStage, Runner]]:
    """A picker with a stream to the runner of an engine."""
    runner, server = Runner(f"unix:{folder}/runner.sock"), new_server()
    add_methods(server, {HOLD_SLOT: runner.hold})
    runner.streams.serve(HOLD_SLOT, runner.hold)
    runner.streams.add_to_server(server)
    server.add_insecure_port(runner.address)
    await server.start()
    view = fleet_view()
    instance = InstanceState(model="tiny", engine_lane=True)
    view = replace(view, runners={"r1": replace(view.runners["r1"], instances={"tiny": instance})})
    try:
        async with picker_stage(folder, view=view) as stage:
            # The first slot is an rpc of its own and has the stream opened.
            await _ask(stage, runner, "first")
            async with asyncio.timeout(SECONDS):
                while not stage.picker._lane._slots._carriers._streams:  # noqa: ASYNC110 - opened in the background
                    await asyncio.sleep(0.005)
            await _end(stage, "first")
            await runner.until_held(0)
            yield stage, runner
    finally:
        await server.stop(None)


async def _ask(stage: PickerStage, runner: Runner, request_id: str) -> None:
    """Have a request sent to the engine."""
    stage.scheduler.script.put_nowait(replace(grant(), address=runner.address))
    answers = await stage.ask(x_request_id=request_id)
    set_headers = answers[0].request_headers.response.header_mutation.set_headers
    assert {each.header.key: each.header.raw_value for each in set_headers}["authorization"] == b"Bearer secret"


async def _end(stage: PickerStage, request_id: str) -> tuple[Reason, receipt_pb2.Receipt]:
    """Have the proxy report a whole answer."""
    await stage.log(log_entry(request_id=request_id, usage=(3, 4), endpoint=ENGINE))
    return await stage.end()


def _carried(runner: Runner) -> int:
    return sum(len(link._calls) for link in runner.streams._links)


async def test_the_end_in_the_proxy_s_log_gives_back_the_slot_of_its_request_alone(tmp_path: Path) -> None:
    async with _engine_stage(tmp_path) as (stage, runner):
        for number in range(3):
            await _ask(stage, runner, f"req-{number}")
        assert (runner.held, _carried(runner)) == (3, 3)
        reason, receipt = await _end(stage, "req-1")
        assert (reason, receipt.outcome) == (Reason.UNSPECIFIED, receipt_pb2.OUTCOME_COMPLETED)
        await runner.until_held(2)
        for number in (0, 2):
            assert (await _end(stage, f"req-{number}"))[0] is Reason.UNSPECIFIED
        await runner.until_held(0)


async def test_requests_whose_stream_is_cut_have_lost_their_engine_unless_the_proxy_says_more(tmp_path: Path) -> None:
    async with _engine_stage(tmp_path) as (stage, runner):
        for number in range(3):
            await _ask(stage, runner, f"req-{number}")
        assert _carried(runner) == 3
        runner.streams.stop()
        await runner.until_held(0)
        requests = stage.picker._lane
        async with asyncio.timeout(SECONDS):
            while not all(lane.is_slot_lost for lane in requests._open.values()):  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        # The answer was whole before its slot was lost.
        reason, receipt = await _end(stage, "req-1")
        assert (reason, receipt.outcome) == (Reason.UNSPECIFIED, receipt_pb2.OUTCOME_COMPLETED)
        await stage.clock.advance(PickerLimits().report_wait_seconds + SWEEP_SECONDS)
        ends = [await stage.end(), await stage.end()]
        assert [reason for reason, _ in ends] == [Reason.SERVER_DIED] * 2
        assert requests.open_count == 0
        # The next request goes on, by an rpc and then by another stream.
        await _ask(stage, runner, "next")
        await runner.until_held(1)


async def test_a_picker_that_stops_gives_all_slots_back(tmp_path: Path) -> None:
    async with _engine_stage(tmp_path) as (stage, runner):
        for number in range(3):
            await _ask(stage, runner, f"req-{number}")
        await stage.picker.stop(0.0)
        await runner.until_held(0)
        assert [(await stage.end())[0] for _ in range(3)] == [Reason.ROUTER_LOST] * 3
