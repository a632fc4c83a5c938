"""The table of operations: each one has its place in every layer."""

import inspect
from typing import Any, get_args

import pytest

from gateway.endpoints import gateway_routers
from gateway.routing import routes_of
from runner_svc.backend.port import ENGINE_METHODS, Backend
from weft.api.common.v1 import receipt_pb2
from weft.api.registry.v1 import model_pb2
from weft.api.runner.v1 import serve_options_pb2, ticket_pb2
from weft.dispatch.operation_table import OPERATIONS, OperationSpec, operation_of
from weft.extension import own_extensions
from weft.kernel.access.principal import MESH_ACCESS, Resource
from weft.kernel.access.rpc_auth import access_of
from weft.kernel.requests.request_values import Operation, OperationName

EVERY_OPERATION = pytest.mark.parametrize("operation", Operation, ids=lambda operation: operation.name.lower())


def fields_of(message: Any) -> dict[str, Any]:
    return dict(message.DESCRIPTOR.fields_by_name)


def payload_type(spec: OperationSpec[Any, Any]) -> str:
    name: str = fields_of(spec.router_rpc.request)["payload"].message_type.full_name
    return name


def test_every_operation_has_a_row_number_and_name() -> None:
    assert set(OPERATIONS) == set(Operation)
    numbers = {name.removeprefix("MODEL_OPERATION_"): number for name, number in model_pb2.ModelOperation.items()}
    assert {each.name: each.value for each in Operation} == {name: n for name, n in numbers.items() if n}
    assert {each.name.lower() for each in Operation} == set(get_args(OperationName))


@EVERY_OPERATION
def test_both_rpcs_of_an_operation_use_its_payload_and_result(operation: Operation) -> None:
    spec = OPERATIONS[operation]
    runner, router = fields_of(spec.runner_rpc.request), fields_of(spec.router_rpc.request)
    assert runner[spec.payload_field].message_type.full_name == payload_type(spec)
    assert runner["ticket"].message_type is ticket_pb2.Ticket.DESCRIPTOR
    assert runner["options"].message_type is serve_options_pb2.ServeOptions.DESCRIPTOR
    assert {"model", "payload", "options"} <= set(router)
    for response in (spec.runner_rpc.response, spec.router_rpc.response):
        fields = fields_of(response)
        assert spec.field in fields if spec.field else {"data", "media_type"} <= set(fields)
        if "receipt" in fields:
            assert fields["receipt"].message_type is receipt_pb2.Receipt.DESCRIPTOR
    assert spec.runner_rpc.is_streamed == spec.router_rpc.is_streamed == spec.streamed


@pytest.mark.parametrize(
    "spec", [spec for spec in OPERATIONS.values() if spec.whole], ids=lambda spec: spec.operation.name
)
def test_unary_method_of_a_streamed_operation_takes_the_same_payload_and_has_a_receipt(
    spec: OperationSpec[Any, Any],
) -> None:
    assert spec.whole is not None
    assert not spec.whole.rpc.is_streamed
    assert fields_of(spec.whole.rpc.request)["payload"].message_type.full_name == payload_type(spec)
    response = fields_of(spec.whole.rpc.response)
    assert spec.whole.field in response
    assert response["receipt"].message_type is receipt_pb2.Receipt.DESCRIPTOR
    assert access_of(spec.whole.rpc.path) == access_of(spec.router_rpc.path)


@EVERY_OPERATION
def test_operation_is_found_by_its_payload(operation: Operation) -> None:
    payload = fields_of(OPERATIONS[operation].router_rpc.request)["payload"].message_type._concrete_class()
    assert operation_of(payload) is OPERATIONS[operation]


@EVERY_OPERATION
def test_callers_may_call_operations_on_the_router_and_only_the_mesh_on_a_runner(operation: Operation) -> None:
    spec = OPERATIONS[operation]
    public = access_of(spec.router_rpc.path)
    assert public is not None
    assert public.resource is Resource.INFERENCE
    assert access_of(spec.runner_rpc.path) == MESH_ACCESS


@EVERY_OPERATION
def test_operation_has_an_engine_method(operation: Operation) -> None:
    is_generation = operation in {Operation.CHAT, Operation.COMPLETION}
    assert (operation in ENGINE_METHODS) is not is_generation
    if not is_generation:
        method = ENGINE_METHODS[operation]
        assert hasattr(Backend, method.name)


@EVERY_OPERATION
def test_operation_has_an_http_endpoint(operation: Operation) -> None:
    handlers = [route.endpoint for route in routes_of(gateway_routers(own_extensions()))]
    modules = {inspect.getmodule(getattr(handler, "func", handler)) for handler in handlers}
    assert any(f"Operation.{operation.name}" in inspect.getsource(module) for module in modules if module is not None)
