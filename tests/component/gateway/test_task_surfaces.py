"""Task APIs without a gateway, as batches use them."""

import json
from typing import Any

import pytest
from gateway_script import FixedFleet, ScriptedDispatcher, delta, finished, model, started, usage
from kit.messages import changed
from task_script import BORN, output
from test_gateway_media import CONFIG, PICTURE, URL, ScriptedMedia

from gateway.deps import InferenceDeps
from gateway.gateway_metrics import GatewayMetrics
from gateway.request_facts import FACTS_KEY, RequestFacts
from gateway.tasks.task_apis import SpecContext, TaskApis, task_apis_of
from weft.api.common.v1 import event_pb2
from weft.api.router.v1 import task_pb2
from weft.kernel.access.principal import Principal
from weft.kernel.errors.error_tree import FieldError, WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.time.clock import SystemClock
from weft.kernel.time.timestamps import stamp_of

HI = [{"role": "user", "content": "hi"}]
CHAT: dict[str, Any] = {"model": "tiny", "messages": HI}
TASK = task_pb2.Task(
    id="task-0123456789abcdef01234567",
    tenant="ann",
    state=task_pb2.TASK_STATE_COMPLETED,
    model="tiny",
    create_time=stamp_of(BORN),
    max_attempts=5,
)


def task_apis(media: ScriptedMedia | None = None) -> TaskApis:
    return task_apis_of(
        InferenceDeps(
            config=CONFIG,
            dispatcher=ScriptedDispatcher(),
            fleet=FixedFleet.of(model("tiny")),
            metrics=GatewayMetrics(),
            clock=SystemClock(),
            media=media or ScriptedMedia(),
        )
    )


def context(field: str = "", *, is_repeatable: bool = False, **headers: str) -> SpecContext:
    named = [(name.replace("_", "-").lower().encode(), value.encode()) for name, value in headers.items()]
    scope = {"headers": named, FACTS_KEY: RequestFacts("req-1", 0.0)}
    return SpecContext(scope=scope, field=field, is_repeatable=is_repeatable)


def spec_of(body: object, about: SpecContext | None = None) -> Any:
    surface = task_apis().of_endpoint("/v1/chat/completions")
    return surface.spec(json.dumps(body).encode(), about or context())


def test_surface_is_found_by_path_and_kind() -> None:
    found = task_apis()
    assert found.endpoints[:3] == ("/v1/chat/completions", "/v1/completions", "/v1/embeddings")
    for endpoint in found.endpoints:
        surface = found.of_endpoint(endpoint)
        assert surface.endpoint == endpoint
        assert found.of_kind(surface.kind) is surface
    assert found.of_kind("") is None
    with pytest.raises(FieldError, match="url: must be one of /v1/chat/completions"):
        found.of_endpoint("/v1/rerank", "url")


def test_unknown_fields_that_ask_for_links_elsewhere_are_ignored() -> None:
    for field in ("result_format", "response_format"):
        body = {"model": "tiny", "prompt": "hi", field: "url"}
        assert task_apis().of_endpoint("/v1/completions").spec(json.dumps(body).encode(), context()).model == "tiny"
    image = {"model": "tiny", "prompt": "hi", "response_format": "url"}
    with pytest.raises(FieldError, match="response_format: must be 'b64_json'"):
        task_apis().of_endpoint("/v1/images/generations").spec(json.dumps(image).encode(), context())


def test_body_errors_have_the_prefix_of_their_container_and_headers_their_own_name() -> None:
    with pytest.raises(FieldError) as caught:
        spec_of({**CHAT, "n": 99}, context("body"))
    assert (caught.value.field, caught.value.message.startswith("body.n: ")) == ("body.n", True)
    with pytest.raises(FieldError) as caught:
        spec_of({**CHAT, "n": 99})
    assert caught.value.field == "n"
    with pytest.raises(FieldError) as caught:
        spec_of(CHAT, context("body", X_Cache_Mode="maybe"))
    assert caught.value.field == "X-Cache-Mode"


def test_allow_remote_scope_applies_to_tasks_too() -> None:
    about = context()
    about.scope[FACTS_KEY].principal = Principal(name="key:k", tenant="ann", access=frozenset())
    with pytest.raises(FieldError) as caught:
        spec_of({**CHAT, "allow_remote": True}, about)
    assert caught.value.reason is Reason.PERMISSION_DENIED
    assert spec_of({**CHAT, "allow_remote": True}).options.allow_remote


def test_repeatable_submission_yields_an_equal_spec_and_others_get_new_traces() -> None:
    keyed = context(is_repeatable=True)
    assert spec_of(CHAT, keyed) == spec_of(CHAT, keyed)
    assert spec_of(CHAT).traceparent != spec_of(CHAT).traceparent != ""


async def test_image_url_is_fetched_only_if_the_caller_can_wait() -> None:
    media = ScriptedMedia()
    media.may_answer.set()
    content = [{"type": "image_url", "image_url": {"url": URL}}]
    raw = json.dumps({"model": "tiny", "messages": [{"role": "user", "content": content}]}).encode()
    surface = task_apis(media).of_endpoint("/v1/chat/completions")
    with pytest.raises(FieldError, match="data: URL") as caught:
        surface.spec(raw, context("body"))
    assert caught.value.field == "body.messages[0].content[0].image_url.url"
    assert media.asked == []
    spec = await surface.supplied_spec(raw, context())
    assert spec.chat.messages[0].content[0].image.data == PICTURE
    media.failure = FieldError("messages[0].content[0].image_url.url", "is gone")
    with pytest.raises(FieldError) as caught:
        await surface.supplied_spec(raw, context("body"))
    assert caught.value.message == "body.messages[0].content[0].image_url.url: is gone"


def test_answer_is_rendered_deterministically_from_stored_output() -> None:
    call = event_pb2.ToolCallDelta(id="call-1", name="f", arguments_text="{}")
    pieces = [
        output([started("big")], [delta(tool_calls=[call])]),
        output([delta(finish="TOOL_CALLS"), usage(), finished()]),
    ]
    surface = task_apis().of_endpoint("/v1/chat/completions")
    older = json.dumps({**CHAT, "functions": [{"name": "f"}], "stream": True}).encode()
    answer = json.loads(surface.answer(older, TASK, pieces))
    assert (answer["id"], answer["created"]) == ("chatcmpl-0123456789abcdef01234567", int(BORN.timestamp()))
    assert (answer["model"], answer["choices"][0]["finish_reason"]) == ("big", "function_call")
    assert surface.answer(older, TASK, pieces) == surface.answer(older, TASK, pieces)
    other = surface.answer(older, changed(TASK, id="task-1"), pieces)
    assert json.loads(other)["id"] == "chatcmpl-1"


@pytest.mark.parametrize("endpoint", ["/v1/chat/completions", "/v1/completions", "/v1/embeddings"])
def test_answer_without_an_end_is_a_protocol_error(endpoint: str) -> None:
    body = {**CHAT, "prompt": "a", "input": "a"}
    surface = task_apis().of_endpoint(endpoint)
    with pytest.raises(WeftError) as caught:
        surface.answer(json.dumps(body).encode(), TASK, [output([started()], [delta("Hello")], vectors=[[0.5]])])
    assert caught.value.reason is Reason.BACKEND_PROTOCOL_ERROR
