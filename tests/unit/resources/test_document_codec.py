"""Messages as documents: whatever a record holds, its document holds to its schema."""

import random
from collections.abc import Callable
from typing import Any

import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from jsonschema import Draft202012Validator

from weft.api.common.v1 import sampling_pb2
from weft.api.operations.v1 import operation_pb2, operation_service_pb2
from weft.api.registry.v1 import agent_pb2, event_pb2, lease_service_pb2, model_pb2, route_pb2, runner_pb2
from weft.api.router.v1 import request_pb2, request_service_pb2, task_pb2, task_service_pb2
from weft.api.runner.v1 import load_pb2
from weft.documents.codec import camel, document_of, plan_of, without_defaults
from weft.documents.json_schema import SchemaSet, comment_of
from weft.documents.reader import read_message
from weft.kernel.schemas.field_rules import RuleError

RECORDS: list[type[Message]] = [
    request_pb2.RequestRecord,
    request_pb2.ClientRecord,
    request_service_pb2.ListRequestsResponse,
    task_pb2.Task,
    task_service_pb2.GetTaskResponse,
    task_service_pb2.ListTasksResponse,
    operation_pb2.Operation,
    operation_service_pb2.ListOperationsResponse,
    operation_service_pb2.ListAuditEntriesResponse,
    lease_service_pb2.HostMemory,
    event_pb2.Event,
    model_pb2.Model,
    agent_pb2.Agent,
    runner_pb2.Runner,
    runner_pb2.InstanceState,
    route_pb2.Route,
]
_VALUES: dict[int, Callable[[random.Random], Any]] = {
    FieldDescriptor.CPPTYPE_STRING: lambda chance: chance.choice(["", "a", "two words"]),
    FieldDescriptor.CPPTYPE_BOOL: lambda chance: chance.random() < 0.5,
    FieldDescriptor.CPPTYPE_DOUBLE: lambda chance: chance.choice([0.0, 0.5, 3.0]),
}


def _value(field: FieldDescriptor, chance: random.Random) -> Any:
    if field.type == FieldDescriptor.TYPE_BYTES:
        return b"x"
    if field.enum_type is not None:
        return chance.choice([value.number for value in field.enum_type.values])
    choose = _VALUES.get(field.cpp_type)
    return chance.choice([0, 1, 77]) if choose is None else choose(chance)


def fill(message: Any, chance: random.Random, depth: int = 0) -> Any:
    """Sets some fields of a message, and of those in it, to some values."""
    for field in message.DESCRIPTOR.fields:
        kind = field.message_type
        if chance.random() < 0.3 or depth > 4 or (kind is not None and kind.GetOptions().map_entry):
            continue
        if kind is not None and kind.full_name.startswith("google.protobuf."):
            getattr(message, field.name).FromNanoseconds(chance.choice([0, 10**9, 1_500_000_000]))
        elif kind is not None:
            parts = [getattr(message, field.name).add() for _ in range(2)] if field.is_repeated else []
            for part in parts or [getattr(message, field.name)]:
                fill(part, chance, depth + 1)
                part.SetInParent()
        elif field.is_repeated:
            getattr(message, field.name).extend(_value(field, chance) for _ in range(2))
        else:
            setattr(message, field.name, _value(field, chance))
    return message


@pytest.mark.parametrize("kind", RECORDS, ids=lambda kind: kind.DESCRIPTOR.name)
def test_written_document_matches_its_schema(kind: type[Message]) -> None:
    schemas, descriptor = SchemaSet(), kind.DESCRIPTOR
    reference = schemas.of_message(descriptor, checked=False)  # type: ignore[arg-type]  # of either implementation
    validator = Draft202012Validator({**reference, "$defs": schemas.definitions})
    validator.validate(document_of(kind()))
    for seed in range(40):
        validator.validate(document_of(fill(kind(), random.Random(seed))))


@pytest.mark.parametrize("kind", RECORDS, ids=lambda kind: kind.DESCRIPTOR.name)
def test_every_document_field_has_a_comment(kind: type[Message]) -> None:
    descriptor: Any = kind.DESCRIPTOR
    plain = [plan.field for plan in plan_of(descriptor).fields]
    assert not [field.full_name for field in plain if not comment_of(descriptor.file.name, field.full_name)]


def test_field_names_are_in_camel_case() -> None:
    assert [camel(name) for name in ("name", "pool_name", "time_to_first_token_seconds")] == [
        "name",
        "poolName",
        "timeToFirstTokenSeconds",
    ]


def test_default_values_are_omitted() -> None:
    agent = agent_pb2.AgentManifest(name="a", model="m")
    agent.behaviour.stop_on_decision_request = True
    agent.behaviour.max_tool_iterations = 0
    assert without_defaults(agent) == {"name": "a", "model": "m", "maxToolIterations": 0}


def test_empty_inline_message_is_unset() -> None:
    value = {"name": "a", "model": "m", "tools": [], "platformPrompt": False}
    assert not read_message(value, agent_pb2.AgentManifest).HasField("behaviour")
    assert read_message({**value, "tools": ["t"]}, agent_pb2.AgentManifest).behaviour.tools == ["t"]


@pytest.mark.parametrize(
    ("value", "path", "problem"),
    [
        ([], (), "must be a mapping"),
        ({"temperature": "warm"}, ("temperature",), "must be a number"),
        ({"temperature": 10**400}, ("temperature",), "is too large a number"),
        ({"temperature": float("inf")}, ("temperature",), "must be a finite number"),
        ({"max_tokens": 1.0}, ("max_tokens",), "must be a whole number"),
        ({"max_tokens": True}, ("max_tokens",), "must be a whole number"),
        ({"maxTokens": 2**31}, ("maxTokens",), "must be at most 2147483647"),
        ({"stop": "x"}, ("stop",), "must be a list"),
        ({"stop": ["x", "\ud800"]}, ("stop", 1), "without lone surrogates"),
        ({"logit_bias": {"x": 1}}, ("logit_bias", "x"), "must be a whole number"),
        ({"logit_bias": {"7": 101}}, ("logit_bias", "7"), "must be -100 to 100"),
        ({7: 1}, (7,), "there is no such field"),
    ],
)
def test_invalid_value_is_reported_with_its_path(value: Any, path: tuple[str | int, ...], problem: str) -> None:
    with pytest.raises(RuleError) as refusal:
        read_message(value, sampling_pb2.SamplingParams)
    assert refusal.value.path == path
    assert problem in refusal.value.problem


def test_load_parameter_values_are_written_unchanged() -> None:
    options = load_pb2.LoadOptions(memory_budget_bytes=3 * 2**20 + 1)
    options.parameters["flag"].flag = True
    options.parameters["context_tokens"].integer = 4096
    assert document_of(options) == {
        "memoryBudgetMb": 4,
        "pin": False,
        "parameters": {"flag": True},
        "contextTokens": 4096,
    }
