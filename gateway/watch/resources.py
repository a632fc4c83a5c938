"""Resources of all kinds as sources of a watch, over one watch of the registry.

All streams of a gateway share that watch, and the JSON of each resource. It is open while one of them reads.
"""

import asyncio
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing, asynccontextmanager
from functools import partial

from gateway.errors import internal_error
from gateway.registry_client import RegistryClient
from gateway.watch.source import Change, WatchCaller, WatchSource, delete, put, synced
from weft.documents.kinds import KINDS, Key
from weft.documents.mesh_state import MeshState
from weft.documents.resource_kinds import ResourceKind
from weft.documents.resources import PoolDocument, plain, pool_document
from weft.documents.rights import view_of, visible_pool
from weft.kernel.access.principal import VIEW_MODELS, Principal
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.services.service_lifecycle import start_task, stop_tasks
from weft.kernel.telemetry.log import get_logger
from weft.kernel.text.json_lines import encode_json

MAX_CHANGED_NAMES = 65_536
"""Maximum names that changed since a stream last read them; with more it begins again."""

log = get_logger("weft.gateway")


class _Subscriber:
    """The names of one kind that changed since they were last taken."""

    def __init__(self, kind: ResourceKind) -> None:
        self.kind = kind
        self._changed: dict[str, None] = {}
        self._is_ready = asyncio.Event()
        self._error: WeftError | None = None

    def note(self, names: Iterable[str]) -> None:
        self._changed.update(dict.fromkeys(names))
        if len(self._changed) > MAX_CHANGED_NAMES:
            self._changed.clear()
            self.end(WeftError(Reason.WATCH_LAGGED, f"more than {MAX_CHANGED_NAMES} names changed unread"))
        self._is_ready.set()

    def end(self, error: WeftError) -> None:
        """Raises `error` in the reader."""
        self._error = self._error or error
        self._is_ready.set()

    async def taken(self) -> list[str]:
        """Returns the changed names once there are any, or the snapshot has arrived. Raises the error that ended it."""
        await self._is_ready.wait()
        if self._error is not None:
            raise self._error
        self._is_ready.clear()
        names = sorted(self._changed)
        self._changed.clear()
        return names


class _Mirror:
    """The mesh as one watch of the registry shows it, until that watch ends."""

    def __init__(self, registry: RegistryClient) -> None:
        self._registry = registry
        self.state = MeshState()
        self._encoded: dict[Key, bytes] = {}
        self._is_known = False
        """Whether the snapshot has arrived."""
        self._subscribers: dict[_Subscriber, None] = {}
        self.ended = False
        self._task = start_task(self._follow(), name="watch-mirror")

    def join(self, subscriber: _Subscriber) -> None:
        """Notes every name to a new subscriber, now or with the snapshot, then those that change."""
        self._subscribers[subscriber] = None
        if self._is_known:
            subscriber.note(self.state.names(subscriber.kind))

    def leave(self, subscriber: _Subscriber) -> bool:
        """Removes a subscriber; returns whether it was the last."""
        self._subscribers.pop(subscriber, None)
        return not self._subscribers

    async def stop(self) -> None:
        """Ends the watch of the registry."""
        self.ended = True
        await stop_tasks([self._task])

    def encoded(self, key: Key) -> bytes | None:
        """Returns the JSON of a resource as in its list; None: it does not exist."""
        found = self._encoded.get(key)
        if found is None:
            document = self.state.document(key)
            if document is None:
                return None
            found = self._encoded[key] = encode_json(plain(document))
        return found

    def encoded_for(self, principal: Principal, key: Key) -> bytes | None:
        """Returns the JSON of a resource for a caller; of a pool, without the members that it may not see."""
        if key[0] is not ResourceKind.POOL or principal.may(VIEW_MODELS):
            return self.encoded(key)
        document = self.state.document(key)
        if not isinstance(document, PoolDocument) or document.observed is None:
            return None
        return encode_json(plain(pool_document(visible_pool(principal, document.observed))))

    async def _follow(self) -> None:
        try:
            async with aclosing(self._registry.watch()) as responses:
                async for response in responses:
                    self._note(self.state.fold(response))
            error = WeftError(Reason.SERVICE_UNAVAILABLE, "the registry ended the watch")
        except WeftError as failure:
            error = failure
        except Exception:
            log.exception("watch of resources failed unexpectedly")
            error = internal_error()
        self.ended = True
        for subscriber in self._subscribers:
            subscriber.end(error)

    def _note(self, changed: Iterable[Key]) -> None:
        by_kind: dict[ResourceKind, list[str]] = {}
        for key in changed:
            self._encoded.pop(key, None)
            by_kind.setdefault(key[0], []).append(key[1])
        is_snapshot, self._is_known = not self._is_known, True
        for subscriber in self._subscribers:
            if is_snapshot or subscriber.kind in by_kind:
                subscriber.note(by_kind.get(subscriber.kind, ()))


class ResourceFeed:
    """The resources of the mesh for all streams of one gateway."""

    def __init__(self, registry: RegistryClient) -> None:
        self._registry = registry
        self._mirror: _Mirror | None = None

    @asynccontextmanager
    async def joined(self, subscriber: _Subscriber) -> AsyncGenerator[_Mirror]:
        """Keeps the registry's watch open, and notifies the subscriber of changes."""
        mirror = self._mirror
        if mirror is None or mirror.ended:
            mirror = self._mirror = _Mirror(self._registry)
        mirror.join(subscriber)
        try:
            yield mirror
        finally:
            if mirror.leave(subscriber):
                if self._mirror is mirror:
                    self._mirror = None
                await mirror.stop()


def _source(kind: ResourceKind, feed: ResourceFeed) -> WatchSource:
    by_name = KINDS[kind].by_name

    async def changes(caller: WatchCaller) -> AsyncGenerator[Change]:
        subscriber, is_synced = _Subscriber(kind), False
        async with feed.joined(subscriber) as mirror:
            while True:
                for name in await subscriber.taken():
                    if by_name and not caller.principal.may_name(VIEW_MODELS, name):
                        continue
                    key = (kind, name)
                    if key in mirror.state:
                        yield put(name, partial(mirror.encoded_for, caller.principal, key))
                    elif is_synced:
                        yield delete(name)
                if not is_synced:
                    is_synced = True
                    yield synced()

    return WatchSource(kind=kind.value, access=view_of(kind), by_name=by_name, changes=changes)


def resource_sources(registry: RegistryClient, kinds: Iterable[ResourceKind] = ResourceKind) -> list[WatchSource]:
    """Returns a source for each kind of resource, over one watch of the registry."""
    feed = ResourceFeed(registry)
    return [_source(kind, feed) for kind in kinds]
