"""Which operations may begin: those that touch the same model do so one after the other, in order of acceptance."""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Unfinished:
    """An operation that waits or runs."""

    id: str
    subjects: frozenset[str]
    """Names of what it changes; empty: it disturbs nobody."""
    running: bool


def startable(unfinished: Iterable[Unfinished], max_running: int) -> list[str]:
    """The ids of those that may begin now. `unfinished` is in order of acceptance.

    One that waits holds its subjects too: a later one must not overtake it, or it could wait for ever.
    """
    waiting_or_running = list(unfinished)
    room = max_running - sum(each.running for each in waiting_or_running)
    held: set[str] = set()
    chosen: list[str] = []
    for each in waiting_or_running:
        if room <= 0:
            break
        if not each.running and held.isdisjoint(each.subjects):
            chosen.append(each.id)
            room -= 1
        held |= each.subjects
    return chosen
