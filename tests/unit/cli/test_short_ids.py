"""Beginnings of ids, as commands accept them."""

from typing import TYPE_CHECKING, Any, cast

import pytest

from weft.kernel.errors import FieldError, WeftError
from weft.kernel.reasons import Reason
from weft_app.cli.short_ids import BATCHES, KEYS, OPERATIONS, REQUESTS, TASKS, RecordIds, full_id

if TYPE_CHECKING:
    from weft_app.cli.mesh_api import MeshApi

FIRST, SECOND = f"req-1b{'0' * 22}", f"req-1c{'0' * 22}"
EVERY = {
    "/v1/requests": {"items": [{"requestId": FIRST}, {"requestId": SECOND}, {"requestId": "mine"}]},
    "/v1/admin/tasks": {"items": [{"id": "task-1"}]},
    "/v1/batches": {"data": [{"id": "batch-1"}], "has_more": False},
    "/v1/admin/operations": {"items": [{"name": "operations/op-1"}]},
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


def _full(word: str, ids: RecordIds = REQUESTS) -> str:
    return full_id(cast("MeshApi", Lists()), ids, word)


@pytest.mark.parametrize(
    ("word", "ids", "whole"),
    [
        ("req-1b", REQUESTS, FIRST),
        ("req-1c…", REQUESTS, SECOND),
        ("task-", TASKS, "task-1"),
        ("b", BATCHES, "batch-1"),
        ("op", OPERATIONS, "op-1"),
        ("3k", KEYS, "3k9x0a7bq2mz"),
    ],
)
def test_unique_beginning_stands_for_the_id(word: str, ids: RecordIds, whole: str) -> None:
    assert _full(word, ids) == whole


def test_ambiguous_beginning_is_refused_with_the_candidates() -> None:
    with pytest.raises(FieldError, match=f"req-1 is the beginning of {FIRST}, {SECOND}"):
        _full("req-1")


@pytest.mark.parametrize("word", ["mine", "unknown"])
def test_id_of_a_caller_and_an_unknown_word_stay_unchanged(word: str) -> None:
    assert _full(word) == word


def test_generated_id_is_not_looked_up() -> None:
    api = Lists()
    assert full_id(cast("MeshApi", api), REQUESTS, FIRST) == FIRST
    assert api.asked == []


def test_failing_list_leaves_the_error_to_the_call() -> None:
    assert _full("x", RecordIds("/v1/none", lambda api: api.get("/v1/none"))) == "x"
