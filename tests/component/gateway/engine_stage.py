"""A picker with a runner that holds the slots of an engine, which the proxy calls itself."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from picker_stage import PickerStage, fleet_view, grant, log_entry, picker_stage

from weft.api.common.v1 import receipt_pb2
from weft.api.registry.v1.runner_pb2 import InstanceState
from weft.dispatch.engine_slots import HOLD_SLOT
from weft.kernel.reasons import Reason
from weft.kernel.rpc import add_methods, answering, new_server
from weft.link.carried_calls import CarriedCalls

ENGINE = "127.0.0.1:34567"
SECONDS = 10.0


class EngineRunner:
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
async def engine_stage(
    folder: Path, *, reported: str = f"http://{ENGINE}"
) -> AsyncIterator[tuple[PickerStage, EngineRunner]]:
    """A picker with a stream to the runner of an engine, which listens at `reported` as far as reports say."""
    runner, server = EngineRunner(f"unix:{folder}/runner.sock"), new_server()
    add_methods(server, {HOLD_SLOT: runner.hold})
    runner.streams.serve(HOLD_SLOT, runner.hold)
    runner.streams.add_to_server(server)
    server.add_insecure_port(runner.address)
    await server.start()
    view = fleet_view()
    instance = InstanceState(model="tiny", engine_lane=True, engine_lane_url=reported)
    view = replace(view, runners={"r1": replace(view.runners["r1"], instances={"tiny": instance})})
    try:
        async with picker_stage(folder, view=view) as stage:
            # The first slot is an rpc of its own and has the stream opened.
            await ask_engine(stage, runner, "first")
            async with asyncio.timeout(SECONDS):
                while not stage.picker._lane._slots._carriers._streams:  # noqa: ASYNC110 - opened in the background
                    await asyncio.sleep(0.005)
            await end_at_engine(stage, "first")
            await runner.until_held(0)
            yield stage, runner
    finally:
        await server.stop(None)


async def ask_engine(stage: PickerStage, runner: EngineRunner, request_id: str) -> None:
    """Have a request sent to the engine."""
    stage.scheduler.script.put_nowait(replace(grant(), address=runner.address))
    answers = await stage.ask(x_request_id=request_id)
    set_headers = answers[0].request_headers.response.header_mutation.set_headers
    assert {each.header.key: each.header.raw_value for each in set_headers}["authorization"] == b"Bearer secret"


async def end_at_engine(stage: PickerStage, request_id: str) -> tuple[Reason, receipt_pb2.Receipt]:
    """Have the proxy report a whole answer."""
    await stage.log(log_entry(request_id=request_id, usage=(3, 4), endpoint=ENGINE))
    return await stage.end()
