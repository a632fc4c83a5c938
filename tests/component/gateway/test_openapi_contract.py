"""The OpenAPI document against the gateway that it describes."""

from typing import Any

import pytest
import schemathesis
from admin_script import admin_ports
from bad_inputs_server import ForgetfulDispatcher, ForgetfulTasks, forgetful_files
from bad_inputs_stage import ENDPOINTS, Endpoint, nameless
from file_script import MemoryBatches
from gateway_script import FixedFleet, app_of, model
from hypothesis import HealthCheck, given, settings
from kit.keys import bearer
from registry_script import ScriptedRegistry
from response_script import MemoryResponses
from schemathesis.core.failures import FailureGroup
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from starlette.responses import Response
from test_api_keys_http import KEYS, ScriptedKeys
from test_gateway_requests import ScriptedRequests
from test_join_tokens_http import ScriptedTokens, joins
from test_trials_http import Judge
from test_usage_http import ScriptedUsage

from gateway.gateway_config import GatewayConfig
from gateway.ports import GatewayPorts
from gateway.registry_client import RegistryService
from gateway.routing import ApiRouter
from weft.extension import own_extensions

pytestmark = pytest.mark.slow("random requests to every endpoint")


def no_surprise(context: Any, response: Any, case: Any) -> None:  # noqa: ARG001 - a check has these
    """501 is a documented refusal; any other server error is a failure."""
    assert response.status_code < 500 or response.status_code == 501, response.content


CHECKS = [
    no_surprise,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]
SENT = {"host": "localhost", "authorization": bearer("admin0000000")["Authorization"]}
NOT_TOLD = {("GET", "/docs"), ("GET", "/openapi.json")}


def app() -> Any:
    """A gateway with all endpoints, over scripted collaborators."""
    fleet = FixedFleet.of(model("tiny"))
    ports = GatewayPorts(
        extensions=own_extensions(),
        dispatcher=ForgetfulDispatcher(),
        fleet=fleet,
        registry=ScriptedRegistry(),
        admin=admin_ports(),
        requests=ScriptedRequests(),
        usage=ScriptedUsage(),
        responses=MemoryResponses(),
        tasks=ForgetfulTasks(),
        files=forgetful_files(),
        batches=MemoryBatches(),
        keys=KEYS,
        api_keys=RegistryService(ScriptedKeys(), timeout_seconds=5.0),
        join_tokens=RegistryService(ScriptedTokens(), timeout_seconds=5.0),
        join_command=joins,
        trials=RegistryService(Judge(fleet), timeout_seconds=5.0),
    )
    return app_of(GatewayConfig(port=0, allowed_hosts=frozenset({"testserver"})), ports)


schemathesis.serializer.alias("application/pdf", "application/octet-stream")


@pytest.fixture(scope="module")
def document() -> Any:
    return schemathesis.openapi.from_asgi("/openapi.json", app(), headers=SENT)


def test_openapi_document_lists_every_route(document: Any) -> None:
    told = {(method.upper(), nameless(path)) for path, item in document.raw_schema["paths"].items() for method in item}
    assert {endpoint.route for endpoint in ENDPOINTS} - told <= NOT_TOLD


@pytest.mark.parametrize("endpoint", [each for each in ENDPOINTS if each.route not in NOT_TOLD], ids=str)
def test_responses_match_the_openapi_document(endpoint: Endpoint, document: Any) -> None:
    path = next(path for path in document.raw_schema["paths"] if nameless(path) == nameless(endpoint.path))
    operation = document[path][endpoint.method]

    @settings(
        max_examples=settings().max_examples // 5,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy())
    def keeps_to_it(case: Any) -> None:
        case.call_and_validate(headers=SENT, checks=CHECKS)

    keeps_to_it()


@pytest.mark.parametrize(
    ("path", "asks"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
        ("/v1/completions", {"prompt": "hi"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}),
        ("/v1/responses", {"input": "hi"}),
    ],
)
def test_event_streams_match_the_openapi_document(path: str, asks: dict[str, Any], document: Any) -> None:
    """Random requests hardly ever ask for a stream; the document once declared each event a string."""
    body = {"model": "tiny", "stream": True, **asks}
    case = document[path]["POST"].Case(body=body, media_type="application/json")
    answer = case.call_and_validate(headers=SENT, checks=CHECKS)
    assert answer.headers["content-type"][0].startswith("text/event-stream")


@pytest.mark.parametrize(
    "answer", [Response(status_code=500), Response(b"{}", 418), Response(b"x", media_type="text/csv")]
)
def test_route_that_violates_its_document_is_detected(answer: Response) -> None:
    async def answers() -> Response:
        return answer

    broken, router = app(), ApiRouter("broken")
    router.add_get("/route", None, answers)
    broken.serve(router)
    operation = schemathesis.openapi.from_asgi("/openapi.json", broken, headers=SENT)["/route"]["GET"]
    with pytest.raises((FailureGroup, AssertionError)):
        operation.Case().call_and_validate(checks=CHECKS)
