"""Corrects times in tables that are too far in the future because a clock was set back.

A lease, a pause or a time limit is stored as its end. If the clock was an hour ahead when it was written, it would last
an hour too long. Each such column declares its latest possible value, and a sweep moves later values to it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from weft.kernel.time.clock import CLOCK_MARGIN_SECONDS
from weft.sql.connections import Tx


@dataclass(frozen=True, slots=True)
class BoundedMoment:
    """A column of times, and their latest possible value."""

    table: str
    key: str
    """The table's primary key."""
    column: str
    latest: str = ":now"
    """SQL for the latest possible value at `:now`."""
    where: str = "1 = 1"
    """Condition for the rows to which it applies."""
    along: Sequence[str] = ()
    """Columns derived from it, which move by the same amount."""

    @property
    def ahead(self) -> str:
        """Query for the keys of rows with times that are too late; `:later` is now plus a margin."""
        latest = self.latest.replace(":now", ":later")
        return f"""SELECT {self.key} FROM {self.table} WHERE {self.where} AND {self.column} > {latest}
            ORDER BY {self.key} LIMIT :limit"""


def is_any_ahead(tx: Tx, moments: Sequence[BoundedMoment], now: float) -> bool:
    """Whether any time is too late. Only reads."""
    later = now + CLOCK_MARGIN_SECONDS
    return any(tx.value(moment.ahead, later=later, limit=1) is not None for moment in moments)


def bring_back(tx: Tx, moments: Sequence[BoundedMoment], now: float | datetime, limit: int) -> int:
    """Corrects times that are too late, at most `limit` rows of each column. Returns the number of changed rows."""
    margin: Any = timedelta(seconds=CLOCK_MARGIN_SECONDS) if isinstance(now, datetime) else CLOCK_MARGIN_SECONDS
    later = now + margin
    moved = 0
    for moment in moments:
        further = [f"{each} = {each} - ({moment.column} - ({moment.latest}))" for each in moment.along]
        changes = ", ".join([f"{moment.column} = {moment.latest}", *further])
        change = f"UPDATE {moment.table} SET {changes} WHERE {moment.key} IN ({moment.ahead})"
        moved += tx.execute(change, now=now, later=later, limit=limit)
    return moved
