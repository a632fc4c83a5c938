"""The SQL of tasks, by name; for SQLite and PostgreSQL alike. Parameters begin with `the_`, as in `durable.statements`.

Each statement that runs all the time uses an index: `tests/contract/test_task_store_plans.py`.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from sqlalchemy import (
    BindParameter,
    ColumnElement,
    Insert,
    Integer,
    Select,
    String,
    and_,
    bindparam,
    delete,
    exists,
    func,
    insert,
    literal,
    literal_column,
    select,
    tuple_,
    update,
)
from sqlalchemy.dialects import sqlite

from router_svc.store.tables import batches, task_attempts, task_pieces, task_specs, tasks
from weft.api.router.v1 import batch_service_pb2 as batch_pb
from weft.api.router.v1 import task_pb2
from weft.api.router.v1 import task_service_pb2 as pb
from weft.sql.moments import BoundedMoment

THE_ID = bindparam("the_id", type_=String)
THE_IDS: BindParameter[Any] = bindparam("the_ids", expanding=True)
THE_SEQ: BindParameter[Any] = bindparam("the_seq")
THE_TENANT = bindparam("the_tenant", type_=String)
THE_MODEL = bindparam("the_model", type_=String)
THE_BAND = bindparam("the_band", type_=Integer)
THE_OWNER = bindparam("the_owner", type_=String)
THE_ATTEMPT = bindparam("the_attempt", type_=Integer)
THE_STATE = bindparam("the_state", type_=Integer)
THE_REASON = bindparam("the_reason", type_=Integer)
THE_MESSAGE: BindParameter[Any] = bindparam("the_message")
THE_INDEX = bindparam("the_index", type_=Integer)
THE_LIMIT = bindparam("the_limit", type_=Integer)
THE_TIME: BindParameter[Any] = bindparam("the_time")
THE_LEASE_END: BindParameter[Any] = bindparam("the_lease_end")

STAGED = 0
"""State of an item whose batch is still being received: it is not visible, and does not start."""

READY_NOW = 0.0
"""`ready_at` of a task without a pause. Zero rather than now, so that it is ready by every router's clock, also after a
clock was set back."""

# Literals: a partial index serves only statements that repeat its condition.
IS_PENDING: ColumnElement[bool] = tasks.c.state == literal_column("1")
IS_RUNNING: ColumnElement[bool] = tasks.c.state == literal_column("2")
IS_TERMINAL: ColumnElement[bool] = tasks.c.state > literal_column("2")

FENCE = and_(tasks.c.id == THE_ID, tasks.c.owner == THE_OWNER, tasks.c.attempt == THE_ATTEMPT, IS_RUNNING)
"""Condition of every write under a claim: it selects the task while the claim is the task's."""

_MAY_START = and_(IS_PENDING, tasks.c.ready_at <= THE_TIME, tasks.c.expires_at > THE_TIME)
_UNCLAIMED: Mapping[str, object] = {"owner": "", "lease_until": None, "lease_seconds": None}
_NO_OUTPUT: Mapping[str, object] = {"last_index": 0, "result_size": 0}
_AGAIN: Mapping[str, object] = {
    "state": task_pb2.TASK_STATE_PENDING,
    "expires_at": func.coalesce(tasks.c.window_ends_at, tasks.c.pending_limit_seconds + THE_TIME),
    **_UNCLAIMED,
    **_NO_OUTPUT,
}
"""Columns of a task that is pending again from now on."""

# -- new tasks

ADD_TASKS = insert(tasks)
ADD_SPECS = insert(task_specs)
# Of one tenant: SQLite scans the whole table for a list of pairs.
TASKS_WITH_KEYS = select(tasks).where(
    tasks.c.tenant == THE_TENANT, tasks.c.idempotency_key.in_(bindparam("the_keys", expanding=True))
)


@cache
def add_tasks_if_absent(dialect: str) -> Insert:
    """Returns an insert that waits for another router's transaction with the same key, and then inserts nothing."""
    key = (tasks.c.tenant, tasks.c.idempotency_key)
    if dialect == "postgresql":
        # Twenty modules that a mesh on SQLite does not need.
        from sqlalchemy.dialects import postgresql  # noqa: PLC0415

        return postgresql.insert(tasks).on_conflict_do_nothing(index_elements=key)
    return sqlite.insert(tasks).on_conflict_do_nothing(index_elements=key)


# -- one task, and pages of them

TASK = select(tasks).where(tasks.c.id == THE_ID, tasks.c.tenant == THE_TENANT, tasks.c.state != STAGED)
LOCK_TASK = TASK.with_for_update()
OPEN_OF_REQUEST = (
    select(tasks)
    .where(tasks.c.request_id == bindparam("the_request_id", type_=String), tasks.c.state.in_((1, 2)))
    .limit(THE_LIMIT)
)
SPECS = select(task_specs).where(task_specs.c.task_id.in_(THE_IDS))
ATTEMPTS = select(task_attempts).where(task_attempts.c.task_id == THE_ID).order_by(task_attempts.c.attempt)
OPEN_COUNTS = [
    select(tasks.c.tenant, func.count().label("number")).where(condition).group_by(tasks.c.tenant)
    for condition in (IS_PENDING, IS_RUNNING)
]
OPEN_STATES = [
    select(func.count().label("number"), func.min(tasks.c.created_at).label("oldest_at")).where(condition)
    for condition in (IS_PENDING, IS_RUNNING)
]
"""How many tasks are pending and running, in this order, and since when."""
ENDED_STATES = select(tasks.c.state, func.count().label("number")).where(IS_TERMINAL).group_by(tasks.c.state)
DATABASE_TIME = select(func.date_part("epoch", func.clock_timestamp()).label("now"))


def tasks_page(dialect: str, before: int | None, request: pb.ListTasksRequest) -> Select[tuple[object, ...]]:
    """Returns the page of a tenant's tasks that a request selects, newest first, before a `seq` (None: all)."""
    page = _newest_first(dialect, before).where(tasks.c.state != STAGED).limit(THE_LIMIT)
    if request.states:
        page = page.where(tasks.c.state.in_(sorted(set(request.states))))
    if request.model:
        page = page.where(tasks.c.model == request.model)
    if request.caller:
        page = page.where(tasks.c.caller == request.caller)
    if request.request_id:
        page = page.where(tasks.c.request_id == request.request_id)
    return page.where(tasks.c.batch_id == request.batch) if request.batch else page


def _newest_first(dialect: str, before: int | None) -> Select[tuple[object, ...]]:
    c = tasks.c
    if dialect == "sqlite":
        found = select(tasks).where(c.tenant == THE_TENANT).order_by(c.seq.desc())
        return found if before is None else found.where(c.seq < before)
    # As in `PENDING_TASKS`: with an equality PostgreSQL may scan the tasks of all tenants.
    found = select(tasks).where(c.tenant >= THE_TENANT).order_by(c.tenant.desc(), c.seq.desc())
    if before is None:
        return found.where(c.tenant <= THE_TENANT)
    return found.where(tuple_(c.tenant, c.seq) < tuple_(THE_TENANT, literal(before, c.seq.type)))


# -- answers, in pieces

_OF_ATTEMPT = and_(task_pieces.c.task_id == THE_ID, task_pieces.c.attempt == THE_ATTEMPT)
# The next event may be inside the piece that begins last before it.
_FIRST_PIECE = (
    select(func.max(task_pieces.c.first_index))
    .where(_OF_ATTEMPT, task_pieces.c.first_index <= THE_INDEX)
    .scalar_subquery()
)

PIECE_SIZES = (
    select(task_pieces.c.first_index, func.length(task_pieces.c.output).label("size"))
    .where(_OF_ATTEMPT, task_pieces.c.first_index >= func.coalesce(_FIRST_PIECE, 0))
    .order_by(task_pieces.c.first_index)
    .limit(THE_LIMIT)
)
PIECES = (
    select(task_pieces.c.first_index, task_pieces.c.event_count, task_pieces.c.output)
    .where(_OF_ATTEMPT, task_pieces.c.first_index.between(THE_INDEX, bindparam("the_last")))
    .order_by(task_pieces.c.first_index)
)
ADD_PIECES = insert(task_pieces)
DELETE_PIECES = delete(task_pieces).where(_OF_ATTEMPT)
DELETE_PIECES_FROM = delete(task_pieces).where(_OF_ATTEMPT, task_pieces.c.first_index >= THE_INDEX)
ANSWER_SIZE = select(
    func.max(task_pieces.c.first_index + task_pieces.c.event_count).label("next_index"),
    func.sum(func.length(task_pieces.c.output)).label("size"),
).where(_OF_ATTEMPT)

# -- tasks that may start

_LANE_ORDER = (tasks.c.model, tasks.c.tenant, tasks.c.band)


def _first_after(model: ColumnElement[str], tenant: ColumnElement[str], band: ColumnElement[int]) -> ColumnElement[int]:
    """Returns the first task of the next lane.

    One subquery per column: SQLite evaluates a row comparison only after a scan of the whole lane.
    """
    c = tasks.c
    first = select(c.seq).where(_MAY_START).limit(1)
    return func.coalesce(
        first.where(c.model == model, c.tenant == tenant, c.band > band).order_by(c.band, c.seq).scalar_subquery(),
        first.where(c.model == model, c.tenant > tenant).order_by(c.tenant, c.band, c.seq).scalar_subquery(),
        first.where(c.model > model).order_by(*_LANE_ORDER, c.seq).scalar_subquery(),
    )


def _lanes_from(begin: ColumnElement[int]) -> Select[tuple[object, ...]]:
    """Returns an index skip scan from each lane's first task to the next lane."""
    lane = select(begin.label("seq"), literal(1).label("place")).cte("lane", recursive=True)
    this = tasks.alias("this")
    following = _first_after(this.c.model, this.c.tenant, this.c.band)
    steps = lane.union_all(
        select(following, lane.c.place + 1)
        .join_from(lane, this, this.c.seq == lane.c.seq)
        .where(lane.c.place < THE_LIMIT)
    )
    return select(steps.c.place, *_LANE_ORDER).join_from(steps, tasks, tasks.c.seq == steps.c.seq)


_FIRST = select(tasks.c.seq).where(_MAY_START).order_by(*_LANE_ORDER, tasks.c.seq).limit(1)

LANES = _lanes_from(_FIRST.scalar_subquery())
LANES_AFTER = _lanes_from(_first_after(THE_MODEL, THE_TENANT, THE_BAND))
PENDING_TASKS = (
    select(
        *(tasks.c.id, tasks.c.caller, tasks.c.attempt, tasks.c.failures, tasks.c.max_attempts, tasks.c.batch_id),
        func.length(task_specs.c.spec).label("size"),
    )
    .join_from(tasks, task_specs, task_specs.c.task_id == tasks.c.id)
    .where(_MAY_START, tasks.c.model == THE_MODEL, tasks.c.tenant == THE_TENANT)
    # BETWEEN instead of an equality, so that only one index has the order: with an equality PostgreSQL may scan all
    # tasks by `seq` until it has met enough of the lane.
    .where(tasks.c.band.between(THE_BAND, THE_BAND))
    .order_by(tasks.c.band, tasks.c.seq)
    .limit(THE_LIMIT)
)
NEXT_READY = select(tasks.c.ready_at).where(IS_PENDING, tasks.c.ready_at > THE_TIME).order_by(tasks.c.ready_at).limit(1)

# -- claims

_FREE = select(tasks.c.seq).where(tasks.c.id == THE_ID, _MAY_START).with_for_update(skip_locked=True)

CLAIM_TASK = (
    update(tasks)
    .where(tasks.c.seq == _FREE.scalar_subquery())
    .values(
        state=task_pb2.TASK_STATE_RUNNING,
        owner=THE_OWNER,
        attempt=tasks.c.attempt + 1,
        lease_until=THE_LEASE_END,
        lease_seconds=bindparam("the_lease_seconds"),
        started_at=THE_TIME,
        **_NO_OUTPUT,
    )
    .returning(tasks.c.attempt)
)
BEGIN_ATTEMPT = insert(task_attempts)
LAST_ATTEMPT_END = select(func.max(task_attempts.c.ended_at)).where(task_attempts.c.task_id == THE_ID)
RENEW_CLAIMS = (
    update(tasks)
    .where(IS_RUNNING, tasks.c.owner == THE_OWNER)
    .values(lease_until=THE_LEASE_END)
    .returning(tasks.c.id, tasks.c.attempt)
)
END_ATTEMPT = (
    update(task_attempts)
    .where(
        task_attempts.c.task_id == THE_ID, task_attempts.c.attempt == THE_ATTEMPT, task_attempts.c.ended_at.is_(None)
    )
    .values(ended_at=THE_TIME, reason=THE_REASON, message=THE_MESSAGE, receipt=bindparam("the_receipt"))
)
ENDED_TASK = (
    select(tasks.c.seq)
    .join(task_attempts, and_(task_attempts.c.task_id == tasks.c.id, task_attempts.c.attempt == tasks.c.attempt))
    .where(tasks.c.id == THE_ID, tasks.c.attempt == THE_ATTEMPT, tasks.c.state == THE_STATE)
    .where(tasks.c.error_reason == THE_REASON, tasks.c.error_message == THE_MESSAGE)
    .where(task_attempts.c.owner == THE_OWNER)
)
"""A task that has ended in just this way by this claim."""


class FencedStatements:
    """The statements that write under a claim; a fence, by default `FENCE`, is the condition of each."""

    def __init__(self, fence: ColumnElement[bool] = FENCE) -> None:
        last: BindParameter[Any] = bindparam("the_last")
        size: BindParameter[Any] = bindparam("the_size")
        changed = update(tasks).where(fence)
        self.lock = select(tasks.c.seq).where(fence).with_for_update()
        self.append = changed.where(tasks.c.last_index == THE_INDEX).values(
            last_index=last, result_size=tasks.c.result_size + size
        )
        """Only after the event of index `the_index`."""
        self.replace = changed.values(last_index=last, result_size=size)
        self.end = changed.values(
            state=THE_STATE, ended_at=THE_TIME, error_reason=THE_REASON, error_message=THE_MESSAGE, **_UNCLAIMED
        ).returning(tasks.c.tenant, tasks.c.caller, tasks.c.model)
        self.revert = changed.values(
            failures=tasks.c.failures + bindparam("the_failures"), ready_at=bindparam("the_ready_at"), **_AGAIN
        ).returning(tasks.c.model, tasks.c.tenant, tasks.c.band, tasks.c.caller)


# -- ends without a claim

_BY_SEQ = update(tasks).where(tasks.c.seq == THE_SEQ)

CANCEL_TASK = _BY_SEQ.values(state=task_pb2.TASK_STATE_CANCELLED, ended_at=THE_TIME, **_UNCLAIMED).returning(tasks)
DELETE_TASK = delete(tasks).where(tasks.c.seq == THE_SEQ)
FAIL_TASK = _BY_SEQ.values(
    state=task_pb2.TASK_STATE_FAILED,
    ended_at=THE_TIME,
    error_reason=THE_REASON,
    error_message=THE_MESSAGE,
    **_UNCLAIMED,
)
FAIL_LOST_TASK = FAIL_TASK.values(failures=tasks.c.failures + 1, **_NO_OUTPUT)
REVERT_LOST_TASK = _BY_SEQ.values(failures=tasks.c.failures + 1, ready_at=READY_NOW, **_AGAIN)
EXPIRED_LEASES = (
    select(tasks)
    .where(IS_RUNNING, tasks.c.lease_until <= THE_TIME, tasks.c.owner != THE_OWNER)
    .order_by(tasks.c.lease_until)
    .limit(THE_LIMIT)
    # A row that is locked by another router is being renewed, or reverted there.
    .with_for_update(skip_locked=True)
)
EXPIRED_TASKS = (
    select(
        *(tasks.c.seq, tasks.c.id, tasks.c.attempt, tasks.c.window_ends_at, tasks.c.pending_limit_seconds),
        *(tasks.c.tenant, tasks.c.caller, tasks.c.model),
    )
    .where(IS_PENDING, tasks.c.expires_at <= THE_TIME)
    .order_by(tasks.c.expires_at)
    .limit(THE_LIMIT)
    .with_for_update(skip_locked=True)
)
_IS_AWAITED = exists().where(
    batches.c.id == tasks.c.batch_id,
    # The results of the batch are still to be written from its items.
    batches.c.state.in_((batch_pb.BATCH_STATE_IN_PROGRESS, batch_pb.BATCH_STATE_FINALIZING)),
)
PURGE_TASKS = delete(tasks).where(
    tasks.c.seq.in_(
        select(tasks.c.seq)
        .where(IS_TERMINAL, tasks.c.ended_at < THE_TIME, ~_IS_AWAITED)
        .order_by(tasks.c.ended_at)
        .limit(THE_LIMIT)
        .with_for_update(skip_locked=True)
    )
)

_SIZE = tasks.c.result_size + tasks.c.request_size
KEPT_COUNTS = (
    select(tasks.c.tenant, func.count().label("number"), func.sum(_SIZE).label("size"))
    .where(IS_TERMINAL)
    .group_by(tasks.c.tenant)
)
_KEPT = (
    select(tasks.c.seq, _SIZE.label("size"))
    .where(IS_TERMINAL, ~_IS_AWAITED)
    .limit(THE_LIMIT)
    .with_for_update(skip_locked=True)
)
OLDEST_KEPT = _KEPT.order_by(tasks.c.ended_at)
# As in `PENDING_TASKS`: with an equality PostgreSQL may scan the finished tasks of all tenants.
OLDEST_KEPT_OF_TENANT = _KEPT.where(tasks.c.tenant.between(THE_TENANT, THE_TENANT)).order_by(
    tasks.c.tenant, tasks.c.ended_at
)
DELETE_TASKS = delete(tasks).where(tasks.c.seq.in_(bindparam("the_seqs", expanding=True)))

# -- times in the future


def moments_of(now: float, longest_pause_seconds: float) -> Sequence[BoundedMoment]:
    """Returns the latest possible times of tasks; `longest_pause_seconds`: the longest retry pause."""
    c = tasks.c
    has_window = c.window_ends_at.is_not(None)
    return (
        BoundedMoment(key=c.seq, column=c.lease_until, latest=now + c.lease_seconds, where=IS_RUNNING),
        BoundedMoment(key=c.seq, column=c.ready_at, latest=now + longest_pause_seconds, where=IS_PENDING),
        BoundedMoment(
            key=c.seq,
            column=c.expires_at,
            latest=now + c.pending_limit_seconds,
            where=IS_PENDING & c.window_ends_at.is_(None),
        ),
        # A window begins with the creation of its batch.
        BoundedMoment(
            key=c.seq,
            column=c.created_at,
            latest=now,
            where=(IS_PENDING | IS_RUNNING) & has_window,
            along=(c.window_ends_at, c.expires_at),
        ),
        BoundedMoment(key=c.seq, column=c.ended_at, latest=now, where=IS_TERMINAL),
    )
