"""Two Python functions that a runner offers to models as tools; weft.yaml beside this file says how."""

import asyncio
import datetime as dt
import zoneinfo
from typing import Annotated, Literal

from pydantic import Field


def count(text: str, unit: Literal["words", "characters"] = "words") -> int:
    """Count the words or the characters of a text."""
    return len(text.split() if unit == "words" else text)


async def time_in(zone: Annotated[str, Field(description="Such as Europe/Berlin.")]) -> dict[str, str]:
    """Tell the date and the time of day in a time zone."""
    # A coroutine function must not block; what it waits for, it awaits.
    known = await asyncio.to_thread(zoneinfo.available_timezones)
    if zone not in known:
        raise ValueError(f"there is no time zone {zone}")
    now = dt.datetime.now(zoneinfo.ZoneInfo(zone))
    return {"date": now.date().isoformat(), "time": now.strftime("%H:%M"), "weekday": now.strftime("%A")}
