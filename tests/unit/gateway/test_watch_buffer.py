"""The changes that wait for the reader of one stream of /api/v1/watch."""

import random

import pytest
from typing_extensions import override

from gateway.watch.source import Change, ChangeType, delete, put, synced
from gateway.watch.watch_stream import CoalescingBuffer

RESET = Change(type=ChangeType.RESET)
AWAY = Change(type=ChangeType.UNAVAILABLE, message="away")


def state(name: str, text: str = "") -> Change:
    return put(name, text.encode)


def drained(buffer: CoalescingBuffer) -> list[tuple[str, str, str, bytes | None]]:
    found = []
    while (taken := buffer.take()) is not None:
        kind, change = taken
        found.append((kind, change.type.value, change.name, change.encode()))
    return found


def test_changes_are_taken_in_arrival_order() -> None:
    buffer = CoalescingBuffer(10)
    for kind, change in (("model", state("b", "1")), ("route", state("a", "2")), ("model", synced())):
        assert buffer.offer(kind, change)
    assert drained(buffer) == [
        ("model", "put", "b", b"1"),
        ("route", "put", "a", b"2"),
        ("model", "synced", "", None),
    ]
    assert len(buffer) == 0


def test_repeated_changes_of_a_name_are_coalesced_at_its_first_position() -> None:
    buffer = CoalescingBuffer(10)
    buffer.offer("model", state("a", "old"))
    buffer.offer("model", state("b"))
    for each in range(1000):
        assert buffer.offer("model", state("a", str(each)))
    assert drained(buffer) == [("model", "put", "a", b"999"), ("model", "put", "b", b"")]


def test_same_name_in_two_kinds_is_distinct() -> None:
    buffer = CoalescingBuffer(10)
    buffer.offer("model", state("a", "model"))
    buffer.offer("pool", state("a", "pool"))
    assert [each[3] for each in drained(buffer)] == [b"model", b"pool"]


def test_deletion_and_pending_state_replace_each_other() -> None:
    buffer = CoalescingBuffer(10)
    buffer.offer("model", state("a", "old"))
    buffer.offer("model", delete("a"))
    buffer.offer("model", delete("b"))
    buffer.offer("model", state("b", "again"))
    assert [each[:3] for each in drained(buffer)] == [("model", "delete", "a"), ("model", "put", "b")]


def test_reset_drops_pending_changes_of_its_kind_only() -> None:
    buffer = CoalescingBuffer(2)
    buffer.offer("model", state("a"))
    buffer.offer("model", AWAY)
    buffer.offer("route", state("r"))
    assert not buffer.offer("model", state("b"))
    buffer.offer("model", RESET)
    assert buffer.offer("model", state("b"))
    assert [each[:3] for each in drained(buffer)] == [
        ("route", "put", "r"),
        ("model", "reset", ""),
        ("model", "put", "b"),
    ]


def test_full_buffer_accepts_changes_of_pending_names_and_marks_but_no_new_name() -> None:
    buffer = CoalescingBuffer(2)
    assert buffer.offer("model", state("a"))
    assert buffer.offer("model", state("b"))
    assert not buffer.offer("model", state("c"))
    assert not buffer.offer("route", delete("c"))
    assert buffer.offer("model", state("a", "new"))
    for mark in (synced(), AWAY, synced()):
        assert buffer.offer("model", mark)
    assert len(buffer) == 4
    buffer.take()
    assert buffer.offer("model", state("c"))
    assert not buffer.offer("model", state("d"))


class Reader:
    """A page's copy of one kind."""

    def __init__(self) -> None:
        self.things: dict[str, bytes | None] = {}

    def apply(self, change: Change) -> None:
        match change.type:
            case ChangeType.PUT:
                self.things[change.name] = change.encode()
            case ChangeType.DELETE:
                self.things.pop(change.name, None)
            case ChangeType.RESET:
                self.things.clear()


class KeepsFirst(CoalescingBuffer):
    """A buffer with a bug: of a name that waits it keeps the oldest state."""

    @override
    def offer(self, kind: str, change: Change) -> bool:
        return (kind, change.name, "") in self._waiting or super().offer(kind, change)


class ForgetsResets(CoalescingBuffer):
    """A buffer with a bug: what waits before a reset is sent after it."""

    @override
    def _drop(self, kind: str) -> None:
        return


def last_difference(buffer: CoalescingBuffer, seed: int) -> bool:
    """Whether a reader of random speed ends with another copy than what there is."""
    chance, truth, reader = random.Random(seed), dict[str, bytes](), Reader()
    for step in range(400):
        name, dice = chance.choice("abcdefgh"), chance.random()
        if dice < 0.05:
            buffer.offer("model", RESET)
            for known in [each for each in truth if chance.random() < 0.5]:
                del truth[known]
            changes = [state(known, text.decode()) for known, text in truth.items()]
        elif dice < 0.3:
            truth.pop(name, None)
            changes = [delete(name)]
        else:
            truth[name] = str(step).encode()
            changes = [state(name, str(step))]
        for change in changes:
            while not buffer.offer("model", change):
                reader.apply(buffer.take()[1])  # type: ignore[index]  # a full one has something
        for _ in range(chance.choice((0, 0, 1, 3))):
            if (taken := buffer.take()) is not None:
                reader.apply(taken[1])
    while (taken := buffer.take()) is not None:
        reader.apply(taken[1])
    return reader.things != truth


@pytest.mark.parametrize("max_names", [1, 3, 100])
def test_reader_of_any_speed_converges_to_the_final_state(max_names: int) -> None:
    assert not any(last_difference(CoalescingBuffer(max_names), seed) for seed in range(50))


@pytest.mark.parametrize("broken", [KeepsFirst, ForgetsResets])
def test_comparison_detects_a_buffer_that_loses_states(broken: type[CoalescingBuffer]) -> None:
    assert any(last_difference(broken(3), seed) for seed in range(50))
