"""A placement outlives its router while the request waits."""

import asyncio
from dataclasses import replace
from types import TracebackType
from typing import Self

import pytest

from weft.api.common.v1 import receipt_pb2
from weft.api.router.v1.placement_service_pb2 import Granted
from weft.dispatch import reconnecting_placement
from weft.dispatch.end_reporter import EndReporter
from weft.dispatch.placement import Decision, OnCancelled, Placement, in_queue
from weft.dispatch.reconnecting_placement import ReconnectConfig, ReconnectingPlacement
from weft.kernel.errors.error_tree import LACKED_ROUTER, WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.requests.placement_request import PlacementRequest
from weft.kernel.requests.request_values import Operation
from weft.kernel.time.clock import SystemClock
from weft_testing.fake_clock import FakeClock

LOST = WeftError(Reason.NO_ROUTER_AVAILABLE, "the router is gone")
GRANT = Decision(granted=Granted(runner="a", model="m", attempt=1))
WAITING = in_queue(1, "busy")
REQUEST = PlacementRequest(
    request_id="r", tenant="t", model="m", operation=Operation.CHAT, age_seconds=2.0, seconds_left=100.0
)


class ScriptedPort(Placement):
    """A placement port whose every placement says what is next in the script."""

    def __init__(self, *script: Decision | WeftError) -> None:
        self._script = list(script)
        self.placed: list[PlacementRequest] = []
        self.left = 0
        self.hears = True
        """Whether it has the ends that are reported."""

    def place(self, request: PlacementRequest) -> "ScriptedPort":
        self.placed.append(request)
        return self

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.left += 1

    async def next_decision(self) -> Decision:
        word = self._script.pop(0)
        if isinstance(word, WeftError):
            raise word
        return word

    def watch_cancellation(self, on_cancelled: OnCancelled) -> None: ...

    async def report_first_content(self, attempt: int) -> None: ...

    async def report_attempt_failed(
        self, attempt: int, reason: Reason, message: str = "", retry_after_seconds: float | None = None
    ) -> None: ...

    async def report_finished(self, reason: Reason, receipt: receipt_pb2.Receipt | None = None) -> bool:
        return self.hears


async def _decide(placement: ReconnectingPlacement, clock: FakeClock, seconds: float) -> Decision:
    """The next decision, with time moving meanwhile."""
    deciding = asyncio.create_task(placement.next_decision())
    await clock.wait_for_sleepers(1)
    await clock.advance(seconds)
    return await deciding


async def test_request_is_placed_again_with_age_and_remaining_deadline_after_router_loss() -> None:
    clock = FakeClock()
    port = ScriptedPort(WAITING, LOST, GRANT)
    async with ReconnectingPlacement(port, REQUEST, clock, ReconnectConfig(retry_interval_seconds=0.5)) as placement:
        assert await placement.next_decision() == WAITING
        await clock.advance(10.0)
        assert await _decide(placement, clock, 1.0) == GRANT
    first, second = port.placed
    assert first == REQUEST
    assert second.age_seconds == pytest.approx(12.5)
    assert second.seconds_left == pytest.approx(89.5)
    assert port.left == 2, "the lost placement was not left"


STANDBY = WeftError(Reason.ROUTER_STANDBY, "another router leads")


@pytest.mark.parametrize(
    ("script", "counted"),
    [
        ((WAITING, LOST, GRANT), [False, True]),
        ((LOST, GRANT), [False, False]),
        ((STANDBY, GRANT), [False, False]),
        ((WAITING, LOST, STANDBY, GRANT), [False, True, True]),
    ],
)
async def test_next_router_counts_a_request_unless_the_lost_one_did(
    script: tuple[Decision | WeftError, ...], counted: list[bool]
) -> None:
    clock = FakeClock()
    port = ScriptedPort(*script)
    async with ReconnectingPlacement(port, REQUEST, clock, ReconnectConfig(retry_interval_seconds=0.5)) as placement:
        deciding = asyncio.create_task(_until_granted(placement))
        while not deciding.done():
            await clock.advance(1.0)
        await deciding
    assert [request.is_counted for request in port.placed] == counted


async def _until_granted(placement: ReconnectingPlacement) -> None:
    while await placement.next_decision() != GRANT:
        pass


async def test_attempts_granted_before_the_loss_count() -> None:
    clock = FakeClock()
    port = ScriptedPort(GRANT, LOST, GRANT)
    async with ReconnectingPlacement(port, REQUEST, clock, ReconnectConfig()) as placement:
        await placement.next_decision()
        await _decide(placement, clock, 1.0)
    assert [request.attempts_used for request in port.placed] == [0, 1]


async def test_outage_beyond_the_limit_ends_the_request() -> None:
    clock = FakeClock()
    port = ScriptedPort(*[LOST] * 100)
    async with ReconnectingPlacement(
        port, REQUEST, clock, ReconnectConfig(router_outage_limit_seconds=5.0)
    ) as placement:
        with pytest.raises(WeftError) as ended:
            await _decide(placement, clock, 10.0)
    assert ended.value.reason is Reason.NO_ROUTER_AVAILABLE
    assert ended.value.metadata == {LACKED_ROUTER: "true"}
    assert 5 <= len(port.placed) <= 12, "the pauses do not grow"


async def test_rejection_is_not_an_outage() -> None:
    port = ScriptedPort(WeftError(Reason.QUEUE_FULL, "full"))
    async with ReconnectingPlacement(port, REQUEST, FakeClock(), ReconnectConfig()) as placement:
        with pytest.raises(WeftError) as refused:
            await placement.next_decision()
    assert refused.value.reason is Reason.QUEUE_FULL
    assert len(port.placed) == 1


class FrozenPort(ScriptedPort):
    """A placement port whose router takes everything and answers nothing."""

    async def next_decision(self) -> Decision:
        await asyncio.Event().wait()
        raise AssertionError("nothing sets it")

    async def report_finished(self, reason: Reason, receipt: receipt_pb2.Receipt | None = None) -> bool:
        await asyncio.Event().wait()
        raise AssertionError("nothing sets it")


class UnreachablePort(FrozenPort):
    """A placement port that cannot even be entered."""

    async def __aenter__(self) -> Self:
        await asyncio.Event().wait()
        raise AssertionError("nothing sets it")


SHORT = replace(REQUEST, seconds_left=0.05)


async def test_frozen_router_does_not_hold_a_request_beyond_its_deadline() -> None:
    port = FrozenPort()
    async with ReconnectingPlacement(port, SHORT, SystemClock(), ReconnectConfig()) as placement:
        with pytest.raises(WeftError) as caught:
            await placement.next_decision()
        assert caught.value.reason is Reason.DEADLINE_EXCEEDED
        await placement.report_finished(Reason.DEADLINE_EXCEEDED)
    assert port.left == 1


async def test_unreachable_router_does_not_hold_a_request_beyond_its_deadline() -> None:
    port = UnreachablePort()
    with pytest.raises(WeftError) as caught:
        async with ReconnectingPlacement(port, SHORT, SystemClock(), ReconnectConfig()):
            raise AssertionError("it is never entered")
    assert (caught.value.reason, port.left) == (Reason.DEADLINE_EXCEEDED, 1)


async def test_caller_that_leaves_while_its_placement_opens_leaves_no_call_behind() -> None:
    """The call stayed open until its deadline, and reached the router once that answered again."""
    port = UnreachablePort()
    entering = asyncio.create_task(ReconnectingPlacement(port, REQUEST, FakeClock(), ReconnectConfig()).__aenter__())
    await asyncio.sleep(0)
    entering.cancel()
    with pytest.raises(asyncio.CancelledError):
        await entering
    assert port.left == 1


async def test_lost_router_does_not_hold_a_request_beyond_its_deadline_and_is_reported() -> None:
    port = ScriptedPort(*[LOST] * 100)
    async with ReconnectingPlacement(
        port, SHORT, SystemClock(), ReconnectConfig(retry_interval_seconds=0.01)
    ) as placement:
        with pytest.raises(WeftError) as caught:
            await placement.next_decision()
    assert caught.value.reason is Reason.DEADLINE_EXCEEDED
    assert "no router answered" in caught.value.message
    assert caught.value.metadata == {LACKED_ROUTER: "true"}


async def test_router_that_responds_but_cannot_place_is_not_reported_as_missing() -> None:
    """Such as one that does not know the mesh yet: it is asked again, and what it says stays its own."""
    clock = FakeClock()
    port = ScriptedPort(*[WeftError(Reason.SERVICE_UNAVAILABLE, "the router does not know the mesh yet")] * 100)
    limits = ReconnectConfig(router_outage_limit_seconds=5.0)
    async with ReconnectingPlacement(port, REQUEST, clock, limits) as placement:
        with pytest.raises(WeftError) as ended:
            await _decide(placement, clock, 10.0)
    assert (ended.value.reason, ended.value.metadata) == (Reason.SERVICE_UNAVAILABLE, {})
    late = ScriptedPort(*[WeftError(Reason.SERVICE_UNAVAILABLE, "the router does not know the mesh yet")] * 100)
    async with ReconnectingPlacement(
        late, SHORT, SystemClock(), ReconnectConfig(retry_interval_seconds=0.01)
    ) as placement:
        with pytest.raises(WeftError) as caught:
            await placement.next_decision()
    assert (caught.value.reason, caught.value.metadata) == (Reason.DEADLINE_EXCEEDED, {})


@pytest.mark.parametrize("seconds", [1.0, 0.049])
async def test_call_deadline_is_reported_as_the_request_deadline(seconds: float) -> None:
    """One that ended a millisecond before was told in the words of the transport, without the lack of a router."""
    clock = FakeClock()
    port = ScriptedPort(WeftError(Reason.DEADLINE_EXCEEDED, "Deadline Exceeded"))
    async with ReconnectingPlacement(port, SHORT, clock, ReconnectConfig()) as placement:
        await clock.advance(seconds)
        with pytest.raises(WeftError, match="the request's deadline passed while it waited"):
            await placement.next_decision()


@pytest.fixture
def _short_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    """A frozen router is waited for for a moment only."""
    monkeypatch.setattr(reconnecting_placement, "REPORT_SECONDS", 0.05)


@pytest.mark.usefixtures("_short_reports")
async def test_report_to_a_frozen_router_does_not_delay_a_complete_answer() -> None:
    async with ReconnectingPlacement(FrozenPort(), REQUEST, SystemClock(), ReconnectConfig()) as placement:
        await placement.report_finished(Reason.UNSPECIFIED)


UNKNOWN = WeftError(Reason.MODEL_NOT_FOUND, "there is no model m")


async def test_locally_known_name_is_retried_while_the_router_is_behind() -> None:
    clock = FakeClock()
    port = ScriptedPort(UNKNOWN, UNKNOWN, GRANT)
    config = ReconnectConfig(retry_interval_seconds=0.5)
    async with ReconnectingPlacement(port, REQUEST, clock, config, knows=lambda name: name == "m") as placement:
        assert await _decide(placement, clock, 2.0) == GRANT
    assert len(port.placed) == 3


async def test_unknown_name_is_refused_immediately() -> None:
    port = ScriptedPort(UNKNOWN)
    async with ReconnectingPlacement(port, REQUEST, FakeClock(), ReconnectConfig(), knows=lambda _: False) as placement:
        with pytest.raises(WeftError, match="there is no model m"):
            await placement.next_decision()
    assert len(port.placed) == 1


async def test_router_that_stays_behind_is_trusted_after_the_limit() -> None:
    clock = FakeClock()
    port = ScriptedPort(*[UNKNOWN] * 100)
    async with ReconnectingPlacement(port, REQUEST, clock, ReconnectConfig(), knows=lambda _: True) as placement:
        deciding = asyncio.create_task(placement.next_decision())
        while not deciding.done():
            await clock.advance(0.5)
        with pytest.raises(WeftError) as raised:
            await deciding
    assert raised.value.reason is Reason.MODEL_NOT_FOUND
    # Pauses of 0.1, 0.2, 0.4, 0.8 and then of a second.
    assert len(port.placed) in range(8, 11)


class Ends(EndReporter):
    """Collects the ends that are handed over."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, int, float]] = []

    def send(self, request: PlacementRequest, receipt: receipt_pb2.Receipt, arrived_at: float) -> None:
        self.sent.append((request.request_id, receipt.reason, arrived_at))


DONE = receipt_pb2.Receipt(request_id="r", outcome=receipt_pb2.OUTCOME_COMPLETED)


@pytest.mark.parametrize("hears", [True, False])
async def test_end_missed_by_its_router_is_handed_over_once_with_the_arrival_time(*, hears: bool) -> None:
    clock, ends, port = FakeClock(), Ends(), ScriptedPort(GRANT)
    port.hears = hears
    arrived = clock.monotonic() - REQUEST.age_seconds
    async with ReconnectingPlacement(port, REQUEST, clock, ReconnectConfig(), ends=ends) as placement:
        await placement.next_decision()
        await clock.advance(3.0)
        assert await placement.report_finished(Reason.UNSPECIFIED, DONE) is hears
    placement.hand_over(DONE)
    assert ends.sent == ([] if hears else [("r", 0, arrived)])


@pytest.mark.usefixtures("_short_reports")
async def test_end_with_a_slow_or_interrupted_report_is_handed_over() -> None:
    ends = Ends()
    async with ReconnectingPlacement(FrozenPort(), SHORT, SystemClock(), ReconnectConfig(), ends=ends) as placement:
        assert not await placement.report_finished(Reason.UNSPECIFIED, DONE)
    assert len(ends.sent) == 1
    async with ReconnectingPlacement(FrozenPort(), REQUEST, SystemClock(), ReconnectConfig(), ends=ends) as placement:
        reporting = asyncio.create_task(placement.report_finished(Reason.UNSPECIFIED, DONE))
        await asyncio.sleep(0)
        reporting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reporting
    assert len(ends.sent) == 2


async def test_cancellation_without_facts_is_not_handed_over() -> None:
    ends, port = Ends(), ScriptedPort(GRANT)
    port.hears = False
    async with ReconnectingPlacement(port, REQUEST, FakeClock(), ReconnectConfig(), ends=ends) as placement:
        assert not await placement.report_finished(Reason.CANCELLED)
    assert ends.sent == []
