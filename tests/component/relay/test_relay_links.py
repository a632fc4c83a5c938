"""The life of links: joining, loss, replacement, and peers that do not keep the rules."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from raw_link import HEARTBEAT, OPEN, RawLink, end_of
from relay_harness import (
    MACHINE,
    RUNNER,
    TOKEN,
    Mesh,
    counting,
    eventually,
    frame,
    refusal,
    running_laptop,
    running_mesh_side,
    soon,
)

from router_svc.relay import RECHECK_SECONDS
from runner_svc.dial_out import DialOut, DialOutConfig, LinkState
from weft.api.common.v1 import link_pb2 as pb
from weft.api.registry.v1 import runner_pb2, runner_session_service_pb2
from weft.api.router.v1 import relay_service_pb2_grpc
from weft.kernel.channels.rpc import open_channel
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.link.link import MAX_LINK_MESSAGE_BYTES
from weft_testing.fake_clock import FakeClock


async def _endless(_request: Any, _context: Any) -> AsyncIterator[Any]:
    yield frame("begun")
    await asyncio.Event().wait()


async def test_mesh_sees_the_address_of_the_relay_instead_of_the_runner(mesh: Mesh) -> None:
    async with running_laptop(mesh) as laptop:
        await laptop.open()
        runner = mesh.registry.opened[0].runner
        assert runner.address == f"{mesh.address}#runner={RUNNER}"
        assert runner.dial_out
        await soon(laptop.until(LinkState.JOINED))


async def test_cut_link_ends_its_calls_immediately_and_closes_the_session(mesh: Mesh) -> None:
    async with running_laptop(mesh) as laptop:
        laptop.script.generate = _endless
        session = await laptop.open()
        calls = [mesh.stream() for _ in range(3)]
        for call in calls:
            await soon(call.read())
        laptop.dial_out._task.cancel()  # type: ignore[union-attr]
        for call in calls:
            assert (await end_of(call)).reason is Reason.WORKER_LOST
        assert await soon(mesh.registry.closed.get()) == session
        assert (await end_of(mesh.stream())).reason is Reason.RUNNER_UNREACHABLE
        for _ in calls:
            await soon(laptop.script.cancelled.get())


async def test_runner_with_a_lost_link_reconnects(mesh: Mesh) -> None:
    async with running_laptop(mesh) as laptop:
        session = await laptop.open()
        mesh.relay._links[RUNNER].link.stop(WeftError(Reason.SERVICE_UNAVAILABLE, "cut"))
        news = await laptop.until(LinkState.LOST)
        assert news.retry_seconds is not None
        assert await soon(mesh.registry.closed.get()) == session
        assert await laptop.open(session) == session
        laptop.script.generate = counting(1)
        assert await soon(mesh.stream().read()) is not grpc.aio.EOF


async def test_session_must_be_reopened_on_a_new_link(mesh: Mesh) -> None:
    async with running_laptop(mesh) as laptop:
        session = await laptop.open()
        await laptop.beat(session)
        mesh.relay._links[RUNNER].link.stop(WeftError(Reason.SERVICE_UNAVAILABLE, "cut"))
        await soon(laptop.fresh.wait())
        assert (await refusal(laptop.beat(session))).reason is Reason.SESSION_UNKNOWN
        await laptop.open(session)
        await laptop.beat(session)


async def test_newer_link_of_a_runner_replaces_the_older_one(mesh: Mesh) -> None:
    async with running_laptop(mesh) as older, running_laptop(mesh, folder="newer") as newer:
        older.script.generate = _endless
        session = await older.open()
        call = mesh.stream()
        await soon(call.read())
        await newer.open(session)
        assert (await end_of(call)).reason is Reason.WORKER_LOST
        newer.script.generate = counting(1)
        assert await soon(mesh.stream().read()) is not grpc.aio.EOF
        # The older one's end says nothing about the runner, which is here.
        assert mesh.registry.closed.empty()


async def test_late_close_does_not_end_the_next_session(mesh: Mesh) -> None:
    async with running_laptop(mesh) as laptop:
        session = await laptop.open()
        mesh.registry.may_answer.clear()
        mesh.relay._links[RUNNER].link.stop(WeftError(Reason.SERVICE_UNAVAILABLE, "cut"))
        opening = asyncio.create_task(laptop.open(session))
        await soon(laptop.until(LinkState.LOST))
        # The fresh link stands, and the good-bye of the old one still waits for the registry.
        await eventually(lambda: len(mesh.relay._standing) == 1 and mesh.relay._closing)
        mesh.registry.may_answer.set()
        assert await soon(opening) == session
        assert mesh.registry.told == ["open", "close", "open"]


async def test_session_that_outlives_its_link_is_closed(mesh: Mesh) -> None:
    async with running_laptop(mesh) as laptop:
        mesh.registry.may_answer.clear()
        opening = asyncio.create_task(laptop.open())
        await eventually(lambda: mesh.registry.opened)
        laptop.dial_out._task.cancel()  # type: ignore[union-attr]
        await eventually(lambda: not mesh.relay._standing)
        mesh.registry.may_answer.set()
        assert await soon(mesh.registry.closed.get()) == "session-1"
        with pytest.raises(grpc.aio.AioRpcError):
            await soon(opening)


async def test_call_before_its_link_is_known_waits_for_it(mesh: Mesh) -> None:
    async with running_laptop(mesh) as laptop:
        mesh.registry.may_answer.clear()
        opening = asyncio.create_task(laptop.open())
        await eventually(lambda: mesh.registry.opened)
        call = mesh.stream()
        reading = asyncio.create_task(call.read())
        mesh.registry.may_answer.set()
        await soon(opening)
        assert await soon(reading) is not grpc.aio.EOF


async def test_repeated_open_during_an_open_is_accepted(mesh: Mesh) -> None:
    """A runner asked again when its link came up, and was told that its session is being opened already."""
    runner = runner_pb2.Runner(name=RUNNER, incarnation="life-1", host="here")
    request = runner_session_service_pb2.OpenSessionRequest(runner=runner, request_id="open-1")
    async with running_laptop(mesh) as laptop:
        await soon(laptop.fresh.wait())
        mesh.registry.may_answer.clear()
        given_up = asyncio.ensure_future(laptop.sessions.OpenSession(request))
        await eventually(lambda: mesh.registry.opened)
        given_up.cancel()
        again = asyncio.ensure_future(laptop.sessions.OpenSession(request))
        other = runner_session_service_pb2.OpenSessionRequest(runner=runner, request_id="open-2")
        with pytest.raises(grpc.aio.AioRpcError, match="being opened already"):
            await soon(laptop.sessions.OpenSession(other))
        mesh.registry.may_answer.set()
        assert (await soon(again)).session_id == "session-1"
        assert len(mesh.registry.opened) == 1


async def test_runner_reachable_elsewhere_by_now_is_not_closed(mesh: Mesh) -> None:
    async with running_laptop(mesh) as laptop:
        await laptop.open()
        mesh.registry.runners[RUNNER].address = f"dns:///other-router:7071#runner={RUNNER}"
    await mesh.relay.stop(0.0)
    assert mesh.registry.closed.empty()


async def test_session_closed_by_the_runner_is_not_closed_again(mesh: Mesh) -> None:
    async with running_laptop(mesh) as laptop:
        session = await laptop.open()
        request = runner_session_service_pb2.CloseSessionRequest(session_id=session, incarnation="life-1")
        await laptop.sessions.CloseSession(request)
        assert await soon(mesh.registry.closed.get()) == session
    await mesh.relay.stop(0.0)
    assert mesh.registry.closed.empty()


@pytest.mark.parametrize("token", ["wjt_abc_wrong", "x"])
async def test_invalid_token_is_rejected_permanently(mesh: Mesh, token: str) -> None:
    async with running_laptop(mesh, token=token) as laptop:
        error = await soon(laptop.dial_out.given_up())
        assert error.reason is Reason.UNAUTHENTICATED
        assert "weft runner token create" in error.message
        assert token not in error.message
        assert not mesh.registry.opened


async def test_revoked_token_keeps_its_link_but_opens_no_other(mesh: Mesh) -> None:
    async with running_laptop(mesh) as laptop:
        await laptop.open()
        mesh.registry.good_tokens.clear()
        assert await soon(mesh.stream().read()) is not grpc.aio.EOF
        mesh.relay._links[RUNNER].link.stop(WeftError(Reason.SERVICE_UNAVAILABLE, "cut"))
        assert (await soon(laptop.dial_out.given_up())).reason is Reason.UNAUTHENTICATED


async def test_credential_of_the_machine_is_checked_with_the_token_and_its_revocation_ends_the_link(mesh: Mesh) -> None:
    async with running_laptop(mesh) as laptop:
        await laptop.open()
        assert mesh.registry.machines == {MACHINE}
        mesh.registry.refuse_open = WeftError(Reason.UNAUTHENTICATED, "the machine was revoked")
        again = runner_session_service_pb2.OpenSessionRequest(
            request_id="again", session_id=laptop.session_id, runner=mesh.registry.opened[0].runner
        )
        with pytest.raises(grpc.aio.AioRpcError):
            await laptop.sessions.OpenSession(again)
        error = await soon(laptop.dial_out.given_up())
        assert (error.reason, error.message) == (Reason.UNAUTHENTICATED, "the machine was revoked")


async def test_revoked_machine_that_sends_no_heartbeats_loses_its_link(tmp_path: Path) -> None:
    clock = FakeClock()
    async with running_mesh_side(tmp_path, clock=clock) as mesh, running_laptop(mesh) as laptop:
        await laptop.open()
        await clock.wait_for_sleepers(1)
        mesh.registry.good_tokens.clear()
        await clock.advance(RECHECK_SECONDS)
        await clock.wait_for_sleepers(1)
        assert RUNNER in mesh.relay._links, "the mesh has its runner"
        mesh.registry.runners.clear()
        await clock.advance(RECHECK_SECONDS)
        assert (await soon(laptop.dial_out.given_up())).reason is Reason.UNAUTHENTICATED


async def test_runner_keeps_dialing_during_a_registry_outage(mesh: Mesh) -> None:
    mesh.registry.is_away = True
    async with running_laptop(mesh) as laptop:
        assert "registry is away" in (await laptop.until(LinkState.LOST)).detail
        mesh.registry.is_away = False
        await laptop.open()


async def test_link_requires_a_token(mesh: Mesh) -> None:
    async with open_channel(mesh.target) as channel:
        call: Any = relay_service_pb2_grpc.RelayServiceStub(channel).Attach(iter(()))
        assert (await end_of(call)).reason is Reason.UNAUTHENTICATED


async def test_router_without_a_relay_is_not_dialed_again(mesh: Mesh) -> None:
    async with running_laptop(mesh, target=mesh.address) as laptop:
        error = await soon(laptop.dial_out.given_up())
        assert error.reason is Reason.UNSUPPORTED_OPERATION
        assert "no relay" in error.message


async def test_registry_rejection_is_reported_to_the_runner(mesh: Mesh) -> None:
    mesh.registry.refuse_open = WeftError(Reason.ALREADY_EXISTS, "laptop belongs to another runner")
    async with running_laptop(mesh) as laptop:
        with pytest.raises(grpc.aio.AioRpcError):
            await laptop.open()
        assert (await laptop.until(LinkState.REFUSED)).detail == "laptop belongs to another runner"
        assert RUNNER not in mesh.relay._links


async def test_link_without_a_session_times_out(tmp_path: Path) -> None:
    async with running_mesh_side(tmp_path, open_timeout_seconds=0.05) as mesh, open_channel(mesh.target) as channel:
        error = await end_of(RawLink(channel).call)
        assert error.reason is Reason.DEADLINE_EXCEEDED


async def test_link_limit_is_enforced(tmp_path: Path) -> None:
    async with running_mesh_side(tmp_path, max_links=1) as mesh, running_laptop(mesh) as laptop:
        await laptop.open()
        async with open_channel(mesh.target) as channel:
            assert (await end_of(RawLink(channel).call)).reason is Reason.TOO_MANY_RESOURCES


async def test_link_cannot_use_a_session_of_another_runner(mesh: Mesh) -> None:
    async with running_laptop(mesh) as laptop, open_channel(mesh.target) as channel:
        session = await laptop.open()
        other = RawLink(channel)
        heartbeat = runner_session_service_pb2.HeartbeatRequest(session_id=session, incarnation="life-1", sequence=9)
        end = await other.ask(1, HEARTBEAT, heartbeat)
        assert end.code == grpc.StatusCode.PERMISSION_DENIED.value[0]
        opening = runner_session_service_pb2.OpenSessionRequest()
        opening.runner.name = "other"
        assert (await other.ask(3, OPEN, opening)).code == 0
        assert (await other.ask(5, HEARTBEAT, heartbeat)).code == grpc.StatusCode.PERMISSION_DENIED.value[0]
        close = runner_session_service_pb2.CloseSessionRequest(session_id=session, incarnation="life-1")
        end = await other.ask(7, HEARTBEAT.replace("Heartbeat", "CloseSession"), close)
        assert end.code == grpc.StatusCode.PERMISSION_DENIED.value[0]
        opening.runner.name = RUNNER
        assert (await other.ask(9, OPEN, opening)).code == grpc.StatusCode.PERMISSION_DENIED.value[0]
        assert not mesh.registry.heartbeats
        assert mesh.registry.closed.empty()


async def test_link_accepts_only_session_calls(mesh: Mesh) -> None:
    for method in (
        "/weft.api.registry.v1.JoinTokenService/CreateJoinToken",
        "/weft.api.registry.v1.RegistryService/ListResources",
        "/weft.api.registry.v1.RunnerSessionService/OpenSessionX",
    ):
        async with open_channel(mesh.target) as channel:
            end = await RawLink(channel).ask(1, method, runner_session_service_pb2.OpenSessionRequest())
            assert end.code == grpc.StatusCode.UNIMPLEMENTED.value[0]


async def test_hostile_name_is_rejected_without_calling_the_registry(mesh: Mesh) -> None:
    for name in (
        "",
        "../up",
        "a" * 10_240,
        "läptop",
        "a\nb",
        "x#runner=y",
    ):
        opening = runner_session_service_pb2.OpenSessionRequest()
        opening.runner.name = name
        async with open_channel(mesh.target) as channel:
            end = await RawLink(channel).ask(1, OPEN, opening)
            assert end.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
            assert end.message.startswith("runner.name")
            assert not mesh.registry.opened


async def test_oversized_frame_ends_the_link(mesh: Mesh) -> None:
    async with running_laptop(mesh) as laptop, open_channel(mesh.target) as channel:
        await laptop.open()
        link = RawLink(channel)
        await link.send(pb.LinkFrame(call_id=1, part=pb.MessagePart(data=b"x" * MAX_LINK_MESSAGE_BYTES)))
        with pytest.raises(grpc.aio.AioRpcError):
            await soon(link.call.read())
        assert await soon(mesh.stream().read()) is not grpc.aio.EOF


async def test_unparseable_request_is_rejected(mesh: Mesh) -> None:
    class Garbage:
        def SerializeToString(self) -> bytes:  # noqa: N802
            return b"\xff\xff\xff"

    async with open_channel(mesh.target) as channel:
        end = await RawLink(channel).ask(1, OPEN, Garbage())
        assert end.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]


async def test_bug_while_dialing_fails_instead_of_waiting_indefinitely() -> None:
    async def broken() -> grpc.aio.Channel:
        raise ValueError("a bug")

    config = DialOutConfig(target="mesh:1", open_channel=broken, token=TOKEN, local_address="unix:/nowhere")
    dial_out = DialOut(config, lambda _: None)
    await dial_out.start()
    assert (await soon(dial_out.given_up())).reason is Reason.INTERNAL
    with pytest.raises(ValueError, match="a bug"):
        await dial_out.stop(0.0)
