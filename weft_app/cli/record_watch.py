"""Records followed until Ctrl-C; those that no service streams changes of, such as tasks, are read at an interval."""

import time
from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum
from typing import Any

from weft.kernel.errors import WeftError, invalid_field
from weft_app.cli.follow import Breaks
from weft_app.cli.output import TEXTS, Feed, Listing, json_line, say

INTERVAL_SECONDS = 1.0
"""Interval between two readings."""
GONE = "gone"
MAX_REMEMBERED = 20_000
"""Records whose last line is remembered; of requests that end there is always one more."""


def wait_interval() -> None:
    """Waits until the next reading is due."""
    time.sleep(INTERVAL_SECONDS)


class RecordChanges:
    """Prints records, then each one that is new, has changed or is gone."""

    def __init__(self, listing: Listing, output: StrEnum) -> None:
        """The listing's `name` identifies each record."""
        self._listing = listing
        self._output = output
        self._feed = Feed(listing, output)
        self._shown: dict[str, Any] = {}
        """The fingerprint of each record that is there."""

    def first(self, found: Iterable[Any]) -> None:
        """Prints what there is at the beginning."""
        records = list(found)
        self._shown = {self._listing.name(record): self._fingerprint(record) for record in records}
        say(self._feed.first(records))

    def all(self, found: Iterable[Any]) -> None:
        """Prints what is different from what was shown; what is not in `found` is gone."""
        now = {self._listing.name(record): record for record in found}
        for name in [name for name in self._shown if name not in now]:
            del self._shown[name]
            say(self._farewell(name))
        for record in now.values():
            self.one(record)

    def one(self, record: Any) -> None:
        """Prints a record if it is new or has changed."""
        name, fingerprint = self._listing.name(record), self._fingerprint(record)
        if self._shown.get(name) != fingerprint:
            self._shown[name] = fingerprint
            if len(self._shown) > MAX_REMEMBERED:
                del self._shown[next(iter(self._shown))]
            say(self._feed.row(record))

    def last(self, record: Any) -> None:
        """Prints a record for the last time, if it was shown."""
        if self._shown.pop(self._listing.name(record), None) is not None:
            say(self._feed.row(record))

    def _fingerprint(self, record: Any) -> Any:
        return self._feed.table.fingerprint(record) if self._output in TEXTS else self._listing.document(record)

    def _farewell(self, name: str) -> str:
        if self._output == "json":
            return json_line({"name": name, GONE: True})
        if self._output == "name":
            return f"{name}\n"
        titles = self._feed.table.titles
        place = titles.index("STATE") if "STATE" in titles else 1
        cells = [GONE if each == place else "-" for each in range(1, len(titles))]
        return self._feed.table.line([name.rpartition("/")[2], *cells])


class RecordWatch:
    """Prints records, then each one that is new, has changed or is gone, as successive readings show it."""

    def __init__(self, listing: Listing, output: StrEnum, read: Callable[[], Iterable[Any]]) -> None:
        """`read` returns the current records; the listing's `name` identifies each."""
        self._changes = RecordChanges(listing, output)
        self._read = read

    def run(self, wait: Callable[[], None] = wait_interval) -> None:
        """Prints until Ctrl-C. Raises the error of a reading, that of a mesh which is away only after a minute."""
        self._changes.first(self._read())
        breaks = Breaks()
        breaks.none()
        while True:
            wait()
            try:
                found = list(self._read())
            except WeftError as error:
                breaks.survive(error)
                continue
            breaks.none()
            self._changes.all(found)


def show_records(
    listing: Listing,
    words: Sequence[str],
    output: StrEnum,
    read: Callable[[], Iterable[Any]],
    unknown: Callable[[str], WeftError],
    *,
    key: str = "name",
    watch: bool = False,
) -> None:
    """Prints the records that `words` name, all without names; `watch`: until Ctrl-C, with each that changes.

    `key`: where a record has its name; `unknown` returns the error for a name that none has.
    """
    if output == "yaml":
        raise invalid_field("--output", f"must be table, wide, json or name: {listing.plural} are not declared")
    names = {word.partition("/")[2] for word in words} if "/" in words[0] else set(words[1:])

    def picked() -> list[Any]:
        return [record for record in read() if not names or record[key] in names]

    found = picked()
    if missing := names - {record[key] for record in found}:
        raise unknown(min(missing))
    if watch:
        RecordWatch(listing, output, picked).run()
    else:
        listing.print(found, output)
