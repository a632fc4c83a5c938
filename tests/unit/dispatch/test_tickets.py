"""A runner works only for a router's permit."""

from typing import Any

import pytest

from weft.api.runner.v1 import ticket_pb2
from weft.dispatch.tickets import TicketGate, sign
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason

KEY = b"k" * 32
NOW = 1_000.0


def _ticket(key: bytes = KEY, **changes: Any) -> ticket_pb2.Ticket:
    fields: dict[str, Any] = {
        "ticket_id": "t1",
        "request_id": "r1",
        "tenant": "default",
        "model": "m",
        "runner": "local",
        "runner_incarnation": "run-1",
        "attempt": 1,
        **changes,
    }
    expires = fields.pop("expires", NOW + 30)
    claims = ticket_pb2.TicketClaims(**fields)
    claims.expire_time.FromSeconds(int(expires))
    signed = claims.SerializeToString()
    return ticket_pb2.Ticket(claims=signed, mac=sign(signed, key))


def _gate() -> TicketGate:
    gate = TicketGate(runner="local", incarnation="run-1")
    gate.use_key(KEY)
    return gate


def _refusal(gate: TicketGate, ticket: ticket_pb2.Ticket, now: float = NOW) -> Reason:
    with pytest.raises(WeftError) as refused:
        gate.admit(ticket, now=now)
    return refused.value.reason


def test_valid_ticket_yields_its_permit() -> None:
    permit = _gate().admit(_ticket(allow_remote=True), now=NOW)
    assert (permit.request_id, permit.model, permit.attempt, permit.allow_remote) == ("r1", "m", 1, True)


def test_ticket_is_accepted_once() -> None:
    gate = _gate()
    gate.admit(_ticket(), now=NOW)
    assert _refusal(gate, _ticket()) is Reason.TICKET_INVALID


def test_same_request_id_with_a_new_ticket_is_accepted() -> None:
    """Callers choose request ids and may choose one twice."""
    gate = _gate()
    gate.admit(_ticket(), now=NOW)
    assert gate.admit(_ticket(ticket_id="t2"), now=NOW).request_id == "r1"


@pytest.mark.parametrize(
    "ticket",
    [
        _ticket(key=b"another runner's key"),
        _ticket(runner="other"),
        _ticket(runner_incarnation="run-0"),
        ticket_pb2.Ticket(),
        ticket_pb2.Ticket(claims=b"\xff\xff\xff", mac=sign(b"\xff\xff\xfe", KEY)),
    ],
)
def test_ticket_for_another_runner_or_with_a_wrong_code_is_refused(ticket: ticket_pb2.Ticket) -> None:
    assert _refusal(_gate(), ticket) is Reason.TICKET_INVALID


def test_modified_claims_invalidate_the_code() -> None:
    ticket = _ticket()
    claims = ticket_pb2.TicketClaims.FromString(ticket.claims)
    claims.allow_remote = True
    assert _refusal(_gate(), ticket_pb2.Ticket(claims=claims.SerializeToString(), mac=ticket.mac)) is (
        Reason.TICKET_INVALID
    )


def test_expired_ticket_is_refused_and_forgotten_a_minute_later() -> None:
    gate = _gate()
    assert _refusal(gate, _ticket(), now=NOW + 30) is Reason.TICKET_EXPIRED
    for number in range(5):
        gate.admit(_ticket(ticket_id=f"n{number}"), now=NOW)
    gate.admit(_ticket(ticket_id="late", expires=NOW + 120), now=NOW + 60)
    assert len(gate._used) == 1


def test_ticket_from_before_the_clock_was_set_back_keeps_no_later_one_from_being_forgotten() -> None:
    """Regression: until it expired, all later ones were remembered, and beyond the limit each was refused."""
    gate = _gate()
    gate.max_remembered = 2
    gate.admit(_ticket(ticket_id="early", expires=NOW + 3_600), now=NOW)
    for minute in range(1, 4):
        now = NOW + 60 * minute
        gate.admit(_ticket(ticket_id=f"t{minute}", expires=now + 30), now=now)
    assert _refusal(gate, _ticket(ticket_id="early", expires=NOW + 3_600), now) is Reason.TICKET_INVALID


def test_ticket_is_refused_without_a_session() -> None:
    gate = TicketGate(runner="local", incarnation="run-1")
    assert _refusal(gate, _ticket(key=b"")) is Reason.BACKEND_NOT_READY, (
        "the ticket may be good, and callers may come again"
    )
