"""The endpoint picker as gateways of the Gateway API see it: they show it the responses, and name subsets."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from engine_stage import ENGINE, engine_stage
from picker_stage import BODY, LIMITED_HEADERS, PickerStage, fleet_view, grant, limited, picker_stage, request_head

from gateway.picker.limits import PickerLimits
from gateway.picker.servicer import _Stream
from gateway.picker.session import TEST_SERVED, PickerSession, Route
from weft.api.common.v1 import receipt_pb2
from weft.api.common.v1.error_reason_pb2 import ERROR_REASON_CANCELLED
from weft.api.envoy.v1 import external_processor_pb2 as pb
from weft.dispatch.placement import WaitingInQueue
from weft.kernel.errors import WeftError
from weft.kernel.lane_names import (
    DESTINATION,
    DESTINATION_NAMESPACE,
    DESTINATION_SERVED,
    PROCESS_METHOD,
    SUBSET,
    SUBSET_NAMESPACE,
)
from weft.kernel.reasons import Reason

EVENTS = (b'data: {"choices":[]}\n\n', b"data: [DONE]\n\n")


def head(subset: list[str] | None = None, **headers: str) -> pb.ProcessingRequest:
    """Headers of a request, of a gateway that shows responses."""
    message = request_head(**headers)
    message.protocol_config.response_body_mode = pb.BODY_SEND_MODE_FULL_DUPLEX_STREAMED
    if subset is not None:
        known = message.metadata_context.filter_metadata[SUBSET_NAMESPACE]
        known.fields[SUBSET].list_value.extend(subset)
    return message


class GatewayStream:
    """A stream of a gateway."""

    def __init__(self, call: Any) -> None:
        self.call = call

    async def ask(self, first: pb.ProcessingRequest) -> None:
        await self.call.write(first)
        await self.call.write(pb.ProcessingRequest(request_body=pb.HttpBody(body=BODY, end_of_stream=True)))

    async def read(self) -> pb.ProcessingResponse:
        message = await asyncio.wait_for(self.call.read(), 5.0)
        assert isinstance(message, pb.ProcessingResponse), "the picker has ended the stream"
        return message

    async def routed(self) -> str:
        """The destination; the body is read, too."""
        first = await self.read()
        assert first.WhichOneof("response") == "request_headers", first
        await self.read()
        mutation = first.request_headers.response.header_mutation
        found = {each.header.key: each.header.raw_value.decode() for each in mutation.set_headers}
        return found[DESTINATION]

    async def refused(self) -> int:
        first = await self.read()
        return first.immediate_response.status.code

    async def respond(self, *chunks: bytes, served: str = "", ends: bool = True) -> dict[str, str]:
        """Sends a response, and requires each chunk back. Returns the headers that the picker sets."""
        message = pb.ProcessingRequest()
        for key, value in ((":status", "200"), ("content-type", "text/event-stream")):
            message.response_headers.headers.headers.add(key=key, raw_value=value.encode())
        if served:
            known = message.metadata_context.filter_metadata[DESTINATION_NAMESPACE]
            known.fields[DESTINATION_SERVED].string_value = served
        await self.call.write(message)
        mutation = (await self.read()).response_headers.response.header_mutation
        for index, chunk in enumerate(chunks):
            is_end = ends and index == len(chunks) - 1
            await self.call.write(pb.ProcessingRequest(response_body=pb.HttpBody(body=chunk, end_of_stream=is_end)))
            back = (await self.read()).response_body.response.body_mutation.streamed_response
            assert (back.body, back.end_of_stream) == (chunk, is_end)
        return {each.header.key: each.header.raw_value.decode() for each in mutation.set_headers}


@asynccontextmanager
async def gateway_stream(stage: PickerStage) -> AsyncIterator[GatewayStream]:
    call = stage.channel.stream_stream(
        PROCESS_METHOD,
        request_serializer=pb.ProcessingRequest.SerializeToString,
        response_deserializer=pb.ProcessingResponse.FromString,
    )()
    try:
        yield GatewayStream(call)
    finally:
        call.cancel()


async def test_a_response_comes_back_whether_or_not_its_request_has_waited(tmp_path: Path) -> None:
    async with picker_stage(tmp_path) as stage:
        for waits in (False, True):
            async with gateway_stream(stage) as stream:
                await stream.ask(head())
                if waits:
                    stage.scheduler.script.put_nowait(WaitingInQueue(position=1, reason="full"))
                    await asyncio.sleep(0.05)
                stage.scheduler.script.put_nowait(grant())
                assert await stream.routed() == "10.0.0.1:8081"
                assert set(await stream.respond(*EVENTS, served="10.0.0.1:8081")) == {"x-request-id"}


async def test_a_response_has_the_rate_limits_of_its_caller_and_the_id_of_its_request(tmp_path: Path) -> None:
    async with picker_stage(tmp_path) as stage, gateway_stream(stage) as stream:
        await stream.ask(head())
        stage.scheduler.script.put_nowait(WaitingInQueue(position=1, reason="full", rate_limits=limited()))
        stage.scheduler.script.put_nowait(grant())
        await stream.routed()
        assert await stream.respond(*EVENTS) == {"x-request-id": "req-1", **LIMITED_HEADERS}


@pytest.mark.parametrize(
    ("chunks", "ends", "reason"),
    [(EVENTS, True, Reason.UNSPECIFIED), (EVENTS[:1], True, Reason.WORKER_LOST), (EVENTS, False, Reason.WORKER_LOST)],
    ids=["complete", "ended in mid-answer", "cut"],
)
async def test_the_end_of_the_stream_ends_the_request_where_no_runner_reports(
    tmp_path: Path, chunks: tuple[bytes, ...], ends: bool, reason: Reason
) -> None:
    async with picker_stage(tmp_path) as stage:
        stage.scheduler.script.put_nowait(grant())
        async with gateway_stream(stage) as stream:
            await stream.ask(head())
            await stream.routed()
            await stream.respond(*chunks, served="10.0.0.1:8081", ends=ends)
        while stage.scheduler.finished.empty():
            await asyncio.sleep(0.01)
            await stage.clock.advance(0.5)
        found, receipt = await stage.end()
        assert found is reason
        assert receipt.proxy.endpoint == "10.0.0.1:8081"
        assert not receipt.proxy.disagreements


async def test_the_runners_report_counts_and_the_stream_contradicts_it_in_nothing(tmp_path: Path) -> None:
    async with picker_stage(tmp_path) as stage:
        stage.scheduler.script.put_nowait(grant())
        async with gateway_stream(stage) as stream:
            await stream.ask(head())
            await stream.routed()
            await stream.respond(*EVENTS[:1], ends=False)
            assert stage.report(grant(), receipt_pb2.Receipt(reason=ERROR_REASON_CANCELLED))
            found, receipt = await stage.end()
    assert found is Reason.CANCELLED
    assert not receipt.proxy.disagreements


async def test_such_gateways_get_one_endpoint_unless_the_setting_says_otherwise(tmp_path: Path) -> None:
    for fallbacks in (0, 1):
        folder = tmp_path / str(fallbacks)
        folder.mkdir()
        async with picker_stage(folder, limits=PickerLimits(foreign_fallbacks=fallbacks)) as stage:
            stage.scheduler.script.put_nowait(grant())
            async with gateway_stream(stage) as stream:
                await stream.ask(head())
                await stream.routed()
            assert stage.scheduler.placed[0].fallbacks == fallbacks


@pytest.mark.parametrize(
    ("subset", "runners"),
    [
        (["10.0.0.2:8081"], {"r2"}),
        (["10.0.0.1:8081", "10.0.0.2:8081", "10.9.9.9:1"], set()),
        (["10.0.0.2:8081 ", "10.0.0.1:1"], {"r2"}),
    ],
    ids=["one of two", "all and another", "another port"],
)
async def test_only_runners_of_the_subset_are_asked_for(tmp_path: Path, subset: list[str], runners: set[str]) -> None:
    async with picker_stage(tmp_path) as stage:
        stage.scheduler.script.put_nowait(grant(1, "r2"))
        async with gateway_stream(stage) as stream:
            await stream.ask(head(subset))
            assert await stream.routed() == "10.0.0.2:8081"
        assert stage.scheduler.placed[0].only_runners == runners


async def test_a_runner_that_came_after_the_subset_was_read_is_not_used(tmp_path: Path) -> None:
    async with picker_stage(tmp_path) as stage:
        stage.scheduler.script.put_nowait(grant(1, "r1"))
        stage.scheduler.script.put_nowait(grant(2, "r2"))
        async with gateway_stream(stage) as stream:
            await stream.ask(head(["10.0.0.2:8081"]))
            assert await stream.routed() == "10.0.0.2:8081"
        assert stage.scheduler.failed == [(1, Reason.TOOL_UNAVAILABLE)]


@pytest.mark.parametrize("subset", [[], ["10.9.9.9:1"]], ids=["empty", "others"])
async def test_a_subset_without_a_runner_is_503_and_places_nothing(tmp_path: Path, subset: list[str]) -> None:
    async with picker_stage(tmp_path) as stage, gateway_stream(stage) as stream:
        await stream.ask(head(subset))
        assert await stream.refused() == 503
        assert not stage.scheduler.placed


@pytest.mark.parametrize("allowed", [ENGINE, "10.0.0.1:8081"], ids=["the engine", "its runner"])
async def test_a_subset_names_an_engine_or_its_runner_and_the_request_goes_there(tmp_path: Path, allowed: str) -> None:
    """Engines were refused whichever of their addresses a subset had."""
    async with engine_stage(tmp_path) as (stage, runner):
        stage.scheduler.script.put_nowait(replace(grant(), address=runner.address))
        async with gateway_stream(stage) as stream:
            await stream.ask(head([allowed], x_request_id="req-2"))
            assert await stream.routed() == allowed
        assert stage.scheduler.placed[-1].only_runners in (set(), {"r1"})


async def test_an_engine_that_has_started_elsewhere_since_the_subset_was_read_is_not_used(tmp_path: Path) -> None:
    async with engine_stage(tmp_path, reported="http://10.9.9.9:1") as (stage, runner):
        stage.scheduler.script.put_nowait(replace(grant(), address=runner.address))
        stage.scheduler.script.put_nowait(WeftError(Reason.NO_RUNNER_AVAILABLE, "none is left"))
        async with gateway_stream(stage) as stream:
            await stream.ask(head(["10.9.9.9:1"], x_request_id="req-2"))
            assert await stream.refused() == 503
        assert stage.scheduler.failed[-1] == (1, Reason.TOOL_UNAVAILABLE)
        await runner.until_held(0)


async def test_a_name_of_a_runner_becomes_an_address(tmp_path: Path) -> None:
    async with picker_stage(tmp_path, view=fleet_view(["http://localhost:8081"])) as stage:
        stage.scheduler.script.put_nowait(grant())
        async with gateway_stream(stage) as stream:
            await stream.ask(head())
            assert await stream.routed() in {"127.0.0.1:8081", "[::1]:8081"}


@pytest.mark.parametrize(("foreign", "status"), [(True, 429), (False, 503)])
async def test_a_dropped_request_is_429_for_such_gateways_and_503_for_wefts_own_callers(
    tmp_path: Path, foreign: bool, status: int
) -> None:
    async with picker_stage(tmp_path) as stage, gateway_stream(stage) as stream:
        stage.scheduler.script.put_nowait(WeftError(Reason.QUEUE_FULL, "full"))
        await stream.ask(head() if foreign else request_head())
        assert await stream.refused() == status


@pytest.mark.parametrize("trusted", [True, False])
async def test_a_fairness_id_names_the_tenant_behind_a_trusted_gateway_alone(tmp_path: Path, trusted: bool) -> None:
    async with picker_stage(tmp_path, limits=PickerLimits(fairness_tenants=trusted)) as stage:
        stage.scheduler.script.put_nowait(grant())
        async with gateway_stream(stage) as stream:
            await stream.ask(head(x_llm_d_inference_fairness_id="team-7"))
            await stream.routed()
        assert (stage.scheduler.placed[0].tenant == "team-7") is trusted


async def test_the_served_endpoint_is_told_to_nobody_without_the_hooks(tmp_path: Path) -> None:
    async with picker_stage(tmp_path) as stage:
        stage.scheduler.script.put_nowait(grant())
        async with gateway_stream(stage) as stream:
            await stream.ask(head(test_epp_endpoint_selection="10.9.9.9"))
            assert await stream.routed() == "10.0.0.1:8081", "the header of conformance tests is not obeyed"
            assert TEST_SERVED not in await stream.respond(*EVENTS, served="10.0.0.1:8081")


class SlowContext:
    """The server's side of a stream: a write lasts until the next message has been read, as on a busy machine."""

    def __init__(self) -> None:
        self.written: list[str] = []
        self.incoming: asyncio.Queue[pb.ProcessingRequest | None] = asyncio.Queue()
        self._is_writing = False

    def peer(self) -> str:
        return "unix:"

    async def read(self) -> pb.ProcessingRequest | None:
        return await self.incoming.get()

    async def write(self, message: pb.ProcessingResponse) -> None:
        assert not self._is_writing, "gRPC takes one write at a time"
        self._is_writing = True
        if message.HasField("request_body"):
            answer = pb.ProcessingRequest()
            answer.response_headers.SetInParent()
            self.incoming.put_nowait(answer)
        for _ in range(10):
            await asyncio.sleep(0)
        self._is_writing = False
        self.written.append(message.WhichOneof("response") or "")


async def test_a_response_that_comes_before_the_write_of_its_request_returns_is_answered_after_it() -> None:
    context = SlowContext()
    stream = _Stream(cast("Any", context), PickerSession(1000))
    await stream.take(head())
    await stream.take(pb.ProcessingRequest(request_body=pb.HttpBody(body=BODY, end_of_stream=True)))
    stream.watch()
    await stream.route(Route(destinations=("10.0.0.1:8081",)))
    for _ in range(50):
        await asyncio.sleep(0)
    context.incoming.put_nowait(None)
    assert await stream.read() is None
    assert context.written == ["request_headers", "request_body", "response_headers"]
