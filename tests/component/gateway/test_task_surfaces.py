"""Task APIs without a gateway, as batches use them."""

import json
import threading
from collections.abc import Sequence
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
from weft.api.common.v1 import event_pb2, image_pb2
from weft.api.router.v1 import task_pb2, task_service_pb2
from weft.extension import Extension, load_hook, own_extensions
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


def task_apis(media: ScriptedMedia | None = None, extensions: Sequence[Extension] | None = None) -> TaskApis:
    return task_apis_of(
        InferenceDeps(
            config=CONFIG,
            dispatcher=ScriptedDispatcher(),
            fleet=FixedFleet.of(model("tiny")),
            metrics=GatewayMetrics(),
            clock=SystemClock(),
            media=media or ScriptedMedia(),
        ),
        own_extensions() if extensions is None else extensions,
    )


def context(field: str = "", *, is_repeatable: bool = False, **headers: str) -> SpecContext:
    named = [(name.replace("_", "-").lower().encode(), value.encode()) for name, value in headers.items()]
    scope = {"headers": named, FACTS_KEY: RequestFacts("req-1", 0.0)}
    return SpecContext(scope=scope, field=field, is_repeatable=is_repeatable)


async def spec_of(body: object, about: SpecContext | None = None) -> Any:
    surface = await task_apis().of_endpoint("/v1/chat/completions")
    return surface.spec(json.dumps(body).encode(), about or context())


async def test_surface_is_found_by_path_and_kind() -> None:
    found = task_apis()
    assert found.endpoints[:3] == ("/v1/chat/completions", "/v1/completions", "/v1/embeddings")
    for endpoint in found.endpoints:
        surface = await found.of_endpoint(endpoint)
        assert surface.endpoint == endpoint
        assert await found.of_kind(surface.kind) is surface
    assert await found.of_kind("") is None
    with pytest.raises(FieldError, match="url: must be one of /v1/chat/completions"):
        await found.of_endpoint("/v1/rerank", "url")


async def test_api_of_tasks_is_imported_at_its_first_use_and_off_the_event_loop() -> None:
    threads: list[int] = []

    def loaded(place: str, kind: type[Any]) -> Any:
        threads.append(threading.get_ident())
        return load_hook(place, kind)

    found = task_apis()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gateway.tasks.task_apis.load_hook", loaded)
        assert found.endpoint_of("chat") == "/v1/chat/completions"
        assert threads == []
        assert await found.of_kind("chat") is await found.of_endpoint("/v1/chat/completions")
    assert len(threads) == 1
    assert threads[0] != threading.get_ident()


async def test_task_of_a_disabled_extension_is_refused_by_its_endpoint_and_its_answer_by_its_operation() -> None:
    found = task_apis(extensions=())
    with pytest.raises(FieldError, match="endpoint: must be one of /v1/chat/completions, /v1/completions"):
        await found.of_endpoint("/v1/images/generations")
    spec = task_pb2.TaskSpec(image=image_pb2.ImagePayload(prompt="a cat"), origin_kind="images", origin=b"{}")
    with pytest.raises(WeftError, match="no API of this gateway has answers of the kind image") as caught:
        await found.answer(task_service_pb2.GetTaskResponse(spec=spec, task=TASK), [])
    assert caught.value.reason is Reason.UNSUPPORTED_OPERATION


async def test_unknown_fields_that_ask_for_links_elsewhere_are_ignored() -> None:
    for field in ("result_format", "response_format"):
        body = {"model": "tiny", "prompt": "hi", field: "url"}
        completions = await task_apis().of_endpoint("/v1/completions")
        assert completions.spec(json.dumps(body).encode(), context()).model == "tiny"
    image = {"model": "tiny", "prompt": "hi", "response_format": "url"}
    images = await task_apis().of_endpoint("/v1/images/generations")
    with pytest.raises(FieldError, match="response_format: must be 'b64_json'"):
        images.spec(json.dumps(image).encode(), context())


async def test_body_errors_have_the_prefix_of_their_container_and_headers_their_own_name() -> None:
    with pytest.raises(FieldError) as caught:
        await spec_of({**CHAT, "n": 99}, context("body"))
    assert (caught.value.field, caught.value.message.startswith("body.n: ")) == ("body.n", True)
    with pytest.raises(FieldError) as caught:
        await spec_of({**CHAT, "n": 99})
    assert caught.value.field == "n"
    with pytest.raises(FieldError) as caught:
        await spec_of(CHAT, context("body", X_Cache_Mode="maybe"))
    assert caught.value.field == "X-Cache-Mode"


async def test_allow_remote_scope_applies_to_tasks_too() -> None:
    about = context()
    about.scope[FACTS_KEY].principal = Principal(name="key:k", tenant="ann", access=frozenset())
    with pytest.raises(FieldError) as caught:
        await spec_of({**CHAT, "allow_remote": True}, about)
    assert caught.value.reason is Reason.PERMISSION_DENIED
    assert (await spec_of({**CHAT, "allow_remote": True})).options.allow_remote


async def test_repeatable_submission_yields_an_equal_spec_and_others_get_new_traces() -> None:
    keyed = context(is_repeatable=True)
    assert await spec_of(CHAT, keyed) == await spec_of(CHAT, keyed)
    assert (await spec_of(CHAT)).traceparent != (await spec_of(CHAT)).traceparent != ""


async def test_image_url_is_fetched_only_if_the_caller_can_wait() -> None:
    media = ScriptedMedia()
    media.may_answer.set()
    content = [{"type": "image_url", "image_url": {"url": URL}}]
    raw = json.dumps({"model": "tiny", "messages": [{"role": "user", "content": content}]}).encode()
    surface = await task_apis(media).of_endpoint("/v1/chat/completions")
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


async def test_answer_is_rendered_deterministically_from_stored_output() -> None:
    call = event_pb2.ToolCallDelta(id="call-1", name="f", arguments_text="{}")
    pieces = [
        output([started("big")], [delta(tool_calls=[call])]),
        output([delta(finish="TOOL_CALLS"), usage(), finished()]),
    ]
    surface = await task_apis().of_endpoint("/v1/chat/completions")
    older = json.dumps({**CHAT, "functions": [{"name": "f"}], "stream": True}).encode()
    answer = json.loads(surface.answer(older, TASK, pieces))
    assert (answer["id"], answer["created"]) == ("chatcmpl-0123456789abcdef01234567", int(BORN.timestamp()))
    assert (answer["model"], answer["choices"][0]["finish_reason"]) == ("big", "function_call")
    assert surface.answer(older, TASK, pieces) == surface.answer(older, TASK, pieces)
    other = surface.answer(older, changed(TASK, id="task-1"), pieces)
    assert json.loads(other)["id"] == "chatcmpl-1"


@pytest.mark.parametrize("endpoint", ["/v1/chat/completions", "/v1/completions", "/v1/embeddings"])
async def test_answer_without_an_end_is_a_protocol_error(endpoint: str) -> None:
    body = {**CHAT, "prompt": "a", "input": "a"}
    surface = await task_apis().of_endpoint(endpoint)
    with pytest.raises(WeftError) as caught:
        surface.answer(json.dumps(body).encode(), TASK, [output([started()], [delta("Hello")], vectors=[[0.5]])])
    assert caught.value.reason is Reason.BACKEND_PROTOCOL_ERROR
