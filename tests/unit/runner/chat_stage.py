"""A conversation with a scripted engine and scripted tools."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from typing import Any

from runner_svc.backend.port import CallInfo
from runner_svc.chat.chat_request import ChatRequest, ChatSetup
from runner_svc.chat.chat_settings import ChatSettings
from runner_svc.chat.tool_loop import converse
from runner_svc.request_records import RequestRecord
from runner_svc.tools.port import ToolDescription, ToolOutcome, ToolSettings
from runner_svc.tools.tool_box import ToolBox
from weft.api.common.v1 import agent_behaviour_pb2, chat_pb2, event_pb2, receipt_pb2, usage_pb2
from weft.dispatch.frames import Frame, GenerationPayload
from weft_testing.fake_clock import FakeClock

STOP = event_pb2.FINISH_REASON_STOP
LENGTH = event_pb2.FINISH_REASON_LENGTH
TOOL_CALLS = event_pb2.FINISH_REASON_TOOL_CALLS
Event = event_pb2.InferenceEvent
Call = Callable[[Mapping[str, Any]], Awaitable[str]]

SEARCH_SCHEMA = {"type": "object", "properties": {"q": {"type": "string"}}, "required": ["q"]}


def text(piece: str) -> Frame:
    return [Event(delta=event_pb2.Delta(text=piece))]


def thought(piece: str) -> Frame:
    return [Event(delta=event_pb2.Delta(reasoning=piece))]


def call(name: str, arguments: str = "{}", index: int = 0, call_id: str = "call_0") -> list[Frame]:
    first = event_pb2.ToolCallDelta(index=index, id=call_id, name=name)
    middle = len(arguments) // 2
    rest = [
        event_pb2.ToolCallDelta(index=index, arguments_text=part) for part in (arguments[:middle], arguments[middle:])
    ]
    return [[Event(delta=event_pb2.Delta(tool_calls=[piece]))] for piece in (first, *rest)]


def end(
    finish: "event_pb2.FinishReason.ValueType" = STOP, *, prompt: int = 10, completion: int = 5, cached: int = 0
) -> list[Frame]:
    """Returns the last frames of a turn, which took 10 ms per token."""
    usage = usage_pb2.Usage(prompt_tokens=prompt, completion_tokens=completion, cached_prompt_tokens=cached)
    receipt = receipt_pb2.Receipt(usage=usage, tokens_per_second=100.0)
    receipt.gpu_time.FromMilliseconds(completion * 10)
    return [
        [Event(delta=event_pb2.Delta(finish_reason=finish))],
        [Event(usage=usage), Event(finished=event_pb2.Finished(receipt=receipt))],
    ]


class ScriptedWork:
    """A ChatEngine that plays one script per turn."""

    def __init__(self, *turns: Sequence[Frame]) -> None:
        clock = FakeClock()
        self.record = RequestRecord(
            request_id="req-1", model="m", clock=clock, started=0.0, started_at=clock.utc_now(), last_progress=0.0
        )
        self.payloads: list[Any] = []
        self.closed_early = 0
        self._turns = list(turns)

    async def generate(self, payload: GenerationPayload, call: CallInfo) -> AsyncGenerator[Frame]:
        self.payloads.append(payload)
        self.record.begin_turn()
        frames = self._turns.pop(0)
        told = 0
        try:
            for frame in frames:
                await asyncio.sleep(0)
                told += 1
                yield frame
        finally:
            self.closed_early += told < len(frames)


class ScriptedTools:
    """A source "search" with one tool of that name, and a source "files" with "files.read"."""

    def __init__(self, call: Call, description: ToolDescription, source: str, **limits: Any) -> None:
        self.settings = ToolSettings(type="python", name=source, function="scripted:tool", **limits)
        self._call = call
        self._description = description
        self.problem: str | None = None

    def why_missing(self, name: str) -> str:
        return "it is not there"

    async def start(self) -> None: ...

    async def stop(self) -> None: ...

    def descriptions(self) -> Sequence[ToolDescription]:
        return [self._description]

    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolOutcome:
        return ToolOutcome(content=await self._call(arguments))


def tool_box(call: Call, *, max_output_bytes: int = 65_536) -> ToolBox:
    sources = []
    for source, name in (("search", "search"), ("files", "files.read")):
        description = ToolDescription(name=name, description=f"About {name}.", parameters=SEARCH_SCHEMA)
        sources.append(ScriptedTools(call, description, source, max_output_bytes=max_output_bytes))
    return ToolBox(sources)


async def answer_of_search(arguments: Mapping[str, Any]) -> str:
    return f"found {arguments['q']}"


def user(content: str = "Hi.") -> chat_pb2.ChatMessage:
    return message(chat_pb2.ROLE_USER, content)


def message(role: "chat_pb2.Role.ValueType", content: str) -> chat_pb2.ChatMessage:
    return chat_pb2.ChatMessage(role=role, content=[chat_pb2.ContentPart(text=content)])


def setup(box: ToolBox | None = None, clock: FakeClock | None = None, **settings: Any) -> ChatSetup:
    return ChatSetup(
        runner="r1",
        model="m",
        settings=ChatSettings(**settings),
        tools=box or tool_box(answer_of_search),
        clock=clock or FakeClock(),
    )


def request(payload: GenerationPayload | None = None, agent: str = "", **behaviour: Any) -> ChatRequest:
    return ChatRequest(
        payload=payload or chat_pb2.ChatPayload(messages=[user()]),
        call=CallInfo(request_id="req-1", traceparent=""),
        behaviour=agent_behaviour_pb2.AgentBehaviour(**behaviour),
        agent=agent,
    )


async def events_of(work: ScriptedWork, asked: ChatRequest, chat: ChatSetup | None = None) -> list[Event]:
    frames = [frame async for frame in converse(work, asked, chat or setup())]
    assert all(frames), "an empty frame"
    return [event for frame in frames for event in frame]


def kinds(events: Sequence[Event]) -> list[str]:
    """Returns the kinds of the events without deltas."""
    return [kind for event in events if (kind := event.WhichOneof("event") or "") != "delta"]


def answer(events: Sequence[Event]) -> str:
    return "".join(event.delta.text for event in events)


def finish_reasons(events: Sequence[Event]) -> list[int]:
    return [event.delta.finish_reason for event in events if event.delta.finish_reason]


def receipt(events: Sequence[Event]) -> receipt_pb2.Receipt:
    assert [event.WhichOneof("event") for event in events].count("finished") == 1
    return events[-1].finished.receipt


def warnings(events: Sequence[Event]) -> list[int]:
    return [event.warning.code for event in events if event.HasField("warning")]


def system_texts(payload: Any) -> list[str]:
    return [part.content[0].text for part in payload.messages if part.role == chat_pb2.ROLE_SYSTEM]


def offered(payload: Any) -> list[str]:
    return [tool.function.name for tool in payload.tools]
