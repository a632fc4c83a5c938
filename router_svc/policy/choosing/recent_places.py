"""Where something last ran: a bounded table."""

from collections import OrderedDict

from router_svc.policy.grants import CandidateKey


class RecentPlaces:
    """Remembers a candidate for each key of a pool; the key used longest ago is forgotten first."""

    def __init__(self, max_entries: int) -> None:
        self._max_entries = max_entries
        self._places: OrderedDict[tuple[str, int | bytes], CandidateKey] = OrderedDict()

    def __len__(self) -> int:
        return len(self._places)

    def find(self, pool: str, key: int | bytes) -> CandidateKey | None:
        """Where it last ran; None: nobody remembers."""
        return self._places.get((pool, key))

    def note(self, pool: str, key: int | bytes, where: CandidateKey) -> None:
        """It runs there now."""
        places, entry = self._places, (pool, key)
        places[entry] = where
        places.move_to_end(entry)
        if len(places) > self._max_entries:
            places.popitem(last=False)
