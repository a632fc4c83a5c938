"""The SQL of batches, files and stored responses, by name; for SQLite and PostgreSQL alike. Tasks: `sql_statements`.

Parameters begin with `the_`, so that none has the name of a column.
"""

from typing import Any

from sqlalchemy import (
    BindParameter,
    Integer,
    Select,
    String,
    and_,
    bindparam,
    case,
    delete,
    exists,
    false,
    func,
    insert,
    not_,
    or_,
    select,
    true,
    update,
)

from router_svc.durable.tasks.sql_statements import IS_PENDING, IS_RUNNING, READY_NOW, STAGED
from router_svc.store.tables import (
    batches,
    file_pieces,
    files,
    responses,
    task_attempts,
    task_pieces,
    task_specs,
    tasks,
)
from weft.api.router.v1 import batch_service_pb2 as batch_pb
from weft.api.router.v1 import task_pb2
from weft.kernel.reasons import Reason

THE_ID = bindparam("the_id", type_=String)
THE_TENANT = bindparam("the_tenant", type_=String)
THE_IDS: BindParameter[Any] = bindparam("the_ids", expanding=True)
THE_LIMIT = bindparam("the_limit", type_=Integer)
THE_TIME: BindParameter[Any] = bindparam("the_time")
"""A datetime in responses, UTC seconds since the epoch elsewhere."""

COUNT_COLUMNS = ("completed_count", "failed_count", "cancelled_count", "expired_count")
"""Numbers of items of a batch by how they ended; the fields of its message are named alike."""

# -- stored responses

RESPONSE = select(responses).where(responses.c.id == THE_ID, responses.c.tenant == THE_TENANT)
RESPONSE_SIZE = select(responses.c.tenant, responses.c.size).where(responses.c.id == THE_ID)
RESPONSE_STEP = select(responses.c.previous_id, responses.c.size).where(
    responses.c.id == THE_ID, responses.c.tenant == THE_TENANT
)
ADD_RESPONSE = insert(responses)
REPLACE_RESPONSE = update(responses).where(responses.c.id == THE_ID)
DELETE_RESPONSE = (
    delete(responses).where(responses.c.id == THE_ID, responses.c.tenant == THE_TENANT).returning(responses.c.size)
)
PURGE_RESPONSES = delete(responses).where(responses.c.created_at < THE_TIME)
RESPONSE_USAGES = select(
    responses.c.tenant, func.count().label("number"), func.sum(responses.c.size).label("bytes")
).group_by(responses.c.tenant)

# -- files; an incomplete one is not visible

_IS_WHOLE = files.c.is_whole == true()
_IS_PARTIAL = files.c.is_whole == false()

FILE = select(files).where(files.c.id == THE_ID, files.c.tenant == THE_TENANT, _IS_WHOLE)
_USAGE = select(func.count().label("number"), func.coalesce(func.sum(files.c.size), 0).label("bytes"))
THE_PURPOSES: BindParameter[Any] = bindparam("the_purposes", expanding=True)
FILE_USAGE = _USAGE.where(files.c.tenant == THE_TENANT, files.c.purpose.in_(THE_PURPOSES))
TOTAL_FILE_USAGE = _USAGE.where(files.c.purpose.in_(THE_PURPOSES))
FILE_PIECE = select(file_pieces.c.data).where(
    file_pieces.c.file_id == THE_ID, file_pieces.c.place == bindparam("the_place")
)
BEGIN_FILE = insert(files)
EXTEND_FILE = (
    update(files)
    .where(files.c.id == THE_ID, _IS_PARTIAL)
    .values(size=files.c.size + bindparam("the_length", type_=Integer), is_whole=bindparam("the_end"))
    .returning(files)
)
ADD_FILE_PIECE = insert(file_pieces)
HIDE_FILE = update(files).where(files.c.id == THE_ID, files.c.tenant == THE_TENANT, _IS_WHOLE).values(is_whole=False)
_OWN_TASK = tasks.c.id == files.c.task_id
_TASK_IS_OPEN = exists(select(tasks.c.seq).where(_OWN_TASK, tasks.c.state <= task_pb2.TASK_STATE_RUNNING))
HIDE_EXPIRED_FILES = (
    update(files).where(files.c.expires_at <= THE_TIME, _IS_WHOLE, not_(_TASK_IS_OPEN)).values(is_whole=False)
)
_IS_OF_ATTEMPT = exists(
    select(tasks.c.seq).where(
        _OWN_TASK,
        files.c.attempt > 0,
        files.c.attempt == tasks.c.attempt,
        tasks.c.state.in_((task_pb2.TASK_STATE_RUNNING, task_pb2.TASK_STATE_COMPLETED)),
    )
)
ABANDONED_FILES = (
    select(files.c.id, files.c.tenant)
    .where(
        files.c.task_id != "",
        _IS_WHOLE,
        files.c.created_at < THE_TIME,
        not_(and_(files.c.attempt == 0, _TASK_IS_OPEN)),
        not_(_IS_OF_ATTEMPT),
    )
    .order_by(files.c.seq)
    .limit(THE_LIMIT)
)
"""Inputs of tasks that have ended, results of lost attempts, and what tasks that are deleted have left."""
FILES_OF_TASK = (
    select(files.c.id, files.c.attempt)
    .where(files.c.task_id == THE_ID, files.c.tenant == THE_TENANT, _IS_WHOLE)
    .order_by(files.c.seq)
    .limit(THE_LIMIT)
)
INCOMPLETE_FILES = (
    select(files.c.id)
    .where(_IS_PARTIAL, or_(files.c.created_at < bindparam("the_begin"), files.c.expires_at <= THE_TIME))
    .order_by(files.c.seq)
    .limit(THE_LIMIT)
)
LOCK_INCOMPLETE_FILE = select(files.c.id).where(files.c.id == THE_ID, _IS_PARTIAL).with_for_update()
DELETE_FILE_PIECES = delete(file_pieces).where(
    file_pieces.c.file_id == THE_ID,
    file_pieces.c.place.in_(
        select(file_pieces.c.place)
        .where(file_pieces.c.file_id == THE_ID)
        .order_by(file_pieces.c.place)
        .limit(THE_LIMIT)
    ),
)
DELETE_FILE = delete(files).where(files.c.id == THE_ID)


def files_page(before: int | None, purpose: str) -> Select[tuple[object, ...]]:
    """Returns the page of a tenant's files, newest first, before a `seq`; None: all.

    Of a purpose; empty: of those in `the_purposes`.
    """
    page = select(files).where(files.c.tenant == THE_TENANT, _IS_WHOLE).order_by(files.c.seq.desc()).limit(THE_LIMIT)
    if not purpose:
        page = page.where(files.c.purpose.in_(THE_PURPOSES))
    if before is not None:
        page = page.where(files.c.seq < before)
    return page.where(files.c.purpose == purpose) if purpose else page


# -- batches; their items are tasks

RECEIVING = 0
"""State of a batch whose items are being received."""
DELETING = -1
"""State of an incomplete batch whose items are being deleted; no item is added any more."""

_IS_VISIBLE = batches.c.state > RECEIVING
_IS_RECEIVING = batches.c.state == RECEIVING
_IS_IN_PROGRESS = batches.c.state == batch_pb.BATCH_STATE_IN_PROGRESS

BATCH = select(batches).where(batches.c.id == THE_ID, batches.c.tenant == THE_TENANT, _IS_VISIBLE)
BATCH_COUNT = select(func.count().label("number")).where(batches.c.tenant == THE_TENANT)
BEGIN_BATCH = insert(batches)
LOCK_RECEIVING_BATCH = select(batches.c.seq).where(batches.c.id == THE_ID, _IS_RECEIVING).with_for_update()
LOCK_BATCH = select(batches.c.state).where(batches.c.id == THE_ID).with_for_update()
ACTIVATE_BATCH = (
    update(batches)
    .where(batches.c.id == THE_ID, _IS_RECEIVING)
    .values(state=batch_pb.BATCH_STATE_IN_PROGRESS, total_count=bindparam("the_total"))
)
CANCEL_BATCH = (
    update(batches)
    .where(batches.c.id == THE_ID, _IS_IN_PROGRESS)
    .values(cancelled_at=func.coalesce(batches.c.cancelled_at, THE_TIME))
)
END_BATCH_ITEMS = (
    update(batches)
    .where(batches.c.id == THE_ID, _IS_IN_PROGRESS)
    .values(
        state=batch_pb.BATCH_STATE_FINALIZING,
        lines_ended_at=THE_TIME,
        **{name: bindparam(f"the_{name}") for name in COUNT_COLUMNS},
    )
)
FINISH_BATCH = (
    update(batches)
    .where(batches.c.id == THE_ID)
    .values(
        state=batch_pb.BATCH_STATE_FINISHED,
        ended_at=THE_TIME,
        output_file=bindparam("the_output_file"),
        error_file=bindparam("the_error_file"),
    )
)
OPEN_BATCHES = (
    select(batches.c.seq, batches.c.id, batches.c.cancelled_at)
    .where(batches.c.seq > bindparam("the_seq"), _IS_IN_PROGRESS)
    .order_by(batches.c.seq)
    .limit(THE_LIMIT)
)
INCOMPLETE_BATCHES = (
    select(batches.c.id)
    .where(batches.c.state <= RECEIVING, batches.c.created_at < THE_TIME)
    .order_by(batches.c.seq)
    .limit(THE_LIMIT)
)
PURGE_BATCHES = delete(batches).where(
    batches.c.seq.in_(
        select(batches.c.seq)
        .where(
            or_(
                batches.c.ended_at < THE_TIME,
                and_(batches.c.state == batch_pb.BATCH_STATE_FINALIZING, batches.c.lines_ended_at < THE_TIME),
            )
        )
        .order_by(batches.c.seq)
        .limit(THE_LIMIT)
    )
)
ABANDON_BATCH = update(batches).where(batches.c.id == THE_ID, _IS_RECEIVING).values(state=DELETING)
ABANDONED_BATCH = select(batches.c.seq).where(batches.c.id == THE_ID, batches.c.state == DELETING)
DELETE_BATCH = delete(batches).where(batches.c.id == THE_ID)


def batches_page(before: int | None) -> Select[tuple[object, ...]]:
    """Returns the page of a tenant's batches, newest first, before a `seq` (None: all)."""
    page = select(batches).where(batches.c.tenant == THE_TENANT, _IS_VISIBLE)
    if before is not None:
        page = page.where(batches.c.seq < before)
    return page.order_by(batches.c.seq.desc()).limit(THE_LIMIT)


# -- items of batches

_OPEN_STATES = (task_pb2.TASK_STATE_PENDING, task_pb2.TASK_STATE_RUNNING)
_IS_OPEN = tasks.c.state.in_(_OPEN_STATES)
_IS_STAGED = tasks.c.state == STAGED

OPEN_TASK_COUNTS = [
    select(func.count().label("number")).where(tasks.c.tenant == THE_TENANT, condition)
    for condition in (IS_PENDING, IS_RUNNING)
]
ACTIVATE_ITEMS = (
    update(tasks)
    .where(tasks.c.batch_id == THE_ID, _IS_STAGED)
    .values(state=task_pb2.TASK_STATE_PENDING, ready_at=READY_NOW)
)
DELETE_ITEMS = delete(tasks).where(
    tasks.c.seq.in_(
        select(tasks.c.seq).where(tasks.c.batch_id == THE_ID, _IS_STAGED).order_by(tasks.c.line).limit(THE_LIMIT)
    )
)
OPEN_ITEMS = (
    select(tasks.c.id)
    .where(tasks.c.batch_id == THE_ID, _IS_OPEN)
    .order_by(tasks.c.line)
    .limit(THE_LIMIT)
    # Other bulk changes lock rows in another order: waiting for them could deadlock.
    .with_for_update(skip_locked=True)
)
ONE_OPEN_ITEM = select(tasks.c.id).where(tasks.c.batch_id == THE_ID, _IS_OPEN).limit(1)
CANCEL_ITEMS = (
    update(tasks)
    .where(tasks.c.id.in_(THE_IDS), _IS_OPEN)
    .values(state=task_pb2.TASK_STATE_CANCELLED, ended_at=THE_TIME, owner="", lease_until=None)
    .returning(tasks.c.id, tasks.c.tenant, tasks.c.caller, tasks.c.model)
)
CANCEL_ATTEMPTS = (
    update(task_attempts)
    .where(task_attempts.c.task_id.in_(THE_IDS), task_attempts.c.ended_at.is_(None))
    .values(ended_at=THE_TIME, reason=Reason.CANCELLED.value, message="its batch was cancelled")
    .returning(task_attempts.c.task_id)
)
ITEMS = (
    select(tasks, func.length(task_specs.c.spec).label("spec_size"))
    .join(task_specs, task_specs.c.task_id == tasks.c.id)
    .where(tasks.c.batch_id == THE_ID, tasks.c.line > bindparam("the_line"), tasks.c.state != STAGED)
    .order_by(tasks.c.line)
    .limit(THE_LIMIT)
)
ITEM_OUTPUTS = (
    select(task_pieces.c.task_id, task_pieces.c.output)
    .join(tasks, and_(tasks.c.id == task_pieces.c.task_id, tasks.c.attempt == task_pieces.c.attempt))
    .where(task_pieces.c.task_id.in_(THE_IDS))
    .order_by(task_pieces.c.task_id, task_pieces.c.first_index)
)


def _item_tallies() -> Select[tuple[object, ...]]:
    # Expired: failed by and after the end of the window, whether or not it had started before.
    is_expired = and_(
        tasks.c.error_reason == Reason.DEADLINE_EXCEEDED.value, tasks.c.ended_at >= tasks.c.window_ends_at
    )
    end = case(
        (tasks.c.state == task_pb2.TASK_STATE_COMPLETED, "completed"),
        (tasks.c.state == task_pb2.TASK_STATE_CANCELLED, "cancelled"),
        (and_(tasks.c.state == task_pb2.TASK_STATE_FAILED, is_expired), "expired"),
        (tasks.c.state == task_pb2.TASK_STATE_FAILED, "failed"),
        else_="open",
    ).label("end_kind")
    items = select(tasks.c.batch_id, end, tasks.c.ended_at).where(tasks.c.batch_id.in_(THE_IDS)).subquery()
    return select(
        items.c.batch_id, items.c.end_kind, func.count().label("number"), func.max(items.c.ended_at).label("last")
    ).group_by(items.c.batch_id, items.c.end_kind)


ITEM_TALLIES = _item_tallies()
"""Items of some batches by how they ended; `last`: when the last one did."""
