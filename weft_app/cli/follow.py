"""Watches of the mesh that reconnect after a failure, and records that are printed as they change."""

import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import REGISTRY_AWAY, Reason
from weft_app.cli.mesh_api import Document, connect
from weft_app.cli.output import TEXTS, Feed, Listing, json_line
from weft_app.cli.terminal import note, say

WATCH = "/api/v1/watch"
RETRY_PAUSE_SECONDS = 1.0
RETRY_LIMIT_SECONDS = 60.0
"""Maximum outage that is retried. The gateway sends something more often."""
INTERVAL_SECONDS = 1.0
"""Polling interval of records without a watch."""
AWAY = REGISTRY_AWAY | {Reason.SHUTTING_DOWN}
"""Reasons that may be temporary."""
DELETED = "deleted"
MAX_REMEMBERED = 20_000
"""Maximum number of remembered records, since the number of ended requests is unlimited."""


class Breaks:
    """Decides whether a failed watch or poll is retried, and waits before the next attempt."""

    def __init__(
        self, limit_seconds: float, reasons: Collection[Reason] = AWAY, *, began: bool = False, is_quiet: bool = False
    ) -> None:
        """`limit_seconds` is the maximum outage with one of `reasons`. `is_quiet`: without a note of an outage."""
        self._limit_seconds = limit_seconds
        self._reasons = reasons
        self._began = began
        self._is_quiet = is_quiet
        self._away_since: float | None = None

    def none(self) -> None:
        """Ends the outage: something arrived."""
        self._began, self._away_since = True, None

    def note(self, error: WeftError) -> None:
        """Records an outage. Raises `error` if a retry cannot help or the outage is too long."""
        if error.reason not in self._reasons or not self._began:
            raise error
        if self._away_since is None:
            self._away_since = time.monotonic()
            if not self._is_quiet:
                note(f"{error.message}; the watch resumes when it is back")
        if time.monotonic() - self._away_since > self._limit_seconds:
            raise error

    def survive(self, error: WeftError) -> None:
        """Waits before the next attempt. Raises as `note`."""
        self.note(error)
        time.sleep(RETRY_PAUSE_SECONDS)


@dataclass(slots=True)
class _Known:
    """The documents of one kind in a watch, by name."""

    documents: dict[str, Document] = field(default_factory=dict)
    renewed: dict[str, Document] | None = field(default_factory=dict)
    """Documents of an incomplete snapshot; None: the snapshot is complete."""

    def take(self, change: Document) -> list[str]:
        """Applies a change. Returns the names that may have changed."""
        name = change.get("name", "")
        match change["change"]:
            case "reset":
                self.renewed = {}
            case "synced" if self.renewed is not None:
                names = [*self.renewed, *(name for name in self.documents if name not in self.renewed)]
                self.documents.clear()
                self.documents.update(self.renewed)
                self.renewed = None
                return names
            case "put" if self.renewed is not None:
                self.renewed[name] = change["object"]
            case "put":
                self.documents[name] = change["object"]
                return [name]
            case "delete":
                self.documents.pop(name, None)
                return [name]
        return []


State = dict[str, dict[str, Document]]
"""Documents by name, by kind."""


def watch(home: Path, kinds: Sequence[str], deadline: float | None = None, **query: Any) -> Iterator[Document]:
    """Yields the changes of some kinds as the mesh sends them. Each connection starts with a `reset` of every kind.

    Ends at the `deadline`. Raises SERVICE_UNAVAILABLE if the mesh does not run, or without a deadline also if it was
    unreachable for RETRY_LIMIT_SECONDS.
    """
    breaks = Breaks(RETRY_LIMIT_SECONDS if deadline is None else math.inf)
    while True:
        away, failure = None, WeftError(Reason.SERVICE_UNAVAILABLE, "the mesh ended the watch")
        try:
            with connect(home, RETRY_LIMIT_SECONDS) as api:
                yield from ({"kind": kind, "change": "reset"} for kind in kinds)
                for change in api.stream(WATCH, deadline, kinds=",".join(kinds), **query):
                    if change is None or change["change"] == "unavailable":
                        away = away if change is None else WeftError(Reason.SERVICE_UNAVAILABLE, change["message"])
                        if away is not None:
                            breaks.note(away)
                    else:
                        away = None
                        breaks.none()
                        yield change
        except WeftError as error:
            failure = error
        if deadline is not None and time.monotonic() >= deadline:
            return
        breaks.survive(failure)


def follow(
    home: Path, kinds: Sequence[str], deadline: float | None = None, **query: Any
) -> Iterator[tuple[State, list[tuple[str, str]]]]:
    """Yields the state of some kinds with all keys, then at each change the keys that may have changed.

    Raises as `watch`.
    """
    known = {kind: _Known() for kind in kinds}
    state = {kind: each.documents for kind, each in known.items()}
    keys, has_begun = list[tuple[str, str]](), False
    for change in watch(home, kinds, deadline, **query):
        kind = change["kind"]
        keys += ((kind, name) for name in known[kind].take(change))
        if all(each.renewed is None for each in known.values()) and (keys or not has_begun):
            has_begun = True
            yield state, keys
            keys = []


def follow_events(home: Path, kind: str, name: str, past_limit: int) -> Iterator[Document]:
    """Yields recent events, then every new one, each once. Raises as `watch`."""
    last, is_synced = 0, False
    for change in watch(home, ("event",)):
        events: list[Document] = []
        if change["change"] == "reset":
            is_synced = False
        elif change["change"] == "synced":
            is_synced = True
            with connect(home) as api:
                events = api.get("/api/v1/events", kind=kind, name=name, limit=past_limit)["items"]
            if not events or events[-1]["sequence"] < last:
                # A restarted registry numbers its events from the start, and may have none of this subject yet.
                last = 0
        elif is_synced:
            events = [change["object"]]
        for event in events:
            is_wanted = kind in ("", event["resourceKind"]) and name in ("", event["resourceName"])
            if is_wanted and event["sequence"] > last:
                last = event["sequence"]
                yield event


def wait_interval() -> None:
    """Waits until the next poll."""
    time.sleep(INTERVAL_SECONDS)


class RecordChanges:
    """Prints records, then each one that is new, changed or gone."""

    def __init__(
        self,
        listing: Listing,
        output: str,
        *,
        gone: str = "gone",
        last_row: Callable[[Any], Any] | None = None,
        has_header: bool = True,
    ) -> None:
        """The listing's `name` identifies each record.

        `gone` is printed for a record that no longer exists, unless `last_row` returns a row to print.
        `has_header`: whether to print a header before there are records.
        """
        self._listing = listing
        self._output = output
        self._feed = Feed(listing, output)
        self._gone = gone
        self._last_row = last_row
        self._has_header = has_header
        self._has_begun = False
        self._shown: dict[str, tuple[Any, Any]] = {}
        """The fingerprint of each existing record, and the record if its last row needs it."""

    def all(self, found: Iterable[Any]) -> None:
        """Prints the differences from what was shown, at first all records. Records not in `found` are gone."""
        now = {self._listing.name(record): record for record in found}
        if not self._has_begun and (now or self._has_header):
            self._has_begun = True
            say(self._feed.first(now.values()))
            self._shown = {name: self._kept(record) for name, record in now.items()}
            return
        for name in [name for name in self._shown if name not in now]:
            self.gone(name)
        for record in now.values():
            self.one(record)

    def one(self, record: Any) -> None:
        """Prints a record if it is new or has changed."""
        name, kept = self._listing.name(record), self._kept(record)
        if name in self._shown and self._shown[name][0] == kept[0]:
            return
        self._shown[name] = kept
        if len(self._shown) > MAX_REMEMBERED:
            del self._shown[next(iter(self._shown))]
        say(self._feed.row(record) if self._has_begun else self._feed.first([record]))
        self._has_begun = True

    def last(self, record: Any) -> None:
        """Prints a record for the last time if it was shown."""
        if self._shown.pop(self._listing.name(record), None) is not None:
            say(self._feed.row(record))

    def gone(self, name: str) -> None:
        """Prints that a record no longer exists if it was shown."""
        kept = self._shown.pop(name, None)
        if kept is not None:
            say(self._farewell(name) if self._last_row is None else self._feed.row(self._last_row(kept[1])))

    def _kept(self, record: Any) -> tuple[Any, Any]:
        return self._fingerprint(record), record if self._last_row else None

    def _fingerprint(self, record: Any) -> Any:
        if self._output in TEXTS:
            return self._feed.table.fingerprint(record)
        if self._output == "yaml" and self._listing.yaml is not None:
            return self._listing.yaml(record)
        return self._listing.lasting(record)

    def _farewell(self, name: str) -> str:
        kind, _, own_name = name.rpartition("/")
        match self._output:
            case "json":
                named = {"kind": kind, "name": own_name} if self._gone == DELETED else {"name": name}
                return json_line(named | {self._gone: True})
            case "yaml":
                return f"# {name} is {self._gone}\n"
            case "name":
                return f"{name}\n"
        table = self._feed.table
        index = next((table.titles.index(each) for each in ("STATUS", "STATE") if each in table.titles), 1)
        cells = [self._gone if each == index else "-" for each in range(1, len(table.titles))]
        return table.line([own_name if self._has_header else name, *cells])


def poll_records(listing: Listing, output: str, read: Callable[[], Iterable[Any]]) -> None:
    """Polls and prints records, then each one that is new, changed or gone, until Ctrl-C.

    Raises errors of `read`, those of an unreachable mesh only after a minute.
    """
    changes, breaks = RecordChanges(listing, output), Breaks(RETRY_LIMIT_SECONDS)
    while True:
        try:
            changes.all(list(read()))
        except WeftError as error:
            breaks.note(error)
        else:
            breaks.none()
        wait_interval()
