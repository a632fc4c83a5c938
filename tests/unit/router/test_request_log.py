"""What a router remembers of requests, and how it forgets."""

import gc
from datetime import UTC, datetime, timedelta

import pytest
from kit.presence import present
from kit.request_endings import ending
from kit.scheduling import placement_request as asked

from router_svc.observer import RequestEnded
from router_svc.policy.decisions import FailedAttempt, Loads, Placed, Rejects, Waits, Wakes
from router_svc.policy.endpoints.candidates import Candidate, Readiness
from router_svc.policy.endpoints.choice import Choice, Considered
from router_svc.policy.router_request import Request
from router_svc.request_log import RequestLog, RequestLogLimits
from router_svc.request_servicer import request_record
from weft.api.common.v1 import receipt_pb2, signal_pb2
from weft.api.router.v1 import request_pb2 as pb
from weft.dispatch.fleet import FleetView
from weft.kernel.errors.error_tree import WeftError, quoting_engine
from weft.kernel.errors.reasons import Reason
from weft.kernel.requests.placement_request import PlacementRequest
from weft.kernel.requests.request_values import Operation, Priority

WALL = datetime(2026, 11, 20, 12, 0, tzinfo=UTC)
CANDIDATE = Candidate(
    model="qwen-2",
    pool="qwen",
    runner="titan",
    incarnation="run-1",
    readiness=Readiness.READY,
    slots=4,
    operations=frozenset({Operation.CHAT}),
)
BUSY = Considered(model="qwen-1", runner="atlas", score=0.25, gate="all 4 slots are busy")
FREE = Considered(model="qwen-2", runner="titan", score=0.75, chosen=True)


def record_of(log: RequestLog, request_id: str = "r-1", now: float = 0.0) -> pb.RequestRecord:
    entry = log.find(request_id, now)
    assert entry is not None
    return request_record(entry, with_decisions=True)


def kinds(record: pb.RequestRecord) -> list[str]:
    return [pb.DecisionRecord.Kind.Name(one.kind).removeprefix("KIND_").lower() for one in record.decisions]


def log_with(*requests: PlacementRequest) -> RequestLog:
    """Requests that have just arrived, with keys from 1 on."""
    log = RequestLog()
    for key, request in enumerate(requests, start=1):
        log.note_arrival(Request.of(key, request, 0.0), WALL)
    return log


def test_ended_requests_add_no_objects_to_the_garbage_collector() -> None:
    log, count = RequestLog(), 500
    choice = Choice(candidate=CANDIDATE, policy="least_loaded", score=FREE.score, others=(BUSY,), count=2)
    gc.collect()
    before = len(gc.get_objects())
    for key in range(count):
        log.note_arrival(Request.of(key, asked(f"r-{key}"), 0.0), WALL)
        log.note_decisions([Placed(key=key, candidate=CANDIDATE, attempt=1, choice=choice)], 0.0)
        log.note_end(ending(key, 1.0, Reason.UNSPECIFIED, receipt_pb2.Receipt(request_id=f"r-{key}")))
    gc.collect()
    assert len(log._ended) == count
    assert len(gc.get_objects()) - before < count / 10
    assert kinds(record_of(log, "r-7", 1.0)) == ["placed"]


def test_request_is_explained_from_arrival_to_receipt() -> None:
    log = RequestLog()
    labels = frozenset({"agent=sub", "team=a"})
    log.note_arrival(Request.of(1, asked(client_id="batch", priority=Priority.HIGH, labels=labels), 100.0), WALL)
    log.note_decisions(
        [Waits(key=1, position=2, reason="VRAM: needs 5.1 GiB", eta_seconds=9.0, considered=(BUSY,))], 100.0
    )
    log.note_decisions(
        [
            Wakes(model="qwen-2", runner="titan", max_wait_seconds=60.0, why="20 s of waiting are worth a swap of 8 s"),
            Loads(key=1, stage="waking qwen-2 on titan (0 s of at most 60 s)", progress=0.0, eta_seconds=8.0),
        ],
        101.0,
    )
    log.note_decisions([Loads(key=1, stage="waking qwen-2 on titan (4 s of at most 60 s)", progress=0.5)], 105.0)
    choice = Choice(candidate=CANDIDATE, policy="least_loaded", score=FREE.score, others=(BUSY,), count=2)
    log.note_decisions([Placed(key=1, candidate=CANDIDATE, attempt=1, choice=choice)], 109.0)
    log.note_failed(1, FailedAttempt(1, Reason.CONNECT_FAILED), 109.5)
    log.note_decisions([Placed(key=1, candidate=CANDIDATE, attempt=2)], 109.5)
    receipt = receipt_pb2.Receipt(request_id="r-1", outcome=receipt_pb2.OUTCOME_COMPLETED)
    log.note_end(ending(1, 112.0, Reason.UNSPECIFIED, receipt))

    record = record_of(log, now=112.0)
    assert (record.tenant, record.client_id, record.target) == ("a", "batch", "qwen")
    assert dict(record.labels) == {"agent": "sub"}, "those of the caller are not kept"
    assert record.state == pb.RequestRecord.STATE_ENDED
    assert record.receipt == receipt
    assert kinds(record) == ["queued", "load_started", "loading", "placed", "retried", "placed"]
    assert [one.age.ToNanoseconds() / 1e9 for one in record.decisions] == [0, 1, 1, 9, 9.5, 9.5]
    queued, started, _, placed, retried, _ = record.decisions
    assert (queued.detail, queued.candidates[0].gate) == (
        "VRAM: needs 5.1 GiB (position 2, about 9 s)",
        "all 4 slots are busy",
    )
    assert started.detail == "qwen-2 on titan is loaded: 20 s of waiting are worth a swap of 8 s"
    assert (placed.policy, placed.candidate_count) == ("least_loaded", 2)
    assert [(one.model, one.score, one.chosen) for one in placed.candidates] == [
        ("qwen-2", 0.75, True),
        ("qwen-1", 0.25, False),
    ]
    assert retried.detail == "attempt 1 failed before any content: connect_failed"
    assert record.arrive_time.ToDatetime(tzinfo=UTC) == WALL
    assert record.end_time.ToDatetime(tzinfo=UTC) == WALL + timedelta(seconds=12)


def test_state_is_the_last_status() -> None:
    log = log_with(asked())
    assert record_of(log).state == pb.RequestRecord.STATE_QUEUED
    log.note_decisions([Waits(key=1, position=7, reason="busy", eta_seconds=3.0)], 0.0)
    record = record_of(log)
    assert (record.queued.position, record.queued.reason, record.queued.eta.seconds) == (7, "busy", 3)
    log.note_decisions([Loads(key=1, stage="m loads on r", progress=0.5)], 0.0)
    record = record_of(log)
    assert record.state == pb.RequestRecord.STATE_LOADING
    assert (record.HasField("queued"), record.loading.progress) == (False, 0.5)
    log.note_decisions([Placed(key=1, candidate=CANDIDATE, attempt=1)], 0.0)
    record = record_of(log)
    assert (record.state, record.HasField("loading")) == (pb.RequestRecord.STATE_RUNNING, False)
    log.note_failed(1, FailedAttempt(1, Reason.WORKER_LOST), 0.0)
    assert record_of(log).state == pb.RequestRecord.STATE_QUEUED


def test_statuses_differing_only_in_figures_are_one_decision_with_the_newest_figures() -> None:
    log = log_with(asked())
    for position in range(500, 0, -1):
        log.note_decisions([Waits(key=1, position=position, reason="all slots are busy")], 0.0)
    record = record_of(log)
    assert kinds(record) == ["queued"]
    assert record.queued.position == 1


def test_wake_is_recorded_only_for_requests_waiting_for_that_model() -> None:
    log = RequestLog()
    for key, model in ((1, "qwen"), (2, "qwen-2")):
        log.note_arrival(Request.of(key, asked(f"r-{key}", model=model), 0.0), WALL)
    wakes = Wakes(model="qwen-2", runner="", max_wait_seconds=60.0)
    log.note_decisions(
        [
            Loads(key=1, stage="waking qwen (0 s)", progress=None),
            wakes,
            Loads(key=2, stage="waking qwen-2 (0 s)", progress=None),
        ],
        0.0,
    )
    assert kinds(record_of(log, "r-1")) == ["loading"]
    assert kinds(record_of(log, "r-2")) == ["load_started", "loading"]


def test_load_is_recorded_once_also_for_requests_that_learn_of_it_later() -> None:
    log = log_with(asked())
    log.note_decisions([Waits(key=1, position=1, reason="no model of qwen is loaded")], 0.0)
    log.note_decisions([Wakes(model="qwen-2", runner="titan", max_wait_seconds=60.0, why="there is room")], 2.0)
    log.note_decisions([Loads(key=1, stage="waking qwen-2 on titan (1 s of at most 60 s)", progress=None)], 3.0)
    log.note_decisions([Waits(key=1, position=1, reason="VRAM: another one was faster")], 4.0)
    log.note_decisions([Loads(key=1, stage="qwen-2 loads on titan", progress=0.5)], 5.0)
    record = record_of(log)
    assert kinds(record) == ["queued", "load_started", "loading", "queued", "loading"]
    assert record.decisions[1].age.seconds == 2
    assert record.decisions[1].detail == "qwen-2 on titan is loaded: there is room"


def test_load_started_before_a_request_arrived_is_not_attributed_to_it() -> None:
    log = RequestLog(RequestLogLimits(max_wakes=2))
    for number in range(5):
        log.note_decisions([Wakes(model=f"m-{number}", runner="", max_wait_seconds=60.0)], 1.0)
    assert list(log._wakes) == ["m-3", "m-4"]
    log.note_arrival(Request.of(1, asked(), 2.0), WALL)
    log.note_decisions([Loads(key=1, stage="waking m-4 (1 s of at most 60 s)", progress=None)], 2.0)
    assert kinds(record_of(log)) == ["loading"]


def test_rejection_ends_the_request_and_a_later_end_adds_only_the_receipt() -> None:
    log = log_with(asked())
    log.note_decisions([Rejects(key=1, reason=Reason.QUEUE_FULL, message="the queue is full")], 1.0)
    log.note_end(ending(1, 5.0, Reason.CANCELLED, receipt_pb2.Receipt(outcome=receipt_pb2.OUTCOME_REJECTED)))
    record = record_of(log)
    assert (record.reason, record.message) == (Reason.QUEUE_FULL.value, "the queue is full")
    assert record.receipt.outcome == receipt_pb2.OUTCOME_REJECTED
    assert record.end_time.ToDatetime(tzinfo=UTC) == WALL + timedelta(seconds=1)
    assert kinds(record) == ["rejected"]


def test_refusal_before_the_queue_is_recorded() -> None:
    log = log_with(asked())
    log.note_end(ending(1, 0.0, refusal=WeftError(Reason.RATE_LIMIT_EXCEEDED, "Tenant a exceeded 1 req/min")))
    record = record_of(log)
    assert (record.reason, kinds(record)) == (Reason.RATE_LIMIT_EXCEEDED.value, ["rejected"])
    assert len(log._under_way) == 0


def test_request_of_a_departed_caller_is_cancelled() -> None:
    log = log_with(asked())
    log.note_end(ending(1, 3.0))
    log.note_end(ending(1, 4.0, Reason.UNSPECIFIED))
    assert record_of(log).reason == Reason.CANCELLED.value


def test_request_placed_again_keeps_its_first_arrival() -> None:
    log = RequestLog()
    log.note_arrival(Request.of(1, asked(age_seconds=20.0), 100.0), WALL)
    log.note_decisions([Placed(key=1, candidate=CANDIDATE, attempt=1)], 101.0)
    record = record_of(log)
    assert record.arrive_time.ToDatetime(tzinfo=UTC) == WALL - timedelta(seconds=20)
    assert record.decisions[0].age.seconds == 21


def test_tenant_sees_only_its_own_requests() -> None:
    log = log_with(asked(tenant="a"), asked("r-2", tenant="b"))
    assert log.find("r-1", 0.0, "a") is not None
    assert log.find("r-1", 0.0, "b") is None
    entries, total = log.under_way(10, "b")
    assert ([entry.spec.request_id for entry in entries], total) == (["r-2"], 1)


def test_tenant_cannot_hide_a_request_of_another_by_reusing_its_id() -> None:
    log = log_with(asked(tenant="a", model="mine"), asked(tenant="b", model="theirs"))
    for tenant, target in (("a", "mine"), ("b", "theirs"), ("", "theirs")):
        entry = log.find("r-1", 0.0, tenant)
        assert isinstance(entry, Request)
        assert entry.spec.model == target


def test_forgotten_requests_leave_no_state() -> None:
    log = RequestLog(RequestLogLimits(max_ended=2))
    for key in range(50):
        log.note_arrival(Request.of(key, asked(f"r-{key}", tenant=f"t-{key % 3}"), 0.0), WALL)
        log.note_end(ending(key, 0.0))
    assert len(log._newest) == len(log._newest_of_tenant) == len(log._ended) == 2


def test_later_of_two_requests_with_one_id_is_found_after_the_earlier_is_forgotten() -> None:
    log = RequestLog(RequestLogLimits(max_ended=1))
    log.note_arrival(Request.of(1, asked(model="first"), 0.0), WALL)
    log.note_arrival(Request.of(2, asked(model="second"), 0.0), WALL)
    log.note_end(ending(1, 1.0))
    assert record_of(log).target == "second"
    log.note_arrival(Request.of(3, asked("r-3"), 2.0), WALL)
    log.note_end(ending(3, 2.0))
    assert len(log._ended) == 1, "the first one is forgotten"
    assert record_of(log, now=2.0).target == "second"


def test_requests_are_forgotten_an_hour_after_their_end_and_not_before() -> None:
    log = log_with(asked())
    log.note_arrival(Request.of(2, asked("r-2"), 0.0), WALL)
    log.note_end(ending(1, 10.0))
    assert log.find("r-1", 3_610.0) is not None
    assert log.find("r-1", 3_610.1) is None
    assert log.find("r-2", 10_000.0) is not None, "it still goes on"
    assert len(log._ended) == 0


def test_request_log_stays_within_its_bound() -> None:
    limits = RequestLogLimits(max_ended=5, max_under_way=3, max_decisions=4)
    log = RequestLog(limits)
    for key in range(20):
        log.note_arrival(Request.of(key, asked(f"r-{key}"), 0.0), WALL)
        for turn in range(10):
            log.note_decisions([Waits(key=key, position=1, reason=f"reason {turn}")], float(turn))
        if key % 2:
            log.note_end(ending(key, 10.0, Reason.UNSPECIFIED))
        assert len(log._under_way) <= 3
        assert len(log._ended) <= 5
    assert log.find("r-19", 10.0) is None, "beyond what may be under way nothing is noted, and nothing fails"
    details = [one.detail for one in record_of(log, "r-0").decisions]
    assert details == [f"reason {turn} (position 1)" for turn in (6, 7, 8, 9)]


def test_receipt_too_large_even_without_signals_keeps_its_outcome() -> None:
    log = log_with(asked())
    receipt = receipt_pb2.Receipt(outcome=receipt_pb2.OUTCOME_FAILED, left_premises=True, model="m" * 20_000)
    for _ in range(400):
        receipt.attempts.add(runner="x" * 128)
    log.note_end(ending(1, 1.0, Reason.WORKER_LOST, receipt))
    kept = record_of(log).receipt
    assert (kept.outcome, kept.left_premises, len(kept.attempts)) == (receipt_pb2.OUTCOME_FAILED, True, 0)


def test_bug_task_with_hundreds_of_attempts_was_recorded_without_its_tokens() -> None:
    """Usage had them, so the two did not agree."""
    log = log_with(asked())
    receipt = receipt_pb2.Receipt(outcome=receipt_pb2.OUTCOME_COMPLETED, price_nanodollars=7)
    receipt.usage.prompt_tokens = 39
    for _ in range(400):
        receipt.attempts.add(runner="x" * 64, message="busy")
    log.note_end(ending(1, 1.0, Reason.UNSPECIFIED, receipt))
    kept = record_of(log).receipt
    assert (kept.usage.prompt_tokens, kept.price_nanodollars, len(kept.attempts)) == (39, 7, 0)


def test_receipt_with_a_reason_of_a_newer_version_still_ends_its_request() -> None:
    log = log_with(asked())
    log.note_end(ending(1, 1.0, Reason.UNSPECIFIED, receipt_pb2.Receipt(reason=9_999)))  # type: ignore[arg-type]
    assert record_of(log).reason == Reason.INTERNAL.value


def test_oversized_receipt_is_kept_without_signals() -> None:
    log = log_with(asked())
    receipt = receipt_pb2.Receipt(outcome=receipt_pb2.OUTCOME_COMPLETED, model="m")
    receipt.signals.extend(signal_pb2.Signal(name="X" * 300) for _ in range(64))
    log.note_end(ending(1, 1.0, Reason.UNSPECIFIED, receipt))
    kept = record_of(log).receipt
    assert (kept.model, len(kept.signals), len(receipt.signals)) == ("m", 0, 64)


DEATH = "the engine died while it processed the request (signal SIGKILL)"


@pytest.mark.parametrize("is_retried", [True, False])
def test_failed_attempt_counts_as_retried_only_after_a_new_placement(*, is_retried: bool) -> None:
    log = log_with(asked())
    log.note_decisions([Placed(key=1, candidate=CANDIDATE, attempt=1)], 0.0)
    log.note_failed(1, FailedAttempt(1, Reason.SERVER_DIED, DEATH), 1.0)
    assert kinds(record_of(log)) == ["placed", "failed"]
    decision = Placed(key=1, candidate=CANDIDATE, attempt=2) if is_retried else refused()
    log.note_decisions([decision], 2.0)
    record = record_of(log)
    assert kinds(record) == (["placed", "retried", "placed"] if is_retried else ["placed", "failed", "rejected"])
    assert record.decisions[1].detail == f"attempt 1 failed before any content: server_died: {DEATH}"
    assert is_retried or record.message == DEATH, "the error that its caller got"


def refused() -> Rejects:
    return Rejects(key=1, reason=Reason.SERVER_DIED, message="attempt 1 failed and is not retried: no other runner")


def test_attempt_that_failed_after_content_is_a_decision_with_its_error() -> None:
    log = log_with(asked())
    log.note_decisions([Placed(key=1, candidate=CANDIDATE, attempt=1)], 0.0)
    receipt = receipt_pb2.Receipt(outcome=receipt_pb2.OUTCOME_FAILED)
    receipt.time_to_first_token.FromMilliseconds(20)
    receipt.attempts.add(runner="titan", reason=Reason.SERVER_DIED.value, message=DEATH)
    log.note_end(ending(1, 1.0, Reason.SERVER_DIED, receipt))
    record = record_of(log)
    assert kinds(record) == ["placed", "failed"]
    assert (
        record.decisions[1].detail
        == f"attempt 1 failed after its answer had begun and is not retried: server_died: {DEATH}"
    )
    assert record.message == DEATH


def test_bug_attempt_of_a_task_with_a_further_attempt_was_recorded_as_not_retried() -> None:
    log, spec = RequestLog(), asked(request_id="task-1", task_id="task-1")
    task = present(log.begin_task(spec, 0.0, 0.0, WALL))
    for key, reason in ((1, Reason.SERVER_DIED), (2, Reason.SERVER_DIED), (3, Reason.UNSPECIFIED)):
        request = Request.of(key, spec, 0.0)
        log.note_arrival(request, WALL)
        log.note_decisions([Placed(key=key, candidate=CANDIDATE, attempt=1)], 0.0)
        receipt = receipt_pb2.Receipt()
        receipt.time_to_first_token.FromMilliseconds(20)
        receipt.attempts.add(runner="titan", reason=reason.value)
        log.note_end(RequestEnded(request=request, at=1.0, view=FleetView(), reason=reason, receipt=receipt))
        assert "not retried" not in str(record_of(log, "task-1").decisions)
    log.end_task(task, receipt_pb2.Receipt(outcome=receipt_pb2.OUTCOME_COMPLETED), "", 2.0)
    record = record_of(log, "task-1")
    assert kinds(record) == ["placed", "retried", "placed", "retried", "placed"]
    assert "not retried" not in str(record.decisions)


def test_bug_task_with_refused_offers_was_queued_without_a_reason() -> None:
    log, spec = RequestLog(), asked(request_id="task-1", task_id="task-1")
    log.begin_task(spec, 0.0, 0.0, WALL)
    for key, seconds in ((1, 5), (2, 10)):
        request = Request.of(key, spec, 0.0)
        log.note_arrival(request, WALL)
        message = f"qwen could not be woken: there is no file; next try in {seconds} s"
        log.note_decisions([Rejects(key=key, reason=Reason.WAKE_FAILED, message=message)], 0.0)
        log.note_end(RequestEnded(request=request, at=1.0, view=FleetView(), reason=Reason.WAKE_FAILED, receipt=None))
        record = record_of(log, "task-1")
        assert (record.queued.reason, kinds(record)) == (message, ["rejected"])


def test_engine_log_lines_are_not_listed() -> None:
    log = log_with(asked())
    receipt = receipt_pb2.Receipt(outcome=receipt_pb2.OUTCOME_FAILED)
    receipt.attempts.add(engine_exit="signal SIGKILL", engine_log=["loaded"])
    log.note_end(ending(1, 1.0, Reason.SERVER_DIED, receipt))
    (ended,), _ = log.ended(1, 1.0, "", lambda _: True)
    assert list(request_record(ended, with_decisions=True).receipt.attempts[0].engine_log) == ["loaded"]
    (listed,) = request_record(ended, with_decisions=False).receipt.attempts
    assert (listed.engine_exit, list(listed.engine_log)) == ("signal SIGKILL", [])


def test_running_requests_are_listed_oldest_first_and_counted_beyond_the_limit() -> None:
    log = RequestLog()
    for key, age in enumerate((0.0, 30.0, 10.0)):
        log.note_arrival(Request.of(key, asked(f"r-{age:g}", age_seconds=age), 100.0), WALL)
    entries, total = log.under_way(2)
    assert ([entry.spec.request_id for entry in entries], total) == (["r-30", "r-10"], 3)


@pytest.mark.parametrize("call", ["decisions", "failure", "refusal", "end"])
def test_event_for_an_unknown_key_is_ignored(call: str) -> None:
    log = RequestLog()
    match call:
        case "decisions":
            log.note_decisions([Waits(key=9, position=1, reason="x"), Loads(key=9, stage="x", progress=None)], 0.0)
        case "failure":
            log.note_failed(9, FailedAttempt(1, Reason.WORKER_LOST), 0.0)
        case "refusal":
            log.note_end(ending(9, 0.0, refusal=WeftError(Reason.QUEUE_FULL, "x")))
        case _:
            log.note_end(ending(9, 0.0))
    assert (len(log._under_way), len(log._ended)) == (0, 0)


def test_bug_token_count_of_a_model_without_a_tokenizer_was_a_failed_request() -> None:
    """The workbench asks before it sends; it estimates when the model cannot count."""
    for step in ("refused", "answered"):
        log = RequestLog()
        spec = asked("r", operation=Operation.TOKENIZE)
        request = Request.of(1, spec, 0.0)
        log.note_arrival(request, datetime(2026, 11, 29, tzinfo=UTC))
        if step == "refused":
            log.note_decisions([Rejects(key=1, reason=Reason.UNSUPPORTED_OPERATION, message="no")], 0.0)
        ended = ending(spec, 1.0, Reason.UNSUPPORTED_OPERATION)
        assert not ended.is_counted
        log.note_end(ended)
        assert (log.ended(9, 1.0, "", lambda _: True)[1], log.under_way(9)[1], log.find("r", 1.0)) == (0, 0, None)
        assert ending(spec, 1.0, Reason.BACKEND_ERROR).is_counted


def test_refusals_are_recorded_without_words_of_an_engine() -> None:
    log = log_with(asked())
    error = quoting_engine(WeftError(Reason.QUEUE_FULL, "the engine said: a prompt"), "the engine is full")
    log.note_end(ending(1, 0.0, refusal=error))
    assert "a prompt" not in str(record_of(log))
