"""Moments in tables that lie further off than they can, because a clock was set back: they are brought back.

A lease, a pause or a time limit is written as the moment at which it ends. Written while the clock was an hour ahead it
would hold for an hour longer than its length. Each such column says how far off it can lie; a sweep moves what lies
further to just that.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from weft.kernel.clock import CLOCK_MARGIN_SECONDS
from weft.sql.connections import Tx


@dataclass(frozen=True, slots=True)
class BoundedMoment:
    """A column of moments, and how far off they can lie."""

    table: str
    key: str
    """Its primary key."""
    column: str
    latest: str = ":now"
    """The latest that it can be at `:now`."""
    where: str = "1 = 1"
    """In which rows it means something."""
    along: Sequence[str] = ()
    """Columns that were counted from it, and move by as much."""

    @property
    def ahead(self) -> str:
        """The keys of rows whose moment lies further off than it can, for `:later`, `:now` and a margin."""
        latest = self.latest.replace(":now", ":later")
        return f"""SELECT {self.key} FROM {self.table} WHERE {self.where} AND {self.column} > {latest}
            ORDER BY {self.key} LIMIT :limit"""


def is_any_ahead(tx: Tx, moments: Sequence[BoundedMoment], now: float) -> bool:
    """Whether there is anything to bring back. Only reads."""
    later = now + CLOCK_MARGIN_SECONDS
    return any(tx.value(moment.ahead, later=later, limit=1) is not None for moment in moments)


def bring_back(tx: Tx, moments: Sequence[BoundedMoment], now: float | datetime, limit: int) -> int:
    """Moves moments that lie too far in the future, at most `limit` rows of each; returns how many were moved."""
    margin: Any = timedelta(seconds=CLOCK_MARGIN_SECONDS) if isinstance(now, datetime) else CLOCK_MARGIN_SECONDS
    later = now + margin
    moved = 0
    for moment in moments:
        further = [f"{each} = {each} - ({moment.column} - ({moment.latest}))" for each in moment.along]
        changes = ", ".join([f"{moment.column} = {moment.latest}", *further])
        change = f"UPDATE {moment.table} SET {changes} WHERE {moment.key} IN ({moment.ahead})"
        moved += tx.execute(change, now=now, later=later, limit=limit)
    return moved
