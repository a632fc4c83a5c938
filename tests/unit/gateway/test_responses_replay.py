"""From the events of a task's watch to the events of its response."""

import json
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any

import pytest
from answer_events import Event, piece, started
from google.protobuf.message import Message
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.messages import changed, watched
from test_responses_sdk_stream import BEFORE, DELTA, FINISH, NOTICE, end, events_in, read

from gateway.gateway_config import ResponseEnvelope
from gateway.responses.background import origin_of, read_origin
from gateway.responses.output import task_of
from gateway.responses.replay import (
    FROM_THE_START,
    BackgroundRequest,
    BackgroundStream,
    Replay,
    first_number,
    require_resumable,
)
from gateway.responses.schema import ResponsesRequest
from weft.api.common.v1 import warning_pb2
from weft.api.router.v1 import task_pb2
from weft.durable.responses import background_response_id
from weft.durable.tasks import event_number, task_error
from weft.kernel.errors.error_tree import FieldError, WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.time.timestamps import stamp_of
from weft.kernel.values.names import new_id
from weft_testing.fake_clock import FakeClock

BORN = datetime(2026, 3, 1, tzinfo=UTC)
PENDING = task_pb2.Task(
    id="task-" + "0123456789abcdef01234567",
    tenant="a",
    state=task_pb2.TASK_STATE_PENDING,
    model="chat",
    create_time=stamp_of(BORN),
    max_attempts=5,
)
WARNING = warning_pb2.Warning(code=warning_pb2.WARNING_CODE_UNSUPPORTED_PARAMETER, field="x", message="not used")
HELLO = [
    started(),
    piece("Hel"),
    piece("lo"),
]


def request(**fields: object) -> BackgroundRequest:
    asked = ResponsesRequest.model_validate({"model": "chat", "input": "hi", "background": True, **fields})
    return BackgroundRequest(params=asked, warnings=[WARNING])


def replay(
    task: task_pb2.Task = PENDING, *, after: int = FROM_THE_START, asked: BackgroundRequest | None = None
) -> Replay:
    return Replay(asked or request(), task, FakeClock(), starting_after=after)


def test_background_response_keeps_the_envelope_of_its_submission() -> None:
    body = json.dumps({"model": "chat", "input": "hi", "background": True}).encode()
    for form in ResponseEnvelope:
        asked = read_origin(origin_of(body, (), (), (), form), PENDING.id)
        document = BackgroundStream(asked, PENDING, 1, FakeClock()).document
        assert ("output_text" in json.loads(document.render("queued"))) is (form is ResponseEnvelope.POOL)


def running(attempt: int = 1, events: int = 0) -> task_pb2.Task:
    last = event_number(attempt, events) if events else 0
    return changed(PENDING, state=task_pb2.TASK_STATE_RUNNING, attempt=attempt, last_event=last)


def ended(
    state: "task_pb2.TaskState.ValueType" = task_pb2.TASK_STATE_COMPLETED, attempt: int = 1, events: int = 0
) -> task_pb2.Task:
    error = task_error(Reason.WORKER_LOST, "gone") if state == task_pb2.TASK_STATE_FAILED else None
    return changed(running(attempt, events), state=state, end_time=BORN + timedelta(seconds=9), error=error)


def cut(events: Sequence[Event], places: Sequence[int], attempt: int = 1) -> list[task_pb2.TaskPiece]:
    """The events in chunks that begin at these places."""
    bounds = sorted({0, *(place for place in places if place < len(events)), len(events)})
    return [
        task_pb2.TaskPiece(
            attempt=attempt,
            last_event=event_number(attempt, last),
            output=task_pb2.TaskOutput(events=events[first:last]),
        )
        for first, last in pairwise(bounds)
    ]


def response_events(
    news: Sequence[Message],
    *,
    after: int = FROM_THE_START,
    asked: BackgroundRequest | None = None,
) -> bytes:
    taker = replay(after=after, asked=asked)
    return taker.opening() + b"".join(taker.take(watched(each)) for each in news) + taker.end()


ANSWERS = st.builds(
    lambda before, said, reason: [*before, *said, *end(reason)],
    st.lists(BEFORE, max_size=3),
    st.lists(DELTA | NOTICE, max_size=10),
    FINISH,
)
PLACES = st.lists(st.integers(0, 20), max_size=6)
JOINS = st.lists(st.integers(0, 100), min_size=1, max_size=3)
"""Events after which a caller joins; every number means one."""


def joined_at(told: list[dict[str, Any]], joins: list[int]) -> list[tuple[int, dict[str, Any]]]:
    return [(join % len(told), told[join % len(told)]) for join in joins]


@settings(max_examples=settings().max_examples // 4)
@given(
    events=ANSWERS,
    first=PLACES,
    second=PLACES,
    attempt=st.integers(1, 3),
    extras=st.booleans(),
    joins=JOINS,
)
def test_replay_is_identical_for_any_chunking_and_resume_point(
    events: list[Event],
    first: list[int],
    second: list[int],
    attempt: int,
    extras: bool,
    joins: list[int],
) -> None:
    asked = request(stream=True, stream_options={"include_weft_events": extras}, top_logprobs=int(extras))
    last, count = ended(attempt=attempt, events=len(events)), len(events)
    live = [PENDING, running(attempt), *cut(events, first, attempt), last]
    again = [last, *cut(events, second, attempt)]
    joined = [running(attempt, count), *cut(events, second, attempt), last, last]
    body = response_events(live, asked=asked)
    assert response_events(again, asked=asked) == response_events(joined, asked=asked) == body
    whole = events_in(body)
    for place, event in joined_at(whole, joins):
        assert events_in(response_events(again, after=event["sequence_number"], asked=asked)) == whole[place + 1 :]
    assert [event.type for event in read(body)] == [event["type"] for event in whole]


@given(
    events=ANSWERS,
    state=st.sampled_from([task_pb2.TASK_STATE_FAILED, task_pb2.TASK_STATE_CANCELLED]),
    places=PLACES,
    joins=JOINS,
)
def test_failed_replay_is_identical_for_any_chunking_and_resume_point(
    events: list[Event], state: "task_pb2.TaskState.ValueType", places: list[int], joins: list[int]
) -> None:
    said = events[:-1]
    last = ended(state, events=len(said))
    body = response_events([running(), *cut(said, []), last])
    assert response_events([last, *cut(said, places)]) == body
    whole = events_in(body)
    assert [event["type"] for event in whole[-2:]] == ["response.failed", "error"]
    for place, event in joined_at(whole, joins):
        assert (
            events_in(response_events([last, *cut(said, places)], after=event["sequence_number"])) == whole[place + 1 :]
        )


def test_random_item_id_is_detected_by_the_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.responses.output.output_item_id", lambda *_: new_id("msg"))
    events = [*HELLO, *end()]
    news = [ended(events=len(events)), *cut(events, [])]
    assert response_events(news) != response_events(news)


@pytest.mark.parametrize("places", [[], [1], [2], [1, 2, 3, 4]])
def test_response_snapshot_grows_with_the_chunks(places: list[int]) -> None:
    taker, shown = replay(), []
    for news in [PENDING, running(), *cut([*HELLO, *end()], places), ended(events=6)]:
        taker.take(watched(news))
        shown.append(json.loads(taker.snapshot()))
    statuses = [body["status"] for body in shown]
    assert (statuses[:2], set(statuses[2:-1]), statuses[-1]) == (
        ["queued", "in_progress"],
        {"in_progress"},
        "completed",
    )
    assert shown[-1]["output"][0]["content"][0]["text"] == "Hello"
    assert shown[-1]["completed_at"] == int(BORN.timestamp()) + 9


def test_replay_uses_task_times_and_repeats_warnings() -> None:
    asked = request(include=["metrics"])
    events = [*HELLO, *end()]
    (*_, last) = events_in(response_events([ended(events=len(events)), *cut(events, [])], asked=asked))
    assert last["response"]["metrics"]["pool_total_wall_ms"] == 9000.0
    assert [warning["field"] for warning in last["response"]["warnings"]] == ["x"]


def test_replay_is_current_once_all_stored_events_are_read() -> None:
    taker = replay()
    seen = []
    for news in [running(events=3), *cut(HELLO, [1, 2])]:
        taker.take(watched(news))
        seen.append(taker.is_current)
    assert seen == [False, False, False, True]
    fresh = replay()
    fresh.take(watched(PENDING))
    assert fresh.is_current


def test_replay_ends_only_after_the_task() -> None:
    taker = replay()
    events = [*HELLO, *end()]
    body = b"".join(taker.take(watched(each)) for each in [running(), *cut(events, [])])
    assert taker.end() == b""
    assert not taker.is_done
    assert b"response.completed" not in body
    assert b"response.completed" in taker.take(watched(ended(events=len(events))))
    assert taker.end() == b""


LOST = changed(PENDING, attempt=1)


@pytest.mark.parametrize("news", [LOST, running(2), cut(HELLO, [], 2)[0], ended(attempt=2, events=3)])
def test_reader_with_content_of_a_lost_attempt_gets_none_of_another(
    news: Message,
) -> None:
    taker = replay()
    for one in [running(events=3), *cut(HELLO, [])]:
        taker.take(watched(one))
    with pytest.raises(WeftError) as caught:
        taker.take(watched(news))
    assert caught.value.reason is Reason.WORKER_LOST
    late = replay(after=5)
    with pytest.raises(WeftError):
        late.take(watched(news))


def test_reader_without_content_continues_with_the_next_attempt() -> None:
    taker = replay()
    news = [running(events=1), *cut(HELLO[:1], []), LOST, running(2), *cut([*HELLO, *end()], [], 2)]
    body = b"".join(taker.take(watched(each)) for each in [*news, ended(attempt=2, events=6)])
    numbers = [event["sequence_number"] for event in events_in(body)]
    assert numbers == [2, *range(1_000_000, 1_000_000 + len(numbers) - 1)]


def test_duplicate_chunks_are_applied_once() -> None:
    pieces = cut([*HELLO, *end()], [1, 2])
    once = response_events([running(), *pieces, ended(events=6)])
    assert response_events([running(), *pieces[:2], *pieces, ended(events=6)]) == once


@pytest.mark.parametrize(
    ("task", "after", "is_taken"),
    [
        (PENDING, 0, True),
        (PENDING, 1, True),
        (PENDING, 7, True),
        (PENDING, 1_000_000, False),
        (running(), 9, True),
        (running(), 1_000_000, False),
        (LOST, 2, True),
        (LOST, 3, False),
        (running(2), 2, True),
        (running(2), 3, False),
        (running(2), 1_000_000, True),
        (running(2), 1_000_007, True),
        (running(3), 1_000_000, True),
        (running(3), 1_000_001, False),
        (ended(attempt=2), 3, False),
        (ended(attempt=2), 2_000_000, False),
        (ended(task_pb2.TASK_STATE_FAILED, attempt=0), 2, True),
        (ended(), 2**53, False),
    ],
)
def test_only_events_of_the_current_attempt_are_resumed(task: task_pb2.Task, after: int, is_taken: bool) -> None:
    if is_taken:
        require_resumable(task, after)
        return
    with pytest.raises(FieldError) as caught:
        require_resumable(task, after)
    assert caught.value.field == "starting_after"


def test_attempts_have_their_own_sequence_numbers() -> None:
    assert [first_number(attempt) for attempt in (1, 2, 3)] == [2, 1_000_000, 2_000_000]


@pytest.mark.parametrize("other", ["resp_1", "resp_" + "F" * 24, "task-" + "0" * 24, "resp_" + "0" * 25, "", "x"])
def test_only_a_background_response_id_maps_to_its_task(other: str) -> None:
    assert task_of(background_response_id(PENDING.id)) == PENDING.id
    assert task_of(other) is None


def test_last_number_is_the_one_the_caller_has() -> None:
    fresh, late = replay(), replay(after=7)
    for taker in (fresh, late):
        taker.opening()
    assert (fresh.last_number, late.last_number) == (1, 7)
    for taker in (fresh, late):
        taker.take(watched(running()))
    assert (fresh.last_number, late.last_number) == (2, 7)
