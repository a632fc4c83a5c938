"""Slots of engines as a picker takes them: over one stream to a runner of its machine, whatever happens to either."""

import asyncio
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from runner_harness import TICKET_KEY, RunningRunner, running_runner
from slot_processes import READY, hold, slot_grant
from test_engine_lane import engine_model
from ticketed_stage import until

from gateway.picker.engine_slot import EngineSlot, EngineSlots
from runner_svc.policy.lifecycle import Phase
from weft.api.runner.v1 import ticket_pb2
from weft.dispatch.engine_slots import HOLD_SLOT
from weft.dispatch.placement import Grant
from weft.dispatch.tickets import sign
from weft.kernel import rpc
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason
from weft.kernel.rpc import ChannelPool, add_methods, new_server
from weft.link.carried_calls import CarriedCalls

_PROCESSES = Path(__file__).with_name("slot_processes.py")
_SECONDS = 30.0


@contextmanager
def _process(*arguments: str) -> "Iterator[subprocess.Popen[str]]":
    """A process of `slot_processes.py` that is ready."""
    command = [sys.executable, str(_PROCESSES), *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdout is not None
            assert child.stdout.readline().strip() == READY
            yield child
        finally:
            child.kill()


class Picker:
    """Takes the slots of one picker."""

    def __init__(self, address: str) -> None:
        self.channels = ChannelPool()
        self.slots = EngineSlots(self.channels)
        self.address = address
        self.lost: list[EngineSlot] = []

    @property
    def is_streamed(self) -> bool:
        """Whether it has a stream to its runner."""
        return self.address in self.slots._carriers._streams

    async def hold(self, grant: Grant | None = None) -> EngineSlot:
        """A slot that is watched."""
        slot = await asyncio.wait_for(self.slots.hold(grant or slot_grant(self.address)), _SECONDS)
        slot.watch(lambda: self.lost.append(slot))
        return slot


@asynccontextmanager
async def _picker(address: str, *, is_streamed: bool = True) -> AsyncIterator[Picker]:
    picker = Picker(address)
    try:
        if is_streamed:
            picker.slots._carriers._open(address)
            await until(lambda: picker.is_streamed)
        yield picker
    finally:
        await picker.channels.close()


@asynccontextmanager
async def _serving(address: str, serve: Any = hold, *, carries: bool = True) -> AsyncIterator[CarriedCalls]:
    server, carried = new_server(), CarriedCalls()
    add_methods(server, {HOLD_SLOT: serve})
    if carries:
        carried.serve(HOLD_SLOT, serve)
    carried.add_to_server(server)
    server.add_insecure_port(address)
    await server.start()
    try:
        yield carried
    finally:
        await server.stop(None)


def _grant(runner: RunningRunner, address: str, number: int) -> Grant:
    claims = ticket_pb2.TicketClaims(
        ticket_id=f"slot-{number}",
        request_id=f"slot-{number}",
        tenant="ann",
        model="m",
        runner="r1",
        runner_incarnation=runner.registry.opened[-1].runner.incarnation,
        attempt=1,
    )
    claims.expire_time.GetCurrentTime()
    claims.expire_time.seconds += 30
    raw = claims.SerializeToString()
    return slot_grant(address, raw, sign(raw, TICKET_KEY))


async def test_the_slots_of_a_picker_share_one_stream_and_each_is_given_back_by_itself(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/runner.sock"
    async with running_runner(tmp_path, [engine_model(slots=4)]) as runner, _picker(address) as picker:
        await runner.until(Phase.READY)
        slots = [await picker.hold(_grant(runner, address, number)) for number in range(4)]
        assert runner.service.holders_of("m") == 4
        assert len(runner.service.carried._links) == 1
        with pytest.raises(WeftError) as refused:
            await picker.hold(_grant(runner, address, 4))
        assert refused.value.reason is Reason.NO_SLOT_AVAILABLE
        slots[0].release()
        slots[0].release()
        await until(lambda: runner.service.holders_of("m") == 3)
        for slot in slots:
            slot.release()
        await until(lambda: runner.service.holders_of("m") == 0)
        assert not picker.lost
        assert not picker.slots._carriers._streams[address].link._calls, "what has ended is forgotten"


async def test_a_ticket_is_good_for_one_slot(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/runner.sock"
    async with running_runner(tmp_path, [engine_model(slots=4)]) as runner, _picker(address) as picker:
        await runner.until(Phase.READY)
        grant = _grant(runner, address, 1)
        await picker.hold(grant)
        with pytest.raises(WeftError) as refused:
            await picker.hold(grant)
        assert refused.value.reason is Reason.TICKET_INVALID


async def test_a_killed_picker_leaves_no_slot_taken(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/runner.sock"
    async with running_runner(tmp_path, [engine_model(slots=4)]) as runner:
        await runner.until(Phase.READY)
        grants = [_grant(runner, address, number) for number in range(3)]
        tickets = [f"{each.claims.hex()}:{each.mac.hex()}" for each in grants]
        process = _process("picker", address, *tickets)
        child = await asyncio.to_thread(process.__enter__)
        try:
            assert runner.service.holders_of("m") == 3
            child.kill()
            await until(lambda: runner.service.holders_of("m") == 0)
        finally:
            process.__exit__(None, None, None)


async def test_a_stream_that_is_cut_ends_its_slots_at_both_ends_and_the_next_slot_opens_another(
    tmp_path: Path,
) -> None:
    address = f"unix:{tmp_path}/runner.sock"
    async with running_runner(tmp_path, [engine_model(slots=4)]) as runner, _picker(address) as picker:
        await runner.until(Phase.READY)
        held = [await picker.hold(_grant(runner, address, number)) for number in range(3)]
        runner.service.carried.stop()
        await until(lambda: len(picker.lost) == 3)
        assert picker.lost == held
        await until(lambda: runner.service.holders_of("m") == 0)
        await picker.hold(_grant(runner, address, 3))
        assert runner.service.holders_of("m") == 1
        await until(lambda: picker.is_streamed)
        await picker.channels.close()
        await until(lambda: runner.service.holders_of("m") == 0)


async def test_a_killed_runner_is_the_loss_of_its_slots_and_of_one_that_is_asked_for(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/runner.sock"
    with _process("runner", address) as child:
        async with _picker(address) as picker:
            held = [await picker.hold(), await picker.hold()]
            child.send_signal(signal.SIGSTOP)
            asked = asyncio.create_task(picker.hold())
            child.kill()
            await until(lambda: len(picker.lost) == 2)
            assert picker.lost == held
            with pytest.raises(WeftError) as lost:
                await asked
            assert lost.value.reason is Reason.WORKER_LOST


async def test_a_frozen_runner_is_the_loss_of_its_slots_and_of_one_that_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick = {"grpc.keepalive_time_ms": 3_000, "grpc.keepalive_timeout_ms": 1_000, "grpc.http2.ping_timeout_ms": 1_000}
    options = tuple((name, quick.get(name, value)) for name, value in rpc.POOLED_OPTIONS)
    monkeypatch.setattr(rpc, "POOLED_OPTIONS", options)
    address = f"unix:{tmp_path}/runner.sock"
    with _process("runner", address) as child:
        async with _picker(address) as picker:
            held = await picker.hold()
            child.send_signal(signal.SIGSTOP)
            asked = asyncio.create_task(picker.hold())
            await until(lambda: bool(picker.lost))
            assert picker.lost == [held]
            with pytest.raises(WeftError) as lost:
                await asked
            assert lost.value.reason is Reason.WORKER_LOST


async def test_the_slot_of_a_request_whose_caller_left_while_it_was_asked_for_is_given_back(tmp_path: Path) -> None:
    begun, ended = asyncio.Event(), asyncio.Event()

    async def slow(_: Any, context: Any) -> None:  # noqa: ARG001 - answers nothing
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    address = f"unix:{tmp_path}/runner.sock"
    async with _serving(address, slow), _picker(address) as picker:
        asked = asyncio.create_task(picker.hold())
        await asyncio.wait_for(begun.wait(), _SECONDS)
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        await asyncio.wait_for(ended.wait(), _SECONDS)


async def test_a_slot_whose_engine_dies_at_once_is_no_slot(tmp_path: Path) -> None:
    """The answer and the end arrived together, and who watched the slot then was not heard."""

    async def die(_: Any, context: Any) -> None:
        context._call.put(HOLD_SLOT.response(url="http://127.0.0.1:1").SerializeToString())
        raise WeftError(Reason.SERVER_DIED, "the engine has died")

    address = f"unix:{tmp_path}/runner.sock"
    async with _serving(address, die), _picker(address) as picker:
        with pytest.raises(WeftError) as dead:
            await picker.hold()
        assert dead.value.reason is Reason.SERVER_DIED
        assert not picker.lost


async def test_a_runner_whose_streams_carry_no_slots_is_called_for_each(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/runner.sock"
    async with _serving(address, carries=False) as carried, _picker(address) as picker:
        slot = await picker.hold()
        (link,) = carried._links
        assert not link._calls
        slot.release()


async def test_a_runner_on_another_machine_is_called_for_each_slot() -> None:
    server = new_server()
    add_methods(server, {HOLD_SLOT: hold})
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    async with _picker(address, is_streamed=False) as picker:
        slots = [await picker.hold() for _ in range(3)]
        assert not picker.is_streamed
        await server.stop(None)
        await until(lambda: len(picker.lost) == 3)
        assert set(picker.lost) == set(slots)
