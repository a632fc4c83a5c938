"""How soon a lost watch of the registry is begun again."""

import asyncio
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any, cast

from weft.api.registry.v1 import registry_service_pb2
from weft.dispatch.fleet import FleetWatcher
from weft.kernel.channels.stream_follower import FIRST_RETRY_SECONDS, MAX_RETRY_SECONDS
from weft_testing.fake_clock import FakeClock

if TYPE_CHECKING:
    import grpc

WATCHES = 8


class Pauses(FakeClock):
    """Notes each pause and lets it pass at once, until there were as many as wanted."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: list[float] = []
        self.enough = asyncio.Event()

    async def sleep(self, seconds: float) -> None:
        self.seconds.append(seconds)
        if len(self.seconds) == WATCHES:
            self.enough.set()
            await asyncio.Event().wait()
        await asyncio.sleep(0)


class Registry:
    """A channel to a registry whose watches end after the snapshot, or before it."""

    def __init__(self, *, answers: bool) -> None:
        self._answers = answers

    def unary_stream(self, *_: object, **__: object) -> Any:
        return lambda _: self._watch()

    def unary_unary(self, *_: object, **__: object) -> Any:
        return None

    async def _watch(self) -> AsyncIterator[registry_service_pb2.WatchResponse]:
        if not self._answers:
            raise ConnectionError
        # The same revision each time: nothing has changed in the mesh meanwhile.
        yield registry_service_pb2.WatchResponse(revision=7, snapshot=registry_service_pb2.Snapshot())


async def _pauses(*, answers: bool) -> list[float]:
    clock = Pauses()
    watcher = FleetWatcher(cast("grpc.aio.Channel", Registry(answers=answers)), clock)
    await watcher.start()
    await clock.enough.wait()
    await watcher.stop()
    return clock.seconds


async def test_watch_with_a_snapshot_is_a_success_even_without_changes() -> None:
    assert await _pauses(answers=True) == [FIRST_RETRY_SECONDS] * WATCHES


async def test_backoff_doubles_up_to_its_limit_without_a_snapshot() -> None:
    pauses = await _pauses(answers=False)
    assert pauses[0] == 2 * FIRST_RETRY_SECONDS
    assert pauses[-1] == MAX_RETRY_SECONDS
