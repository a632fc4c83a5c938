"""When an event is sent to a webhook, and which ones are sent now. Pure; times are UTC seconds."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

GIVE_UP_SECONDS = 86_400.0
"""Age of an event after which no attempt begins."""
MAX_ATTEMPTS = 16
"""The pauses below reach GIVE_UP_SECONDS earlier, unless a clock was set back."""
FIRST_PAUSE_SECONDS = 5.0
PAUSE_GROWTH = 3.0
MAX_PAUSE_SECONDS = 4 * 3_600.0
JITTER = 0.2
"""Pauses are longer by up to this share, so that events that failed together are sent apart."""
MAX_SENDING = 256
"""Maximum concurrent attempts ..."""
MAX_SENDING_PER_TENANT = 4
"""... and for one tenant, so that its slow receiver delays no other tenant."""


class Waiting(NamedTuple):
    """An event that waits for an attempt."""

    id: str
    tenant: str
    next_at: float


def next_attempt_at(attempts: int, created_at: float, now: float, chance: float) -> float | None:
    """Returns when an event is sent again after failed attempts; None: it is given up. `chance` is 0 to 1."""
    if attempts >= MAX_ATTEMPTS:
        return None
    pause = min(FIRST_PAUSE_SECONDS * PAUSE_GROWTH ** (attempts - 1), MAX_PAUSE_SECONDS)
    again_at = now + pause * (1 + JITTER * chance)
    return None if again_at > created_at + GIVE_UP_SECONDS else again_at


def to_send(first: Sequence[Waiting], sending: Mapping[str, str], now: float) -> Sequence[str]:
    """Returns the ids of events to send: of tenants with the fewest running attempts first, then the oldest.

    `first`: each tenant's first MAX_SENDING_PER_TENANT events by time. `sending`: tenants of running attempts by event.
    """
    running = Counter(sending.values())
    due: list[tuple[int, float, str]] = []
    for each in sorted(first, key=lambda each: each.next_at):
        if each.next_at <= now and each.id not in sending and running[each.tenant] < MAX_SENDING_PER_TENANT:
            running[each.tenant] += 1
            due.append((running[each.tenant], each.next_at, each.id))
    return [event for _, _, event in sorted(due)[: MAX_SENDING - len(sending)]]
