"""Writes the audit log: changes of operations with their actors, and refused requests with the reason."""

import hashlib
from collections import Counter
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from google.protobuf import json_format

from registry_svc.operations.actions import action_bytes
from registry_svc.operations.audit_chain import detail_json, empty_head
from registry_svc.operations.operation_store import OperationStore
from registry_svc.operations.policy.governance import Refused
from weft.api.operations.v1 import operation_pb2
from weft.api.operations.v1.operation_service_pb2 import AuditEntry, AuditHead
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.telemetry.log import get_logger
from weft.kernel.time.clock import Clock

WINDOW_SECONDS = 600.0
MAX_ENTRIES_PER_WINDOW = 20
MAX_COUNTED_REASONS = 16
OTHER_REASONS = "other"
# Share of the log that refusals may fill; the rest is for accepted operations.
SHARE_FOR_REFUSALS = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class CountedRefusals:
    """Refusals without separate entries."""

    since: datetime
    until: datetime
    count: int
    reasons: dict[str, int] = field(hash=False)
    """Counts by reason; at most MAX_COUNTED_REASONS, the rest as OTHER_REASONS."""


class RefusalWindow:
    """Counts refusals in windows of WINDOW_SECONDS.

    The first MAX_ENTRIES_PER_WINDOW of a window each get a separate entry; the others share one, written at the end of
    the window. A flood writes at most 21 entries in 10 minutes, 3,024 a day.
    """

    def __init__(self) -> None:
        self._since: datetime | None = None
        self._written = 0
        self._counted: Counter[str] = Counter()

    def takes(self, now: datetime) -> bool:
        """Whether a refusal at `now` gets a separate entry. Call `closed` first."""
        if self._since is None:
            self._since = now
        if self._written < MAX_ENTRIES_PER_WINDOW:
            self._written += 1
            return True
        return False

    def count(self, why: str) -> None:
        """Counts a refusal without a separate entry."""
        known = why in self._counted or len(self._counted) < MAX_COUNTED_REASONS
        self._counted[why if known else OTHER_REASONS] += 1

    def closed(self, now: datetime, *, immediately: bool = False) -> CountedRefusals | None:
        """Returns the counts of an expired window, or of any window with `immediately`, and ends it. None: none."""
        # A clock that was set back also ends the window, which otherwise might never end.
        over = self._since is not None and not timedelta(0) <= now - self._since < timedelta(seconds=WINDOW_SECONDS)
        if self._since is None or not (over or immediately):
            return None
        counted, since = self._counted, self._since
        self._since, self._written, self._counted = None, 0, Counter()
        if not counted:
            return None
        return CountedRefusals(since=since, until=now, count=counted.total(), reasons=dict(sorted(counted.items())))


log = get_logger("weft.registry.audit")

ENTRIES_PER_OPERATION = 4
"""Maximum: accepted, started, cancellation requested, ended."""
MAX_WHY_CHARS = 256


class AuditLog:
    """One log. Entries about operations are drafted here, and the store writes them together with the operation."""

    def __init__(self, store: OperationStore, clock: Clock, max_entries: int) -> None:
        self._store = store
        self._clock = clock
        self._max_entries = max_entries
        self._head = empty_head()
        self._refusals = RefusalWindow()
        self._cancellations = RefusalWindow()

    @property
    def head(self) -> AuditHead:
        """The newest stored entry."""
        return self._head

    async def start(self) -> None:
        """Loads the head."""
        self._head = await self._store.audit_head()

    def moved(self, head: AuditHead) -> None:
        """Updates the head after entries were written."""
        self._head = head

    def require_room(self, unfinished: int) -> None:
        """Raises TOO_MANY_RESOURCES if another operation could leave no room for the entries of the unfinished ones."""
        if self._head.sequence + (unfinished + 1) * ENTRIES_PER_OPERATION > self._max_entries:
            raise WeftError(
                Reason.TOO_MANY_RESOURCES,
                f"the audit log is full at {self._max_entries} entries; keep a copy of it and raise "
                "registry.operations.max_audit_entries",
                metadata={"limit": str(self._max_entries)},
            )

    def drafted(self, event: str, operation: operation_pb2.Operation, actor: str, **detail: object) -> AuditEntry:
        """Returns a draft about an operation."""
        return entry_draft(
            at=self._clock.utc_now(), event=event, actor=actor, operation=operation.name, detail=detail_json(detail)
        )

    async def refused(self, refused: Refused, action: operation_pb2.OperationAction, requested_by: str) -> None:
        """Records a refusal, or counts it if there were too many. Raises SERVICE_UNAVAILABLE."""
        why = refused.why[:MAX_WHY_CHARS]
        detail: dict[str, object] = {
            "action": action_detail(action),
            "action_sha256": action_hash(action_bytes(action)),
            "why": why,
        }
        await self._write_or_count("operation.refused", requested_by, detail, self._refusals, why)

    async def cancelled(self, request_id: str, tenant: str, cancelled_by: str) -> None:
        """Records the cancellation of a request by its id, or counts it as refusals. Raises SERVICE_UNAVAILABLE."""
        detail: dict[str, object] = {"request_id": request_id, "tenant": tenant}
        await self._write_or_count("request.cancelled", cancelled_by, detail, self._cancellations, tenant)

    async def close_window(self, *, immediately: bool = False) -> None:
        """Writes entries about counted refusals and cancellations if their window has ended, or with `immediately`."""
        refusals = self._refusals.closed(self._clock.utc_now(), immediately=immediately)
        cancellations = self._cancellations.closed(self._clock.utc_now(), immediately=immediately)
        if refusals is not None:
            log.warning("refusals counted", count=refusals.count, since=refusals.since.isoformat())
            await self._write_counted("operation.refusals_counted", refusals, "why")
        if cancellations is not None:
            log.info("cancellations counted", count=cancellations.count, since=cancellations.since.isoformat())
            await self._write_counted("request.cancellations_counted", cancellations, "tenants")

    def _has_room_for_refusals(self) -> bool:
        return self._head.sequence < self._max_entries * SHARE_FOR_REFUSALS

    async def _write_or_count(
        self, event: str, actor: str, detail: dict[str, object], window: RefusalWindow, counted_as: str
    ) -> None:
        await self.close_window()
        if self._has_room_for_refusals() and window.takes(self._clock.utc_now()):
            await self.write(event, actor, detail)
        else:
            window.count(counted_as)

    async def _write_counted(self, event: str, counted: CountedRefusals, by: str) -> None:
        if self._has_room_for_refusals():
            await self.write(event, "", _counted_detail(counted, by))

    def tell_head(self) -> None:
        """Writes the head to the process's log, which is stored elsewhere."""
        log.info("audit head", sequence=self._head.sequence, hash=self._head.hash)

    async def write(self, event: str, actor: str, detail: dict[str, object]) -> None:
        """Writes an entry that belongs to no operation. Raises SERVICE_UNAVAILABLE."""
        draft = entry_draft(
            at=self._clock.utc_now(), event=event, actor=actor, operation="", detail=detail_json(detail)
        )
        self._head = await self._store.append_audit([draft])


def action_detail(action: operation_pb2.OperationAction) -> object:
    """Returns an action as JSON, with the field names of the contract."""
    detail: object = json_format.MessageToDict(action, preserving_proto_field_name=True)
    return detail


def action_hash(action: bytes) -> str:
    """Returns the SHA-256 of a serialized action, as 64 hex digits."""
    return hashlib.sha256(action).hexdigest()


def _counted_detail(counted: CountedRefusals, by: str) -> dict[str, object]:
    """Returns the detail of an entry about counted events; `by` is what they are counted by."""
    return {
        "count": counted.count,
        "since": counted.since.isoformat(),
        "until": counted.until.isoformat(),
        by: counted.reasons,
    }


def entry_draft(*, at: datetime, event: str, actor: str, operation: str, detail: str) -> AuditEntry:
    """Returns an entry that is not chained yet. `detail` is a JSON object; see `detail_json`."""
    draft = AuditEntry(event=event, actor=actor, operation=operation, detail=detail)
    draft.time.FromDatetime(at)
    return draft
