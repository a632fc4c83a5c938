"""Peers and callers that mean no good: what they do stays theirs, and costs the mesh little."""

import asyncio
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
from raw_link import HEARTBEAT, OPEN, RawLink, end_of
from relay_harness import RUNNER, TOKEN, Mesh, eventually, prompt, refusal, running_laptop, running_mesh_side, soon

from runner_svc.dial_out import LinkState
from weft.api.common.v1 import link_pb2 as pb
from weft.api.registry.v1 import runner_session_service_pb2
from weft.kernel.channels.rpc import open_channel
from weft.kernel.errors.reasons import Reason
from weft.link.frames import MAX_FRAMES_AT_ONCE

FLOOD = 1000


def _opening(name: str) -> runner_session_service_pb2.OpenSessionRequest:
    request = runner_session_service_pb2.OpenSessionRequest()
    request.runner.name = name
    return request


async def test_concurrent_opens_of_two_names_over_one_link_are_rejected(mesh: Mesh) -> None:
    async with open_channel(mesh.target) as channel:
        link = RawLink(channel)
        mesh.registry.may_answer.clear()
        first = asyncio.create_task(link.ask(1, OPEN, _opening("one")))
        await eventually(lambda: mesh.registry.opened)
        await link.start(3, OPEN, _opening("two"))
        assert (await soon(first)).code == grpc.StatusCode.PERMISSION_DENIED.value[0]  # the answer to 3 comes first
        mesh.registry.may_answer.set()
        await eventually(lambda: "one" in mesh.relay._links)
        assert [request.runner.name for request in mesh.registry.opened] == ["one"]
        link.call.cancel()
        await eventually(lambda: not mesh.relay._links)
        assert await soon(mesh.registry.closed.get()) == "session-1"


async def test_flood_of_cancelled_opens_calls_the_registry_once(mesh: Mesh) -> None:
    async with open_channel(mesh.target) as channel:
        link = RawLink(channel)
        mesh.registry.may_answer.clear()
        for number in range(50):
            await link.start(2 * number + 1, OPEN, _opening("one"))
            await eventually(lambda: mesh.registry.opened)
            await link.send(pb.LinkFrame(call_id=2 * number + 1, cancel=pb.CallCancel()))
        await link.ask(101, HEARTBEAT, runner_session_service_pb2.HeartbeatRequest())
        assert len(mesh.registry.opened) == 1
        assert len(mesh.relay._calls._openings) == 1  # type: ignore[union-attr]
        mesh.registry.may_answer.set()


async def test_immediately_cancelled_calls_leave_nothing_behind(mesh: Mesh) -> None:
    async with open_channel(mesh.target) as channel:
        link = RawLink(channel)
        for number in range(FLOOD):
            call_id = 2 * number + 1
            await link.send(
                pb.LinkFrame(call_id=call_id, start=pb.CallStart(method=OPEN)),
                pb.LinkFrame(call_id=call_id, part=pb.MessagePart(data=b"x" * 1000)),
                pb.LinkFrame(call_id=call_id, cancel=pb.CallCancel()),
            )
        end = await link.ask(2 * FLOOD + 1, HEARTBEAT, runner_session_service_pb2.HeartbeatRequest())
        assert end.code == grpc.StatusCode.PERMISSION_DENIED.value[0]
        (standing,) = mesh.relay._standing.values()
        await eventually(lambda: not standing.link._answers)
        assert standing.link.mux.unread_bytes == 0
        assert not standing.link.mux._calls


async def test_too_many_frames_in_one_message_end_the_link(mesh: Mesh) -> None:
    async with open_channel(mesh.target) as channel:
        link = RawLink(channel)
        await link.send(*[pb.LinkFrame(call_id=1, credit=1)] * (MAX_FRAMES_AT_ONCE + 1))
        error = await end_of(link.call)
        assert error.reason is Reason.MALFORMED_REQUEST
        assert "in one message" in error.message


async def test_frames_for_unknown_calls_end_only_the_senders_link(mesh: Mesh) -> None:
    async with running_laptop(mesh) as laptop, open_channel(mesh.target) as channel:
        await laptop.open()
        call = mesh.stream()
        await soon(call.read())
        # 2 is the id of a call on the laptop's link; on this one it was never begun.
        for frame in (
            pb.LinkFrame(call_id=2, end=pb.CallEnd()),
            pb.LinkFrame(call_id=2, part=pb.MessagePart(data=b"forged")),
            pb.LinkFrame(call_id=2, credit=2**32 - 1),
        ):
            link = RawLink(channel)
            await link.send(frame)
            assert (await end_of(link.call)).reason is Reason.MALFORMED_REQUEST
        assert await soon(call.read()) is not grpc.aio.EOF


async def test_partial_request_blocks_no_other_and_ends_with_its_link(tmp_path: Path) -> None:
    async with running_mesh_side(tmp_path, open_timeout_seconds=0.2) as mesh, open_channel(mesh.target) as channel:
        link = RawLink(channel)
        await link.send(
            pb.LinkFrame(call_id=1, start=pb.CallStart(method=OPEN)),
            pb.LinkFrame(call_id=1, part=pb.MessagePart(data=b"half", more=True)),
        )
        async with running_laptop(mesh) as laptop:
            await laptop.open()
            assert (await end_of(link.call)).reason is Reason.DEADLINE_EXCEEDED
            assert await soon(mesh.stream().read()) is not grpc.aio.EOF
            assert len(mesh.relay._standing) == 1


async def test_malformed_method_name_cannot_end_a_link(mesh: Mesh) -> None:
    async with running_laptop(mesh) as laptop:
        await laptop.open()
        standing = mesh.relay._links[RUNNER]
        service = "/weft.api.runner.v1.RunnerService/"
        for method in ("Des-cribe", "", "a/b", "x" * 300):
            rpc: Any = mesh.channel.unary_unary(service + method)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await soon(rpc(b"", metadata=mesh.metadata))
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
        assert await soon(mesh.stream().read()) is not grpc.aio.EOF
        assert mesh.relay._links[RUNNER] is standing


async def test_call_must_name_its_runner_exactly_once(mesh: Mesh) -> None:
    async with running_laptop(mesh) as laptop:
        await laptop.open()
        for metadata in (
            (("weft-runner", RUNNER), ("weft-runner", "other")),
            (("weft-runner", "other"), ("weft-runner", RUNNER)),
            (("weft-runner", ""),),
            (),
        ):
            error = await refusal(mesh.requests.Generate(prompt(), metadata=metadata).read())
            assert (error.reason, error.metadata["field"]) == (Reason.INVALID_ARGUMENT, "metadata weft-runner")


async def test_invalid_tokens_are_rate_limited_without_blocking_valid_ones(mesh: Mesh) -> None:
    async with running_laptop(mesh) as laptop, open_channel(mesh.target) as channel:
        await laptop.open()
        reasons = [(await end_of(RawLink(channel, f"wjt_abc_{number}").call)).reason for number in range(200)]
        assert set(reasons) == {Reason.UNAUTHENTICATED, Reason.RATE_LIMIT_EXCEEDED}
        assert mesh.registry.token_checks < 50
        # The same peer, but its token was good before.
        again = RawLink(channel, TOKEN)
        assert (await again.ask(1, OPEN, _opening("other"))).code == 0
        mesh.registry.good_tokens.clear()
        assert (await end_of(RawLink(channel, TOKEN).call)).reason is Reason.UNAUTHENTICATED
        assert (await end_of(RawLink(channel, TOKEN).call)).reason is Reason.RATE_LIMIT_EXCEEDED


async def test_rate_limited_runner_keeps_dialing(mesh: Mesh) -> None:
    async with open_channel(mesh.target) as channel:
        for _ in range(100):
            await end_of(RawLink(channel, "wjt_abc_wrong").call)
    async with running_laptop(mesh, token="wjt_abc_other") as laptop:
        assert "too many join tokens" in (await laptop.until(LinkState.LOST)).detail


async def test_two_tokens_in_one_call_are_rejected(mesh: Mesh) -> None:
    async with open_channel(mesh.target) as channel:
        link = RawLink(channel, TOKEN, ("authorization", f"Bearer {TOKEN}"))
        assert (await end_of(link.call)).reason is Reason.UNAUTHENTICATED
        assert mesh.registry.token_checks == 0


async def test_laptop_receives_the_mesh_time(mesh: Mesh) -> None:
    async with running_laptop(mesh) as laptop:
        await laptop.open()
        assert abs(laptop.mesh_times[0] - datetime.now(UTC)) < timedelta(minutes=5)
