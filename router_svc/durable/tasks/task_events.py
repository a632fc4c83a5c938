"""News of tasks inside one process: told after the commit, never instead of it. Whoever misses some looks again."""

import asyncio
import json
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import structlog
from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncConnection

from router_svc.durable.tasks.store_port import Lane, LaneFilled, ManyChanged, StoreEvent, TaskChanged
from router_svc.store.database import RouterDatabase
from weft.kernel.clock import Clock
from weft.kernel.errors import WeftError
from weft.kernel.request import Priority

Listener = Callable[[StoreEvent], None]


class TaskEventBus:
    """Hands on news to whoever listens in this process."""

    def __init__(self) -> None:
        self._listeners: list[Listener] = []
        self._watchers: dict[str, list[asyncio.Event]] = {}

    def subscribe(self, listener: Listener) -> None:
        """Be told everything, in the order it happens. A listener must not raise, and must not wait."""
        self._listeners.append(listener)

    def publish(self, event: StoreEvent) -> None:
        """Something is on disk."""
        for listener in self._listeners:
            listener(event)
        if isinstance(event, TaskChanged):
            _set(self._watchers.get(event.task_id, ()))
        elif isinstance(event, ManyChanged):
            for watchers in self._watchers.values():
                _set(watchers)

    def is_watched(self, task_id: str) -> bool:
        """Whether somebody waits for news of it."""
        return task_id in self._watchers

    @contextmanager
    def watching(self, task_id: str) -> Generator[asyncio.Event]:
        """An event that is set with every news of a task; clear it before looking."""
        event = asyncio.Event()
        self._watchers.setdefault(task_id, []).append(event)
        try:
            yield event
        finally:
            watchers = self._watchers[task_id]
            with suppress(ValueError):
                watchers.remove(event)
            if not watchers:
                del self._watchers[task_id]


def _set(events: "list[asyncio.Event] | tuple[()]") -> None:
    for event in events:
        event.set()


async def wait_for_event(event: asyncio.Event, clock: Clock, seconds: float) -> bool:
    """Whether there was news within so many seconds."""
    if event.is_set():
        return True
    waiting = asyncio.ensure_future(event.wait())
    sleeping = asyncio.ensure_future(clock.sleep(max(0.0, seconds)))
    try:
        await asyncio.wait((waiting, sleeping), return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiting.cancel()
        sleeping.cancel()
    return event.is_set()


log = structlog.get_logger("weft.tasks")

CHANNEL = "weft_tasks"
MAX_PAYLOAD_BYTES = 7_900
"""PostgreSQL takes less than 8000."""
MAX_TOLD = 64
"""Of more news in one write only that there is much."""
PROBE_SECONDS = 15.0
"""How often a silent connection is asked whether it still is one ..."""
PROBE_TIMEOUT_SECONDS = 10.0
"""... and how long its answer may take."""
FIRST_PAUSE_SECONDS = 0.25
MAX_PAUSE_SECONDS = 30.0


async def notify_routers(connection: AsyncConnection, origin: str, events: Sequence[StoreEvent]) -> None:
    """Tell the other routers with this transaction; `origin` is who does not want to hear it. Not for SQLite."""
    distinct = list(dict.fromkeys(events))
    for payload in _payloads(origin, distinct if len(distinct) <= MAX_TOLD else [ManyChanged()]):
        await connection.execute(select(func.pg_notify(CHANNEL, payload)))


class PostgresEvents:
    """Hears what other routers tell."""

    def __init__(self, database: RouterDatabase, origin: str, clock: Clock) -> None:
        self._database = database
        self._origin = origin
        self._clock = clock
        self._pause_seconds = FIRST_PAUSE_SECONDS

    async def listen(self, heard: Callable[[StoreEvent], None]) -> None:
        """Hand on news until cancelled; ManyChanged whenever it begins to hear: what was told before was missed."""
        while True:
            try:
                async with self._database.apart() as connection:
                    await self._hear(connection, heard)
                log.warning("news of other routers are lost, listening again")
            except (WeftError, OSError) as error:
                log.warning("no news of other routers, trying again", kind=type(error).__name__)
            except Exception as error:
                # The driver's own errors: its package is there on PostgreSQL only. Anything else is a fault of ours.
                if not type(error).__module__.startswith("asyncpg"):
                    raise
                log.warning("no news of other routers, trying again", kind=type(error).__name__)
            await self._clock.sleep(self._pause_seconds)
            self._pause_seconds = min(2 * self._pause_seconds, MAX_PAUSE_SECONDS)

    async def _hear(self, connection: AsyncConnection, heard: Callable[[StoreEvent], None]) -> None:
        """Returns when the connection is gone."""
        driver: Any = (await connection.get_raw_connection()).driver_connection
        gone = asyncio.Event()
        driver.add_termination_listener(lambda _: gone.set())
        await driver.add_listener(CHANNEL, lambda *notice: self._pass_on(notice[-1], heard))
        self._pause_seconds = FIRST_PAUSE_SECONDS
        heard(ManyChanged())
        while not await self._is_gone(gone):
            await driver.execute("SELECT 1", timeout=PROBE_TIMEOUT_SECONDS)

    async def _is_gone(self, gone: asyncio.Event) -> bool:
        """After a while, or as soon as it is."""
        napping = asyncio.ensure_future(self._clock.sleep(PROBE_SECONDS))
        waiting = asyncio.ensure_future(gone.wait())
        try:
            await asyncio.wait((napping, waiting), return_when=asyncio.FIRST_COMPLETED)
        finally:
            napping.cancel()
            waiting.cancel()
            await asyncio.gather(napping, waiting, return_exceptions=True)
        return gone.is_set()

    def _pass_on(self, payload: str, heard: Callable[[StoreEvent], None]) -> None:
        origin, events = _parsed(payload)
        if origin != self._origin:
            for each in events:
                heard(each)


def _payloads(origin: str, events: Sequence[StoreEvent]) -> Sequence[str]:
    payloads: list[str] = []
    words: list[object] = []
    for each in events:
        longer = json.dumps([origin, *words, _word_of(each)], separators=(",", ":"))
        if words and len(longer) > MAX_PAYLOAD_BYTES:
            payloads.append(json.dumps([origin, *words], separators=(",", ":")))
            words = []
        words.append(_word_of(each))
    return [*payloads, json.dumps([origin, *words], separators=(",", ":"))] if words else payloads


def _word_of(event: StoreEvent) -> object:
    match event:
        case LaneFilled(lane):
            return [lane.model, lane.tenant, lane.band.value]
        case TaskChanged(task_id):
            return task_id
        case ManyChanged():
            return 0


def _parsed(payload: str) -> tuple[str, Sequence[StoreEvent]]:
    """What a newer release says otherwise means that something has changed."""
    try:
        origin, *words = json.loads(payload)
        return origin, [_news_of(word) for word in words]
    except (ValueError, TypeError):
        return "", [ManyChanged()]


def _news_of(word: Any) -> StoreEvent:
    if isinstance(word, str):
        return TaskChanged(word)
    if word == 0:
        return ManyChanged()
    model, tenant, band = word
    return LaneFilled(Lane(model, tenant, Priority(band)))
