"""A router that stops: what becomes of the calls that its relay carries, and of its runners."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from relay_harness import (
    RUNNER,
    Laptop,
    Mesh,
    eventually,
    frame,
    refusal,
    running_laptop,
    running_mesh_side,
    soon,
    text_of,
)

from router_svc.relay import Relay
from router_svc.router_config import RelayConfig
from runner_svc.dial_out import LinkState
from weft.api.runner.v1 import embedding_service_pb2, runner_service_pb2
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.time.clock import SystemClock
from weft_app.compose.home import WeftHome
from weft_app.compose.relay import RelayListener
from weft_app.config.config import RelaySettings
from weft_testing.fake_clock import FakeClock

GRACE_SECONDS = 30.0
OTHER = "tower"


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
async def mesh(tmp_path: Path, clock: FakeClock) -> AsyncIterator[Mesh]:
    async with running_mesh_side(tmp_path, clock=clock) as mesh:
        yield mesh


@pytest.fixture
async def laptop(mesh: Mesh) -> AsyncIterator[Laptop]:
    async with running_laptop(mesh) as laptop:
        session = await laptop.open()
        await laptop.beat(session)
        yield laptop


class _Answer:
    """A stream of the laptop whose last part is held back until `may_end`."""

    def __init__(self, mesh: Mesh, laptop: Laptop) -> None:
        self.may_end = asyncio.Event()
        laptop.script.generate = self._generate
        self._call = mesh.stream()

    async def _generate(self, _request: Any, _context: Any) -> AsyncIterator[Any]:
        yield frame("first ")
        await self.may_end.wait()
        yield frame("last")

    async def begin(self) -> None:
        assert text_of(await soon(self._call.read())) == "first "

    async def rest(self) -> str:
        texts = []
        while (response := await soon(self._call.read())) is not grpc.aio.EOF:
            texts.append(text_of(response))
        return "".join(texts)

    async def error(self) -> WeftError:
        return await refusal(self._call.read())


async def _begun(mesh: Mesh, laptop: Laptop) -> _Answer:
    answer = _Answer(mesh, laptop)
    await answer.begin()
    return answer


def _stopping(mesh: Mesh) -> "asyncio.Task[None]":
    return asyncio.create_task(mesh.relay.stop(GRACE_SECONDS))


async def test_relayed_stream_finishes_when_the_router_stops(mesh: Mesh, laptop: Laptop) -> None:
    answer = await _begun(mesh, laptop)
    stopping = _stopping(mesh)
    await eventually(lambda: len(mesh.registry.heartbeats) > 1)
    answer.may_end.set()
    assert await answer.rest() == "last"
    await soon(stopping)
    assert "shutting down" in (await laptop.until(LinkState.LOST)).detail


async def test_stream_longer_than_the_drain_ends_with_its_link(mesh: Mesh, laptop: Laptop, clock: FakeClock) -> None:
    answer = await _begun(mesh, laptop)
    stopping = _stopping(mesh)
    await eventually(lambda: len(mesh.registry.heartbeats) > 1)
    await clock.wait_for_sleepers(2)
    await clock.advance(GRACE_SECONDS)
    assert (await answer.error()).reason is Reason.WORKER_LOST
    await soon(stopping)


async def test_second_stop_without_grace_ends_the_links_immediately(mesh: Mesh, laptop: Laptop) -> None:
    answer = await _begun(mesh, laptop)
    stopping = _stopping(mesh)
    await eventually(lambda: len(mesh.registry.heartbeats) > 1)
    await soon(mesh.relay.stop(0.0))
    assert (await answer.error()).reason is Reason.WORKER_LOST
    await soon(stopping)


async def test_draining_relay_rejects_new_requests_and_forwards_other_calls(mesh: Mesh, laptop: Laptop) -> None:
    answer = await _begun(mesh, laptop)
    stopping = _stopping(mesh)
    await eventually(lambda: len(mesh.registry.heartbeats) > 1)
    embedding = mesh.requests.Embed(embedding_service_pb2.EmbedRequest(), metadata=mesh.metadata)
    assert (await refusal(embedding)).reason is Reason.SHUTTING_DOWN
    described = await soon(mesh.runner.Describe(runner_service_pb2.DescribeRequest(), metadata=mesh.metadata))
    assert described.runner.name == RUNNER
    answer.may_end.set()
    assert await answer.rest() == "last"
    await soon(stopping)


async def test_draining_relay_rejects_new_links(mesh: Mesh, laptop: Laptop) -> None:
    answer = await _begun(mesh, laptop)
    stopping = _stopping(mesh)
    async with running_laptop(mesh, name=OTHER, folder=OTHER) as other:
        assert "shutting down" in (await other.until(LinkState.LOST)).detail
    answer.may_end.set()
    assert await answer.rest() == "last"
    await soon(stopping)


async def test_idle_runner_leaves_immediately_while_another_still_works(mesh: Mesh, laptop: Laptop) -> None:
    async with running_laptop(mesh, name=OTHER, folder=OTHER) as other:
        session = await other.open()
        answer = await _begun(mesh, laptop)
        stopping = _stopping(mesh)
        await other.until(LinkState.LOST)
        assert await soon(mesh.registry.closed.get()) == session
        answer.may_end.set()
        assert await answer.rest() == "last"
        await soon(stopping)


async def test_mesh_learns_immediately_that_runners_behind_a_draining_relay_accept_no_work(
    mesh: Mesh, laptop: Laptop
) -> None:
    answer = await _begun(mesh, laptop)
    stopping = _stopping(mesh)
    await eventually(lambda: len(mesh.registry.heartbeats) > 1)
    await laptop.beat(laptop.session_id)
    reported = [(beat.sequence, beat.capability.draining) for beat in mesh.registry.heartbeats]
    assert reported == [(1, False), (2, True), (1, True)]
    answer.may_end.set()
    assert await answer.rest() == "last"
    await soon(stopping)


async def test_draining_relay_stops_listening(tmp_path: Path) -> None:
    home = WeftHome(tmp_path / "home")
    home.create()
    relay = Relay(RelayConfig(address="unix:/router.sock"), SystemClock())
    listener = RelayListener(RelaySettings(listen="127.0.0.1:0"), home, relay)
    await listener.start()
    host, _, port = listener.endpoint.url.removeprefix("http://").rpartition(":")
    await listener.stop(GRACE_SECONDS)
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection(host, int(port))
