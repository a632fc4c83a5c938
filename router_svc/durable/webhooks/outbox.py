"""Events for webhooks in a router's database. Each is written in the transaction with the end that it reports."""

from collections.abc import Callable, Mapping, Sequence

from router_svc.policy.webhook_attempts import MAX_PAUSE_SECONDS, MAX_SENDING_PER_TENANT, Waiting
from router_svc.store.database import RouterDatabase
from weft.api.common.v1.event_pb2 import FINISH_REASON_CONTENT_FILTER, FINISH_REASON_LENGTH
from weft.api.router.v1 import task_pb2
from weft.api.router.v1.batch_service_pb2 import Batch
from weft.api.router.v1.webhook_pb2 import WebhookEvent
from weft.durable.batches import batch_status
from weft.durable.responses import BACKGROUND_KIND, background_response_id
from weft.durable.tasks import state_name, task_error
from weft.kernel.errors.reasons import Reason
from weft.kernel.time.timestamps import stamp_of
from weft.sql.connections import Tx
from weft.sql.statements import insert

MAX_WAITING = 10_000
"""Maximum events of one tenant that wait for an attempt; further ones are dropped."""
PURGED_AT_ONCE = 1_000
_CUT_OFF = frozenset({FINISH_REASON_LENGTH, FINISH_REASON_CONTENT_FILTER})
_WAITS = "tenant = :tenant AND next_at IS NOT NULL"


class Outbox:
    """Adds events in transactions of tasks and batches."""

    def __init__(self, tenants: frozenset[str] | None = frozenset()) -> None:
        """`tenants`: those with a webhook; None: unknown so far, so that every end gets an event."""
        self.tenants = tenants
        self.note_added: Callable[[int], None] = lambda _: None
        """Called in the database's thread before the commit, with how many of the new events were dropped."""

    def has(self, tenant: str) -> bool:
        """Whether ends of this tenant get events."""
        return self.tenants is None or tenant in self.tenants

    def add_tasks(self, tx: Tx, tasks: Sequence[task_pb2.Task], now: float) -> None:
        """Adds the events of tasks that this transaction ends, except lines of batches and tasks whose caller waits."""
        for tenant in {task.tenant for task in tasks if self.has(task.tenant)}:
            own = (task for task in tasks if task.tenant == tenant and not (task.batch or task.request_id))
            self._add(tx, tenant, [_event_of(tx, task, now) for task in own], now)

    def add_batch(self, tx: Tx, batch: Batch, now: float) -> None:
        """Adds the event of a batch that this transaction ends."""
        if self.has(batch.tenant):
            self._add(tx, batch.tenant, [_new(f"batch.{batch_status(batch)}", batch.id, now)], now)

    def find(self, tx: Tx, task: task_pb2.Task) -> WebhookEvent | None:
        """Returns the event of a task; None: none, or its tenant has no webhook."""
        kept = "SELECT event FROM webhook_events WHERE id = :id"
        found = tx.value(kept, id=event_id(task.id)) if self.has(task.tenant) else None
        return None if found is None else WebhookEvent.FromString(found)

    def _add(self, tx: Tx, tenant: str, new: Sequence[WebhookEvent], now: float) -> None:
        if not new:
            return
        waiting = f"SELECT count(*) FROM (SELECT 1 FROM webhook_events WHERE {_WAITS} LIMIT :most) AS kept"
        room = max(0, MAX_WAITING - tx.value(waiting, tenant=tenant, most=MAX_WAITING))
        for each in new[room:]:
            each.state = WebhookEvent.STATE_DROPPED
            words = f"{MAX_WAITING} events of the tenant wait for its receiver"
            each.error.CopyFrom(task_error(Reason.TOO_MANY_RESOURCES, words))
            each.ClearField("next_time")
        for index, each in enumerate(new):
            row = {"id": each.id, "tenant": tenant, "created_at": now, "event": each.SerializeToString()}
            row["next_at"] = now if index < room else None
            # An end must be stored whatever happens to its event.
            tx.execute(f"{insert('webhook_events', *row)} ON CONFLICT (id) DO NOTHING", **row)
        self.note_added(len(new[room:]))


class EventStore:
    """The events in a router's database, for their sender. Every method raises SERVICE_UNAVAILABLE."""

    def __init__(self, database: RouterDatabase) -> None:
        self._database = database

    async def first(self) -> Mapping[Waiting, WebhookEvent]:
        """Returns the first MAX_SENDING_PER_TENANT waiting events of each tenant by time."""
        tenants = """SELECT tenant FROM webhook_events WHERE next_at IS NOT NULL AND tenant > :after
            ORDER BY tenant LIMIT 1"""
        some = f"SELECT * FROM webhook_events WHERE {_WAITS} ORDER BY next_at LIMIT {MAX_SENDING_PER_TENANT}"

        def read(tx: Tx) -> Mapping[Waiting, WebhookEvent]:
            found: dict[Waiting, WebhookEvent] = {}
            tenant = tx.value(tenants, after="")
            # One step per tenant, as a scan would read all that wait for a dead receiver.
            while tenant is not None:
                for row in tx.rows(some, tenant=tenant):
                    found[Waiting(row.id, tenant, row.next_at)] = WebhookEvent.FromString(row.event)
                tenant = tx.value(tenants, after=tenant)
            return found

        return await self._database.read(read)

    async def put(self, event: WebhookEvent, next_at: float | None) -> None:
        """Stores an event after an attempt; `next_at`: when the next one begins."""
        row = {"id": event.id, "next_at": next_at, "event": event.SerializeToString()}
        await self._database.run(lambda tx: tx.update("webhook_events", "id", row))

    async def remove(self, event: str) -> None:
        """Deletes an event."""
        await self._database.change("DELETE FROM webhook_events WHERE id = :id", id=event)

    async def sweep(self, now: float, keep_seconds: float) -> None:
        """Deletes old events, and moves attempts that a clock set back left too far in the future to now."""
        old = f"""FROM webhook_events WHERE id IN (SELECT id FROM webhook_events WHERE created_at < :old
            AND next_at IS NULL ORDER BY created_at LIMIT {PURGED_AT_ONCE})"""
        # There is nearly always nothing to do, which a read finds out without a commit.
        while await self._database.value(f"SELECT 1 {old}", old=now - keep_seconds) is not None:
            await self._database.change(f"DELETE {old}", old=now - keep_seconds)
        late, latest = "FROM webhook_events WHERE next_at > :latest", now + 2 * MAX_PAUSE_SECONDS
        if await self._database.value(f"SELECT 1 {late}", latest=latest) is not None:
            move = "UPDATE webhook_events SET next_at = :now WHERE next_at > :latest"
            await self._database.change(move, now=now, latest=latest)


def event_id(ended: str) -> str:
    """Returns the id of the event about the end of a task or batch, which has only one."""
    return f"evt_{ended.rpartition('-')[2]}"


def _event_of(tx: Tx, task: task_pb2.Task, now: float) -> WebhookEvent:
    state = state_name(task.state).lower()
    if task.origin_kind != BACKGROUND_KIND:
        return _new(f"task.{state}", task.id, now)
    if task.state == task_pb2.TASK_STATE_COMPLETED and _is_cut_off(tx, task):
        state = "incomplete"
    event = _new(f"response.{state}", task.id, now)
    event.object_id = background_response_id(task.id)
    return event


def _is_cut_off(tx: Tx, task: task_pb2.Task) -> bool:
    """Whether an answer ended at its limit or by a content filter, as its last pieces say."""
    last = """SELECT output FROM task_pieces WHERE task_id = :id AND attempt = :attempt
        ORDER BY first_index DESC LIMIT 2"""
    pieces = (task_pb2.TaskOutput.FromString(row.output) for row in tx.rows(last, id=task.id, attempt=task.attempt))
    return any(event.delta.finish_reason in _CUT_OFF for piece in pieces for event in piece.events)


def _new(kind: str, ended: str, now: float) -> WebhookEvent:
    waiting, time = WebhookEvent.STATE_WAITING, stamp_of(now)
    return WebhookEvent(id=event_id(ended), type=kind, object_id=ended, state=waiting, create_time=time, next_time=time)
