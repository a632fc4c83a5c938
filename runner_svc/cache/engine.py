"""What the cache asks of an engine beyond the backend port."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotSight:
    """One slot of an engine at one moment."""

    number: int
    is_busy: bool
    is_empty: bool
    """Whether it has nothing cached."""
    task: int | None
    """The task that it works on or worked on last; None: unknown, or none yet."""


@runtime_checkable
class SlottedEngine(Protocol):
    """An engine whose slots each keep the prefix of what they last worked on."""

    @property
    def slot_count(self) -> int:
        """The slots it has, by its own word; 0: it does not run, or does not say."""
        ...

    async def look_at_slots(self) -> Sequence[SlotSight]:
        """Its slots right now; empty where it does not say in time. Never raises."""
        ...
