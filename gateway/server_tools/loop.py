"""The loop of a model and the tools of servers: passes of the model until it calls none of these tools any more.

Each pass is a call of its own, with the same request id. Tools run before the end of a pass is reported, so that its
receipt lists them also if the caller leaves meanwhile.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain

from gateway.server_tools.pages import appears, cleaned, is_wanted, named_texts, result_text
from gateway.server_tools.request_tools import RequestTools, ServerCall
from gateway.server_tools.tool import CallError, CallOptions, ToolAnswer
from weft.api.common.v1 import chat_pb2, event_pb2, receipt_pb2, usage_pb2, warning_pb2
from weft.dispatch.call import Call, Proceed
from weft.dispatch.extra_fields import joined_fields
from weft.dispatch.frames import Frame
from weft.dispatch.request_receipt import RequestContext, add_tool_runs
from weft.kernel.telemetry.log import get_logger
from weft.kernel.time.clock import Clock
from weft.kernel.time.timestamps import set_seconds

log = get_logger("weft.gateway")

SPARE_PASSES = 2
"""Passes beyond the permitted calls; in the last one the model can call nothing, so the loop always ends."""
MAX_CALLS_PER_PASS = 8
_SPARE_SECONDS = 1.0
_CUT = (event_pb2.FINISH_REASON_LENGTH, event_pb2.FINISH_REASON_CONTENT_FILTER)
_COUNTS = (
    "prompt_tokens",
    "completion_tokens",
    "cached_prompt_tokens",
    "cache_write_prompt_tokens",
    "reasoning_tokens",
)
Again = Callable[[RequestContext, chat_pb2.ChatPayload], Call[Frame]]
"""Returns the call of another pass."""


@dataclass(slots=True)
class ModelPass:
    """One pass of the model: what the caller gets of it, and what it calls."""

    names: frozenset[str]
    """The functions that the gateway runs."""
    is_first: bool
    """Whether nothing was sent before it, so that its runner may still change."""
    told: set[str] = field(default_factory=set)
    """Warnings that the caller has got."""
    text: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    seals: list[chat_pb2.SignedReasoning] = field(default_factory=list)
    calls: dict[int, chat_pb2.ToolCallRecord] = field(default_factory=dict)
    has_callers_calls: bool = False
    finish: event_pb2.Delta | None = None
    usage: usage_pb2.Usage | None = None
    receipt: receipt_pb2.Receipt | None = None
    """Set with the last frame."""
    _sealed: int = 0

    def read(self, frame: Frame) -> Frame:
        """Returns the caller's part of a frame: without calls of the gateway's tools and without the end."""
        shown: Frame = []
        for event in frame:
            match event.WhichOneof("event"):
                case "delta":
                    if (kept := self._delta(event)) is not None:
                        shown.append(kept)
                case "usage":
                    self.usage = event.usage
                case "finished":
                    self.receipt = event.finished.receipt
                case "started":
                    self._begin_again()
                    if self.is_first:
                        shown.append(event)
                case "warning" if not self.is_first and event.warning.message in self.told:
                    pass
                case _:
                    self.told.add(event.warning.message)
                    shown.append(event)
        return shown

    def _begin_again(self) -> None:
        for kept in (self.text, self.reasoning, self.seals, self.calls):
            kept.clear()

    def _delta(self, event: event_pb2.InferenceEvent) -> event_pb2.InferenceEvent | None:
        delta = event.delta
        self.text.append(delta.text)
        self.reasoning.append(delta.reasoning)
        if delta.reasoning_signature:
            thought = "".join(self.reasoning[self._sealed :])
            self._sealed = len(self.reasoning)
            self.seals.append(chat_pb2.SignedReasoning(text=thought, signature=delta.reasoning_signature))
        if delta.redacted_reasoning:
            self.seals.append(chat_pb2.SignedReasoning(redacted=delta.redacted_reasoning))
        if not (delta.tool_calls or delta.finish_reason):
            return event
        kept = event_pb2.InferenceEvent()
        kept.CopyFrom(event)
        if delta.finish_reason:
            self.finish = event_pb2.Delta(finish_reason=delta.finish_reason, stop_sequence=delta.stop_sequence)
            kept.delta.ClearField("finish_reason")
            kept.delta.ClearField("stop_sequence")
        del kept.delta.tool_calls[:]
        kept.delta.tool_calls.extend(piece for piece in delta.tool_calls if not self._take(piece))
        return kept if kept.delta.ByteSize() else None

    def _take(self, piece: event_pb2.ToolCallDelta) -> bool:
        """Takes a piece of a call of the gateway's tools; returns whether it is one."""
        call = self.calls.get(piece.index)
        if call is None:
            if piece.name not in self.names:
                self.has_callers_calls = True
                return False
            call = self.calls[piece.index] = chat_pb2.ToolCallRecord(name=piece.name)
        call.arguments_text += piece.arguments_text
        call.extra_fields.MergeFrom(piece.extra_fields)
        return True

    def message(self, calls: Sequence[ServerCall]) -> chat_pb2.ChatMessage:
        """Returns the model's turn with these calls, for its next pass."""
        said = chat_pb2.ChatMessage(role=chat_pb2.ROLE_ASSISTANT, signed_reasoning=self.seals)
        if text := "".join(self.text):
            said.content.add(text=text)
        if thought := "".join(self.reasoning):
            said.reasoning = thought
        for call, made in zip(calls, self.calls.values(), strict=False):
            record = said.tool_calls.add(id=call.id, name=call.tool.name, arguments_text=call.arguments_text)
            if made.extra_fields.fields:
                record.extra_fields.CopyFrom(joined_fields(made.extra_fields))
        return said


class ToolLoop:
    """A layer around the call of a chat that offers tools of servers."""

    def __init__(
        self, hosted: RequestTools, again: Again, clock: Clock, *, new_id: Callable[[], str], defers: bool
    ) -> None:
        """`new_id` returns the id of a call.

        `defers`: whether a call beside the caller's functions is left to the caller's next request.
        """
        self._hosted = hosted
        self._again = again
        self._clock = clock
        self._new_id = new_id
        self._defers = defers
        self._began = clock.monotonic()
        self._runs: list[receipt_pb2.ToolRun] = []
        self._usage = usage_pb2.Usage()
        self._told: set[str] = set()
        self._round = 0
        self._timeout_seconds: float | None = None
        self._asked = chat_pb2.ChatPayload()

    async def __call__(self, call: Call[Frame], /, proceed: Proceed[Frame]) -> AsyncGenerator[Frame]:
        """Yields the frames of all passes as one answer. Raises as the call of a pass."""
        hosted, self._timeout_seconds, self._asked = self._hosted, call.context.timeout_seconds, call.payload
        most = sum(tool.max_uses for tool in hosted.offered.values()) + SPARE_PASSES
        if hosted.first:
            hosted.require_target(call.context.model)
            async with aclosing(self._run(hosted.first, call.context)) as frames:
                async for frame in frames:
                    yield frame
            _add_results(call.payload, hosted.first)
        current, run = call, proceed
        current.context = self._next_context(call.context)
        for left in reversed(range(most)):
            turn = ModelPass(frozenset(hosted.offered), is_first=current is call and not self._runs, told=self._told)
            calls: list[ServerCall] | None = None
            async with aclosing(run(current)) as frames:
                async for frame in frames:
                    if shown := turn.read(frame):
                        yield shown
                    if turn.receipt is not None and calls is None:
                        calls = self._calls_of(turn) if left else []
                        async with aclosing(self._end(turn, calls, current)) as steps:
                            async for step in steps:
                                yield step
            self._add_usage(turn)
            self._round += 1
            if not calls or turn.has_callers_calls:
                yield self._last(turn, call, current)
                return
            # A layer below may have replaced the payload and the context of the first pass.
            payload = self._next_payload(current.payload, turn, calls, is_last=left == 1)
            current, run = self._again(self._next_context(current.context), payload), Call.chunks
            current.whole = call.whole

    def _next_context(self, context: RequestContext) -> RequestContext:
        left = self._timeout_seconds
        if left is not None:
            left = max(0.0, left - (self._clock.monotonic() - self._began))
        return replace(context, tool_runs=tuple(self._runs), timeout_seconds=left)

    def _calls_of(self, turn: ModelPass) -> list[ServerCall]:
        """Returns the calls of a pass that run: none of one that was cut."""
        if turn.finish is not None and turn.finish.finish_reason in _CUT:
            return []
        return [
            ServerCall(
                id=self._new_id(),
                tool=self._hosted.offered[made.name],
                arguments_text=made.arguments_text or "{}",
                round=self._round,
            )
            for made in list(turn.calls.values())[:MAX_CALLS_PER_PASS]
        ]

    async def _end(self, turn: ModelPass, calls: Sequence[ServerCall], current: Call[Frame]) -> AsyncGenerator[Frame]:
        """Runs the calls of a pass before its end is reported, and adds them to its receipt."""
        if len(turn.calls) > len(calls):
            names = ", ".join(sorted({made.name for made in turn.calls.values()}))
            yield [_not_run(f"{names} was not run: the answer was cut, or made more than {MAX_CALLS_PER_PASS} calls")]
        if self._defers and turn.has_callers_calls:
            for call in calls:
                self._hosted.calls[call.id] = call
                yield [_called(call)]
            return
        before = len(self._runs)
        try:
            async with aclosing(self._run(calls, current.context)) as frames:
                async for frame in frames:
                    yield frame
        finally:
            # Also if the caller has left: the pass reports its receipt after this.
            if current.receipt is not None:
                add_tool_runs(current.receipt, self._runs[before:])

    async def _run(self, calls: Sequence[ServerCall], context: RequestContext) -> AsyncGenerator[Frame]:
        """Runs calls concurrently; yields each, then each result in order."""
        for call in calls:
            self._hosted.calls[call.id] = call
            if not call.is_known:
                yield [_called(call)]
        for call in calls:
            # Counted before any of them runs.
            call.tool.uses += 1
            uses = sum(tool.uses for tool in self._hosted.offered.values())
            if call.tool.uses > call.tool.max_uses or uses > self._hosted.max_calls:
                call.answer = ToolAnswer(error=CallError.MAX_USES)
        await asyncio.gather(*(self._answer(call, context) for call in calls if call.answer is None))
        for call in calls:
            assert call.answer is not None
            result = event_pb2.ToolResult(id=call.id, content=_text_of(call), failed=call.answer.error is not None)
            yield [event_pb2.InferenceEvent(tool_result=result)]

    async def _answer(self, call: ServerCall, context: RequestContext) -> None:
        tool, began = call.tool.tool, self._clock.monotonic()
        # Until it has ended, it counts as sent.
        run = receipt_pb2.ToolRun(tool=call.tool.name, host=tool.host, failed=True)

        def on_host(host: str) -> None:
            if host not in run.host.split(", "):
                run.host = ", ".join(filter(None, (run.host, host)))

        options = replace(call.tool.options, appears=partial(self._appears, call), on_host=on_host)
        set_seconds(run.start, began - self._began)
        self._runs.append(run)
        found = ToolAnswer(error=CallError.UNAVAILABLE, sent_bytes=1, why="the caller has left")
        try:
            found = await self._found(call, options, context)
        finally:
            if not found.sent_bytes:
                run.host = ""
            most = options.max_text_bytes or tool.max_text_bytes
            pages = [page for each in found.pages if (page := cleaned(each, most)) is not None]
            wanted = [page for page in pages if is_wanted(page.url, call.tool.options)]
            call.answer = replace(found, pages=() if found.error else wanted)
            self._note(run, call.answer, context, self._clock.monotonic() - began)

    def _appears(self, call: ServerCall, url: str) -> bool:
        """See `CallOptions.appears`."""
        results = (_text_of(each) for each in self._hosted.calls.values() if each.answer and each.round < call.round)
        return appears(url, chain(named_texts(self._asked), results))

    async def _found(self, call: ServerCall, options: CallOptions, context: RequestContext) -> ToolAnswer:
        tool = call.tool.tool
        try:
            async with asyncio.timeout(tool.timeout_seconds + _SPARE_SECONDS):
                return await tool.run(call.arguments, options)
        except TimeoutError:
            return ToolAnswer(error=CallError.UNAVAILABLE, sent_bytes=1, why="it did not end in time")
        except Exception as error:  # of another package
            log.exception("server tool failed unexpectedly", request_id=context.request_id)
            return ToolAnswer(error=CallError.UNAVAILABLE, sent_bytes=1, why=type(error).__name__)

    def _note(self, run: receipt_pb2.ToolRun, answer: ToolAnswer, context: RequestContext, seconds: float) -> None:
        run.failed, run.result_count = answer.error is not None, len(answer.pages)
        run.sent_byte_count, run.received_byte_count = answer.sent_bytes, answer.received_bytes
        set_seconds(run.duration, seconds)
        log.info(
            "server tool ran",
            request_id=context.request_id,
            tenant=context.tenant,
            tool=run.tool,
            host=run.host or None,
            results=run.result_count,
            sent_bytes=run.sent_byte_count,
            received_bytes=run.received_byte_count,
            duration_ms=round(seconds * 1e3, 1),
            error=answer.error and answer.error.value,
            why=answer.why or None,
        )

    def _next_payload(
        self, payload: chat_pb2.ChatPayload, turn: ModelPass, calls: Sequence[ServerCall], *, is_last: bool
    ) -> chat_pb2.ChatPayload:
        after = chat_pb2.ChatPayload()
        after.CopyFrom(payload)
        after.messages.append(turn.message(calls))
        for call in calls:
            after.messages.add(role=chat_pb2.ROLE_TOOL, tool_call_id=call.id).content.add(text=_text_of(call))
        # The list of tools stays, since the engine's prefix cache ends at the first difference.
        after.tool_choice.mode = chat_pb2.ToolChoice.MODE_NONE if is_last else chat_pb2.ToolChoice.MODE_AUTO
        if after.sampling.HasField("max_tokens") and after.sampling.max_tokens > 0:
            left = payload.sampling.max_tokens - (turn.usage or usage_pb2.Usage()).completion_tokens
            after.sampling.max_tokens = max(1, left)
        return after

    def _add_usage(self, turn: ModelPass) -> None:
        usage = turn.usage
        if usage is None and turn.receipt is not None:
            usage = turn.receipt.usage
        for name in _COUNTS if usage is not None else ():
            setattr(self._usage, name, getattr(self._usage, name) + getattr(usage, name))

    def _last(self, turn: ModelPass, call: Call[Frame], current: Call[Frame]) -> Frame:
        """Returns the end of the answer: the finish reason, the counts of all passes, the receipt."""
        receipt = receipt_pb2.Receipt()
        receipt.CopyFrom(current.receipt or turn.receipt or receipt)
        receipt.usage.CopyFrom(self._usage)
        if not receipt.tool_runs:
            add_tool_runs(receipt, self._runs)
        call.receipt, call.rate_limits = receipt, current.rate_limits
        events: Frame = [] if turn.finish is None else [event_pb2.InferenceEvent(delta=self._finish(turn))]
        events.append(event_pb2.InferenceEvent(usage=self._usage))
        return [*events, event_pb2.InferenceEvent(finished=event_pb2.Finished(receipt=receipt))]

    def _finish(self, turn: ModelPass) -> event_pb2.Delta:
        assert turn.finish is not None
        if turn.calls and not turn.has_callers_calls and turn.finish.finish_reason not in _CUT:
            turn.finish.finish_reason = event_pb2.FINISH_REASON_STOP
        return turn.finish


def _text_of(call: ServerCall) -> str:
    answer = call.answer or ToolAnswer()
    return result_text(answer.pages, answer.error, call.tool.name)


def _add_results(payload: chat_pb2.ChatPayload, calls: Sequence[ServerCall]) -> None:
    """Fills the empty results of calls in a payload."""
    texts = {call.id: _text_of(call) for call in calls}
    for message in payload.messages:
        if message.role == chat_pb2.ROLE_TOOL and not message.content and message.tool_call_id in texts:
            message.content.add(text=texts[message.tool_call_id])


def _called(call: ServerCall) -> event_pb2.InferenceEvent:
    return event_pb2.InferenceEvent(tool_call=event_pb2.ToolCall(id=call.id, name=call.tool.name, remote=True))


def _not_run(message: str) -> event_pb2.InferenceEvent:
    code = warning_pb2.WARNING_CODE_TOOL_CALL_NOT_RUN
    return event_pb2.InferenceEvent(warning=warning_pb2.Warning(code=code, message=message))
