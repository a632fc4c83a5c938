"""Events of tasks: a bus inside the process, and LISTEN/NOTIFY between routers on one PostgreSQL.

An event is published after the commit that it reports, as a hint to read again; a reader that misses one still polls.
"""

import asyncio
import json
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncConnection

from router_svc.durable.tasks.store_port import Lane, LaneFilled, ManyChanged, StoreEvent, TaskChanged
from router_svc.store.database import RouterDatabase
from weft.kernel.clock import Clock
from weft.kernel.errors import WeftError
from weft.kernel.log import get_logger
from weft.kernel.request import Priority

Listener = Callable[[StoreEvent], None]


class TaskEventBus:
    """Passes events to the listeners and watchers of this process."""

    def __init__(self) -> None:
        self._listeners: list[Listener] = []
        self._watchers: dict[str, list[asyncio.Event]] = {}

    def subscribe(self, listener: Listener) -> None:
        """Registers a listener for every event, in order. It must not raise, and must not block."""
        self._listeners.append(listener)

    @contextmanager
    def listening(self, listener: Listener) -> Generator[None]:
        """Registers a listener for the length of a block."""
        self._listeners.append(listener)
        try:
            yield
        finally:
            self._listeners.remove(listener)

    def publish(self, event: StoreEvent) -> None:
        """Publishes a change that is committed."""
        for listener in self._listeners:
            listener(event)
        if isinstance(event, TaskChanged):
            _set(self._watchers.get(event.task_id, ()))
        elif isinstance(event, ManyChanged):
            for watchers in self._watchers.values():
                _set(watchers)

    def is_watched(self, task_id: str) -> bool:
        """Whether a watcher waits for events of the task."""
        return task_id in self._watchers

    @contextmanager
    def watching(self, task_id: str) -> Generator[asyncio.Event]:
        """Yields an asyncio event that is set with every change of a task; clear it before reading."""
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
    """Waits at most `seconds`; returns whether the event was set."""
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


log = get_logger("weft.tasks")

CHANNEL = "weft_tasks"
MAX_PAYLOAD_BYTES = 7_900
"""PostgreSQL takes less than 8000 bytes."""
MAX_EVENTS_PER_WRITE = 64
"""A write with more events publishes ManyChanged instead."""
PROBE_SECONDS = 15.0
"""How often an idle connection is probed ..."""
PROBE_TIMEOUT_SECONDS = 10.0
"""... and how long the answer to a probe may take."""
FIRST_PAUSE_SECONDS = 0.25
MAX_PAUSE_SECONDS = 30.0


async def notify_routers(connection: AsyncConnection, origin: str, events: Sequence[StoreEvent]) -> None:
    """Notifies the other routers when this transaction commits; the listener with the id `origin` ignores it.

    PostgreSQL only.
    """
    distinct = list(dict.fromkeys(events))
    for payload in _payloads(origin, distinct if len(distinct) <= MAX_EVENTS_PER_WRITE else [ManyChanged()]):
        await connection.execute(select(func.pg_notify(CHANNEL, payload)))


class PostgresEvents:
    """Listens to the events of other routers."""

    def __init__(self, database: RouterDatabase, origin: str, clock: Clock) -> None:
        self._database = database
        self._origin = origin
        self._clock = clock
        self._pause_seconds = FIRST_PAUSE_SECONDS

    async def listen(self, on_event: Callable[[StoreEvent], None]) -> None:
        """Passes on events until cancelled; ManyChanged after each connect, because earlier events were missed."""
        while True:
            try:
                async with self._database.dedicated() as connection:
                    await self._listen_once(connection, on_event)
                log.warning("connection for events of other routers lost, listening again")
            except (WeftError, OSError) as error:
                log.warning("cannot listen to events of other routers, trying again", kind=type(error).__name__)
            except Exception as error:
                # Errors of the driver, whose package is installed for PostgreSQL only. Anything else is a bug.
                if not type(error).__module__.startswith("asyncpg"):
                    raise
                log.warning("cannot listen to events of other routers, trying again", kind=type(error).__name__)
            await self._clock.sleep(self._pause_seconds)
            self._pause_seconds = min(2 * self._pause_seconds, MAX_PAUSE_SECONDS)

    async def _listen_once(self, connection: AsyncConnection, on_event: Callable[[StoreEvent], None]) -> None:
        """Passes on events until the connection is lost."""
        driver: Any = (await connection.get_raw_connection()).driver_connection
        gone = asyncio.Event()
        driver.add_termination_listener(lambda _: gone.set())
        await driver.add_listener(CHANNEL, lambda *notice: self._pass_on(notice[-1], on_event))
        self._pause_seconds = FIRST_PAUSE_SECONDS
        on_event(ManyChanged())
        while not await wait_for_event(gone, self._clock, PROBE_SECONDS):
            await driver.execute("SELECT 1", timeout=PROBE_TIMEOUT_SECONDS)

    def _pass_on(self, payload: str, on_event: Callable[[StoreEvent], None]) -> None:
        origin, events = _parsed(payload)
        if origin != self._origin:
            for each in events:
                on_event(each)


def _payloads(origin: str, events: Sequence[StoreEvent]) -> Sequence[str]:
    payloads: list[str] = []
    items: list[object] = []
    for each in events:
        longer = json.dumps([origin, *items, _json_of(each)], separators=(",", ":"))
        if items and len(longer) > MAX_PAYLOAD_BYTES:
            payloads.append(json.dumps([origin, *items], separators=(",", ":")))
            items = []
        items.append(_json_of(each))
    return [*payloads, json.dumps([origin, *items], separators=(",", ":"))] if items else payloads


def _json_of(event: StoreEvent) -> object:
    match event:
        case LaneFilled(lane):
            return [lane.model, lane.tenant, lane.band.value]
        case TaskChanged(task_id):
            return task_id
        case ManyChanged():
            return 0


def _parsed(payload: str) -> tuple[str, Sequence[StoreEvent]]:
    """Parses a payload; one that a newer release wrote differently is read as ManyChanged."""
    try:
        origin, *items = json.loads(payload)
        return origin, [_event_of(item) for item in items]
    except (ValueError, TypeError):
        return "", [ManyChanged()]


def _event_of(item: Any) -> StoreEvent:
    if isinstance(item, str):
        return TaskChanged(item)
    if item == 0:
        return ManyChanged()
    model, tenant, band = item
    return LaneFilled(Lane(model, tenant, Priority(band)))
