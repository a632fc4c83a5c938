"""A conversation whose earlier turns an engine refuses goes on in another form, with a warning."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
from kit.presence import present
from typing_extensions import override

from runner_svc.backend.port import Backend, CacheIsolation, CacheUse, CallInfo, SlotSnapshot
from runner_svc.cache.model_cache import ModelCache, RequestCache
from runner_svc.instance.admission import AdmittedRequest
from runner_svc.request_records import RequestRecord
from weft.api.common.v1 import chat_pb2, event_pb2, receipt_pb2, tokenize_pb2
from weft.dispatch.frames import Frame
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.requests.capabilities import Capabilities
from weft.kernel.requests.request_values import Handling, Operation, Skill
from weft_testing.fake_clock import FakeClock

Event = event_pb2.InferenceEvent
CALL = CallInfo(request_id="r", traceparent="")
TEMPLATE = "the engine answered 400: Jinja Exception: System message must be at the beginning."


class StrictEngine:
    """Refuses system turns in mid-conversation, and images."""

    def __init__(self, message: str, *, begins: bool = False) -> None:
        self._message = message
        self._begins = begins
        self.seen: list[chat_pb2.ChatPayload] = []

    async def generate(self, payload: chat_pb2.ChatPayload, call: CallInfo) -> AsyncGenerator[Frame]:
        del call
        if self._begins:
            yield [Event(delta=event_pb2.Delta(text="a"))]
        self._require(payload)
        yield [Event(delta=event_pb2.Delta(text="b"))]
        yield [Event(finished=event_pb2.Finished(receipt=receipt_pb2.Receipt()))]

    async def tokenize(self, payload: tokenize_pb2.TokenizePayload, call: CallInfo) -> tokenize_pb2.TokenizeResult:
        del call
        self._require(payload.chat)
        return tokenize_pb2.TokenizeResult(count=7)

    def _require(self, payload: chat_pb2.ChatPayload) -> None:
        self.seen.append(payload)
        has_image = any(part.HasField("image") for message in payload.messages for part in message.content)
        if has_image or any(message.role == chat_pb2.ROLE_SYSTEM for message in payload.messages[1:]):
            raise WeftError(Reason.BACKEND_REJECTED, self._message)


def admitted(
    engine: StrictEngine,
    capabilities: Capabilities = Capabilities(),  # noqa: B008 - immutable
    cache: RequestCache | None = None,
) -> tuple[AdmittedRequest, list[WeftError]]:
    clock, failures = FakeClock(), list[WeftError]()
    record = RequestRecord(
        request_id="r", model="m", clock=clock, started=0.0, started_at=clock.utc_now(), last_progress=0.0
    )
    backend = cast("Backend", SimpleNamespace(generate=engine.generate, tokenize=engine.tokenize))
    return AdmittedRequest(record, backend, failures.append, cache, capabilities), failures


def conversation(*, with_image: bool = False) -> chat_pb2.ChatPayload:
    image = chat_pb2.ContentPart(image=chat_pb2.MediaPart(data=b"x", media_type="image/png"))
    first = image if with_image else chat_pb2.ContentPart(text="hi")
    return chat_pb2.ChatPayload(
        messages=[
            chat_pb2.ChatMessage(role=chat_pb2.ROLE_USER, content=[first]),
            chat_pb2.ChatMessage(role=chat_pb2.ROLE_ASSISTANT, content=[chat_pb2.ContentPart(text="hello")]),
            chat_pb2.ChatMessage(role=chat_pb2.ROLE_SYSTEM, content=[chat_pb2.ContentPart(text="a file changed")]),
            chat_pb2.ChatMessage(role=chat_pb2.ROLE_USER, content=[chat_pb2.ContentPart(text="go on")]),
        ]
    )


async def test_mid_conversation_system_turn_does_not_fail_with_a_strict_template() -> None:
    engine = StrictEngine(TEMPLATE)
    work, failures = admitted(engine)
    events = [event for frame in [each async for each in work.generate(conversation(), CALL)] for event in frame]
    assert [event.WhichOneof("event") for event in events] == ["warning", "delta", "finished"]
    assert [message.role for message in engine.seen[1].messages] == [
        chat_pb2.ROLE_USER, chat_pb2.ROLE_ASSISTANT, chat_pb2.ROLE_USER,
    ]  # fmt: skip
    assert failures == [], "the engine has not failed"


async def test_tokens_of_a_conversation_refused_by_a_strict_template_are_counted() -> None:
    work, _ = admitted(StrictEngine(TEMPLATE))
    payload = tokenize_pb2.TokenizePayload(chat=conversation())
    assert (await work.run(Operation.TOKENIZE, payload, CALL)).count == 7


async def test_image_of_an_earlier_turn_is_not_sent_to_a_text_only_engine() -> None:
    engine = StrictEngine(TEMPLATE)
    work, _ = admitted(engine, Capabilities(lacking=frozenset({Skill.IMAGE})))
    payload = conversation(with_image=True)
    del payload.messages[2]
    events = [event for frame in [each async for each in work.generate(payload, CALL)] for event in frame]
    assert [event.WhichOneof("event") for event in events] == ["warning", "delta", "finished"]
    assert len(engine.seen) == 1


class SlottedEngine(StrictEngine):
    """Has two slots. An embedding of another tenant begins while it refuses a conversation."""

    cache_isolation = CacheIsolation.SLOTS
    process_id, slot_count, kept_prompt_bytes, prefix_reports = 100, 2, 0, None

    def __init__(self) -> None:
        super().__init__(TEMPLATE)
        self.model, self.backend = "m", self
        self.cache = ModelCache(cast("Any", self))
        self.calls: list[CacheUse | str] = []
        self.embedding: asyncio.Task[None] | None = None

    @override
    async def generate(self, payload: chat_pb2.ChatPayload, call: CallInfo) -> AsyncGenerator[Frame]:
        self.calls.append(call.cache)
        self.embedding = self.embedding or asyncio.create_task(self.embed())
        await asyncio.sleep(0)
        async for frame in super().generate(payload, call):
            yield frame

    async def embed(self) -> None:
        async with await RequestCache(self.cache, "bob", Handling()).embedding():
            self.calls.append("embedding")

    async def slot_snapshots(self) -> Sequence[SlotSnapshot]:
        return ()


async def test_embedding_of_another_tenant_waits_until_a_conversation_has_begun_in_its_slot() -> None:
    """It took the slot, and the conversation's cached tokens told how much of its text was equal."""
    engine = SlottedEngine()
    for tenant in ("ann", "bob"):
        async with await RequestCache(engine.cache, tenant, Handling()).generating(conversation()) as turn:
            turn.worked = True
    work, _ = admitted(engine, cache=RequestCache(engine.cache, "ann", Handling()))
    async for _ in work.generate(conversation(), CALL):
        pass
    await present(engine.embedding)
    in_its_slot = CacheUse(slot=1)
    assert engine.calls == [in_its_slot, in_its_slot, "embedding"], "it is sent twice, since it is refused once"


@pytest.mark.parametrize(
    "engine", [StrictEngine("CUDA error: out of memory"), StrictEngine(TEMPLATE, begins=True)], ids=["other", "begun"]
)
async def test_unrelated_or_late_engine_failure_is_not_retried(engine: StrictEngine) -> None:
    work, failures = admitted(engine)
    with pytest.raises(WeftError):
        async for _ in work.generate(conversation(), CALL):
            pass
    assert len(engine.seen) == len(failures) == 1
