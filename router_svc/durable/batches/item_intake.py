"""Item intake: validates the items of a new batch as they arrive, and turns each into a task row."""

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from hashlib import blake2b

from router_svc.durable.batches.config import BatchLimits
from router_svc.durable.tasks.config import TaskLimits
from router_svc.durable.tasks.spec_validation import CheckedSpec, check_spec
from router_svc.durable.tasks.store_port import Lane, LaneFilled, ManyChanged, StoreEvent, TaskRow
from weft.dispatch.agents import KnownNames
from weft.durable.batches import MAX_CUSTOM_ID_CHARS, BatchLine, NewBatch
from weft.durable.tasks import TASK_PREFIX
from weft.kernel.errors import FieldError, WeftError, invalid_field
from weft.kernel.names import new_id
from weft.kernel.reasons import Reason

CHUNK_LINES = 256
"""Items that one transaction writes at most ..."""
CHUNK_BYTES = 4 * 1024 * 1024
"""... and about how many bytes."""
MAX_LANES_PUBLISHED = 256
"""Lanes that are published one by one."""
_DIGEST_BYTES = 16


class ItemIntake:
    """The intake of one batch. `room`: how many more open tasks its tenant may have."""

    def __init__(
        self,
        batch_id: str,
        new: NewBatch,
        now: float,
        room: int,
        limits: tuple[BatchLimits, TaskLimits],
        names: KnownNames | None = None,
    ) -> None:
        self._batch_id = batch_id
        self._new = new
        self._now = now
        self._room = room
        self._limits, self._task_limits = limits
        self._names = names
        self._seen: set[bytes] = set()
        self._lanes: set[Lane] = set()
        self._count = 0

    @property
    def count(self) -> int:
        """Number of items so far."""
        return self._count

    @property
    def events(self) -> Sequence[StoreEvent]:
        """Events to publish when all items are stored."""
        if len(self._lanes) > MAX_LANES_PUBLISHED:
            return [ManyChanged()]
        return [LaneFilled(lane) for lane in self._lanes]

    def require_room_for_all(self, room: int) -> None:
        """Checks the room again at the end, after other submissions. Raises TOO_MANY_RESOURCES."""
        if self._count > room:
            raise self._too_many()

    async def chunks(self, lines: AsyncIterator[BatchLine]) -> AsyncGenerator[list[TaskRow]]:
        """Yields the items as task rows, in chunks.

        Raises INVALID_ARGUMENT or REQUEST_TOO_LARGE naming `lines[n].field`, n counted from 0, and TOO_MANY_RESOURCES.
        """
        rows: list[TaskRow] = []
        size = 0
        async for line in lines:
            row = self._row_of(line)
            rows.append(row)
            size += len(row.spec)
            if len(rows) >= CHUNK_LINES or size >= CHUNK_BYTES:
                yield rows
                rows, size = [], 0
        if not self._count:
            raise invalid_field("lines", "must have at least one")
        if rows:
            yield rows

    def _row_of(self, line: BatchLine) -> TaskRow:
        place = self._count
        self._require_room()
        self._check_custom_id(line.custom_id, f"lines[{place}].custom_id")
        checked = self._checked(line, f"lines[{place}].spec")
        self._count += 1
        lane = Lane(model=checked.model, tenant=self._new.tenant, band=checked.band)
        if len(self._lanes) <= MAX_LANES_PUBLISHED:
            self._lanes.add(lane)
        return TaskRow(
            id=new_id(TASK_PREFIX),
            lane=lane,
            digest=checked.digest,
            spec=checked.spec,
            origin_kind=checked.origin_kind,
            caller=self._new.caller,
            batch=self._batch_id,
            line=place,
            custom_id=line.custom_id,
            max_attempts=checked.max_attempts,
            pending_limit_seconds=checked.pending_limit_seconds,
            created_at=self._now,
            window_ends_at=self._new.window_ends_at.timestamp(),
        )

    def _checked(self, line: BatchLine, field: str) -> CheckedSpec:
        if line.spec.options.priority:
            raise invalid_field(f"{field}.options.priority", "must not be set: lines of a batch are durable work")
        checked = check_spec(line.spec, self._task_limits, field)
        if self._names is not None and not line.spec.wait_for_model:
            self._names.require(checked.model, f"{field}.model")
        return checked

    def _require_room(self) -> None:
        most = self._limits.max_lines
        if self._count >= most:
            raise FieldError("lines", f"must be at most {most}", Reason.REQUEST_TOO_LARGE)
        if self._count >= self._room:
            raise self._too_many()

    def _too_many(self) -> WeftError:
        return WeftError(
            Reason.TOO_MANY_RESOURCES,
            f"the tenant would have more than {self._task_limits.max_open_per_tenant} tasks that have not ended, its "
            "limit (router.tasks.max_open_per_tenant); send the batch when some have ended, or in parts",
        )

    def _check_custom_id(self, custom_id: str, field: str) -> None:
        # PostgreSQL stores no NUL.
        if not 1 <= len(custom_id) <= MAX_CUSTOM_ID_CHARS or "\0" in custom_id:
            raise invalid_field(field, f"must be 1 to {MAX_CUSTOM_ID_CHARS} characters")
        digest = blake2b(custom_id.encode(), digest_size=_DIGEST_BYTES).digest()
        if digest in self._seen:
            raise invalid_field(field, "is that of an earlier line")
        self._seen.add(digest)
