"""Requests followed until Ctrl-C by the router's watch."""

from collections.abc import Callable, Iterable, Iterator
from enum import StrEnum
from pathlib import Path

from weft.client.requests import connect_requests
from weft.documents.codec import document_of
from weft.kernel.errors import WeftError
from weft_app.cli.follow import Breaks
from weft_app.cli.mesh_documents import Document
from weft_app.cli.output import Listing
from weft_app.cli.record_watch import RecordChanges

ENDED = "ended"


def follow_requests(home: Path, ended_limit: int = 0) -> Iterator[tuple[list[Document], bool]]:
    """Yields the requests under way and the last ended ones with True, then those that change with False.

    After a break what there is comes again. Raises like `follow_resources`.
    """
    breaks = Breaks()
    while True:
        try:
            with connect_requests(home=home) as requests:
                first: list[Document] | None = []
                for response in requests.watch(ended_limit=ended_limit):
                    breaks.none()
                    if first is None:
                        yield list(map(document_of, response.requests)), False
                        continue
                    first += map(document_of, response.requests)
                    if response.synced:
                        yield first, True
                        first = None
        except WeftError as error:
            breaks.survive(error)


def watch_under_way(listing: Listing, output: StrEnum, following: Iterator[tuple[list[Document], bool]]) -> None:
    """Prints requests under way, then each that changes, and once more when it has ended; see `follow_requests`."""
    changes, has_begun = RecordChanges(listing, output), False
    for records, is_snapshot in following:
        open_ones = [record for record in records if record["state"] != ENDED]
        if is_snapshot:
            (changes.all if has_begun else changes.first)(open_ones)
            has_begun = True
            continue
        for record in records:
            (changes.last if record["state"] == ENDED else changes.one)(record)


def watch_ended(
    listing: Listing,
    output: StrEnum,
    first: Iterable[Document],
    following: Iterator[tuple[list[Document], bool]],
    is_wanted: Callable[[Document], bool],
) -> None:
    """Prints the ended requests `first`, then each wanted one that ends; see `follow_requests`."""
    changes = RecordChanges(listing, output)
    changes.first(first)
    for records, is_snapshot in following:
        for record in reversed(records) if is_snapshot else records:
            if record["state"] == ENDED and is_wanted(record):
                changes.one(record)


def watch_named(
    listing: Listing,
    output: StrEnum,
    read: Callable[[], Iterable[Document]],
    following: Iterator[tuple[list[Document], bool]],
) -> None:
    """Prints the requests that `read` returns, again with each change of one; see `follow_requests`."""
    changes, found = RecordChanges(listing, output), list(read())
    names = {record["requestId"] for record in found}
    changes.first(found)
    for records, is_snapshot in following:
        if is_snapshot or any(record["requestId"] in names for record in records):
            changes.all(read())
