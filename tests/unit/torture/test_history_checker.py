"""The checker of histories: a good one passes, and every promise that can be broken is missed when it is."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from tools.torture.checker import check, rules_broken
from tools.torture.history import (
    CANCELLED,
    COMPLETED,
    FAILED,
    AttemptRow,
    Event,
    History,
    KeptTask,
    Kind,
    expected_text,
)
from tools.torture.plan import MAX_ATTEMPTS, MAX_FREE_ATTEMPTS

PENDING, RUNNING = 1, 2


def _event(kind: Kind, at: float, task: str = "t1", **fields: Any) -> Event:
    return Event(kind=kind, at=at, source=fields.pop("source", "s0"), task=task, **fields)


def _row(attempt: int, claimed_at: float, ended_at: float | None, reason: int = 0) -> AttemptRow:
    return AttemptRow(attempt=attempt, owner=f"r{attempt}", claimed_at=claimed_at, ended_at=ended_at, reason=reason)


ROWS = (_row(1, 1.0, 3.0, reason=30), _row(2, 4.0, 6.0))
STORED = KeptTask(id="t1", state=COMPLETED, attempt=2, key="k1", attempts=ROWS)
SERVED = KeptTask(
    id="t1",
    state=COMPLETED,
    attempt=2,
    tokens=3,
    text=expected_text(3),
    answer_attempts=frozenset({2}),
    finishes=1,
    attempts=ROWS,
)
GOOD = (
    Event(kind=Kind.INTENT, at=0.0, source="s0", key="k1", tokens=3),
    _event(Kind.ACKED, 0.5, key="k1", state=PENDING),
    _event(Kind.CLAIMED, 1.0, attempt=1, owner="r1", source="router"),
    _event(Kind.BEGUN, 1.1, source="backend"),
    _event(Kind.SEEN, 2.0, state=RUNNING, attempt=1),
    _event(Kind.REVERTED, 3.0, attempt=1, owner="r2", source="router"),
    _event(Kind.CLAIMED, 4.0, attempt=2, owner="r2", source="router"),
    _event(Kind.BEGUN, 4.1, source="backend"),
    _event(Kind.ENDED, 6.0, attempt=2, owner="r2", state=COMPLETED, source="router"),
    _event(Kind.LEASE_LOST, 7.0, attempt=1, owner="r1", source="router"),
    _event(Kind.SEEN, 8.0, state=COMPLETED, attempt=2),
)


def _history(
    *more: Event,
    without: Kind | None = None,
    served: KeptTask | None = SERVED,
    stored: KeptTask | None = STORED,
    damage: tuple[str, ...] = (),
) -> History:
    events = [event for event in GOOD if event.kind is not without]
    return History(
        events=[*events, *more],
        served=_by_id([served]),
        stored=_by_id([stored]),
        usage=_USAGE if stored else None,
        damage=damage,
    )


_USAGE = {"completed_count": 1, "failed_count": 0, "cancelled_count": 0, "rejected_count": 0, "retried_count": 1}


def _by_id(tasks: Iterable[KeptTask | None]) -> dict[str, KeptTask]:
    return {task.id: task for task in tasks if task is not None}


def _cancelled(*more: Event) -> History:
    """Somebody ended it while its second attempt ran."""
    rows = (ROWS[0], replace(ROWS[1], reason=40))
    return History(
        events=[
            *(event for event in GOOD if event.state != COMPLETED),
            _event(Kind.CANCEL_INTENT, 5.0),
            _event(Kind.CANCELLED, 5.5, state=CANCELLED, source="router"),
            _event(Kind.CANCEL_ACKED, 5.6, state=CANCELLED),
            *more,
        ],
        served=_by_id([replace(SERVED, state=CANCELLED, text="tok0", finishes=0, attempts=rows)]),
        stored=_by_id([replace(STORED, state=CANCELLED, attempts=rows)]),
    )


def test_restarted_and_completed_task_violates_no_rule() -> None:
    assert check(_history()) == []


def test_task_cancelled_while_running_violates_no_rule() -> None:
    assert check(_cancelled()) == []


def test_late_cancel_violates_no_rule() -> None:
    late = (_event(Kind.CANCEL_INTENT, 7.0), _event(Kind.CANCEL_ACKED, 7.1, state=COMPLETED))
    assert check(_history(*late)) == []


def test_concurrent_cancels_of_one_task_violate_no_rule() -> None:
    assert check(_cancelled(_event(Kind.CANCEL_ACKED, 5.61, state=CANCELLED, source="s1"))) == []


def test_overlapping_calls_may_be_answered_in_either_order() -> None:
    """A look that was made before the end was told may have been read before it, and arrive after it."""
    crossed = _event(Kind.SEEN, 9.0, state=RUNNING, attempt=2, asked_at=5.9)
    assert check(_history(crossed)) == []
    crossed_attempt = (
        _event(Kind.SEEN, 4.5, state=RUNNING, attempt=2, asked_at=4.4),
        _event(Kind.SEEN, 4.6, state=RUNNING, attempt=1, asked_at=2.9),
    )
    assert check(_cancelled(*crossed_attempt)) == []


def test_submission_with_an_unknown_outcome_may_or_may_not_exist() -> None:
    unknown = Event(kind=Kind.INTENT, at=9.0, source="s0", key="k2", tokens=3)
    assert check(_history(unknown)) == []
    arrived = KeptTask(id="t2", state=FAILED, attempt=0, key="k2")
    history = _history(unknown)
    history = replace(history, usage=_USAGE | {"failed_count": 1})
    kept = replace(history, stored={**history.stored, "t2": arrived}, served={**history.served, "t2": arrived})
    assert check(kept) == []


def _refusal(note: str) -> Event:
    return _event(Kind.TURNED_AWAY, 2.5, task="", note=note)


@pytest.mark.parametrize("note", ["UNAVAILABLE SERVICE_UNAVAILABLE the router's database failed", "UNKNOWN - gone"])
def test_refusal_with_a_reason_and_a_router_crash_violate_no_rule(note: str) -> None:
    assert check(_history(_refusal(note))) == []


_BROKEN: dict[str, tuple[str, History]] = {
    "the service does not know an acknowledged task": ("lost", _history(served=None)),
    "the database does not know an acknowledged task": ("lost", _history(stored=None)),
    "a reader was told that there is none": ("lost", _history(_event(Kind.MISSED, 2.0))),
    "it never reached its end": (
        "unfinished",
        _history(without=Kind.ENDED, stored=replace(STORED, state=RUNNING), served=replace(SERVED, state=RUNNING)),
    ),
    "an observer saw another end": ("two terminals", _history(_event(Kind.SEEN, 6.5, state=FAILED, source="s1"))),
    "service and database disagree": ("two terminals", _history(served=replace(SERVED, state=FAILED))),
    "a router ended it otherwise": (
        "two terminals",
        _history(_event(Kind.CANCELLED, 5.0, state=CANCELLED, source="router")),
    ),
    "it was over and ran again": ("revived", _history(_event(Kind.SEEN, 9.0, state=RUNNING))),
    "it was over, and a call made after that was answered saw it run": (
        "revived",
        _history(_event(Kind.SEEN, 9.0, state=RUNNING, attempt=2, asked_at=8.001)),
    ),
    "an earlier attempt was seen after a later one": (
        "revived",
        _cancelled(
            _event(Kind.SEEN, 4.5, state=RUNNING, attempt=2, asked_at=4.4),
            _event(Kind.SEEN, 4.7, state=RUNNING, attempt=1, asked_at=4.6),
        ),
    ),
    "a router had written its end, and somebody else who asked later saw it run": (
        "hidden end",
        _history(_event(Kind.SEEN, 7.0, state=RUNNING, attempt=2, source="s1", asked_at=6.1)),
    ),
    "it was ended twice by one attempt": (
        "double",
        _history(_event(Kind.ENDED, 6.1, attempt=2, owner="r2", state=COMPLETED, source="router")),
    ),
    "two calls cancelled it": (
        "double",
        _cancelled(_event(Kind.CANCELLED, 5.51, state=CANCELLED, source="router")),
    ),
    "it was completed and cancelled": (
        "double",
        _cancelled(_event(Kind.ENDED, 5.4, attempt=2, owner="r2", state=CANCELLED, source="router")),
    ),
    "it was ended by an attempt that was given up": (
        "double",
        _history(_event(Kind.ENDED, 6.1, attempt=1, owner="r1", state=COMPLETED, source="router"), without=Kind.ENDED),
    ),
    "it was ended by an attempt that had lost its lease": (
        "double",
        replace(
            _history(),
            events=[
                *(event for event in GOOD if event.kind not in (Kind.ENDED, Kind.REVERTED)),
                _event(Kind.ENDED, 5.0, attempt=1, owner="r1", state=COMPLETED, source="router"),
            ],
        ),
    ),
    "a backend began what nobody had claimed": ("start without claim", _history(without=Kind.CLAIMED)),
    "a backend began before the claim": ("start without claim", _history(_event(Kind.BEGUN, 0.9, source="backend"))),
    "two claims of one attempt": (
        "attempt claimed twice",
        _history(_event(Kind.CLAIMED, 4.5, attempt=2, owner="r3", source="router")),
    ),
    "an attempt began before the one before was over": (
        "overlap",
        _history(stored=replace(STORED, attempts=(ROWS[0], _row(2, 2.5, 6.0)))),
    ),
    "an attempt began while the one before was not over at all": (
        "overlap",
        _history(stored=replace(STORED, attempts=(_row(1, 1.0, None, reason=30), ROWS[1]))),
    ),
    "an attempt is not kept": ("attempts", _history(stored=replace(STORED, attempts=ROWS[1:]))),
    "a claim is kept as another's": (
        "attempts",
        _history(stored=replace(STORED, attempts=(ROWS[0], replace(ROWS[1], owner="r9")))),
    ),
    "an attempt of a task at its end still runs": (
        "attempts",
        _history(stored=replace(STORED, attempts=(ROWS[0], replace(ROWS[1], ended_at=None)))),
    ),
    "it is completed by an attempt that failed": (
        "attempts",
        _history(stored=replace(STORED, attempts=(ROWS[0], replace(ROWS[1], reason=30)))),
    ),
    "a good attempt was not the last": (
        "attempts",
        _history(stored=replace(STORED, attempts=(replace(ROWS[0], reason=0), ROWS[1]))),
    ),
    "a cancel was acknowledged and it is completed": (
        "cancel",
        _history(_event(Kind.CANCEL_INTENT, 5.0), _event(Kind.CANCEL_ACKED, 5.1, state=CANCELLED)),
    ),
    "a cancel was acknowledged and it ran on": ("cancel", _cancelled(_event(Kind.CANCEL_ACKED, 5.7, state=RUNNING))),
    "it is cancelled and nobody asked": (
        "cancel",
        replace(_cancelled(), events=[event for event in _cancelled().events if event.kind is not Kind.CANCEL_INTENT]),
    ),
    "the answer is of two attempts": ("answer", _history(served=replace(SERVED, answer_attempts=frozenset({1, 2})))),
    "the answer is of an attempt that was lost": (
        "answer",
        _history(served=replace(SERVED, answer_attempts=frozenset({1}))),
    ),
    "the answer is cut off": ("answer", _history(served=replace(SERVED, text=expected_text(2)))),
    "the answer is spliced": ("answer", _history(served=replace(SERVED, text="tok0 tok1tok0 tok1 tok2"))),
    "the answer cannot be told to its end": ("answer", _history(served=replace(SERVED, is_watch_complete=False))),
    "the answer has no end": ("answer", _history(served=replace(SERVED, finishes=0))),
    "one key is two tasks": ("key", _history(_event(Kind.ACKED, 9.0, task="t2", key="k1"))),
    "one task is two keys": ("key", _history(_event(Kind.ACKED, 9.0, key="k2"))),
    "nobody meant to send it": ("key", _history(without=Kind.INTENT)),
    "one key was taken with two bodies": ("key", _history(Event(kind=Kind.CONTRADICTED, at=9.0, key="k1"))),
    "an end is not counted": ("usage", replace(_history(), usage=_USAGE | {"completed_count": 0})),
    "an end is counted twice": ("usage", replace(_history(), usage=_USAGE | {"completed_count": 2})),
    "an attempt is counted as the end of another task": (
        "usage",
        replace(_history(), usage=_USAGE | {"failed_count": 1, "retried_count": 0}),
    ),
    "a router failed without a reason": (
        "untyped refusal",
        _history(_refusal("UNAVAILABLE INTERNAL an internal error")),
    ),
    "a router answered an exception that it did not handle": (
        "untyped refusal",
        _history(_refusal("UNKNOWN - Unexpected <class 'OSError'>: no route")),
    ),
    "a router refused without a reason": ("untyped refusal", _history(_refusal("RESOURCE_EXHAUSTED - busy"))),
    "a task failed more often than allowed": (
        "too many attempts",
        _history(stored=replace(STORED, failures=MAX_ATTEMPTS + 1)),
    ),
    "a task was begun more often than allowed": (
        "too many attempts",
        _history(stored=replace(STORED, attempt=MAX_ATTEMPTS + MAX_FREE_ATTEMPTS + 1)),
    ),
    "an engine outlived its runner": ("orphan", replace(_history(), orphans=["engine 7 has no runner"])),
    "the database is damaged": ("damage", _history(damage=("row 7 missing from index",))),
}


@pytest.mark.parametrize("what", _BROKEN)
def test_violation_is_detected(what: str) -> None:
    rule, history = _BROKEN[what]
    assert rule in rules_broken(check(history)), what


def test_every_rule_has_a_history_that_violates_it() -> None:
    rules = {violation.rule for _, history in _BROKEN.values() for violation in check(history)}
    assert rules == {rule for rule, _ in _BROKEN.values()}


def _stream(kind: Kind, text: str | None, tokens: int = 3) -> Event:
    return _event(kind, 110.0, task="stream-1", key="gateway-1", asked_at=100.0, tokens=tokens, text=text)


_KILLED_GATEWAY = _event(Kind.KILLED, 105.0, task="", key="gateway-1")
_KILLED_ENGINE = _event(Kind.KILLED, 105.0, task="", key="backend 7")
_BEGUN = _event(Kind.BEGUN, 101.0, task="stream-1", source="backend 7")


@pytest.mark.parametrize(
    ("kind", "text", "is_wrong"),
    [
        (Kind.STREAM_ENDED, "tok0 tok1 tok2", False),
        (Kind.STREAM_ENDED, None, False),
        (Kind.STREAM_ENDED, "", True),
        (Kind.STREAM_ENDED, "tok0 tok1", True),
        (Kind.STREAM_ENDED, "tok0 tok1 tok1 tok2", True),
        (Kind.STREAM_FAILED, "", False),
        (Kind.STREAM_FAILED, "tok0 to", False),
        (Kind.STREAM_FAILED, "tok0 tok0", True),
        (Kind.STREAM_BROKEN, "tok0 tok2", True),
        (Kind.STREAM_BROKEN, "tok0 tok1 tok2 tok3", True),
    ],
)
def test_no_character_of_a_stream_is_lost_or_doubled_before_its_end(
    kind: Kind, text: str | None, is_wrong: bool
) -> None:
    found = check(_history(_KILLED_GATEWAY, _KILLED_ENGINE, _BEGUN, _stream(kind, text)))
    assert rules_broken(found) == ({"stream text": 1} if is_wrong else {})


@pytest.mark.parametrize(
    ("events", "is_wrong"),
    [
        ((_KILLED_ENGINE, _BEGUN), False),
        ((_KILLED_ENGINE,), True),
        ((_BEGUN,), True),
        ((_KILLED_GATEWAY, _BEGUN), True),
    ],
)
def test_stream_may_fail_only_with_an_engine_that_had_begun_it(events: tuple[Event, ...], is_wrong: bool) -> None:
    found = check(_history(*events, _stream(Kind.STREAM_FAILED, "tok0")))
    assert rules_broken(found) == ({"failed stream": 1} if is_wrong else {})


@pytest.mark.parametrize(
    ("has_spares", "killed", "reason", "is_wrong"),
    [
        (False, "backend 7", "server_died", False),
        (True, "backend 7", "server_died", True),
        (False, "backend 7", "worker_lost", True),
        (False, "runner-steady", "worker_lost", True),
        (False, "gateway-2", "server_died", True),
    ],
)
def test_stream_that_no_engine_has_begun_may_fail_only_with_the_only_engine(
    has_spares: bool, killed: str, reason: str, is_wrong: bool
) -> None:
    why = f'HTTP 502: {{"error":{{"code":"{reason}"}}}}'
    failed = _event(Kind.STREAM_FAILED, 110.0, task="stream-1", key="gateway-1", asked_at=100.0, text="", note=why)
    history = _history(_event(Kind.KILLED, 101.0, task="", key=killed), failed)
    assert bool(check(replace(history, has_spares=has_spares))) == is_wrong


def _broken_stream(begun: float, at: float, gateway: str = "gateway-1") -> Event:
    return _event(Kind.STREAM_BROKEN, at, task="stream-1", key=gateway, asked_at=begun, note="it ended early")


@pytest.mark.parametrize(
    ("kills", "is_wrong"),
    [
        ([], True),
        ([("gateway-1", 105.0)], False),
        ([("gateway-1", 99.5)], False),
        ([("gateway-1", 95.0)], True),
        ([("gateway-1", 111.0)], True),
        ([("gateway-2", 105.0)], True),
    ],
)
def test_stream_may_break_only_with_its_gateway(kills: list[tuple[str, float]], is_wrong: bool) -> None:
    killed = [_event(Kind.KILLED, at, task="", key=gateway) for gateway, at in kills]
    found = check(_history(*killed, _broken_stream(100.0, 110.0)))
    assert rules_broken(found) == ({"broken stream": 1} if is_wrong else {})


@pytest.mark.parametrize(("slots", "is_wrong"), [(0, False), (1, True), (2, False)])
def test_backend_never_exceeds_its_slots(slots: int, is_wrong: bool) -> None:
    events = (
        _event(Kind.BEGUN, 20.0, task="stream-1", source="backend 7"),
        _event(Kind.LEFT, 21.0, task="stream-1", source="backend 7"),
        _event(Kind.BEGUN, 22.0, task="stream-2", source="backend 7"),
        _event(Kind.BEGUN, 22.5, task="stream-3", source="backend 7"),
    )
    found = check(replace(_history(*events, without=Kind.BEGUN), slots=slots))
    assert rules_broken(found) == ({"overbooked": 1} if is_wrong else {})


def test_backend_with_the_process_id_of_a_killed_one_starts_without_its_requests() -> None:
    """In two hours of kills, ids came again: a backend seemed to have the requests of a killed one."""
    first = _event(Kind.BEGUN, 20.0, task="stream-1", source="backend 7", key="10.0")
    second = _event(Kind.BEGUN, 30.0, task="stream-2", source="backend 7", key="25.0")
    assert not check(replace(_history(first, second, without=Kind.BEGUN), slots=1))
