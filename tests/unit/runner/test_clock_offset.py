"""The clock offset of a runner, from the times in the registry's answers."""

from datetime import datetime, timedelta

import pytest
from google.protobuf.timestamp_pb2 import Timestamp

from runner_svc.session.clock_offset import ClockOffset
from weft.api.runner.v1 import ticket_pb2
from weft.dispatch.tickets import TicketGate, sign
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.time.clock import MeshClock, clock_off, offset_words
from weft_testing.fake_clock import FakeClock

KEY = b"k" * 32
LIFETIME_SECONDS = 30.0


class Registry:
    """A registry with its clock and the mesh's time, which advances evenly from the registry's start."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.mesh_clock = MeshClock(self.clock)
        self.mesh_clock.set(self.clock.utc_now())

    def ticket(self) -> ticket_pb2.Ticket:
        claims = ticket_pb2.TicketClaims(ticket_id="t", runner="r1", runner_incarnation="life-1", request_id="q")
        claims.expire_time.FromDatetime(self.mesh_clock.utc_now() + timedelta(seconds=LIFETIME_SECONDS))
        data = claims.SerializeToString()
        return ticket_pb2.Ticket(claims=data, mac=sign(data, KEY))


class Runner:
    """A runner on a machine whose clock is off."""

    def __init__(self, registry: Registry, ahead_seconds: float) -> None:
        self.registry = registry
        self.clock = FakeClock(utc=registry.clock.utc_now() + timedelta(seconds=ahead_seconds))
        self.mesh_clock = MeshClock(self.clock)
        self.offset = ClockOffset(self.clock, self.mesh_clock)
        self.gate = TicketGate(runner="r1", incarnation="life-1")
        self.gate.use_key(KEY)

    async def hear(self, takes_seconds: float = 0.0) -> None:
        """Receive an answer with the same latency in both directions."""
        asked = self.clock.monotonic()
        await self.pass_time(takes_seconds / 2)
        mesh, wall = _stamp(self.registry.mesh_clock.utc_now()), _stamp(self.registry.clock.utc_now())
        await self.pass_time(takes_seconds / 2)
        self.offset.note(mesh, wall, asked)

    async def pass_time(self, seconds: float) -> None:
        if seconds:
            await self.registry.clock.advance(seconds)
            await self.clock.advance(seconds)

    def admits(self, ticket: ticket_pb2.Ticket) -> bool:
        try:
            self.gate.admit(ticket, now=self.mesh_clock.utc_now().timestamp())
        except WeftError:
            return False
        return True


def _stamp(moment: datetime) -> Timestamp:
    stamp = Timestamp()
    stamp.FromDatetime(moment)
    return stamp


@pytest.mark.parametrize("ahead_seconds", [-600.0, -30.0, -3.0, 0.0, 3.0, 30.0, 600.0, 86_400.0])
async def test_tickets_are_validated_by_mesh_time_for_any_clock_skew(ahead_seconds: float) -> None:
    """Clocks of router and runner 30 s apart stopped every request with `ticket_expired`."""
    runner = Runner(Registry(), ahead_seconds)
    await runner.hear(takes_seconds=0.2)
    fresh = runner.registry.ticket()
    assert runner.admits(fresh)
    late = runner.registry.ticket()
    await runner.pass_time(LIFETIME_SECONDS + 1.0)
    assert not runner.admits(late), "the correction prolongs no ticket"
    assert not runner.admits(fresh)


@pytest.mark.parametrize("jump_seconds", [-600.0, -30.0, 30.0, 600.0])
async def test_clock_set_on_either_side_invalidates_no_ticket_between_two_heartbeats(jump_seconds: float) -> None:
    """NTP steps a clock back or forward; the next heartbeat is up to 30 s away."""
    runner = Runner(Registry(), 0.0)
    await runner.hear()
    for clock in (runner.clock, runner.registry.clock):
        ticket = runner.registry.ticket()
        clock._utc += timedelta(seconds=jump_seconds)
        assert runner.admits(ticket)
        runner.gate = TicketGate(runner="r1", incarnation="life-1")
        runner.gate.use_key(KEY)
        assert runner.admits(runner.registry.ticket())
        runner.gate = TicketGate(runner="r1", incarnation="life-1")
        runner.gate.use_key(KEY)


async def test_clock_jump_is_measured_with_the_next_response_and_so_is_its_reversal() -> None:
    runner = Runner(Registry(), 0.0)
    runner.offset.allow(300.0)
    measured = []
    for jump in (0.0, 600.0, -590.0, -40.0, 30.0):
        runner.clock._utc += timedelta(seconds=jump)
        await runner.hear(takes_seconds=0.5)
        measured.append((runner.offset.seconds, runner.offset.is_notable, runner.offset.is_refused))
    assert measured == [
        (0.0, False, False),
        (600.0, True, True),
        (10.0, True, False),
        (-30.0, True, False),
        (0.0, False, False),
    ]


async def test_slow_response_is_not_counted_as_skew_and_small_changes_are_not_reported() -> None:
    runner = Runner(Registry(), 100.0)
    await runner.hear(takes_seconds=4.0)
    assert runner.offset.seconds == 100.0
    runner.clock._utc += timedelta(seconds=0.9)
    await runner.hear()
    assert runner.offset.seconds == 100.0, "it would be reported with every heartbeat"


async def test_clock_skew_at_the_bound_is_allowed_and_more_is_refused() -> None:
    runner = Runner(Registry(), 300.0)
    runner.offset.allow(300.0)
    await runner.hear()
    assert not runner.offset.is_refused
    runner.clock._utc += timedelta(seconds=2.0)
    await runner.hear()
    assert runner.offset.is_refused


async def test_runner_without_a_bound_may_have_any_clock() -> None:
    runner = Runner(Registry(), 86_400.0)
    runner.offset.allow(None)
    await runner.hear()
    assert (runner.offset.is_notable, runner.offset.is_refused) == (True, False)


def test_refusal_states_the_clock_skew_and_a_remedy() -> None:
    error = clock_off("r1", -600.0)
    assert error.reason is Reason.CLOCK_OFF
    assert error.message == (
        "the runner r1 accepts no requests: its clock is 600 s behind the mesh's, more than is allowed; set it right "
        "there (NTP)"
    )
    assert error.metadata == {"runner": "r1", "clock_offset_seconds": "-600"}
    assert offset_words(30.0) == "its clock is 30 s ahead of the mesh's"
