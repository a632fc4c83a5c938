"""Sends events to the webhooks of tenants while this router leads; see docs/webhooks.md."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import TypeAlias

from typing_extensions import override

from router_svc.durable.store_service import StoreService
from router_svc.durable.webhooks.outbox import EventStore, Outbox
from router_svc.policy.webhook_attempts import Waiting, next_attempt_at, to_send
from router_svc.store.database import RouterDatabase
from weft.api.registry.v1.secret_service_pb2 import GetWebhookResponse
from weft.api.router.v1.task_pb2 import TaskError
from weft.api.router.v1.webhook_pb2 import WebhookEvent
from weft.dispatch.fleet import FleetView
from weft.durable.tasks import task_error
from weft.kernel.channels.outbound import Outbound
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import reason_of
from weft.kernel.services.service_lifecycle import start_restarting, start_task, stop_tasks
from weft.kernel.telemetry.log import get_logger
from weft.kernel.time.clock import Clock, wait_for_event
from weft.kernel.time.timestamps import seconds_of, stamp_of
from weft.sql.sweeper import Sweeper

log = get_logger("weft.webhooks")

SWEEP_SECONDS = 3_600.0
STORE_PAUSE_SECONDS = 1.0
"""Pause after a database failure."""

GetWebhook: TypeAlias = Callable[[str], Awaitable[GetWebhookResponse]]
"""Returns the webhook of a tenant, without a URL if it has none. Raises WeftError."""
Observe: TypeAlias = Callable[[str], None]
"""Called with the result of each attempt (delivered, failed, given_up), and with dropped for an event without one."""


def ignore_result(_: str) -> None:
    """Observe of a router without metrics."""


class WebhookSender(StoreService):
    """Sends the events in a router's database."""

    def __init__(  # noqa: PLR0913 - what a router provides
        self,
        database: RouterDatabase,
        outbox: Outbox,
        get_webhook: GetWebhook,
        clock: Clock,
        *,
        utc_now: Callable[[], float],
        keep_seconds: float,
        observe: Observe = ignore_result,
        outbound: Outbound | None = None,
    ) -> None:
        """`utc_now`: the clock of stored tasks. `keep_seconds`: how long an event is kept."""
        self._store = store = EventStore(database)
        self._outbox = outbox
        self._get_webhook = get_webhook
        self._clock = clock
        self._utc_now = utc_now
        self._observe = observe
        self._outbound = outbound or Outbound()
        self._changed = asyncio.Event()
        self._tenants: Mapping[str, object] | None = None
        """Those of the last view."""
        self._sending: dict[str, str] = {}
        """The tenants of running attempts, by event."""
        self._tasks: set[asyncio.Task[None]] = set()
        sweeps = {"webhook events": lambda: store.sweep(utc_now(), keep_seconds)}
        super().__init__(database, Sweeper("webhook-sweeper", sweeps, SWEEP_SECONDS, clock))

    def mesh_changed(self, view: FleetView) -> None:
        """Receives a new view of the mesh."""
        if view.revision and view.tenants is not self._tenants:
            self._tenants = view.tenants
            declared = (name for name, tenant in view.tenants.items() if tenant.manifest.HasField("webhook"))
            self._outbox.tenants = frozenset(declared)

    @override
    async def begin(self) -> None:
        loop = asyncio.get_running_loop()

        def note_added(dropped: int) -> None:
            with suppress(RuntimeError):  # A closed loop must not fail the end of a task.
                loop.call_soon_threadsafe(self._note_added, dropped)

        self._outbox.note_added = note_added
        self._tasks.add(start_restarting(self._run, name="webhook-sender", clock=self._clock))

    @override
    async def end(self, grace_seconds: float) -> None:
        # An attempt that is not stored is repeated with the same id.
        await stop_tasks(list(self._tasks))

    def _note_added(self, dropped: int) -> None:
        for _ in range(dropped):
            self._observe("dropped")
        self._changed.set()

    async def _run(self) -> None:
        while True:
            self._changed.clear()
            try:
                pause = await self._round()
            except WeftError as error:
                log.warning("events for webhooks could not be read", why=error.message)
                pause = STORE_PAUSE_SECONDS
            await wait_for_event(self._changed, self._clock, pause)

    async def _round(self) -> float:
        """Starts attempts; returns the maximum pause before the next round."""
        found, now = await self._store.first(), self._utc_now()
        events = {waiting.id: (waiting, event) for waiting, event in found.items()}
        for event_id in to_send(list(found), self._sending, now):
            waiting, event = events[event_id]
            self._sending[event_id] = waiting.tenant
            attempt = start_task(self._attempt(waiting, event), name=f"webhook {event_id}")
            self._tasks.add(attempt)
            attempt.add_done_callback(self._tasks.discard)
        return min((each.next_at - now for each in found if each.next_at > now), default=SWEEP_SECONDS)

    async def _attempt(self, waiting: Waiting, event: WebhookEvent) -> None:
        try:
            await self._deliver(waiting.tenant, event)
        except WeftError as error:
            log.warning("an attempt is repeated, as it was not stored", event_id=event.id, why=error.message)
            await self._clock.sleep(STORE_PAUSE_SECONDS)
        finally:
            del self._sending[waiting.id]
            self._changed.set()

    async def _deliver(self, tenant: str, event: WebhookEvent) -> None:
        """Makes one attempt. Raises SERVICE_UNAVAILABLE if it cannot be stored."""
        from router_svc.durable.webhooks.request import send  # noqa: PLC0415 - its HTTP client takes memory

        began_at, failure = self._utc_now(), None
        try:
            webhook = await self._get_webhook(tenant)
            if not webhook.url:
                log.info("event removed: its tenant has no webhook", event_id=event.id, tenant=tenant)
                await self._store.remove(event.id)
                return
            await send(webhook.url, webhook.secret, event, began_at, self._outbound)
        except WeftError as error:
            failure = task_error(error.reason, error.message)
        next_at = note_attempt(event, failure, began_at, self._utc_now(), random.random())  # noqa: S311 - jitter
        await self._store.put(event, next_at)
        about = f"{event.type} {event.object_id}"
        if failure is None:
            self._observe("delivered")
            log.info("event delivered", event_id=event.id, tenant=tenant, about=about, attempt=len(event.attempts))
            return
        self._observe("given_up" if next_at is None else "failed")
        log.warning(
            "event not delivered",
            event_id=event.id,
            tenant=tenant,
            about=about,
            attempt=len(event.attempts),
            reason=reason_of(failure.reason).name,
            why=failure.message,
            gives_up=next_at is None,
        )


def note_attempt(
    event: WebhookEvent, failure: TaskError | None, began_at: float, now: float, chance: float
) -> float | None:
    """Adds an attempt to an event. Returns when the next one begins; None: there is none. Pure."""
    event.attempts.add(start_time=stamp_of(began_at), error=failure)
    event.ClearField("next_time")
    if failure is None:
        event.state = WebhookEvent.STATE_DELIVERED
        return None
    next_at = next_attempt_at(len(event.attempts), seconds_of(event.create_time), now, chance)
    if next_at is None:
        event.state = WebhookEvent.STATE_FAILED
    else:
        event.next_time.CopyFrom(stamp_of(next_at))
    return next_at
