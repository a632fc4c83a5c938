"""Beginnings of ids of requests, tasks, batches, operations and keys, as commands accept them."""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from weft.kernel.errors import WeftError, invalid_field
from weft.kernel.reasons import Reason
from weft_app.cli.mesh_api import Document, MeshApi

MAX_SEARCHED = 10_000
"""Maximum number of records whose ids are compared, newest first."""
MAX_NAMED = 5
_PAGE = 1000
_BATCH_PAGE = 100
_WHOLE = re.compile(r"[a-z]+-[0-9a-f]{24}|[a-z0-9]{12}")
"""Ids that services generate. Callers may choose other ids for their requests."""


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

    Returns an unknown word unchanged, because the call with it reports the error. Raises INVALID_ARGUMENT with the
    candidates if several ids begin with it.
    """
    beginning = word.removesuffix("…")
    if not beginning or _WHOLE.fullmatch(word):
        return word
    try:
        if beginning == word and ids.path and _exists(api, ids, word):
            return word
        found = {each for each in islice(ids.listed(api), MAX_SEARCHED) if each.startswith(beginning)}
    except WeftError:
        return word
    if word in found or not found:
        return word
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


def _batches(api: MeshApi) -> Iterator[str]:
    after = ""
    while True:
        page = api.get("/v1/batches", limit=_BATCH_PAGE, after=after)
        yield from _ids(page["data"])
        if not page["has_more"] or not page["data"]:
            return
        after = page["data"][-1]["id"]


def _operations(api: MeshApi) -> Iterator[str]:
    for each in _ids(api.pages("/v1/admin/operations", pageSize=_PAGE), "name"):
        yield each.rpartition("/")[2]


REQUESTS = RecordIds("/v1/requests", _requests, query=(("allTenants", True),))
TASKS = RecordIds("/v1/admin/tasks", lambda api: _ids(api.get("/v1/admin/tasks", limit=_PAGE)["items"]))
BATCHES = RecordIds("/v1/batches", _batches)
OPERATIONS = RecordIds("/v1/admin/operations", _operations)
KEYS = RecordIds("", lambda api: _ids(api.get("/api/v1/keys")["items"]))
