"""Moments in tables that lie further off than they can, because a clock was set back: they are brought back.

A lease, a pause or a time limit is written as the moment at which it ends. Written while the clock was an hour ahead it
would hold for an hour longer than its length. Each such column says how far off it can lie; a sweep moves what lies
further to just that.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import Column, ColumnElement, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from weft.kernel.clock import CLOCK_MARGIN_SECONDS


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundedMoment:
    """A column of moments, and how far off they can lie."""

    key: Column[Any]
    """The primary key of its table."""
    column: Column[Any]
    latest: ColumnElement[float] | float | datetime
    """The latest that it can be now."""
    where: ColumnElement[bool]
    """In which rows it means something."""
    along: Sequence[Column[Any]] = ()
    """Columns that were counted from it, and move by as much."""

    @property
    def is_ahead(self) -> ColumnElement[bool]:
        """Of a row: whether its moment lies further off than it can."""
        if isinstance(self.latest, datetime):
            return self.where & (self.column > self.latest + timedelta(seconds=CLOCK_MARGIN_SECONDS))
        return self.where & (self.column > self.latest + CLOCK_MARGIN_SECONDS)


async def is_any_ahead(connection: AsyncConnection, moments: Sequence[BoundedMoment]) -> bool:
    """Whether there is anything to bring back. Only reads."""
    for moment in moments:
        found = await connection.execute(select(moment.key).where(moment.is_ahead).limit(1))
        if found.first() is not None:
            return True
    return False


async def bring_back(connection: AsyncConnection, moments: Sequence[BoundedMoment], limit: int) -> int:
    """Move moments that lie too far in the future, at most `limit` rows of each; returns how many were moved."""
    moved = 0
    for moment in moments:
        table = moment.column.table
        # Rows are locked in one order everywhere; rows that another transaction has locked are its own to move.
        chosen = select(moment.key).where(moment.is_ahead).order_by(moment.key).limit(limit)
        values = {moment.column.name: moment.latest}
        values |= {each.name: each - (moment.column - moment.latest) for each in moment.along}
        changed = update(table).where(moment.key.in_(chosen.with_for_update(skip_locked=True))).values(values)
        moved += (await connection.execute(changed)).rowcount
    return moved
