"""Everything that is known after a run: what processes wrote meanwhile, and what is kept at the end."""

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
    """What happened."""

    INTENT = "intent"
    """A submitter is about to send this submission."""
    ACKED = "acked"
    """It was told that the task is kept."""
    REFUSED = "refused"
    """The same key with another body was refused, as it must be."""
    CONTRADICTED = "contradicted"
    """The same key with another body was taken."""
    CANCEL_INTENT = "cancel-intent"
    """It is about to cancel."""
    CANCEL_ACKED = "cancel-acked"
    """It was told how the task ended."""
    SEEN = "seen"
    """Somebody read the task and saw it so."""
    MISSED = "missed"
    """Somebody was told that there is no such task."""
    CLAIMED = "claimed"
    """A router has claimed the task for an attempt."""
    ENDED = "ended"
    """A router has ended the task with an attempt that was its own, or swept it away."""
    REVERTED = "reverted"
    """A router has given an attempt up, its own or one whose lease was over."""
    LEASE_LOST = "lease-lost"
    """A router found that a claim is not its own any more."""
    CANCELLED = "cancelled"
    """A router has ended the task because somebody asked for it."""
    BEGUN = "begun"
    """A backend has begun to work on it."""
    LEFT = "left"
    """A backend has finished with it: `note` says how."""


class Event(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line. Times are UTC seconds since the epoch: all processes run on one machine."""

    kind: Kind
    at: float
    asked_at: float = 0.0
    """When the call was made that was answered `at`; 0: the line is of no call, or does not say."""
    source: str = ""
    """Which process."""
    task: str = ""
    key: str = ""
    """Idempotency key of a submission."""
    attempt: int = 0
    owner: str = ""
    """Which life of a router."""
    state: int = 0
    """Number of a TaskState; 0: the line says nothing of it."""
    tokens: int = 0
    """How long the answer to a submission must be."""
    note: str = ""


class EventFile:
    """Appends events, each in one write without a buffer: what was written survives a SIGKILL of its writer."""

    def __init__(self, path: Path, source: str) -> None:
        """Raises OSError when the file cannot be opened."""
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._source = source

    def write(self, kind: Kind, **fields: str | float) -> None:
        """Append what happens now."""
        event = msgspec.convert({"kind": kind, "at": time.time(), "source": self._source, **fields}, Event)
        os.write(self._descriptor, msgspec.json.encode(event) + b"\n")

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)


def read_events(path: Path) -> Iterator[Event]:
    """The events of a file, in order. What a killed writer left half written is the last line, and is skipped.

    Raises msgspec.DecodeError for any other line that is no event.
    """
    for line in whole_lines(path):
        yield msgspec.json.decode(line, type=Event)


def whole_lines(path: Path) -> list[bytes]:
    """The lines of a file that end; none where there is no file."""
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")
    return [line for line in lines[:-1] if line]


def occurrences(path: Path, words: bytes) -> int:
    """How often some bytes are in a file; 0 where there is none."""
    return path.read_bytes().count(words) if path.exists() else 0


COMPLETED, FAILED, CANCELLED = 3, 4, 5
"""Numbers of the states that nothing leaves, as in `router.v1.TaskState`: the checker shares no code with routers."""
TERMINAL = frozenset({COMPLETED, FAILED, CANCELLED})


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptRow:
    """One time that a task was begun, as it is kept."""

    attempt: int
    owner: str
    claimed_at: float
    ended_at: float | None
    reason: int
    """Number of the reason why it came to nothing; 0: it did not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptTask:
    """A task at the end of a run, as one reader found it."""

    id: str
    state: int
    attempt: int
    key: str = ""
    """Its idempotency key; empty where the reader is not told."""
    tokens: int | None = None
    """How long the answer must be, by what is kept of the request; None where the reader does not look."""
    text: str | None = None
    """The answer; None where the reader does not look."""
    answer_attempts: frozenset[int] = frozenset()
    """The attempts that its pieces are of."""
    finishes: int = 0
    """How many good ends the answer has."""
    is_told_whole: bool = True
    """Whether its watch came to an end; else it was refused in the middle, as that of a task that is gone."""
    attempts: Sequence[AttemptRow] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """The whole run."""

    events: Sequence[Event]
    """In the order of their files; those of one file are in the order in which they happened."""
    served: Mapping[str, KeptTask]
    """By id, as TaskService gives it."""
    stored: Mapping[str, KeptTask]
    """By id, as it stands in the database."""
    damage: Sequence[str] = field(default=())
    """What the database itself says is wrong with it."""

    def of_kind(self, *kinds: Kind) -> list[Event]:
        """The events of some kinds."""
        return [event for event in self.events if event.kind in kinds]


def expected_text(tokens: int) -> str:
    """What the fake backend answers when it may say so many tokens."""
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
    """The lines about tasks, in order. Raises ValueError for a line that is no JSON."""
    for line in map(json.loads, whole_lines(path)):
        kind = _KINDS.get(line["event"])
        if kind is not None:
            yield _event(kind, line)


def read_backend_log(path: Path) -> Iterator[Event]:
    """What the fake backends wrote (see weft_testing.fake_backend.request_log)."""
    for line in map(json.loads, whole_lines(path)):
        yield Event(
            kind=_BACKEND_KINDS[line["event"]],
            at=line["at"],
            source=f"backend {line['pid']}",
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
