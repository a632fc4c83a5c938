"""What observers of extensions get of requests, and that they neither fail nor delay them."""

import asyncio
from typing import Any

import pytest
from structlog.testing import capture_logs
from typing_extensions import override

from router_svc.router_config import RouterConfig
from router_svc.router_service import build
from weft.api.common.v1 import chat_pb2, completion_pb2, embedding_pb2, event_pb2, receipt_pb2
from weft.dispatch.fleet import FleetView
from weft.dispatch.frames import GenerationPayload
from weft.dispatch.request_receipt import RequestContext
from weft.durable.ended_requests import (
    MAX_KEPT_BYTES,
    MAX_WAITING,
    EndedRequest,
    EndedRequests,
    ObserverParts,
    RequestObserver,
    ended_requests,
)
from weft.extension import Extension, ObserverHook, enabled_extensions
from weft.kernel.requests.request_values import Operation
from weft.kernel.telemetry.structured_logs import new_traceparent
from weft_testing.fake_clock import FakeClock

CONTEXT = RequestContext(
    request_id="r1", tenant="acme", model="m", operation=Operation.CHAT, traceparent=new_traceparent()
)
CHAT = chat_pb2.ChatPayload(
    messages=[chat_pb2.ChatMessage(role=chat_pb2.ROLE_USER, content=[chat_pb2.ContentPart(text="Hi")])]
)
FAILED = receipt_pb2.Receipt(outcome=receipt_pb2.OUTCOME_FAILED)
ANSWER = [
    event_pb2.InferenceEvent(queued=event_pb2.Queued()),
    event_pb2.InferenceEvent(delta=event_pb2.Delta(text="Hel")),
]
PARTS = ObserverParts(tasks=lambda: None, view=FleetView, clock=FakeClock())


class Watcher(RequestObserver):
    """Keeps what it gets."""

    def __init__(self) -> None:
        self.got: list[EndedRequest] = []
        self.fails_at = ""
        """Where it fails: "wants", or the id of a request."""

    @override
    def wants(self, view: FleetView, context: RequestContext, payload: GenerationPayload) -> bool:
        if self.fails_at == "wants":
            raise ValueError
        return context.tenant == "acme"

    @override
    async def ended(self, request: EndedRequest) -> None:
        if self.fails_at == request.context.request_id:
            raise ValueError
        self.got.append(request)


def run(ended: EndedRequests, payload: Any = CHAT, answer: Any = ANSWER, request_id: str = "r1") -> bool:
    """Whether a request is followed, which fails after its answer began."""
    context = RequestContext(
        request_id=request_id, tenant="acme", model="m", operation=Operation.CHAT, traceparent=CONTEXT.traceparent
    )
    followed = ended.observe(FleetView(), context, payload)
    if followed is not None:
        followed.add(answer)
        followed.end(FAILED)
    return followed is not None


async def test_observer_gets_a_request_with_its_answer_and_receipt_once_it_has_ended() -> None:
    watcher = Watcher()
    ended = EndedRequests("watcher", watcher)
    assert run(ended)
    assert watcher.got == []
    await ended.stop()
    [request] = watcher.got
    assert (request.context.request_id, request.payload, request.receipt) == ("r1", CHAT, FAILED)
    assert [each.delta.text for each in request.answer.events] == ["Hel"]


async def test_request_without_a_text_answer_or_above_the_size_limit_is_not_passed_on() -> None:
    watcher = Watcher()
    ended = EndedRequests("watcher", watcher)
    assert not run(ended, embedding_pb2.EmbeddingPayload())
    long = "a" * MAX_KEPT_BYTES
    assert run(ended, completion_pb2.CompletionPayload(prompts=[completion_pb2.PromptInput(text=long)]))
    assert run(ended, answer=[event_pb2.InferenceEvent(delta=event_pb2.Delta(text=long))])
    # The payload of a task gets its images after the start of its run.
    filled = chat_pb2.ChatPayload()
    followed = ended.observe(FleetView(), CONTEXT, filled)
    assert followed is not None
    filled.messages.add().content.add().image.data = b"a" * MAX_KEPT_BYTES
    followed.end(FAILED)
    await ended.stop()
    assert watcher.got == []


async def test_requests_beyond_those_that_may_wait_are_dropped() -> None:
    watcher = Watcher()
    ended = EndedRequests("watcher", watcher)
    with capture_logs() as logs:
        for number in range(MAX_WAITING + 2):
            assert run(ended, request_id=f"r{number}")
    async with asyncio.timeout(10):
        await ended.stop()
    assert len(watcher.got) == MAX_WAITING
    assert [(each["event"], each["observer"]) for each in logs] == [("ended request dropped", "watcher")] * 2


async def test_observer_that_fails_at_one_request_gets_the_next() -> None:
    watcher = Watcher()
    watcher.fails_at = "r1"
    ended = EndedRequests("watcher", watcher)
    with capture_logs() as logs:
        assert run(ended)
        assert run(ended, request_id="r2")
        await ended.stop()
    assert [each.context.request_id for each in watcher.got] == ["r2"]
    assert [each["event"] for each in logs] == ["ended request dropped by the fault of its observer"]


async def test_observer_that_fails_before_a_request_is_asked_no_more() -> None:
    watcher = Watcher()
    watcher.fails_at = "wants"
    ended = EndedRequests("watcher", watcher)
    with capture_logs() as logs:
        assert not run(ended)
        watcher.fails_at = ""
        assert not run(ended)
    assert [each["event"] for each in logs] == ["observer failed, and is asked for nothing until a restart"]


def watcher(_: ObserverParts) -> Watcher:
    """Makes an observer, as the hook of an extension does."""
    return Watcher()


def test_observer_that_cannot_be_imported_is_left_out_and_logged() -> None:
    places = ("no_such_package:watcher", f"{__name__}:PARTS", f"{__name__}:watcher")
    hooks = tuple(ObserverHook(place=place) for place in places)
    added = Extension(name="watch", summary="Watches.", docs="docs/extensions.md", observers=hooks)
    with capture_logs() as logs:
        (found,) = ended_requests([added], PARTS)
    assert found.name == "watch"
    assert [each["event"] for each in logs] == ["observer cannot be used"] * 2


@pytest.mark.parametrize(("disabled", "names"), [([], ["trials"]), (["trials"], [])])
def test_router_has_the_observers_of_extensions_that_are_on(disabled: list[str], names: list[str]) -> None:
    router = build(RouterConfig(registry_address="unix:none"), extensions=enabled_extensions(disabled))
    assert [each.name for each in router.ended_requests] == names
    assert len(router.observers) == 1 + len(names)
