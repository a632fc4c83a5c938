"""What a request log has for the database: each change once, bounded, and nothing where there is no writer."""

from datetime import UTC, datetime

from kit.request_endings import ending
from kit.scheduling import placement_request

from router_svc.policy.router_request import Request
from router_svc.request_log import RequestLog
from weft.api.common.v1 import receipt_pb2
from weft.kernel.errors.reasons import Reason

WALL = datetime(2026, 11, 23, 12, tzinfo=UTC)
MANY = 100


def log_of(max_ended: int = MANY) -> RequestLog:
    log = RequestLog()
    log.unwritten.keep(max_ended)
    return log


def arrive(log: RequestLog, key: int, age_seconds: float = 0.0) -> None:
    request = placement_request(f"r-{key}", age_seconds=age_seconds)
    log.note_arrival(Request.of(key, request, 0.0), WALL)


def test_no_records_are_collected_without_a_writer() -> None:
    log = RequestLog()
    arrive(log, 1)
    arrive(log, 2)
    log.note_end(ending(1, 1.0, Reason.UNSPECIFIED))
    assert log.unwritten.take(MANY).is_empty


def test_request_ended_before_it_was_taken_is_one_row_and_a_running_one_is_taken_once() -> None:
    log = log_of()
    arrive(log, 1)
    arrive(log, 2)
    log.note_end(ending(1, 1.0, Reason.UNSPECIFIED))
    taken = log.unwritten.take(MANY)
    assert ([each.key for each in taken.begun], [each.key for each in taken.ended]) == ([2], [1])
    assert log.unwritten.take(MANY).is_empty
    log.note_end(ending(2, 2.0, Reason.UNSPECIFIED))
    assert [each.key for each in log.unwritten.take(MANY).ended] == [2]


def test_late_receipt_requeues_its_request() -> None:
    log = log_of()
    arrive(log, 1)
    log.note_end(ending(1, 1.0, Reason.QUEUE_TIMEOUT))
    assert not log.unwritten.take(MANY).ended[0].read().HasField("receipt")
    log.note_end(ending(1, 1.0, Reason.QUEUE_TIMEOUT, receipt_pb2.Receipt(request_id="r-1")))
    assert log.unwritten.take(MANY).ended[0].read().HasField("receipt")


def test_ends_are_numbered_in_order() -> None:
    log = log_of()
    for key in (1, 2, 3):
        arrive(log, key)
    for key in (3, 1, 2):
        log.note_end(ending(key, 1.0, Reason.UNSPECIFIED))
    assert [(each.key, each.number) for each in log.unwritten.take(MANY).ended] == [(3, 1), (1, 2), (2, 3)]


def test_detached_request_has_no_end_record() -> None:
    log = log_of()
    for key in (1, 2):
        arrive(log, key)
    log.note_end(ending(1, is_closing=True))
    taken = log.unwritten.take(MANY)
    assert ([each.key for each in taken.begun], taken.ended) == ([1, 2], [])
    assert len(log._under_way) == 1


def test_returned_records_are_taken_again_and_superseded_by_newer_ones() -> None:
    log = log_of()
    for key in (1, 2):
        arrive(log, key, age_seconds=1.0)
    taken = log.unwritten.take(MANY)
    log.note_end(ending(1, 1.0, Reason.UNSPECIFIED))
    log.unwritten.give_back(taken, log.is_under_way)
    again = log.unwritten.take(MANY)
    assert ([each.key for each in again.begun], [each.key for each in again.ended]) == ([2], [1])
    assert again.placed_again == [("a", "r-1"), ("a", "r-2")]


def test_oldest_ends_beyond_the_bound_are_dropped_and_counted_also_when_returned() -> None:
    log = log_of(max_ended=2)
    for key in range(1, 6):
        arrive(log, key)
    for key in (1, 2, 3):
        log.note_end(ending(key, 1.0, Reason.UNSPECIFIED))
    assert log.unwritten.dropped_count == 1
    taken = log.unwritten.take(MANY)
    assert [each.key for each in taken.ended] == [2, 3]
    log.note_end(ending(4, 1.0, Reason.UNSPECIFIED))
    log.unwritten.give_back(taken, log.is_under_way)
    assert log.unwritten.dropped_count == 2
    assert [each.key for each in log.unwritten.take(MANY).ended] == [3, 4]


def test_batch_is_limited_per_kind() -> None:
    log = log_of()
    for key in range(10):
        arrive(log, key)
    for key in range(5):
        log.note_end(ending(key, 1.0, Reason.UNSPECIFIED))
    sizes = []
    while not (taken := log.unwritten.take(2)).is_empty:
        sizes.append((len(taken.begun), len(taken.ended)))
    assert sizes == [(2, 2), (2, 2), (1, 1)]
