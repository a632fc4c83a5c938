"""The part of a router's request log that is not yet in its database, collected as requests arrive and end.

Above a bound the requests that ended first are dropped and counted, so that memory stays bounded without a database.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice

from router_svc.policy.router_request import Request
from router_svc.request_record import EndedRequest
from weft.kernel.requests.placement_request import PlacementRequest


@dataclass(frozen=True, slots=True)
class RecordBatch:
    """The records of one transaction."""

    begun: Sequence[Request]
    """Requests under way that are written for the first time."""
    ended: Sequence[EndedRequest]
    placed_again: Sequence[tuple[str, str]]
    """Tenants and ids of requests of a router that was lost or gave them away, and that were placed again or have a
    known end."""

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to write."""
        return not (self.begun or self.ended or self.placed_again)


class UnwrittenRecords:
    """Collects records after `keep`, when a writer exists. Called only from the router's event loop."""

    def __init__(self) -> None:
        self._max_ended = 0
        self._begun: dict[int, Request] = {}
        """Under way; bounded by the log."""
        self._ended: dict[int, EndedRequest] = {}
        """In order of their ends."""
        self._placed_again: list[tuple[str, str]] = []
        self.dropped_count = 0

    def keep(self, max_ended: int) -> None:
        """Start collecting, with at most `max_ended` ended requests."""
        self._max_ended = max_ended

    def note_arrival(self, entry: Request) -> None:
        """Collect an arrived request."""
        if self._max_ended:
            self._begun[entry.key] = entry
            if entry.spec.age_seconds > 0.0:
                self.note_placed_again(entry.spec)

    def note_end(self, ended: EndedRequest) -> None:
        """Collect the end of a request, or a later correction of it."""
        if not self._max_ended:
            return
        self._begun.pop(ended.key, None)
        self._ended[ended.key] = ended
        if len(self._ended) > self._max_ended:
            del self._ended[next(iter(self._ended))]
            self.dropped_count += 1

    def forget(self, key: int) -> None:
        """Discard an arrival that needs no record."""
        self._begun.pop(key, None)

    def note_placed_again(self, spec: PlacementRequest) -> None:
        """Collect that a request from an earlier process runs again, or has an end: it is no longer lost."""
        if self._max_ended:
            self._placed_again.append((spec.tenant, spec.request_id))
            del self._placed_again[: -self._max_ended]

    @property
    def placed_again(self) -> list[str]:
        """Ids of requests that are no longer lost."""
        return [request_id for _, request_id in self._placed_again]

    def take(self, limit: int) -> RecordBatch:
        """Return at most `limit` collected records of each kind; the caller writes them or gives them back."""
        begun, ended = list(islice(self._begun, limit)), list(islice(self._ended, limit))
        taken = RecordBatch(
            begun=[self._begun.pop(key) for key in begun],
            ended=[self._ended.pop(key) for key in ended],
            placed_again=self._placed_again[:limit],
        )
        del self._placed_again[:limit]
        return taken

    def give_back(self, taken: RecordBatch, is_under_way: Callable[[int], bool]) -> None:
        """Collect again what could not be written; `is_under_way`: whether a request has not ended since."""
        later, self._ended = self._ended, {}
        self._begun = {entry.key: entry for entry in taken.begun if is_under_way(entry.key)} | self._begun
        self._placed_again = [*taken.placed_again, *self._placed_again]
        for ended in (*taken.ended, *later.values()):
            self.note_end(ended)
