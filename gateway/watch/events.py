"""Events of resources as a source of a watch."""

from collections.abc import AsyncGenerator
from contextlib import aclosing

from typing_extensions import override

from gateway.registry_client import RegistryClient
from gateway.watch.source import Change, WatchCaller, WatchSource, put_message, synced
from weft.kernel.principal import Access, Resource, Role

PAST_EVENTS = 100


class EventSource(WatchSource):
    """The newest events, then every new one; the name of one is its sequence, and none is ever deleted."""

    kind = "event"
    access = Access(Resource.TELEMETRY, Role.VIEW)
    by_name = False

    def __init__(self, registry: RegistryClient) -> None:
        self._registry = registry

    @override
    async def changes(self, caller: WatchCaller) -> AsyncGenerator[Change]:
        async with aclosing(self._registry.follow_events(PAST_EVENTS)) as events:
            async for event in events:
                yield synced() if event is None else put_message(str(event.sequence), event)
