"""Beginnings of ids of requests, tasks, batches, operations and keys, as commands accept them."""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from weft.kernel.errors.error_tree import WeftError, invalid_field
from weft.kernel.errors.reasons import Reason
from weft_app.cli.mesh_api import Document, MeshApi

MAX_SEARCHED = 10_000
"""Maximum number of records whose ids are compared, newest first."""
MAX_NAMED = 5
_PAGE = 1000
_BATCH_PAGE = 100
_WHOLE = re.compile(r"[a-z]+-[0-9a-f]{24}|[a-z0-9]{12}")
"""Ids that services generate. Callers may choose other ids for their requests."""
_BEGINNING = re.compile(r"[a-z]+-[0-9a-f]{4,}|[a-z0-9]{4,}")
"""A shorter word would select whatever is there alone, and be a mistake more often than an id."""


@dataclass(frozen=True, slots=True)
class RecordIds:
    """The ids of one kind of record."""

    path: str
    """Path of a record without its id; empty: records are only listed."""
    listed: Callable[[MeshApi], Iterable[str]]
    """Returns the ids, newest first."""
    query: Iterable[tuple[str, Any]] = ()
    """Parameters for reading one record."""


def full_id(api: MeshApi, ids: RecordIds, word: str) -> str:
    """Returns the id that `word` is, or the only one that begins with it; the … of a table may follow.

    Only generated ids are shortened: the id `job-1` of a caller never stands for `job-10`. Returns an unknown word
    without the …, because the call with it reports the error. Raises INVALID_ARGUMENT with the candidates if several
    ids begin with it.
    """
    beginning = word.removesuffix("…")
    if not _BEGINNING.fullmatch(beginning) or _WHOLE.fullmatch(beginning):
        return beginning
    try:
        if ids.path and _exists(api, ids, beginning):
            return beginning
        listed = islice(ids.listed(api), MAX_SEARCHED)
        found = {each for each in listed if each.startswith(beginning) and _WHOLE.fullmatch(each)}
    except WeftError:
        return beginning
    if not found:
        return beginning
    if len(found) > 1:
        more = f" and {len(found) - MAX_NAMED} more" if len(found) > MAX_NAMED else ""
        raise invalid_field("ID", f"{beginning} is the beginning of {', '.join(sorted(found)[:MAX_NAMED])}{more}")
    return found.pop()


def _exists(api: MeshApi, ids: RecordIds, word: str) -> bool:
    try:
        api.get(f"{ids.path}/{word}", **dict(ids.query))
    except WeftError as error:
        if error.reason is not Reason.NOT_FOUND:
            raise
        return False
    return True


def _ids(items: Iterable[Document], field: str = "id") -> Iterator[str]:
    return (str(each[field]) for each in items)


def _requests(api: MeshApi) -> Iterator[str]:
    for state in ("", "ended"):
        found = api.get("/v1/requests", limit=_PAGE, state=state, allTenants=True)["items"]
        yield from _ids(found, "requestId")


def _operations(api: MeshApi) -> Iterator[str]:
    for each in _ids(api.pages("/v1/admin/operations", pageSize=_PAGE), "name"):
        yield each.rpartition("/")[2]


REQUESTS = RecordIds("/v1/requests", _requests, query=(("allTenants", True),))
TASKS = RecordIds("/v1/admin/tasks", lambda api: _ids(api.get("/v1/admin/tasks", limit=_PAGE)["items"]))
BATCHES = RecordIds("/v1/batches", lambda api: _ids(api.newest("/v1/batches", _BATCH_PAGE)))
OPERATIONS = RecordIds("/v1/admin/operations", _operations)
KEYS = RecordIds("", lambda api: _ids(api.get("/api/v1/keys")["items"]))
