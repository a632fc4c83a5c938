"""What a history is made of: one thing that one process knew at one moment, as a line of JSON in its own file."""

import os
import time
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path

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
