"""Documents inside documents: lists of messages, and fields that are not spelled as in the message."""

from typing import Any

import pytest

from weft.api.registry.v1.tenant_pb2 import TenantManifest
from weft.api.registry.v1.workflow_pb2 import WorkflowManifest
from weft.documents.codec import document_of
from weft.documents.reader import read_message
from weft.kernel.schemas.field_rules import RuleError

WORKFLOW: dict[str, Any] = {
    "name": "turbo",
    "model": "comfy",
    "graph": {"6": {"class_type": "Text", "inputs": {"text": "a hill"}}},
    "inputs": [{"name": "steps", "type": "integer", "node": "6", "input": "text", "default": 4, "maximum": 8}],
    "outputs": ["6"],
}
TENANT: dict[str, Any] = {"name": "research", "limits": [{"window": "minute", "requests": 60}]}


def test_message_in_a_list_round_trips() -> None:
    message = read_message(WORKFLOW, WorkflowManifest)
    assert (message.workflow.inputs[0].default, message.workflow.inputs[0].maximum) == ("4", 8.0)
    assert document_of(read_message(document_of(message), WorkflowManifest)) == document_of(message)
    assert document_of(message)["inputs"][0]["default"] == 4


@pytest.mark.parametrize(
    ("wrong", "path"),
    [
        ({"limits": {"window": "minute"}}, ["limits"]),
        ({"limits": ["minute"]}, ["limits", 0]),
        ({"limits": [{"window": "minute"}, {"window": "fortnight"}]}, ["limits", 1, "window"]),
        ({"limits": [{"window": "minute", "x": 1}]}, ["limits", 0, "x"]),
        ({"limits": [{"window": "minute", "requests": 0.5}]}, ["limits", 0, "requests"]),
    ],
)
def test_nested_error_has_its_path(wrong: dict[str, Any], path: list[str | int]) -> None:
    with pytest.raises(RuleError) as caught:
        read_message(TENANT | wrong, TenantManifest)
    assert [str(step) for step in caught.value.path] == [str(step) for step in path]
