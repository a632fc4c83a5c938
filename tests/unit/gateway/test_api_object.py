"""Objects of the HTTP API that show a message."""

from typing import Annotated, Literal

import pytest
from google.protobuf.timestamp_pb2 import Timestamp
from pydantic import BaseModel

from gateway.answers.api_object import Shows, object_json
from weft.api.router.v1 import batch_service_pb2, task_pb2


class Shown(BaseModel):
    object: Literal["shown"]
    id: str
    detail: None
    model: str | None
    made_at: Annotated[int, Shows("create_time")]
    began_at: Annotated[str | None, Shows("start_time")]
    state: str
    result: str | None = None


def test_members_have_the_fields_they_show_and_null_for_empty_ones() -> None:
    task = task_pb2.Task(id="t", create_time=Timestamp(seconds=7, nanos=999_999_999))
    assert object_json(Shown, task, state="new") == {
        "object": "shown",
        "id": "t",
        "detail": None,
        "model": None,
        "made_at": 7,
        "began_at": None,
        "state": "new",
    }


def test_time_string_is_utc_in_milliseconds_and_not_rounded_up() -> None:
    task = task_pb2.Task(start_time=Timestamp(seconds=1_700_000_000, nanos=1_999_999))
    assert object_json(Shown, task, state="new")["began_at"] == "2023-11-14T22:13:20.001Z"


def test_members_follow_schema_order_and_omit_unset_defaults() -> None:
    required = ["object", "id", "detail", "model", "made_at", "began_at", "state"]
    assert list(object_json(Shown, task_pb2.Task(), state="")) == required
    assert list(object_json(Shown, task_pb2.Task(), state="", result="done")) == [*required, "result"]


def test_empty_map_is_null_and_another_map_is_an_object() -> None:
    class WithMap(BaseModel):
        metadata: dict[str, str] | None

    assert object_json(WithMap, batch_service_pb2.Batch()) == {"metadata": None}
    assert object_json(WithMap, batch_service_pb2.Batch(metadata={"a": "b"})) == {"metadata": {"a": "b"}}


def test_member_that_shows_no_field_must_be_computed() -> None:
    class WithUnknown(BaseModel):
        nothing_of_a_task: str

    with pytest.raises(AssertionError, match="nothing_of_a_task"):
        object_json(WithUnknown, task_pb2.Task())
