"""Ended requests of the lane: how long they are remembered, and how many."""

from typing import Any, cast

from gateway.picker.ended_requests import EndedRequests


class Ended:
    """A request that has ended."""

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id


def keep(ended: EndedRequests, name: str, now: float, seconds: float) -> None:
    ended.keep(cast("Any", Ended(name)), now, seconds)


def test_each_is_forgotten_when_its_own_time_is_over() -> None:
    ended = EndedRequests(10)
    keep(ended, "long", 0.0, 30.0)
    keep(ended, "short", 1.0, 2.0)
    keep(ended, "later", 2.0, 2.0)
    ended.forget(2.9)
    assert len(ended) == 3
    ended.forget(3.0)
    assert ("long" in ended, "short" in ended, "later" in ended) == (True, False, True)
    assert ended.get("short") is None
    found = ended.get("long")
    assert found is not None
    assert found.request_id == "long"
    ended.forget(30.0)
    assert len(ended) == 0


def test_of_too_many_the_oldest_is_forgotten_that_is_kept_for_as_long() -> None:
    ended = EndedRequests(2)
    keep(ended, "long", 0.0, 30.0)
    for number in range(3):
        keep(ended, f"short-{number}", 1.0, 2.0)
    assert ("long" in ended, "short-0" in ended, "short-1" in ended, "short-2" in ended) == (True, False, True, True)
