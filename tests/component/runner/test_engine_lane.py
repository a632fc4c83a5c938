"""Slots that a runner holds for requests which a proxy sends to the engine itself."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import aiohttp
import grpc
import pytest
from runner_harness import TICKET_KEY, RunningRunner, ending, events_of, refusal, running_runner
from ticketed_stage import counting_model, until

from runner_svc.instance.settings import ServedModel
from runner_svc.policy.lifecycle import Phase
from weft.api.runner.v1 import engine_lane_service_pb2 as pb
from weft.api.runner.v1 import engine_lane_service_pb2_grpc, runner_service_pb2, ticket_pb2
from weft.dispatch.engine_slots import HOLD_SLOT
from weft.dispatch.tickets import sign
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason
from weft.kernel.rpc import ChannelPool, error_from_call
from weft.link.carriers import Carriers

if TYPE_CHECKING:
    from weft.api.runner.v1.engine_lane_service_pb2_grpc import EngineLaneServiceAsyncStub


@pytest.fixture(params=["rpcs", "one stream"])
def is_carried(request: pytest.FixtureRequest) -> bool:
    """Whether a router on the runner's machine takes the slots over one stream, or one elsewhere by an rpc each."""
    return bool(request.param == "one stream")


class Holder:
    """Takes slots as a router does."""

    def __init__(
        self, runner: RunningRunner, stub: "EngineLaneServiceAsyncStub", address: str, carriers: Carriers | None
    ) -> None:
        self.runner = runner
        self._stub = stub
        self._address = address
        self._carriers = carriers
        self._count = 0

    async def call(self, model: str = "m", key: bytes = TICKET_KEY) -> Any:
        """A call that holds a slot of a model."""
        self._count += 1
        claims = ticket_pb2.TicketClaims(
            ticket_id=f"hold-{self._count}",
            request_id=f"held-{self._count}",
            tenant="ann",
            model=model,
            runner="r1",
            runner_incarnation=self.runner.registry.opened[-1].runner.incarnation,
            attempt=1,
        )
        claims.expire_time.GetCurrentTime()
        claims.expire_time.seconds += 30
        raw = claims.SerializeToString()
        request = pb.HoldSlotRequest(ticket=ticket_pb2.Ticket(claims=raw, mac=sign(raw, key)))
        if self._carriers is None:
            return self._stub.HoldSlot(request)
        # The stream is opened in the background.
        while (  # noqa: ASYNC110
            carried := self._carriers.call(self._address, HOLD_SLOT, request, (), None)
        ) is None:
            await asyncio.sleep(0.005)
        return carried

    async def take(self, model: str = "m") -> tuple[Any, pb.HoldSlotResponse]:
        """A slot that is held, and how the engine is called."""
        call = await self.call(model)
        answer = await call.read()
        assert isinstance(answer, pb.HoldSlotResponse)
        return call, answer

    def used(self, model: str = "m") -> int:
        return self.runner.service.holders_of(model)


def engine_model(**switches: Any) -> ServedModel:
    return replace(counting_model(**switches), engine_lane=True)


@asynccontextmanager
async def holder(folder: Path, is_carried: bool, *models: ServedModel, **settings: Any) -> AsyncIterator[Holder]:
    async with running_runner(folder, models or [engine_model()], **settings) as runner:
        await runner.until(Phase.READY)
        address, channels = f"unix:{folder}/runner.sock", ChannelPool()
        try:
            stub = engine_lane_service_pb2_grpc.EngineLaneServiceStub(await channels.get(address))
            carriers = Carriers(channels) if is_carried else None
            yield Holder(runner, cast("EngineLaneServiceAsyncStub", stub), address, carriers)
        finally:
            await channels.close()


async def ended(call: Any) -> WeftError:
    """The error with which the runner ends a call."""
    try:
        await call.read()
    except grpc.aio.AioRpcError as error:
        return error_from_call(error, Reason.WORKER_LOST)
    except WeftError as error:
        return error
    raise AssertionError("the call goes on")


async def test_who_holds_a_slot_can_call_the_engine_with_its_key_and_nobody_else_can(
    tmp_path: Path, is_carried: bool
) -> None:
    async with holder(tmp_path, is_carried) as lane, aiohttp.ClientSession() as http:
        call, engine = await lane.take()
        body = {"messages": [{"role": "user", "content": "Count."}], "max_tokens": 2}
        key = {"Authorization": f"Bearer {engine.api_key}"}
        async with http.post(f"{engine.url}/v1/chat/completions", json=body, headers=key) as response:
            assert (await response.json())["choices"][0]["message"]["content"] == "tok0 tok1"
        async with http.post(f"{engine.url}/v1/chat/completions", json=body) as response:
            assert response.status == 401
        call.cancel()
        await until(lambda: lane.used() == 0)


async def test_the_key_of_an_engine_stands_in_no_report_description_or_log(
    tmp_path: Path, is_carried: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    async with holder(tmp_path, is_carried) as lane:
        call, engine = await lane.take()
        assert engine.api_key
        state = await lane.runner.until_state(lambda state: state.slots_used == 1)
        description = await lane.runner.control.Describe(runner_service_pb2.DescribeRequest(log_line_count=1000))
        call.cancel()
    assert state.engine_lane
    told = "".join(map(str, [lane.runner.registry.opened, lane.runner.registry.beats, description]))
    assert engine.api_key not in told + capsys.readouterr().out


async def test_a_held_slot_is_taken_for_every_other_request_and_free_again_when_its_holder_is_gone(
    tmp_path: Path,
    is_carried: bool,
) -> None:
    async with holder(tmp_path, is_carried, max_requests=2) as lane:
        (first, _), (second, _) = await lane.take(), await lane.take()
        assert (await ended(await lane.call())).reason is Reason.NO_SLOT_AVAILABLE
        assert (await refusal(lane.runner.generate().read())).reason is Reason.NO_SLOT_AVAILABLE
        first.cancel()
        await until(lambda: lane.used() == 1)
        events = await events_of(lane.runner.generate(max_tokens=1))
        assert events[-1].HasField("finished")
        second.cancel()


@pytest.mark.parametrize(
    ("model", "key", "reason"),
    [
        ("m", b"x" * 32, Reason.TICKET_INVALID),
        ("plain", TICKET_KEY, Reason.UNSUPPORTED_OPERATION),
        ("absent", TICKET_KEY, Reason.MODEL_NOT_FOUND),
    ],
)
async def test_without_a_good_ticket_for_a_model_of_the_lane_no_key_is_given(
    tmp_path: Path, is_carried: bool, model: str, key: bytes, reason: Reason
) -> None:
    async with holder(tmp_path, is_carried, engine_model(), counting_model("plain")) as lane:
        await lane.runner.until(Phase.READY, "plain")
        assert (await ended(await lane.call(model, key))).reason is reason
        assert (lane.used(), lane.used("plain")) == (0, 0)


async def test_a_dead_engine_ends_the_calls_of_those_who_hold_its_slots(tmp_path: Path, is_carried: bool) -> None:
    async with (
        holder(tmp_path, is_carried, engine_model(crash_after_tokens=1)) as lane,
        aiohttp.ClientSession() as http,
    ):
        call, engine = await lane.take()
        body = {"messages": [{"role": "user", "content": "Count."}]}
        key = {"Authorization": f"Bearer {engine.api_key}"}
        with pytest.raises(aiohttp.ClientError):
            async with http.post(f"{engine.url}/v1/chat/completions", json=body, headers=key) as response:
                await response.read()
        assert (await ended(call)).reason is Reason.SERVER_DIED
        await lane.runner.until_state(lambda state: state.fault_count == 1 and state.phase == Phase.READY.value)
        again, restarted = await lane.take()
        assert restarted.api_key != engine.api_key, "each start has a key of its own"
        again.cancel()


async def test_an_unload_waits_for_a_held_slot_within_its_time(tmp_path: Path, is_carried: bool) -> None:
    async with holder(tmp_path, is_carried) as lane:
        call, _ = await lane.take()
        unloading = asyncio.create_task(lane.runner.unload())
        async with ending(unloading):
            await until(lambda: lane.runner.registry.capability.instances[0].phase == Phase.STOPPING.value)
            assert lane.used() == 1
            call.cancel()
            await unloading
        await lane.runner.until(Phase.HIBERNATING)


async def test_a_runner_that_stops_waits_for_held_slots_and_then_ends_their_calls(
    tmp_path: Path, is_carried: bool
) -> None:
    async with holder(tmp_path, is_carried) as lane:
        call, _ = await lane.take()
        await lane.runner.service.stop(grace_seconds=0.2)
        assert (await ended(call)).reason in {Reason.SHUTTING_DOWN, Reason.WORKER_RESTARTED}
