"""The hourly row in which a request is counted. Rows are bounded for any number of tenants, keys and models."""

from collections.abc import Iterable
from typing import NamedTuple

OTHER = "_other"
"""Tenant, key, model and name of the rows for everything else. No name of the mesh begins with `_`."""


class UsageKey(NamedTuple):
    """The key of a usage row."""

    hour: int
    """Hours since the epoch, UTC."""
    tenant: str
    key: str
    model: str
    asked: str
    """The requested name; empty: the model's own."""
    program: str = ""
    agent: str = ""
    purpose: str = ""
    """What a coding agent's request said of itself; empty: it said nothing, or there are too many such rows."""

    @property
    def undivided(self) -> "UsageKey":
        """The row without what the request said."""
        return self._replace(program="", agent="", purpose="")


class HourRows:
    """The rows of an hour: at most `limit` separate ones, `limit` for the rest of a tenant, and one for all others.

    Rows that are divided by agents have a limit of the same size; beyond it a request is counted in an undivided one.
    Existing rows stay: only keys without a row may be counted in `OTHER`. Sums per tenant are exact for up to `limit`
    tenants.
    """

    def __init__(self, limit: int, existing: Iterable[UsageKey] = ()) -> None:
        """`limit`: maximum separate rows, and maximum tenants with a row for the rest."""
        self._limit = limit
        self._divided = 0
        self._own = 0
        self._rest = 0
        self._known: set[UsageKey] = set()
        for key in existing:
            self._add(key)

    def __contains__(self, key: UsageKey) -> bool:
        return key in self._known

    def row_of(self, key: UsageKey) -> UsageKey:
        """Returns the row that counts `key`, and creates it if needed."""
        if key in self._known:
            return key
        if key != key.undivided:
            return self._add(key) if self._divided < self._limit else self.row_of(key.undivided)
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
            if key != key.undivided:
                self._divided += 1
            elif key.key != OTHER:
                self._own += 1
            elif key.tenant != OTHER:
                self._rest += 1
        return key
