"""Beginnings of ids, as commands accept them."""

from typing import TYPE_CHECKING, Any, cast

import pytest

from weft.kernel.errors.error_tree import FieldError, WeftError
from weft.kernel.errors.reasons import Reason
from weft_app.cli.short_ids import BATCHES, KEYS, OPERATIONS, REQUESTS, TASKS, RecordIds, full_id

if TYPE_CHECKING:
    from weft_app.cli.mesh_api import MeshApi

FIRST, SECOND = f"req-1b2c0{'0' * 19}", f"req-1b2c1{'0' * 19}"
TASK, BATCH, OPERATION = (f"{kind}-abcd{'1' * 20}" for kind in ("task", "batch", "op"))
EVERY = {
    "/v1/requests": {"items": [{"requestId": each} for each in (FIRST, SECOND, "mine", "job-1234567")]},
    "/v1/admin/tasks": {"items": [{"id": TASK}]},
    "/v1/batches": {"data": [{"id": BATCH}], "has_more": False},
    "/v1/admin/operations": {"items": [{"name": f"operations/{OPERATION}"}]},
    "/api/v1/keys": {"items": [{"id": "3k9x0a7bq2mz"}]},
}


class Lists:
    """An API that knows only its lists, and requests by their id."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def get(self, path: str, **_: Any) -> Any:
        self.asked.append(path)
        if path in EVERY:
            return EVERY[path]
        if path == "/v1/requests/mine":
            return {}
        raise WeftError(Reason.NOT_FOUND, path)

    def pages(self, path: str, **_: Any) -> Any:
        return self.get(path)["items"]

    def newest(self, path: str, _: int) -> Any:
        return self.get(path)["data"]


def _full(word: str, ids: RecordIds = REQUESTS) -> str:
    return full_id(cast("MeshApi", Lists()), ids, word)


@pytest.mark.parametrize(
    ("word", "ids", "whole"),
    [
        ("req-1b2c0", REQUESTS, FIRST),
        ("req-1b2c1…", REQUESTS, SECOND),
        ("task-abcd", TASKS, TASK),
        ("batch-abcd1", BATCHES, BATCH),
        ("op-abcd…", OPERATIONS, OPERATION),
        ("3k9x", KEYS, "3k9x0a7bq2mz"),
    ],
)
def test_unique_beginning_stands_for_the_id(word: str, ids: RecordIds, whole: str) -> None:
    assert _full(word, ids) == whole


def test_ambiguous_beginning_is_refused_with_the_candidates() -> None:
    with pytest.raises(FieldError, match=f"req-1b2c is the beginning of {FIRST}, {SECOND}"):
        _full("req-1b2c")


@pytest.mark.parametrize("word", ["mine", "unknown", "job-1234", "job-1", "req-", "req-1b2", "r"])
def test_id_of_a_caller_and_a_few_characters_stay_unchanged(word: str) -> None:
    # `weft cancel job-1` cancelled job-10 when only that was running.
    assert _full(word) == word


def test_shortened_id_that_is_unknown_loses_its_ellipsis() -> None:
    assert _full("req-ffff…") == "req-ffff"


def test_generated_id_is_not_looked_up() -> None:
    api = Lists()
    assert full_id(cast("MeshApi", api), REQUESTS, FIRST) == FIRST
    assert api.asked == []


def test_failing_list_leaves_the_error_to_the_call() -> None:
    assert _full("x", RecordIds("/v1/none", lambda api: api.get("/v1/none"))) == "x"
