"""Queues in `/api/v1/watch`: what changed alone, and one question to the router for all streams."""

from contextlib import aclosing
from dataclasses import dataclass, field

from gateway_script import serving
from watch_script import QUICK, brief, watching

from gateway.watch.queues import queues_by_name
from gateway.watch.source import WatchCaller, WatchSource
from weft.kernel.access.principal import LOCAL
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.requests.placement_request import PoolQueue
from weft.kernel.time.clock import SystemClock
from weft_testing.fake_clock import FakeClock

INTERVAL_SECONDS = 0.01


@dataclass
class ChangingQueues:
    """Queues that a test changes; `failure` is raised instead."""

    queues_now: list[PoolQueue] = field(default_factory=list)
    failure: WeftError | None = None
    asked: int = 0

    async def queues(self) -> list[PoolQueue]:
        self.asked += 1
        if self.failure is not None:
            raise self.failure
        return list(self.queues_now)


def queue(pool: str, waiting: int = 0, average: float | None = None) -> PoolQueue:
    return PoolQueue(pool=pool, waiting=waiting, max_waiting=16, running=1, average_wait_seconds=average)


def source_of(queues: ChangingQueues) -> WatchSource:
    return queues_by_name(queues, SystemClock(), INTERVAL_SECONDS)


async def test_only_changed_queues_are_sent() -> None:
    queues = ChangingQueues([queue("a"), queue("b")])
    async with serving(config=QUICK, watched=[source_of(queues)]) as gateway, watching(gateway, "queue") as stream:
        found = await stream.snapshot("queue")
        assert [brief(one) for one in found] == [("queue", "put", "a"), ("queue", "put", "b"), ("queue", "synced")]
        assert found[0]["object"] == {"waiting": 0, "maxWaiting": 16, "running": 1}
        queues.queues_now = [queue("a", average=2.0), queue("b", waiting=3)]
        change = await stream.next()
        assert (brief(change), change["object"]["waiting"]) == (("queue", "put", "b"), 3)
        queues.queues_now = [queue("a")]
        assert brief(await stream.next()) == ("queue", "delete", "b")


async def test_queues_are_unavailable_while_the_router_is_down_and_resent_after() -> None:
    queues = ChangingQueues([queue("a")])
    async with serving(config=QUICK, watched=[source_of(queues)]) as gateway, watching(gateway, "queue") as stream:
        await stream.snapshot("queue")
        queues.failure = WeftError(Reason.SERVICE_UNAVAILABLE, "no router answers")
        away = await stream.next()
        assert (away["change"], away["message"]) == ("unavailable", "no router answers")
        queues.failure = None
        changes = [brief(one) for one in await stream.until("queue", "synced")]
        assert changes == [("queue", "reset"), ("queue", "put", "a"), ("queue", "synced")]


async def test_concurrent_streams_share_one_router_poll() -> None:
    queues = ChangingQueues([queue("a")])
    source = queues_by_name(queues, FakeClock(), 1.0)
    for _ in range(3):
        async with aclosing(source.changes(WatchCaller(principal=LOCAL, tenant="default"))) as changes:
            assert (await anext(changes)).name == "a"
    assert queues.asked == 1
