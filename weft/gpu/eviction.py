"""Which loaded models leave a host when their memory is wanted: the one rule, for the VRAM ledger and for the router.

A model may leave if it is idle, is not pinned, and served no higher priority class. Lower classes leave first, then the
least recently used, and none leaves that is not needed. Both callers see the same page of a host; the router also knows
who waits there, so it may decide that a model in use leaves next.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

from weft.kernel.requests.request_values import Priority

ModelT = TypeVar("ModelT")
RoomT = TypeVar("RoomT")


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """What counts for and against a loaded model."""

    name: str
    priority: Priority
    """Priority class of its last request."""
    last_used_at: float
    """In seconds, on any one clock for all models of a host; minus infinity: never."""
    in_use: bool
    pinned: bool
    turn_left: float = 0.0
    """Seconds for which it must still serve; only the router grants turns."""
    loss: float = 0.0
    """What the requests for it lose, in seconds; only counts while it is in use."""

    def may_leave(self, wanted_for: Priority) -> bool:
        """Whether a load of this class may evict it. SYSTEM: the router has decided, and drains a model in use."""
        is_free = not self.in_use or wanted_for is Priority.SYSTEM
        return is_free and not self.pinned and self.priority >= wanted_for

    @property
    def order(self) -> tuple[float, bool, float, int, float, str]:
        """Sort key: the lowest leaves first."""
        loss = self.loss if self.in_use else 0.0
        return self.turn_left, self.in_use, loss, -self.priority, self.last_used_at, self.name


NEVER = -math.inf
"""`Standing.last_used_at` of a model that was not used yet."""


def victims(
    among: Iterable[ModelT],
    room: RoomT,
    *,
    standing: Callable[[ModelT], Standing],
    fits: Callable[[RoomT], bool],
    freed: Callable[[RoomT, ModelT, int], RoomT],
) -> tuple[ModelT, ...] | None:
    """Returns the models of `among` to evict so that a load fits, in this order; None: all together are not enough.

    `room` is the free memory; `freed` adds a model's memory to it (sign 1) or takes it back (-1), at most once each, as
    there may be a thousand models. After the first victim has left, the answer is the rest.
    """
    chosen: list[ModelT] = []
    for model in sorted(among, key=lambda each: standing(each).order):
        if fits(room):
            break
        chosen.append(model)
        room = freed(room, model, 1)
    if not fits(room):
        return None
    # The most valuable are spared first.
    for index in reversed(range(len(chosen))):
        spared = freed(room, chosen[index], -1)
        if fits(spared):
            room = spared
            del chosen[index]
    return tuple(chosen)
