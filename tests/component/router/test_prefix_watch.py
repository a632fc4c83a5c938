"""The router follows engines that report their prefixes over real gRPC, and returns to estimates without them."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from kit.fleet import model_view, runner_view
from kit.serving import served
from kit.waiting import until

from router_svc.policy.endpoints.prefix_affinity import PrefixReport, StoredPrompt
from router_svc.prefix_watch import RETRY_SECONDS, PrefixWatch
from weft.api.registry.v1.runner_pb2 import InstanceState
from weft.api.runner.v1 import runner_service_pb2 as pb
from weft.api.runner.v1 import runner_service_pb2_grpc
from weft.dispatch.fleet import FleetView
from weft.kernel.channels.rpc import ChannelPool, answering
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.values.address import relayed_address
from weft_testing.fake_clock import FakeClock

KEY = ("m", "r", "1")
RESTART = PrefixReport(key=KEY, restart=True)


class ReportingRunner(runner_service_pb2_grpc.RunnerServiceServicer):
    """Sends what the test puts in; None ends the stream."""

    def __init__(self) -> None:
        self.changes: asyncio.Queue[pb.WatchPrefixesResponse | WeftError | None] = asyncio.Queue()
        self.stream_count = 0

    async def WatchPrefixes(  # noqa: N802 - the name of the rpc
        self, request: pb.WatchPrefixesRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncGenerator[pb.WatchPrefixesResponse]:
        async with answering(context):
            assert request.model == "m"
            self.stream_count += 1
            while (change := await self.changes.get()) is not None:
                if isinstance(change, WeftError):
                    raise change
                yield change


class Watching:
    """A watch, its runner, and the reports that it passed on."""

    def __init__(self, runner: ReportingRunner, address: str) -> None:
        self.runner = runner
        self.clock = FakeClock()
        self.channels = ChannelPool()
        self.reports: list[PrefixReport] = []
        self.watch = PrefixWatch(self.channels, self.clock, self.reports.append)
        self._runner = runner_view("r", address=address)
        self._model = model_view("m", "r")

    def show(
        self, *, reports: bool = True, stores: bool = False, phase: Any = InstanceState.PHASE_READY, **runner: Any
    ) -> None:
        state = InstanceState(model="m", phase=phase, reports_prefixes=reports, stores_prompts=stores)
        view = FleetView(1, {"r": replace(self._runner, instances={"m": state}, **runner)}, {"m": self._model})
        self.watch.update_view(view)


@asynccontextmanager
async def _watching(folder: Path) -> AsyncIterator[Watching]:
    runner = ReportingRunner()  # type: ignore[abstract]  # nobody calls the other methods
    watching = Watching(runner, f"unix:{folder}/r")
    async with served(folder / "r", (runner_service_pb2_grpc.add_RunnerServiceServicer_to_server, runner)):
        try:
            yield watching
        finally:
            await watching.watch.stop()
            await watching.channels.close()


async def test_reports_of_a_ready_engine_are_passed_on(tmp_path: Path) -> None:
    async with _watching(tmp_path) as watching:
        watching.show(reports=False)
        watching.show(phase=InstanceState.PHASE_LOADING)
        watching.show(active=False)
        assert watching.watch._followed == {}
        for _ in range(3):
            watching.show()
        watching.runner.changes.put_nowait(pb.WatchPrefixesResponse(restart=True, held=[1, 2**64 - 1]))
        watching.runner.changes.put_nowait(pb.WatchPrefixesResponse(cleared=True, lost=[1]))
        await until(lambda: len(watching.reports) == 2)
        assert watching.reports == [
            PrefixReport(key=KEY, restart=True, held=(1, 2**64 - 1)),
            PrefixReport(key=KEY, cleared=True, lost=(1,)),
        ]
        assert watching.runner.stream_count == 1


async def test_stored_prompts_of_a_sleeping_model_are_passed_on(tmp_path: Path) -> None:
    async with _watching(tmp_path) as watching:
        watching.show(reports=False, stores=True, phase=InstanceState.PHASE_HIBERNATING)
        message = pb.WatchPrefixesResponse()
        message.stored.prompts.add(prefix_digests=[1, 2]).restore.FromMilliseconds(250)
        watching.runner.changes.put_nowait(message)
        await until(lambda: bool(watching.reports))
        assert watching.reports == [PrefixReport(key=KEY, stored=(StoredPrompt((1, 2), 0.25),))]


@pytest.mark.parametrize(("is_joined", "kind"), [(False, "llama-1"), (True, "")])
async def test_stored_prompts_of_a_joined_machine_are_not_moved_to_others(
    tmp_path: Path, is_joined: bool, kind: str
) -> None:
    async with _watching(tmp_path) as watching:
        address = f"unix:{tmp_path}/r"
        watching.show(stores=True, address=relayed_address(address, "r") if is_joined else address)
        message = pb.WatchPrefixesResponse()
        message.stored.prompts.add(prefix_digests=[1], state_kind="llama-1")
        watching.runner.changes.put_nowait(message)
        await until(lambda: bool(watching.reports))
        assert watching.reports == [PrefixReport(key=KEY, stored=(StoredPrompt((1,), 0.0, 0, kind),))]


async def test_broken_stream_means_estimates_until_it_is_opened_again(tmp_path: Path) -> None:
    async with _watching(tmp_path) as watching:
        watching.show()
        for end in (WeftError(Reason.UNSUPPORTED_OPERATION, "no reports"), None):
            watching.reports.clear()
            watching.runner.changes.put_nowait(end)
            await until(lambda: watching.reports == [RESTART])
            await watching.clock.wait_for_sleepers(1)
            await watching.clock.advance(RETRY_SECONDS)
        watching.runner.changes.put_nowait(pb.WatchPrefixesResponse(held=[5]))
        await until(lambda: watching.reports[-1].held == (5,))


async def test_engine_that_reports_no_more_is_estimated(tmp_path: Path) -> None:
    async with _watching(tmp_path) as watching:
        watching.show()
        watching.runner.changes.put_nowait(pb.WatchPrefixesResponse(held=[5]))
        await until(lambda: len(watching.reports) == 1)
        watching.show(reports=False)
        assert watching.reports[1:] == [RESTART]
        watching.show(incarnation="2")
        await until(lambda: watching.runner.stream_count == 2)
