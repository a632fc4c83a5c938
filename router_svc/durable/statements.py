"""The SQL of files and stored responses, by name; for SQLite and PostgreSQL alike.

Parameters begin with `the_`, so that none has the name of a column.
"""

from typing import Any

from sqlalchemy import (
    BindParameter,
    Integer,
    Select,
    String,
    bindparam,
    delete,
    false,
    func,
    insert,
    or_,
    select,
    true,
    update,
)

from router_svc.store.tables import file_pieces, files, responses

THE_ID = bindparam("the_id", type_=String)
THE_TENANT = bindparam("the_tenant", type_=String)
THE_LIMIT = bindparam("the_limit", type_=Integer)
THE_TIME: BindParameter[Any] = bindparam("the_time")
"""A datetime in responses, UTC seconds since the epoch elsewhere."""

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
FILE_USAGE = select(func.count().label("number"), func.coalesce(func.sum(files.c.size), 0).label("bytes")).where(
    files.c.tenant == THE_TENANT
)
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
HIDE_EXPIRED_FILES = update(files).where(files.c.expires_at <= THE_TIME, _IS_WHOLE).values(is_whole=False)
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
    """Returns the page of a tenant's files, newest first, before a `seq` (None: all) and of a purpose (empty: any)."""
    page = select(files).where(files.c.tenant == THE_TENANT, _IS_WHOLE).order_by(files.c.seq.desc()).limit(THE_LIMIT)
    if before is not None:
        page = page.where(files.c.seq < before)
    return page.where(files.c.purpose == purpose) if purpose else page
