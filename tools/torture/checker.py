"""The history checker: returns the promises that a run has violated.

An unacknowledged outcome (its submitter was killed first) may be either way; every other one is checked. The checker
only reads the events of routers, submitters and backends and the final state, and does not know how routers work.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from tools.torture.history import (
    BACKEND_PREFIX,
    BEGINS,
    CANCELLED,
    COMPLETED,
    FAILED,
    NO_REASON,
    TERMINAL,
    Event,
    History,
    KeptTask,
    Kind,
    expected_text,
)
from tools.torture.plan import MAX_ATTEMPTS, MAX_FREE_ATTEMPTS

STREAM_PREFIX = "stream-"
"""Prefix of request ids that are streams instead of tasks."""
DEATH_SECONDS = 1.0
"""How long a process may still accept a request after its kill was recorded."""
NOTICE_SECONDS = 15.0
"""How long after a partition a stream may still fail with a connection that it broke."""
SERVER_DIED = '"server_died"'
"""The error of a request whose engine died."""
UNKNOWN, INTERNAL = "UNKNOWN", "INTERNAL"
UNHANDLED = "Unexpected <class"
"""Prefix of gRPC's message for an unhandled exception of a service; a dead service returns UNKNOWN too."""
CLOCK_GRAIN_SECONDS = 0.002
"""Times of two processes within this distance count as equal, because logs have milliseconds."""


@dataclass(frozen=True, slots=True)
class Violation:
    """A violated promise."""

    rule: str
    task: str
    detail: str

    def __str__(self) -> str:
        return f"{self.rule}: {self.task}: {self.detail}"


def check(history: History) -> list[Violation]:
    """Returns every violation, in the order of the rules."""
    return [violation for rule in _RULES for violation in rule(history)]


def rules_broken(violations: Iterable[Violation]) -> Counter[str]:
    """Returns the number of violations of each rule."""
    return Counter(violation.rule for violation in violations)


def _lost(history: History) -> Iterator[Violation]:
    """Every acknowledged task exists for every reader, at all times."""
    acked = {event.task for event in history.of_kind(Kind.ACKED)}
    for task in sorted(acked):
        for reader, kept in (("the service", history.served), ("the database", history.stored)):
            if task not in kept:
                yield Violation("lost", task, f"it was acknowledged, and {reader} does not know it")
    for event in history.of_kind(Kind.MISSED):
        if event.task in acked:
            yield Violation("lost", event.task, f"{event.source} got NOT_FOUND for it")


def _terminals(history: History) -> Iterator[Violation]:
    """Every task is terminal, and was never seen in another terminal state."""
    seen: dict[str, dict[int, str]] = defaultdict(dict)
    for event in history.events:
        if event.task and event.state in TERMINAL:
            seen[event.task].setdefault(event.state, f"{event.kind} of {event.source}")
    for reader, kept in (("the service", history.served), ("the database", history.stored)):
        for task in kept.values():
            if task.state not in TERMINAL:
                yield Violation("unfinished", task.id, f"state {task.state} for {reader}")
            else:
                seen[task.id].setdefault(task.state, reader)
    for task_id, states in seen.items():
        if len(states) > 1:
            ends_text = ", ".join(f"{state} by {who}" for state, who in sorted(states.items()))
            yield Violation("two terminals", task_id, ends_text)


def _revived(history: History) -> Iterator[Violation]:
    """An observer that has seen a task terminal, or in an attempt, never sees an earlier state of it again.

    Concurrent calls have no order: each is compared with the answers that its observer had when the call was made.
    """
    ended: dict[tuple[str, str], float] = {}
    attempts: dict[tuple[str, str], list[Event]] = defaultdict(list)
    for event in history.of_kind(Kind.SEEN, Kind.ACKED, Kind.CANCEL_ACKED):
        who = (event.source, event.task)
        if event.state in TERMINAL:
            ended.setdefault(who, event.at)
        elif who in ended and _is_after(event, ended[who]):
            yield Violation("revived", event.task, f"{event.source} saw state {event.state} after its end")
        if event.kind is Kind.SEEN:
            later = max((seen.attempt for seen in attempts[who] if _is_after(event, seen.at)), default=0)
            if later > event.attempt:
                detail = f"{event.source} saw attempt {event.attempt} after attempt {later}"
                yield Violation("revived", event.task, detail)
            attempts[who].append(event)


def _hidden_ends(history: History) -> Iterator[Violation]:
    """Once a router has logged the end of a task, every answer to a later call shows it terminal."""
    ended: dict[str, float] = {}
    for event in history.of_kind(Kind.ENDED, Kind.CANCELLED):
        ended[event.task] = min(event.at, ended.get(event.task, event.at))
    for event in history.of_kind(Kind.SEEN, Kind.ACKED, Kind.CANCEL_ACKED):
        if event.state in TERMINAL or not event.asked_at or event.task not in ended:
            continue
        if event.asked_at > ended[event.task] + CLOCK_GRAIN_SECONDS:
            yield Violation("hidden end", event.task, f"{event.source} asked after its end and saw {event.state}")


def _is_after(event: Event, moment: float) -> bool:
    """Whether an event's call was made after a time; an event without a call counts as later."""
    return not event.asked_at or event.asked_at > moment


def _doubles(history: History) -> Iterator[Violation]:
    """A task is ended once, by the router that then owns it."""
    for task, events in _by_task(history.of_kind(Kind.ENDED, Kind.CANCELLED)).items():
        if len(events) > 1:
            ends_text = ", ".join(
                f"{event.kind} with attempt {event.attempt} in state {event.state}" for event in events
            )
            yield Violation("double", task, f"ended {len(events)} times: {ends_text}")
    given_up = {(event.task, event.attempt) for event in history.of_kind(Kind.REVERTED)}
    newest = {task: max(event.attempt for event in events) for task, events in _claims(history).items()}
    for event in history.of_kind(Kind.ENDED):
        if not event.attempt:
            continue
        if (event.task, event.attempt) in given_up:
            yield Violation("double", event.task, f"attempt {event.attempt} ended it, and had been given up")
        elif event.attempt < newest.get(event.task, 0):
            yield Violation("double", event.task, f"attempt {event.attempt} ended it, which had lost its lease")


def _starts(history: History) -> Iterator[Violation]:
    """No backend starts a request of a task that no router has claimed."""
    claims = _claims(history)
    for event in history.of_kind(Kind.BEGUN):
        if event.task.startswith(STREAM_PREFIX):
            continue
        before = event.at + CLOCK_GRAIN_SECONDS
        if not any(claim.at <= before for claim in claims.get(event.task, ())):
            yield Violation("start without claim", event.task, f"begun by {event.source}")


def _claim_overlaps(history: History) -> Iterator[Violation]:
    """An attempt has one claim, and begins after the previous one has ended."""
    for task, events in _claims(history).items():
        for attempt, count in Counter(event.attempt for event in events).items():
            if count > 1:
                yield Violation("attempt claimed twice", task, f"attempt {attempt}, {count} times")
    for kept in history.stored.values():
        for earlier, later in pairwise(kept.attempts):
            if earlier.ended_at is None or later.claimed_at + CLOCK_GRAIN_SECONDS < earlier.ended_at:
                yield Violation("overlap", kept.id, f"attempt {later.attempt} began before {earlier.attempt} was over")


def _attempts(history: History) -> Iterator[Violation]:
    """The stored attempts match the claims, and the last one decides the result."""
    claims = _claims(history)
    for kept in history.stored.values():
        rows = {row.attempt: row for row in kept.attempts}
        if sorted(rows) != list(range(1, kept.attempt + 1)):
            yield Violation("attempts", kept.id, f"{sorted(rows)} are kept, and it was begun {kept.attempt} times")
        for claim in claims.get(kept.id, ()):
            row = rows.get(claim.attempt)
            if row is None or row.owner != claim.owner:
                yield Violation("attempts", kept.id, f"claim {claim.attempt} of {claim.owner} is not kept")
        if any(row.ended_at is None for row in rows.values()) and kept.state in TERMINAL:
            yield Violation("attempts", kept.id, "it is terminal, and an attempt has not ended")
        if kept.state == COMPLETED:
            yield from _completed_attempts(kept)


def _completed_attempts(kept: KeptTask) -> Iterator[Violation]:
    if not kept.attempts or kept.attempts[-1].reason:
        yield Violation("attempts", kept.id, "it is completed, and its last attempt failed")
    for row in kept.attempts[:-1]:
        if not row.reason:
            yield Violation("attempts", kept.id, f"attempt {row.attempt} is good, and was not the last")


def _cancels(history: History) -> Iterator[Violation]:
    """The state in an acknowledged cancellation is the final one."""
    for event in history.of_kind(Kind.CANCEL_ACKED):
        kept = history.stored.get(event.task)
        if event.state not in TERMINAL:
            yield Violation("cancel", event.task, f"{event.source} got state {event.state}")
        elif kept is not None and kept.state != event.state:
            yield Violation("cancel", event.task, f"{event.source} got {event.state}, and it is {kept.state}")
    asked = {event.task for event in history.of_kind(Kind.CANCEL_INTENT)}
    for kept in history.stored.values():
        if kept.state == CANCELLED and kept.id not in asked:
            yield Violation("cancel", kept.id, "no cancellation was sent")


def _answers(history: History) -> Iterator[Violation]:
    """The answer of a completed task is complete and from its last attempt; every stored task can be watched."""
    for kept in history.served.values():
        if not kept.is_watch_complete:
            yield Violation("answer", kept.id, "its watch was refused, and the task is there")
        if kept.state != COMPLETED or kept.text is None:
            continue
        if kept.tokens is not None and kept.text != expected_text(kept.tokens):
            yield Violation("answer", kept.id, f"{kept.tokens} tokens were asked for: {kept.text[:200]!r}")
        if kept.answer_attempts != {kept.attempt}:
            found = sorted(kept.answer_attempts)
            yield Violation("answer", kept.id, f"its pieces are of attempts {found}, the last is {kept.attempt}")
        if kept.finishes != 1:
            yield Violation("answer", kept.id, f"it has {kept.finishes} ends")


def _keys(history: History) -> Iterator[Violation]:
    """Keys and tasks correspond one to one, and every stored task was intended."""
    tasks: dict[str, set[str]] = defaultdict(set)
    keys: dict[str, set[str]] = defaultdict(set)
    stored = [(kept.key, kept.id) for kept in history.stored.values()]
    for key, task in [*((event.key, event.task) for event in history.of_kind(Kind.ACKED)), *stored]:
        tasks[key].add(task)
        keys[task].add(key)
    for key, found in sorted(tasks.items()):
        if len(found) > 1:
            yield Violation("key", min(found), f"{key} is {len(found)} tasks")
    for task, found in sorted(keys.items()):
        if len(found) > 1:
            yield Violation("key", task, f"it is of {len(found)} submissions")
    for event in history.of_kind(Kind.CONTRADICTED):
        yield Violation("key", event.key, "it was taken with another body")
    meant = {event.key for event in history.of_kind(Kind.INTENT)}
    for key, task in stored:
        if key not in meant:
            yield Violation("key", task, f"no submitter intended {key!r}")


def _usage(history: History) -> Iterator[Violation]:
    """Every end of a task, and every attempt that was restarted, is counted once."""
    counts, tasks = history.usage, history.stored.values()
    if counts is None:
        return
    ends = Counter(kept.state for kept in tasks)
    counted = {
        COMPLETED: counts["completed_count"],
        FAILED: counts["failed_count"] + counts["rejected_count"],
        CANCELLED: counts["cancelled_count"],
    }
    for state, number in counted.items():
        if number != ends[state]:
            yield Violation("usage", "-", f"{number} ends in state {state} are counted, {ends[state]} tasks are in it")
    # The last attempt ended its task, unless that ended while it waited for the next one.
    attempts = sum(kept.attempt for kept in tasks)
    fewest = sum(max(0, kept.attempt - 1) for kept in tasks)
    if not fewest <= counts["retried_count"] <= attempts - ends[COMPLETED]:
        yield Violation("usage", "-", f"{counts['retried_count']} of {attempts} attempts are counted as begun again")


def _streams(history: History) -> Iterator[Violation]:
    """Streams lose their end only with their gateway, and fail only with an engine that had begun them."""
    kills: dict[str, list[float]] = defaultdict(list)
    for event in history.of_kind(Kind.KILLED):
        kills[event.key].append(event.at)

    def is_hit(stream: Event, processes: Iterable[str]) -> bool:
        moments = [at for process in processes for at in kills[process]]
        return any(stream.asked_at - DEATH_SECONDS <= at <= stream.at for at in moments)

    for event in history.of_kind(Kind.STREAM_BROKEN):
        if not is_hit(event, [event.key]):
            yield Violation("broken stream", event.task, f"over {event.key}: {event.note}")
    engines, cuts = _by_task(history.of_kind(Kind.BEGUN)), _partitions(history)
    for event in history.of_kind(Kind.STREAM_FAILED):
        was_cut = any(begun <= event.at and event.asked_at <= ended for begun, ended in cuts)
        begun_by = {begun.source for begun in engines.get(event.task, ())}
        # An engine that dies may have died of a prompt it was sent, which only another one is then given.
        died = [process for process in kills if process.startswith(BACKEND_PREFIX)]
        was_sent = not history.has_spares and SERVER_DIED in event.note and not event.text and is_hit(event, died)
        if not (was_cut or was_sent or is_hit(event, begun_by)):
            yield Violation("failed stream", event.task, f"over {event.key}: {event.note}")


def _partitions(history: History) -> list[tuple[float, float]]:
    """Returns from when until when connections were cut, or what had broken with them was not noticed yet."""
    found: list[tuple[float, float]] = []
    begun: dict[str, float] = {}
    for event in history.of_kind(Kind.PARTITION):
        if event.note.endswith(BEGINS):
            begun[event.key] = event.at
        elif event.key in begun:
            found.append((begun.pop(event.key), event.at + NOTICE_SECONDS))
    return [*found, *((at, float("inf")) for at in begun.values())]


def _stream_texts(history: History) -> Iterator[Violation]:
    """A client receives the characters of an answer in order, none twice, and all of them before a regular end."""
    for event in history.of_kind(Kind.STREAM_ENDED, Kind.STREAM_FAILED, Kind.STREAM_BROKEN):
        if event.text is None:
            continue
        whole = expected_text(event.tokens)
        is_right = event.text == whole if event.kind is Kind.STREAM_ENDED else whole.startswith(event.text)
        if not is_right:
            yield Violation("stream text", event.task, f"{event.tokens} tokens were asked for: {event.text[:200]!r}")


def _refusals(history: History) -> Iterator[Violation]:
    """A call that a router cannot answer is rejected with a reason that says what to do, never as an internal error."""
    for event in history.of_kind(Kind.TURNED_AWAY):
        code, reason, words = event.note.split(" ", 2)
        is_lost = code == UNKNOWN and not words.startswith(UNHANDLED)
        if reason == INTERNAL or (reason == NO_REASON and not is_lost):
            yield Violation("untyped refusal", "-", f"{event.source} got {event.note}")


def _overbooked(history: History) -> Iterator[Violation]:
    """No backend works on more requests than it has slots."""
    if not history.slots:
        return
    at_work: Counter[tuple[str, str]] = Counter()
    for event in history.of_kind(Kind.BEGUN, Kind.LEFT):
        process = event.source, event.key
        at_work[process] += 1 if event.kind is Kind.BEGUN else -1
        if at_work[process] > history.slots:
            detail = f"{event.source} works on {at_work[process]} requests with {history.slots} slots"
            yield Violation("overbooked", event.task, detail)


def _attempt_limit(history: History) -> Iterator[Violation]:
    """No task fails more often than its submitter allows, nor is it begun more often than the router allows beyond."""
    most = MAX_ATTEMPTS + MAX_FREE_ATTEMPTS
    for kept in history.stored.values():
        if kept.failures > MAX_ATTEMPTS or kept.attempt > most:
            detail = f"{kept.failures} failures of {MAX_ATTEMPTS}, {kept.attempt} attempts of {most}"
            yield Violation("too many attempts", kept.id, detail)


def _orphans(history: History) -> Iterator[Violation]:
    """Every engine and every lease has an owner."""
    for line in history.orphans:
        yield Violation("orphan", "-", line)


def _damage(history: History) -> Iterator[Violation]:
    """The database is intact."""
    for line in history.damage:
        yield Violation("damage", "-", line)


def _claims(history: History) -> dict[str, list[Event]]:
    return _by_task(history.of_kind(Kind.CLAIMED))


def _by_task(events: Iterable[Event]) -> dict[str, list[Event]]:
    found: dict[str, list[Event]] = defaultdict(list)
    for event in events:
        found[event.task].append(event)
    return found


_RULES: Sequence[Callable[[History], Iterator[Violation]]] = (
    _lost,
    _terminals,
    _revived,
    _hidden_ends,
    _doubles,
    _starts,
    _claim_overlaps,
    _attempts,
    _cancels,
    _answers,
    _keys,
    _usage,
    _streams,
    _stream_texts,
    _refusals,
    _overbooked,
    _attempt_limit,
    _orphans,
    _damage,
)
