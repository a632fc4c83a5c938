"""In which row of its hour a request is counted: bounded, however many tenants, keys and models there are."""

from collections.abc import Iterable
from typing import NamedTuple

OTHER = "_other"
"""The tenant, key, model and name of the rows for everything else. No name of the mesh begins with `_`."""


class UsageKey(NamedTuple):
    """What one row of usage counts."""

    hour: int
    """Hours since the epoch, UTC."""
    tenant: str
    key: str
    model: str
    asked: str
    """The name that was asked for; empty: the model's own."""


class HourRows:
    """The rows of one hour: at most `limit` separate ones, as many for the rest of tenants, and one for the others.

    A row that exists stays: only what has none yet may be counted in `OTHER`. Sums per tenant are exact for
    up to `limit` tenants.
    """

    def __init__(self, limit: int, existing: Iterable[UsageKey] = ()) -> None:
        """`limit`: most separate rows, and most tenants with a row for the rest."""
        self._limit = limit
        self._own = 0
        self._rest = 0
        self._known: set[UsageKey] = set()
        for key in existing:
            self._add(key)

    def __contains__(self, key: UsageKey) -> bool:
        return key in self._known

    def row_of(self, key: UsageKey) -> UsageKey:
        """Returns the row that counts `key`; from then on the row exists."""
        if key in self._known:
            return key
        if key.key == OTHER:
            of_tenant = key
        elif self._own < self._limit:
            return self._add(key)
        else:
            of_tenant = UsageKey(key.hour, key.tenant, OTHER, OTHER, "")
        if of_tenant in self._known or self._rest < self._limit:
            return self._add(of_tenant)
        return self._add(UsageKey(key.hour, OTHER, OTHER, OTHER, ""))

    def _add(self, key: UsageKey) -> UsageKey:
        if key not in self._known:
            self._known.add(key)
            if key.key != OTHER:
                self._own += 1
            elif key.tenant != OTHER:
                self._rest += 1
        return key
