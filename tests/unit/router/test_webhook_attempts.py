"""When events are sent to webhooks, and in which order."""

from itertools import pairwise

import pytest

from router_svc.policy.webhook_attempts import (
    GIVE_UP_SECONDS,
    JITTER,
    MAX_ATTEMPTS,
    MAX_PAUSE_SECONDS,
    MAX_SENDING,
    MAX_SENDING_PER_TENANT,
    Waiting,
    next_attempt_at,
    to_send,
)

NOW = 1_800_000_000.0


def attempts_of_a_dead_receiver(chance: float) -> list[float]:
    """Seconds after the end at which attempts begin."""
    moments = [0.0]
    while (again := next_attempt_at(len(moments), NOW, NOW + moments[-1], chance)) is not None:
        moments.append(again - NOW)
    return moments


@pytest.mark.parametrize("chance", [0.0, 0.5, 1.0])
def test_pauses_grow_from_5_s_to_4_h_for_a_day(chance: float) -> None:
    moments = attempts_of_a_dead_receiver(chance)
    pauses = [after - before for before, after in pairwise(moments)]
    assert pauses[0] == pytest.approx(5.0 * (1 + JITTER * chance))
    assert pauses == sorted(pauses)
    assert max(pauses) <= MAX_PAUSE_SECONDS * (1 + JITTER)
    assert GIVE_UP_SECONDS - MAX_PAUSE_SECONDS * (1 + JITTER) < moments[-1] <= GIVE_UP_SECONDS
    assert len(moments) < MAX_ATTEMPTS


def test_attempts_end_also_if_the_clock_was_set_back() -> None:
    assert next_attempt_at(MAX_ATTEMPTS, NOW, NOW - 10 * GIVE_UP_SECONDS, 0.0) is None
    assert next_attempt_at(10**6, NOW, NOW, 0.0) is None


def events(tenant: str, count: int, next_at: float = NOW) -> list[Waiting]:
    return [Waiting(f"{tenant}-{number}", tenant, next_at + number) for number in range(count)]


def test_event_that_is_not_due_is_not_sent() -> None:
    assert to_send([*events("ann", 1, NOW - 1), *events("bob", 1, NOW + 60)], {}, NOW) == ["ann-0"]


def test_event_that_is_being_sent_is_not_sent_again() -> None:
    assert to_send(events("ann", 1), {"ann-0": "ann"}, NOW) == []


def test_tenant_has_4_attempts_at_once() -> None:
    sending = {f"ann-{number}": "ann" for number in range(3)}
    first = [*events("ann", 3), Waiting("ann-8", "ann", NOW - 9), Waiting("ann-9", "ann", NOW - 8)]
    choice = to_send(first, sending, NOW)
    assert choice == ["ann-8"]
    assert MAX_SENDING_PER_TENANT == 4


def test_dead_receiver_does_not_delay_other_tenants() -> None:
    # Tenants without a running attempt come first, of those the one whose event waits longest.
    dead = [each for number in range(64, 164) for each in events(f"dead-{number}", 4, NOW - 3_600)]
    sending = {each.id: each.tenant for each in dead[: MAX_SENDING - 1]}
    choice = to_send([*dead, *events("ann", 1)], sending, NOW)
    assert choice == ["dead-128-0"]
    few = to_send([*dead[:4], *events("ann", 1)], {each.id: each.tenant for each in dead[:3]}, NOW)
    assert few == ["ann-0", "dead-64-3"]
