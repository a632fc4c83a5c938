"""Tables by names of messages name messages that there are."""

import pytest
from google.protobuf import descriptor_pool

import weft.api.common.v1.workflow_pb2
import weft.api.operations.v1.operation_pb2
import weft.api.registry.v1.key_service_pb2
import weft.api.registry.v1.wake_pb2
import weft.api.router.v1.task_pb2
import weft.api.runner.v1.load_pb2
from weft.documents.computed import CHECKS, COMPUTED

DEFINED_IN = (
    weft.api.common.v1.workflow_pb2,
    weft.api.operations.v1.operation_pb2,
    weft.api.registry.v1.key_service_pb2,
    weft.api.registry.v1.wake_pb2,
    weft.api.router.v1.task_pb2,
    weft.api.runner.v1.load_pb2,
)
"""Modules whose import defines the messages."""


@pytest.mark.parametrize("name", [*COMPUTED, *CHECKS])
def test_every_computed_name_belongs_to_a_message(name: str) -> None:
    assert any(module.DESCRIPTOR.package == name.rpartition(".")[0] for module in DEFINED_IN)
    assert descriptor_pool.Default().FindMessageTypeByName(name).full_name == name
