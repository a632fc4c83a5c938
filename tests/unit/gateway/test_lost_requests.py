"""Requests that a proxy has carried on without their picker: what its successor has the router record."""

import pytest

from gateway.picker import lost_requests
from gateway.picker.ends import ProxySight
from gateway.picker.lost_requests import LostRequestBook
from weft.api.common.v1 import receipt_pb2, usage_pb2
from weft.api.router.v1 import lane_service_pb2
from weft.api.runner.v1 import ticket_pb2
from weft.kernel.reasons import Reason

WAIT = 2.0
USAGE = usage_pb2.Usage(prompt_tokens=3, completion_tokens=5)


class Router:
    """A LostRequests port that records everything it is given."""

    def __init__(self, *known: str) -> None:
        self.known = set(known)
        """Ids of requests whose ends are known, or that are under way again."""
        self.recorded: list[tuple[ticket_pb2.TicketClaims, receipt_pb2.Receipt]] = []
        self.gone: list[str] = []

    def is_lost(self, request_id: str, tenant: str) -> bool:
        del tenant
        return request_id not in self.known

    def note_gone(self, claims: ticket_pb2.TicketClaims) -> None:
        self.gone.append(claims.runner)

    def recover(self, claims: ticket_pb2.TicketClaims, receipt: receipt_pb2.Receipt) -> None:
        self.recorded.append((claims, receipt))

    @property
    def receipt(self) -> receipt_pb2.Receipt:
        ((_, receipt),) = self.recorded
        return receipt


def claimed(attempt: int = 1, request_id: str = "r-1", tenant: str = "ann") -> ticket_pb2.TicketClaims:
    claims = ticket_pb2.TicketClaims(request_id=request_id, tenant=tenant, model="m", attempt=attempt)
    claims.runner, claims.runner_incarnation, claims.lane.asked_model = f"gpu-{attempt}", "1", "best"
    return claims


def reported(reason: Reason = Reason.UNSPECIFIED, *, has_content: bool = True) -> lane_service_pb2.AttemptReport:
    outcome = receipt_pb2.OUTCOME_FAILED if reason else receipt_pb2.OUTCOME_COMPLETED
    receipt = receipt_pb2.Receipt(outcome=outcome, reason=reason.value, host="box")  # type: ignore[arg-type]
    report = lane_service_pb2.AttemptReport(receipt=receipt)
    if has_content:
        report.receipt.usage.CopyFrom(USAGE)
        report.time_to_first_content.FromMilliseconds(10)
    return report


def seen(*flags: str, usage: usage_pb2.Usage | None = USAGE, request_id: str = "r-1") -> ProxySight:
    return ProxySight(
        request_id=request_id, status=200, flags=flags, usage=usage, placed="m on gpu-1", endpoint="10.0.0.1:1"
    )


@pytest.mark.parametrize("report_first", [True, False])
def test_both_witnesses_make_one_record_once_both_had_time_to_speak(report_first: bool) -> None:
    router = Router()
    book = LostRequestBook(router, WAIT)
    if report_first:
        assert book.note_attempt(claimed(), reported(), 0.0)
        book.note_sight(seen(), 1.0)
    else:
        book.note_sight(seen(), 0.0)
        assert book.note_attempt(claimed(), reported(), 1.0)
    book.sweep(WAIT - 0.1)
    assert not router.recorded
    book.sweep(WAIT)
    receipt = router.receipt
    assert (receipt.request_id, receipt.outcome) == ("r-1", receipt_pb2.OUTCOME_COMPLETED)
    assert (receipt.model, receipt.asked_model, receipt.usage, receipt.host) == ("m", "best", USAGE, "box")
    assert (receipt.proxy.status, list(receipt.proxy.disagreements)) == (200, [])
    assert router.recorded[0][0].tenant == "ann"
    book.sweep(100.0)
    assert len(router.recorded) == 1


def test_a_runner_that_alone_reports_frees_its_slot_at_once_and_a_second_report_changes_nothing() -> None:
    router = Router()
    book = LostRequestBook(router, WAIT)
    assert book.note_attempt(claimed(), reported(), 0.0)
    assert router.gone == ["gpu-1"]
    assert not book.note_attempt(claimed(), reported(), 0.1)
    assert router.gone == ["gpu-1"]
    book.sweep(WAIT)
    assert not router.receipt.HasField("proxy")


@pytest.mark.parametrize("order", [(1, 2), (2, 1)])
def test_an_attempt_that_failed_before_content_is_not_the_end_of_its_request(order: tuple[int, int]) -> None:
    reports = {1: reported(Reason.SERVER_DIED, has_content=False), 2: reported()}
    router = Router()
    book = LostRequestBook(router, WAIT)
    for attempt in order:
        assert book.note_attempt(claimed(attempt), reports[attempt], 0.0)
    book.close()
    receipt = router.receipt
    assert receipt.outcome == receipt_pb2.OUTCOME_COMPLETED
    assert [(each.runner, each.reason) for each in receipt.attempts] == [
        ("gpu-1", Reason.SERVER_DIED.value),
        ("gpu-2", 0),
    ]


@pytest.mark.parametrize(
    ("sight", "reason"),
    [
        (seen(), Reason.UNSPECIFIED),
        (seen("downstream_connection_termination", usage=None), Reason.CANCELLED),
        (seen("upstream_remote_reset", usage=None), Reason.WORKER_LOST),
        # A clean end without usage: it may have been whole, or cut off.
        (seen(usage=None), Reason.ROUTER_LOST),
    ],
)
def test_where_the_proxy_alone_speaks_its_word_counts_as_far_as_it_goes(sight: ProxySight, reason: Reason) -> None:
    router = Router()
    book = LostRequestBook(router, WAIT)
    book.note_sight(sight, 0.0)
    book.sweep(WAIT)
    receipt = router.receipt
    assert (receipt.reason, receipt.proxy.status) == (reason.value, 200)
    (attempt,) = receipt.attempts
    assert (attempt.runner, attempt.model, attempt.reason) == ("gpu-1", "m", reason.value)
    assert (receipt.outcome == receipt_pb2.OUTCOME_COMPLETED) == (reason is Reason.UNSPECIFIED)


def test_a_request_whose_end_is_known_or_whose_id_is_in_use_again_is_left_as_it_is() -> None:
    router = Router("r-1")
    book = LostRequestBook(router, WAIT)
    assert not book.note_attempt(claimed(), reported(), 0.0)
    book.note_sight(seen(), 0.0)
    book.sweep(WAIT)
    assert (router.recorded, router.gone) == ([], [])


def test_a_request_that_is_placed_again_before_the_second_witness_spoke_is_left_as_it_is() -> None:
    router = Router()
    book = LostRequestBook(router, WAIT)
    book.note_attempt(claimed(), reported(), 0.0)
    router.known.add("r-1")
    book.sweep(WAIT)
    assert router.recorded == []


def test_of_too_many_the_oldest_is_recorded_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lost_requests, "MAX_COLLECTED", 2)
    router = Router()
    book = LostRequestBook(router, WAIT)
    for number in range(4):
        book.note_attempt(claimed(request_id=f"r-{number}"), reported(), 0.0)
    assert [claims.request_id for claims, _ in router.recorded] == ["r-0", "r-1"]


def test_two_tenants_may_have_used_one_id() -> None:
    router = Router()
    book = LostRequestBook(router, WAIT)
    book.note_attempt(claimed(tenant="ann"), reported(), 0.0)
    book.note_attempt(claimed(tenant="bob"), reported(), 0.0)
    book.close()
    assert [claims.tenant for claims, _ in router.recorded] == ["ann", "bob"]
