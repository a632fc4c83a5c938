"""The history of a run: events from files and logs of processes, and the final state of every task."""

import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import Any

import msgspec


class Kind(StrEnum):
    """The kind of an event."""

    INTENT = "intent"
    """A submitter is about to send this submission."""
    ACKED = "acked"
    """The submission was acknowledged."""
    REFUSED = "refused"
    """The same key with another body was rejected, as it must be."""
    CONTRADICTED = "contradicted"
    """The same key with another body was accepted."""
    CANCEL_INTENT = "cancel-intent"
    """A submitter is about to cancel the task."""
    CANCEL_ACKED = "cancel-acked"
    """The cancellation was acknowledged, with the task's state."""
    SEEN = "seen"
    """A submitter read the task in this state."""
    MISSED = "missed"
    """A submitter got NOT_FOUND for the task."""
    CLAIMED = "claimed"
    """A router claimed the task for an attempt."""
    ENDED = "ended"
    """A router ended the task with its own attempt, or in a sweep."""
    REVERTED = "reverted"
    """A router reverted an attempt, its own or one with an expired lease."""
    LEASE_LOST = "lease-lost"
    """A router detected that it lost a claim."""
    CANCELLED = "cancelled"
    """A router ended the task on request, outside its attempt; an attempt that is cancelled logs `ENDED`."""
    BEGUN = "begun"
    """A backend started a request of the task."""
    LEFT = "left"
    """A backend ended the request; `note` says how."""
    STREAM_ENDED = "stream-ended"
    """A stream over the gateway `key` was complete."""
    STREAM_FAILED = "stream-failed"
    """A stream ended with an explicit error, in an event or as an HTTP status; `note` has it."""
    STREAM_BROKEN = "stream-broken"
    """A stream over the gateway `key`, started at `asked_at`, had no end at all; `note` says why."""
    KILLED = "killed"
    """The process `key` is about to be killed: a gateway, a runner, or `backend PID`."""
    TURNED_AWAY = "turned-away"
    """A router rejected a call that may be retried: `note` has the code, its ErrorInfo's reason, and the message."""
    PARTITION = "partition"
    """Connections of the process `key` are cut (`note`: "begins") or work again."""
    DATABASE_FAULT = "database-fault"
    """A database fault begins (`note`: "begins") or has ended; `key` is the disconnected process."""


BEGINS, ENDS = "begins", "is over"
"""End of the note of a fault that lasts."""
BACKEND_PREFIX = "backend "
"""Prefix of the name of an engine's process, before its pid."""
NO_REASON = "-"
"""In the note of a rejection without ErrorInfo."""


class Event(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A line of a history file. Times are UTC in Unix seconds; all processes run on one machine."""

    kind: Kind
    at: float
    asked_at: float = 0.0
    """When the call was made that was answered at `at`; 0: no call, or unknown."""
    source: str = ""
    """The process that wrote it."""
    task: str = ""
    key: str = ""
    """Idempotency key of a submission; of a backend's request, when its process began."""
    attempt: int = 0
    owner: str = ""
    """Id of a router process."""
    state: int = 0
    """Number of a TaskState; 0: not stated."""
    tokens: int = 0
    """Expected length of the answer."""
    note: str = ""
    text: str | None = None
    """All characters of a stream that its client received; None: they cannot be predicted."""


class EventFile:
    """Appends events to a file, each in one unbuffered write, so that they survive a SIGKILL of the writer."""

    def __init__(self, path: Path, source: str) -> None:
        """Raises OSError if the file cannot be opened."""
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._source = source

    def write(self, kind: Kind, **fields: str | float | None) -> None:
        """Appends an event with the current time."""
        event = msgspec.convert({"kind": kind, "at": time.time(), "source": self._source, **fields}, Event)
        os.write(self._descriptor, msgspec.json.encode(event) + b"\n")

    def close(self) -> None:
        """Closes the file."""
        os.close(self._descriptor)


def read_events(path: Path) -> Iterator[Event]:
    """Yields the events of a file in order, without an incomplete last line of a killed writer.

    Raises msgspec.DecodeError for any other line that is not an event.
    """
    for line in complete_lines(path):
        yield msgspec.json.decode(line, type=Event)


def complete_lines(path: Path) -> list[bytes]:
    """Returns the complete lines of a file; empty if there is no file."""
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")
    return [line for line in lines[:-1] if line]


class Tally:
    """Counts byte strings in files that other processes append to; reads each byte once per byte string."""

    def __init__(self) -> None:
        self._read: dict[tuple[Path, bytes], tuple[int, int]] = {}
        """How far, and how often it occurs until there."""

    def count(self, path: Path, text: bytes) -> int:
        """Returns how often the complete lines of a file contain a byte string; 0 if there is no file."""
        begins_at, found = self._read.get((path, text), (0, 0))
        if path.exists():
            with path.open("rb") as file:
                file.seek(begins_at)
                lines, newline, _ = file.read().rpartition(b"\n")
            found += lines.count(text)
            self._read[path, text] = (begins_at + len(lines) + len(newline), found)
        return found


COMPLETED, FAILED, CANCELLED = 3, 4, 5
"""Numbers of the terminal states, as in `router.v1.TaskState`; the checker shares no code with routers."""
TERMINAL = frozenset({COMPLETED, FAILED, CANCELLED})


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptRow:
    """A stored attempt of a task."""

    attempt: int
    owner: str
    claimed_at: float
    ended_at: float | None
    reason: int
    """Number of its failure's reason; 0: it did not fail."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptTask:
    """The final state of a task, as a reader found it."""

    id: str
    state: int
    attempt: int
    failures: int = 0
    """Number of attempts that count as failures; 0 if the reader cannot see it."""
    key: str = ""
    """Its idempotency key; empty if the reader cannot see it."""
    tokens: int | None = None
    """Expected length of the answer, from the stored request; None: not read."""
    text: str | None = None
    """The answer; None: not read."""
    answer_attempts: frozenset[int] = frozenset()
    """The attempts that its chunks belong to."""
    finishes: int = 0
    """Number of `finished` events in the answer."""
    is_watch_complete: bool = True
    """Whether its watch ended regularly, instead of with NOT_FOUND."""
    attempts: Sequence[AttemptRow] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """The history of the whole run."""

    events: Sequence[Event]
    """Events, file by file, in the order of each file."""
    served: Mapping[str, KeptTask]
    """Tasks by id, as TaskService returns them."""
    stored: Mapping[str, KeptTask]
    """Tasks by id, as stored in the database."""
    usage: Mapping[str, int] | None = None
    """Usage counts in the database by column, without tokens; None: not read."""
    slots: int = 0
    """Maximum concurrent requests of one backend; 0: any number."""
    damage: Sequence[str] = field(default=())
    """Damage reported by the database's integrity check."""
    has_spares: bool = True
    """Whether each pool of streams has several runners."""
    orphans: Sequence[str] = field(default=())
    """Engines and leases without an owner, after the last kill and after the end of all runners."""

    def of_kind(self, *kinds: Kind) -> list[Event]:
        """Returns the events of these kinds."""
        return [event for event in self.events if event.kind in kinds]


def expected_text(tokens: int) -> str:
    """Returns the answer of the fake backend for a token limit."""
    return " ".join(f"tok{number}" for number in range(tokens))


_KINDS = {
    "task claimed": Kind.CLAIMED,
    "task ended": Kind.ENDED,
    "task reverted": Kind.REVERTED,
    "task lease lost": Kind.LEASE_LOST,
    "task cancelled": Kind.CANCELLED,
}
_STATES = {"completed": COMPLETED, "failed": FAILED, "cancelled": CANCELLED}
_BACKEND_KINDS = {"begun": Kind.BEGUN, "finished": Kind.LEFT, "cancelled": Kind.LEFT, "failed": Kind.LEFT}


def read_router_log(path: Path) -> Iterator[Event]:
    """Yields the task events of a router log, in order. Raises ValueError for a line that is not JSON."""
    for line in map(json.loads, complete_lines(path)):
        kind = _KINDS.get(line["event"])
        if kind is not None:
            yield _event(kind, line)


RUNNER_PREFIXES = ("check-", "prewarm-")
"""Beginnings of the ids of requests that runners send on their own."""


def read_backend_log(path: Path) -> Iterator[Event]:
    """Yields the events of callers' requests in the fake backends' log (see weft_testing.fake_backend.state)."""
    for line in map(json.loads, complete_lines(path)):
        if line["request_id"].startswith(RUNNER_PREFIXES):
            continue
        yield Event(
            kind=_BACKEND_KINDS[line["event"]],
            at=line["at"],
            source=f"{BACKEND_PREFIX}{line['pid']}",
            key=str(line["opened_at"]),
            task=line["request_id"],
            note=line["event"],
        )


def _event(kind: Kind, line: Mapping[str, Any]) -> Event:
    return Event(
        kind=kind,
        at=datetime.fromisoformat(line["timestamp"]).timestamp(),
        source="router",
        task=line["task"],
        attempt=line.get("attempt", 0),
        owner=line.get("owner") or "",
        state=_STATES.get(str(line.get("state", "")).lower(), 0),
        note=str(line.get("reason", "")),
    )
