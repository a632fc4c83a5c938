"""Records that no service streams changes of, such as requests and leases: read again at an interval, and followed."""

import time
from collections.abc import Callable, Iterable
from enum import StrEnum
from typing import Any

from weft.kernel.errors import WeftError
from weft_app.cli.follow import Breaks
from weft_app.cli.output import TEXTS, Feed, Listing, json_line, say

INTERVAL_SECONDS = 1.0
"""Interval between two readings."""
GONE = "gone"


def wait_interval() -> None:
    """Waits until the next reading is due."""
    time.sleep(INTERVAL_SECONDS)


class RecordWatch:
    """Prints records, then each one that is new, has changed or is gone, as successive readings show it."""

    def __init__(self, listing: Listing, output: StrEnum, read: Callable[[], Iterable[Any]]) -> None:
        """`read` returns the records as they are now; the listing's `name` identifies each."""
        self._listing = listing
        self._output = output
        self._read = read
        self._feed = Feed(listing, output)
        self._shown: dict[str, Any] = {}
        """The fingerprint of each record that is there."""

    def run(self, wait: Callable[[], None] = wait_interval) -> None:
        """Prints until Ctrl-C. Raises the error of a reading, that of a mesh which is away only after a minute."""
        found = list(self._read())
        self._shown = {self._listing.name(record): self._fingerprint(record) for record in found}
        say(self._feed.first(found))
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
            self._print_changes(found)

    def _print_changes(self, found: Iterable[Any]) -> None:
        now = {self._listing.name(record): record for record in found}
        for name in [name for name in self._shown if name not in now]:
            del self._shown[name]
            say(self._farewell(name))
        for name, record in now.items():
            fingerprint = self._fingerprint(record)
            if self._shown.get(name) != fingerprint:
                self._shown[name] = fingerprint
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
