"""Calls of a dispatcher to the runner of its own process: they mean what calls over a stream mean."""

import asyncio

from kit.called_runner import METADATA, SOON_SECONDS, CalledRunner, error_of_call, read_text

from weft.api.runner.v1 import generation_service_pb2 as pb
from weft.dispatch.operations import CHAT, IMAGE
from weft.kernel.reasons import Reason
from weft.kernel.rpc import ChannelPool
from weft.link.carried_calls import CarriedCalls
from weft.link.carriers import Carriers
from weft.link.own_calls import MAX_UNREAD_MESSAGES, OwnCall

ADDRESS = "127.0.0.1:7000"
TEXTS = [f"{number} " for number in range(100)]
ALL = "".join(TEXTS)


def _own(runner: CalledRunner) -> tuple[Carriers, CarriedCalls]:
    served = CarriedCalls()
    served.serve(CHAT.runner_rpc, runner.generate)
    carriers = Carriers(ChannelPool())
    carriers.add_own(ADDRESS, served)
    return carriers, served


def _begin(carriers: Carriers, agent: str = "", seconds: float | None = None) -> OwnCall:
    call = carriers.call(ADDRESS, CHAT.runner_rpc, pb.GenerateRequest(agent=agent), METADATA, seconds)
    assert isinstance(call, OwnCall)
    return call


async def test_a_call_has_its_messages_in_order_its_metadata_and_its_deadline() -> None:
    runner = CalledRunner(TEXTS)
    carriers, _ = _own(runner)
    assert await read_text(_begin(carriers, seconds=30.0)) == ALL
    assert runner.metadata == METADATA
    assert runner.seconds_left is not None
    assert 0 < runner.seconds_left <= 30


async def test_the_first_call_needs_no_stream_and_a_method_that_is_not_carried_is_an_rpc() -> None:
    carriers, _ = _own(CalledRunner(TEXTS))
    assert await read_text(_begin(carriers)) == ALL
    assert carriers.call(ADDRESS, IMAGE.runner_rpc, IMAGE.runner_rpc.request(), METADATA, None) is None


async def test_a_slow_reader_makes_the_servicer_wait() -> None:
    runner = CalledRunner(TEXTS)
    carriers, _ = _own(runner)
    call = _begin(carriers)
    for _ in range(300):
        await asyncio.sleep(0)
    assert runner.written == MAX_UNREAD_MESSAGES - 1, "it waits inside of its write"
    assert await read_text(call) == ALL


async def test_the_error_of_a_call_has_its_reason_and_its_details() -> None:
    carriers, _ = _own(CalledRunner(TEXTS))
    error = await error_of_call(_begin(carriers, "fail"))
    assert (error.reason, error.message) == (Reason.NO_SLOT_AVAILABLE, "all 2 slots are taken")
    assert error.retry_after_seconds == 2.5
    assert (await error_of_call(_begin(carriers, "fault"))).reason is Reason.INTERNAL


async def test_the_cancellation_of_a_call_reaches_the_runner_and_no_other_call() -> None:
    runner = CalledRunner(TEXTS)
    carriers, served = _own(runner)
    call, beside = _begin(carriers, "hang"), _begin(carriers)
    await asyncio.wait_for(runner.begun.wait(), SOON_SECONDS)
    call.cancel()
    assert call.done()
    await asyncio.wait_for(runner.cancelled.wait(), SOON_SECONDS)
    assert (await error_of_call(call)).reason is Reason.CANCELLED
    assert await read_text(beside) == ALL
    await asyncio.sleep(0)
    assert not served._own


async def test_a_call_ends_at_its_deadline_at_both_ends() -> None:
    runner = CalledRunner(TEXTS)
    carriers, _ = _own(runner)
    assert (await error_of_call(_begin(carriers, "hang", seconds=0.05))).reason is Reason.DEADLINE_EXCEEDED
    await asyncio.wait_for(runner.cancelled.wait(), SOON_SECONDS)


async def test_a_runner_that_stops_ends_its_calls_and_tells_who_waits_for_their_end() -> None:
    runner = CalledRunner(TEXTS)
    carriers, served = _own(runner)
    call, ended = _begin(carriers, "hang"), asyncio.Event()
    call.add_done_callback(lambda _: ended.set())
    await asyncio.wait_for(runner.begun.wait(), SOON_SECONDS)
    served.stop()
    await asyncio.wait_for(ended.wait(), SOON_SECONDS)
    assert (await error_of_call(call)).reason is Reason.SHUTTING_DOWN
    await asyncio.wait_for(runner.cancelled.wait(), SOON_SECONDS)
