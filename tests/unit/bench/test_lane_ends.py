"""The checker of ends in the lane: a wrong end of each kind is found, and what a kill explains is counted apart."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy import create_engine, insert

from bench.lane_ends import ClientEnd, Receipt, SeenEnd, Views, by_request, check, jain, served_tokens
from bench.lane_load import Offered
from bench.lane_mesh import log_lines, receipt_of_log, receipts_of_database
from bench.lane_offer import LaneOffer, OfferSummary, Outcome, TenantOffer, _schedule, judged
from router_svc.store.tables import metadata, request_records
from weft.api.common.v1 import receipt_pb2, usage_pb2
from weft.kernel.reasons import Reason
from weft_testing.torture.history import expected_text

SEEN = SeenEnd(request_id="q", tenant="a", sent_at=10.0, ended_at=11.0, end=ClientEnd.COMPLETE, tokens=16)
RECEIPT = Receipt(request_id="q", outcome="completed", tokens=16)
LOST = Receipt(request_id="q", outcome="failed", reason="router_lost")
REFUSED = replace(SEEN, end=ClientEnd.REFUSED, tokens=0, note="503 queue_full")
BROKEN = replace(SEEN, end=ClientEnd.BROKEN, tokens=0, note="error event")
DONE = ("finished",)


def wrong(
    seen: SeenEnd, receipts: Sequence[Receipt] = (), engine: Sequence[str] = (), kills: Sequence[float] = ()
) -> list[str]:
    outages = [(kill, kill + 1.0) for kill in kills]
    views = Views(seen=[seen], engines={"q": engine}, receipts=by_request(receipts), outages=outages)
    return [each.rule for each in check(views).wrong]


def test_ends_that_all_saw_alike_are_right() -> None:
    assert wrong(SEEN, [RECEIPT, RECEIPT], DONE) == []
    # A first runner that failed before any content is an attempt of the same request.
    assert wrong(SEEN, [RECEIPT], ("failed", "finished")) == []
    assert wrong(REFUSED, [Receipt(request_id="q", outcome="rejected", reason="queue_full")]) == []
    # Envoy refuses by itself while no picker is there.
    assert wrong(REFUSED) == []
    assert wrong(BROKEN, [Receipt(request_id="q", outcome="failed", reason="worker_lost")], ("cancelled",)) == []


@pytest.mark.parametrize(
    ("seen", "receipts", "engine", "rule"),
    [
        (SEEN, [RECEIPT], (), "complete of nothing"),
        (SEEN, [RECEIPT], ("cancelled",), "complete of nothing"),
        (SEEN, [], DONE, "no receipt"),
        (SEEN, [Receipt(request_id="q", outcome="failed", reason="worker_lost")], DONE, "not recorded as complete"),
        (SEEN, [RECEIPT, LOST], DONE, "not recorded as complete"),
        (SEEN, [replace(RECEIPT, tokens=15)], DONE, "other tokens"),
        (SEEN, [RECEIPT], ("finished", "finished"), "served twice"),
        (REFUSED, [RECEIPT], (), "recorded as complete"),
        (REFUSED, [], DONE, "refused, and served"),
        (BROKEN, [RECEIPT], ("cancelled",), "recorded as complete"),
    ],
)
def test_a_planted_wrong_end_is_found(
    seen: SeenEnd, receipts: Sequence[Receipt], engine: Sequence[str], rule: str
) -> None:
    assert wrong(seen, receipts, engine) == [rule]


def test_a_kill_explains_a_receipt_that_is_missing() -> None:
    assert wrong(SEEN, [], DONE, kills=[10.5]) == []
    # Its runner's report was on its way.
    assert wrong(SEEN, [], DONE, kills=[12.0]) == []
    assert wrong(SEEN, [], DONE, kills=[9.0, 14.0]) == ["no receipt"]


def test_a_kill_explains_that_a_request_is_lost_whose_end_its_router_had_not_written() -> None:
    for written_at in (9.0, 10.5, 12.0):
        assert wrong(SEEN, [replace(LOST, written_at=written_at)], DONE, kills=[16.0]) == []
        assert wrong(SEEN, [replace(LOST, written_at=written_at), RECEIPT], DONE, kills=[16.0]) == []
    # It had written records after the end, or was not killed.
    assert wrong(SEEN, [replace(LOST, written_at=14.0)], DONE, kills=[16.0]) == ["not recorded as complete"]
    assert wrong(SEEN, [replace(LOST, written_at=10.5)], DONE, kills=[9.0]) == ["not recorded as complete"]


def test_a_kill_explains_no_other_end() -> None:
    cancelled = Receipt(request_id="q", outcome="cancelled", reason="cancelled")
    assert wrong(SEEN, [cancelled], DONE, kills=[10.5]) == ["not recorded as complete"]
    assert wrong(BROKEN, [RECEIPT], (), kills=[10.5]) == ["recorded as complete"]


def test_what_a_kill_explains_is_counted_apart() -> None:
    views = Views(
        seen=[
            SEEN,
            replace(SEEN, request_id="p"),
            replace(REFUSED, request_id="o", sent_at=12.0, ended_at=12.0),
            replace(REFUSED, request_id="n", sent_at=30.0, ended_at=30.0),
        ],
        engines={"q": DONE, "p": DONE},
        receipts=by_request([replace(LOST, written_at=10.0)]),
        outages=[(10.5, 13.0)],
    )
    found = check(views)
    assert found.wrong == []
    assert found.counts == {
        "complete": 2,
        "complete, lost with its router": 1,
        "complete, without a receipt, under way at a kill": 1,
        "refused": 2,
        "refused, while no picker was there": 1,
        "refused, without a receipt": 1,
    }


def test_jain_s_index_is_one_for_equal_shares_and_the_share_of_one_for_a_single_tenant() -> None:
    assert jain([5, 5, 5, 5]) == 1.0
    assert jain([0, 0, 8, 0]) == 0.25
    assert jain([0, 0]) == 0.0


def test_tokens_of_answers_that_are_not_whole_count_for_no_tenant() -> None:
    assert served_tokens([SEEN, SEEN, REFUSED, BROKEN], ["a", "b"]) == {"a": 32, "b": 0}


def chunked(*parts: bytes) -> bytes:
    return b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (*parts, b""))


def stream(*, text: str = expected_text(2), finish: str | None = "length", tokens: int = 2, done: bool = True) -> bytes:
    events = [
        {"choices": [{"delta": {"content": text}, "finish_reason": None}]},
        {"choices": [{"delta": {}, "finish_reason": finish}]},
        {"choices": [], "usage": {"completion_tokens": tokens}},
    ]
    lines = [b"data: " + json.dumps(event).encode() + b"\n\n" for event in events]
    whole = b"".join([*lines, b"data: [DONE]\n\n" if done else b""])
    # The marks of chunks may fall into the middle of an event.
    return chunked(whole[:10], whole[10:])


def unary(*, text: str = expected_text(2), finish: str | None = "length", tokens: int = 2) -> bytes:
    choice = {"message": {"content": text}, "finish_reason": finish}
    return json.dumps({"choices": [choice], "usage": {"completion_tokens": tokens}}).encode()


def outcome(body: bytes, *, status: int = 200, is_stream: bool = False, fault: str = "") -> Outcome:
    return Outcome(
        request_id="q",
        tenant="a",
        is_stream=is_stream,
        sent_at=1.0,
        ended_at=2.0,
        status=status,
        body=body,
        fault=fault,
    )


@pytest.mark.parametrize(
    ("given", "end"),
    [
        (outcome(unary()), ClientEnd.COMPLETE),
        (outcome(stream(), is_stream=True), ClientEnd.COMPLETE),
        (outcome(unary(finish=None)), ClientEnd.BROKEN),
        (outcome(unary(text="tok0")), ClientEnd.BROKEN),
        (outcome(unary(tokens=3)), ClientEnd.BROKEN),
        (outcome(b"{"), ClientEnd.BROKEN),
        (outcome(stream(done=False), is_stream=True), ClientEnd.BROKEN),
        (outcome(stream(finish=None), is_stream=True), ClientEnd.BROKEN),
        (outcome(stream()[:40], is_stream=True), ClientEnd.BROKEN),
        (outcome(chunked(b'data: {"error": {"code": "worker_lost"}}\n\n'), is_stream=True), ClientEnd.BROKEN),
        (outcome(unary(), fault="closed in mid-answer"), ClientEnd.BROKEN),
        (outcome(b'{"error": {"code": "queue_full", "message": "full"}}', status=503), ClientEnd.REFUSED),
        (outcome(b"", status=503), ClientEnd.REFUSED),
    ],
)
def test_an_answer_is_complete_only_if_it_says_so_and_is_whole(given: Outcome, end: ClientEnd) -> None:
    seen = judged(given, 2)
    assert (seen.end, seen.tokens) == (end, 2 if end is ClientEnd.COMPLETE else 0)
    assert bool(seen.note) == (end is not ClientEnd.COMPLETE)


def test_every_tenant_sends_at_its_own_rate() -> None:
    tenants = [TenantOffer(name="a", key="", rate=4.0), TenantOffer(name="b", key="", rate=1.0)]
    job = LaneOffer(port=1, model="m", tenants=tenants, tokens=2, seconds=2.0, run="x", file="")
    schedule = _schedule(job)
    assert [tenant.name for _, tenant, _ in schedule].count("a") == 8
    assert [at for at, tenant, _ in schedule if tenant.name == "b"] == [0.5, 1.5]
    assert schedule == sorted(schedule, key=lambda each: each[0])


def offered(waits: Sequence[float], lag: float = 0.0) -> Offered:
    seen = [replace(SEEN, sent_at=float(number), ended_at=number + wait) for number, wait in enumerate(waits)]
    summary = OfferSummary(sent=len(seen), began=0.0, ended=1.0, drained_seconds=0.0, largest_lag=lag)
    return Offered(rate=1.0, seconds=1.0, summary=summary, seen=seen)


def test_a_rate_is_carried_if_the_last_requests_wait_no_longer_than_the_first() -> None:
    assert offered([0.2] * 9).is_sustained
    assert not offered([0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0]).is_sustained
    assert not offered([0.2] * 9, lag=2.0).is_sustained
    refused = offered([0.2] * 9)
    assert not replace(refused, seen=[*refused.seen, REFUSED]).is_sustained


def test_receipts_of_the_log_and_of_the_database_say_the_same(tmp_path: Path) -> None:
    file = tmp_path / "router.db"
    engine = create_engine(f"sqlite:///{file}")
    metadata.create_all(engine, tables=[request_records])
    row = dict.fromkeys(("client_id", "target", "asked_model", "message", "cancelled_by"), "")
    shared = {
        **row,
        "incarnation": "i",
        "router": "r",
        "priority": 1,
        "arrived_at": 1.0,
        "decisions": b"",
        "tenant": "a",
    }
    receipt = receipt_pb2.Receipt(usage=usage_pb2.Usage(completion_tokens=16)).SerializeToString()
    rows = [
        {"key": 1, "number": 1, "request_id": "q", "ended_at": 2.0, "reason": 0, "receipt": receipt},
        {"key": 2, "number": 2, "request_id": "p", "ended_at": 2.0, "reason": 95, "receipt": None},
        {"key": 3, "number": 0, "request_id": "o", "ended_at": None, "reason": 0, "receipt": None},
    ]
    with engine.begin() as connection:
        connection.execute(insert(request_records), [{**shared, **each} for each in rows])
    engine.dispose()
    assert Reason(95) is Reason.ROUTER_LOST
    assert list(receipts_of_database(file)) == [RECEIPT, replace(LOST, request_id="p", written_at=2.0)]
    assert (
        receipt_of_log({"request_id": "q", "outcome": "completed", "reason": None, "completion_tokens": 16}) == RECEIPT
    )


def test_half_a_line_of_a_killed_router_costs_no_line_of_its_successor(tmp_path: Path) -> None:
    lines = [b'{"component":"a","n":1}', b'{"component":"weft.router","requ{"component":"a","n":2}', b'{"compo']
    (tmp_path / "log").write_bytes(b"\n".join(lines))
    assert [line["n"] for line in log_lines(tmp_path / "log")] == [1, 2]
    (tmp_path / "log").write_bytes(b"nothing\n")
    with pytest.raises(ValueError, match="Expecting value"):
        list(log_lines(tmp_path / "log"))
