"""Fields of calls about operations have the names that callers wrote."""

import re
from collections.abc import Iterator

import pytest
from google.protobuf.descriptor import Descriptor, MethodDescriptor

from gateway.runner_api.runner_operations import callers_field
from weft.api.operations.v1 import operation_service_pb2
from weft.documents.field_names import operation_field
from weft_app.cli.verbs import option_of


@pytest.mark.parametrize(
    ("theirs", "document", "body", "option"),
    [
        ("action.load_model.model", "name", "modelId", "MODEL"),
        ("action.unload_model.model", "name", "modelId", "MODEL"),
        ("action.load_model.evict_model", "evictModel", "evictModel", "--evict"),
        ("action.load_model.replicas", "replicas", "replicas", "--replicas"),
        ("action.load_model.options.quantization", "quantization", "quantization", "--quantization"),
        ("action.load_model.options.keep_alive", "keepAlive", "keepAlive", "--keep-alive"),
        ("action.load_model.options.memory_budget_bytes", "memoryBudgetMb", "gpuMemoryBudgetMB", "--budget"),
        ("action.load_model.options.parameters", "parameters", "parameters", "--set"),
        ("action.load_model.options.parameters.a_b", "parameters.a_b", "parameters.a_b", "--set a_b"),
        ("parameters.a_b", "parameters.a_b", "parameters.a_b", "--set a_b"),
        (
            "action.load_model.options.parameters.context_tokens",
            "parameters.context_tokens",
            "maxContextLength",
            "--ctx",
        ),
        ("action.flush_cache.model", "model", "modelId", "--model"),
        ("action.flush_cache.tenant", "tenant", "tenantId", "--tenant"),
        ("action.flush_cache.tag", "tag", "tag", "--tag"),
        ("request_id", "Idempotency-Key", "Idempotency-Key", "--request-id"),
        ("authorization", "authorization", "verifiedOpToken", "--token"),
        ("page_token", "pageToken", "pageToken", "pageToken"),
        ("action", "action", "action", "action"),
    ],
)
def test_field_refused_by_the_registry_is_reported_under_the_callers_name(
    theirs: str, document: str, body: str, option: str
) -> None:
    assert operation_field(theirs) == document
    assert callers_field(theirs) == body
    assert option_of(operation_field(theirs)) == option


def _values(message: Descriptor, path: str = "") -> Iterator[str]:
    """The paths of the values in a message; the messages of a oneof are chosen by the route."""
    for field in message.fields:
        if field.message_type is None or not field.message_type.full_name.startswith("weft.api.operations"):
            yield path + field.name
        else:
            yield from _values(field.message_type, f"{path}{field.name}.")


@pytest.mark.parametrize("method", operation_service_pb2.DESCRIPTOR.services_by_name["OperationService"].methods[:])
def test_request_fields_are_reported_without_internal_message_paths(method: MethodDescriptor) -> None:
    for field in _values(method.input_type):
        for name in (operation_field(field), callers_field(field)):
            assert not re.search(r"_|^action", name), f"{field}: {name}"
