"""Round-robin over the lanes of tasks, so that no lane keeps the others from being offered. Pure."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

LaneT = TypeVar("LaneT", bound=Hashable)


@dataclass(frozen=True, slots=True)
class LaneTurn(Generic[LaneT]):
    """A lane that may offer tasks."""

    lane: LaneT
    ready: int
    """Tasks that may be offered now."""
    offered: int
    """Tasks that are offered already."""


def next_turns(lanes: Sequence[LaneTurn[LaneT]], *, after: LaneT | None, per_lane: int, free: int) -> Sequence[LaneT]:
    """Return the lanes to offer a task of, in order, each as often as it may offer one more.

    Rounds start with the lane behind `after`, which was last served: with `free` places for all of them, the lane with
    most waiting tasks gets no more than the rest.
    """
    order = _beginning_behind(lanes, after)
    left = [min(turn.ready, per_lane - turn.offered) for turn in order]
    turns: list[LaneT] = []
    while len(turns) < free and any(count > 0 for count in left):
        for place, turn in enumerate(order):
            if left[place] > 0 and len(turns) < free:
                left[place] -= 1
                turns.append(turn.lane)
    return turns


def _beginning_behind(lanes: Sequence[LaneTurn[LaneT]], after: LaneT | None) -> list[LaneTurn[LaneT]]:
    for place, turn in enumerate(lanes):
        if turn.lane == after:
            return [*lanes[place + 1 :], *lanes[: place + 1]]
    return list(lanes)
