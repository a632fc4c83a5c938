"""Conversations with an engine: a single turn, or the loop that runs tools and signals between turns."""

import asyncio
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

from runner_svc.backend.port import CallInfo
from runner_svc.chat.chat_request import ChatEngine, ChatRequest, ChatSetup
from runner_svc.chat.chat_settings import ChatSettings
from runner_svc.chat.constraint import with_kept_format
from runner_svc.chat.offered_tools import CallKind, Offer, json_object, make_offer, require_local
from runner_svc.chat.receipt import AnswerReceipt, warning
from runner_svc.chat.turn import (
    CallCollector,
    FunctionCall,
    RepetitionWatch,
    TurnMonitor,
    TurnReader,
    kills_repetition,
    repetition_watch,
)
from runner_svc.policy.platform_prompt import join_system_texts
from runner_svc.policy.text_calls import TextCallParser
from runner_svc.policy.turn_outcome import NextStep, next_step
from runner_svc.request_records import RequestRecord
from runner_svc.tools.port import ToolOutcome
from runner_svc.tools.schemas import ArgumentCheck
from runner_svc.tools.tool_box import ToolBox
from weft.api.common.v1 import chat_pb2, event_pb2, json_value_pb2, signal_pb2, warning_pb2
from weft.dispatch.extra_fields import joined_fields
from weft.dispatch.frames import Frame, GenerationPayload, apart, has_content
from weft.dispatch.presets import fill_defaults
from weft.kernel.errors.error_tree import PROMPT_TOKENS, WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.values.names import new_id

_GOES_ON = (NextStep.RUN_TOOLS, NextStep.GO_ON)
MAX_EVENT_CHARS = 64 * 1024
"""Maximum content of a `tool_result` event. The model may receive more."""
NOTED = "noted"
"""Result that a model receives for its signal in the next turn."""
_SYSTEM_ROLES = (chat_pb2.ROLE_SYSTEM, chat_pb2.ROLE_DEVELOPER)
_Messages = list[chat_pb2.ChatMessage]


def converse(work: ChatEngine, request: ChatRequest, setup: ChatSetup) -> AsyncGenerator[Frame]:
    """Returns the frames of an answer like Backend.generate, with events of tools and signals.

    Besides the engine's errors, raises INVALID_ARGUMENT and TOOL_UNAVAILABLE before anything is generated,
    TOOL_CALL_INVALID for a call that cannot be executed, REPEATED_LINE_LOOP if the policy is to kill, and
    CONSTRAINT_NOT_MET if a strict format is not kept.
    """
    return with_kept_format(_conversation(work, request, setup), request.payload)


def _conversation(work: ChatEngine, request: ChatRequest, setup: ChatSetup) -> AsyncGenerator[Frame]:
    request = _with_defaults(request, setup.settings)
    if not request.call.ends_loops and kills_repetition(request.behaviour, setup.settings):
        request = replace(request, call=replace(request.call, ends_loops=True))
    if not isinstance(request.payload, chat_pb2.ChatPayload):
        watch = repetition_watch(request.behaviour, setup.settings, request.payload)
        return _single_turn(work, request.payload, request.call, watch, repairs=False)
    offer = make_offer(request.payload, request.behaviour, setup.settings, setup.tools)
    if not offer.is_plain:
        if not request.allow_remote:
            require_local(offer, setup.tools)
        return ToolLoop(work, request, request.payload, setup, offer).frames()
    prompt = setup.prompt(request, offer, iterations_left=0, text_calls=False)
    payload = request.payload
    if needs_system_prompt(payload, prompt):
        payload = with_system_prompt(payload, prompt)
    watch = repetition_watch(request.behaviour, setup.settings, request.payload)
    return _single_turn(work, payload, request.call, watch, repairs=setup.settings.tool_call_repair)


def _with_defaults(request: ChatRequest, settings: ChatSettings) -> ChatRequest:
    """Returns the request with the model's default sampling parameters and token limit where it sets none."""
    needs_maximum = settings.default_max_tokens is not None and not request.payload.sampling.HasField("max_tokens")
    if not needs_maximum and settings.default_params is None:
        return request
    payload = type(request.payload)()
    payload.CopyFrom(request.payload)  # type: ignore[arg-type]  # the same type
    if settings.default_params is not None:
        fill_defaults(payload, settings.default_params)
    if needs_maximum and settings.default_max_tokens is not None:
        payload.sampling.max_tokens = settings.default_max_tokens
    return replace(request, payload=payload)


async def _single_turn(
    work: ChatEngine, payload: GenerationPayload, call: CallInfo, watch: RepetitionWatch | None, *, repairs: bool
) -> AsyncGenerator[Frame]:
    """Runs a single turn and adds its warnings to the receipt."""
    answer = AnswerReceipt(work.record)
    monitor = TurnMonitor(payload, answer, watch, whole=call.whole, repairs=repairs)
    try:
        async with aclosing(work.generate(payload, call)) as frames:
            async for frame in frames:
                for part in monitor.take(frame):
                    yield _noted(part, monitor, work.record, answer)
        if rest := await monitor.rest(work, call):
            yield _noted(rest, monitor, work.record, answer)
    except WeftError as error:
        if not _is_uncounted_loop(error):
            raise
        yield monitor.usage_so_far()
        raise answer.with_usage(error) from None


def _is_uncounted_loop(error: WeftError) -> bool:
    """Whether a loop ended the answer and the counts have not been sent yet."""
    return error.reason is Reason.REPEATED_LINE_LOOP and PROMPT_TOKENS not in error.metadata


def _noted(frame: Frame, monitor: TurnMonitor, record: RequestRecord, answer: AnswerReceipt) -> Frame:
    """Records the output and warnings of a frame; returns it, with late warnings before a receipt, now complete."""
    pieces: list[str] = []
    late: Frame = []
    for event in frame:
        match event.WhichOneof("event"):
            case "delta":
                delta = event.delta
                pieces.append(delta.text or delta.reasoning)
            case "warning":
                answer.note_warning(event.warning)
            case "finished":
                late = monitor.late_warnings(event.finished.receipt.usage)
                answer.fill(event.finished.receipt)
                if any(each.delta.finish_reason == event_pb2.FINISH_REASON_TOOL_CALLS for each in frame):
                    event.finished.receipt.awaits_tool_results = True
    if text := "".join(pieces):
        record.note_output(text)
    return [*frame[:-1], *late, frame[-1]] if late else frame


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedCall:
    """A tool call whose arguments have been validated."""

    id: str
    tool: str
    """The tool's configured name."""
    arguments: Mapping[str, Any]
    """Arguments that match the tool's schema."""
    as_message: json_value_pb2.JsonObject
    """The arguments as a message for events."""
    remote: bool = False
    """Whether the call sends data to a remote provider."""

    def called(self) -> event_pb2.InferenceEvent:
        """Returns the event of the call."""
        return event_pb2.InferenceEvent(
            tool_call=event_pb2.ToolCall(id=self.id, name=self.tool, arguments=self.as_message, remote=self.remote)
        )

    def answered(self, outcome: ToolOutcome) -> event_pb2.InferenceEvent:
        """Returns the event of the result."""
        content = outcome.content
        if len(content) > MAX_EVENT_CHARS:
            content = f"{content[:MAX_EVENT_CHARS]}\n[cut: the model received {len(content)} characters]"
        return event_pb2.InferenceEvent(
            tool_result=event_pb2.ToolResult(id=self.id, content=content, failed=outcome.failed)
        )


class ToolLoop:
    """A chat with one choice."""

    def __init__(
        self, work: ChatEngine, request: ChatRequest, payload: chat_pb2.ChatPayload, setup: ChatSetup, offer: Offer
    ) -> None:
        self._work = work
        self._request = request
        self._setup = setup
        self._offer = offer
        self._answer = AnswerReceipt(work.record)
        self._rounds_left = offer.iterations if offer.tools else 0
        self._max_tokens = payload.sampling.max_tokens if payload.sampling.HasField("max_tokens") else None
        behaviour = request.behaviour
        self._reads_text = not behaviour.HasField("parse_text_tool_calls") or behaviour.parse_text_tool_calls
        self._stops = not behaviour.HasField("stop_on_decision_request") or behaviour.stop_on_decision_request
        self._conversation = ConversationHistory(payload, offer)
        self._call_ids: set[str] = set()
        self._has_begun = False
        self._has_answer = False
        self._has_gone_on = False
        self._decision_asked = False

    async def frames(self) -> AsyncGenerator[Frame]:
        """Yields the frames of the answer; see `converse`."""
        while True:
            self._work.record.tool_iterations_left = self._rounds_left if self._offer.tools else None
            turn = self._new_turn()
            monitor = self._new_monitor(payload := self._payload())
            try:
                async with aclosing(self._run_turn(turn, payload, monitor)) as frames:
                    async for frame in frames:
                        yield frame
            except WeftError as error:
                if not _is_uncounted_loop(error):
                    raise
                yield monitor.usage_so_far()
                raise self._answer.with_usage(error) from None
            step = self._next_step(turn)
            if step not in _GOES_ON:
                for frame in self._end(turn, step):
                    yield frame
                return
            async with aclosing(self._go_on(turn)) as frames:
                async for frame in frames:
                    yield frame

    def _new_turn(self) -> TurnReader:
        with_tools = self._rounds_left > 0
        limit = self._setup.settings.max_tool_calls_per_turn
        calls = CallCollector(self._offer, with_tools=with_tools, limit=limit)
        names = self._offer.names(with_tools=with_tools)
        return TurnReader(calls, TextCallParser(names) if self._reads_text and names else None)

    def _payload(self) -> chat_pb2.ChatPayload:
        prompt = self._setup.prompt(
            self._request, self._offer, iterations_left=self._rounds_left, text_calls=self._reads_text
        )
        left = None if self._max_tokens is None else self._max_tokens - self._answer.completion_tokens
        return self._conversation.turn(prompt, with_tools=self._rounds_left > 0, max_tokens=left)

    def _new_monitor(self, payload: chat_pb2.ChatPayload) -> TurnMonitor:
        watch = repetition_watch(self._request.behaviour, self._setup.settings, self._request.payload)
        repairs = self._setup.settings.tool_call_repair
        return TurnMonitor(payload, self._answer, watch, whole=self._request.call.whole, repairs=repairs)

    async def _run_turn(
        self, turn: TurnReader, payload: chat_pb2.ChatPayload, monitor: TurnMonitor
    ) -> AsyncGenerator[Frame]:
        """Runs a turn and yields its frames for the caller. A signal that requests a decision ends it early."""
        record, answer, call = self._work.record, self._answer, self._request.call
        async with aclosing(self._work.generate(payload, call)) as frames:
            async for frame in frames:
                for part in self._read(turn, monitor.take(frame)):
                    yield part
                if self._decision_asked:
                    break
        if not self._decision_asked:
            for part in self._read(turn, [await monitor.rest(self._work, call)]):
                yield part
        # The engine is idle until the next turn.
        record.with_caller = True
        if turn.receipt is not None:
            answer.add_turn(turn.receipt)
            if missed := monitor.late_warnings(turn.receipt.usage):
                yield missed
        else:
            monitor.end_unfinished()
        self._has_answer = self._has_answer or turn.has_answer

    def _read(self, turn: TurnReader, frames: Sequence[Frame]) -> Iterator[Frame]:
        """Yields the caller's part of frames of a turn, and the signals in them."""
        for frame in frames:
            yield from self._in_parts(self._passed_on(turn.read(apart(frame))))
            for signal in turn.calls.take_signals():
                yield [self._answer.note_signal(self._signal(signal))]

    def _passed_on(self, frame: Frame) -> Frame:
        """Returns the frame without warnings that were already sent."""
        out: Frame = []
        for event in frame:
            kind = event.WhichOneof("event")
            if kind == "delta" and (text := event.delta.text or event.delta.reasoning):
                self._work.record.note_output(text)
            if kind != "warning" or self._answer.note_warning(event.warning) is not None:
                out.append(event)
        return out

    def _in_parts(self, frame: Frame) -> Iterator[Frame]:
        """Splits a frame so that the answer's first content comes alone: held-back text arrives in bulk."""
        if not self._has_begun and has_content(frame):
            self._has_begun = True
            at = next(at for at, event in enumerate(frame) if has_content([event]))
            yield from filter(None, (frame[:at], [frame[at]], frame[at + 1 :]))
        elif frame:
            yield frame

    def _signal(self, call: FunctionCall) -> signal_pb2.Signal:
        """Returns the signal of a call. Raises TOOL_CALL_INVALID for invalid arguments."""
        description = self._offer.signals[call.name]
        arguments = ArgumentCheck(call.name, description.parameters).parse(call.arguments_text)
        if description.asks_for_decision and self._stops:
            self._decision_asked = True
        return signal_pb2.Signal(name=call.name, arguments=_as_message(call.name, arguments))

    def _next_step(self, turn: TurnReader) -> NextStep:
        step = next_step(
            cut=turn.was_cut,
            # An answer that waits for a decision ends with this turn.
            mesh_calls=0 if self._decision_asked else len(turn.calls.of_kind(CallKind.MESH)),
            caller_calls=turn.calls.caller_calls,
            signals=len(turn.calls.of_kind(CallKind.SIGNAL)),
            has_answer=self._has_answer or self._decision_asked,
            has_gone_on=self._has_gone_on,
        )
        out_of_tokens = self._max_tokens is not None and self._answer.completion_tokens >= self._max_tokens
        return NextStep.END_CUT if out_of_tokens and step in _GOES_ON else step

    def _end(self, turn: TurnReader, step: NextStep) -> Iterator[Frame]:
        """Yields the last frames: warnings about calls that were not run, the finish reason, the receipt."""
        half = [call.name for call in turn.calls.of_kind(CallKind.SIGNAL) if not call.complete]
        for name in [*(self._offer.tools[call.name].name for call in turn.calls.of_kind(CallKind.MESH)), *half]:
            if (told := self._answer.note_warning(_not_run(name, step))) is not None:
                yield [told]
        finish = turn.finish
        if step is NextStep.END_CUT and not turn.was_cut:
            finish = event_pb2.FINISH_REASON_LENGTH
        elif step is NextStep.END_WITH_CALLS:
            finish = event_pb2.FINISH_REASON_TOOL_CALLS
        elif step is NextStep.END_WITH_SIGNALS or finish == event_pb2.FINISH_REASON_TOOL_CALLS:
            # The finish reason must not ask for results if the caller received no calls.
            finish = event_pb2.FINISH_REASON_STOP
        delta = event_pb2.Delta(finish_reason=finish)
        if finish == event_pb2.FINISH_REASON_STOP:
            delta.stop_sequence = turn.stop_sequence
        awaits_tool_results = finish == event_pb2.FINISH_REASON_TOOL_CALLS
        end = self._answer.end(awaits_tool_results=awaits_tool_results)
        yield [event_pb2.InferenceEvent(delta=delta), *end]

    async def _go_on(self, turn: TurnReader) -> AsyncGenerator[Frame]:
        """Runs the tools that the model called, and adds the turn to the history."""
        calls = turn.calls.calls
        for call in calls:
            call.id = self._unique_id(call.id)
        # Every call is validated before any of them has an effect.
        checked = [self._checked(call) for call in calls if call.kind is CallKind.MESH]
        results = {call.id: NOTED for call in calls if call.kind is CallKind.SIGNAL}
        if checked:
            async with aclosing(self._run_tools(checked, results)) as frames:
                async for frame in frames:
                    yield frame
        else:
            self._has_gone_on = True
        self._conversation.add_turn(turn, calls, [results[call.id] for call in calls])

    async def _run_tools(self, calls: Sequence[CheckedCall], results: dict[str, str]) -> AsyncGenerator[Frame]:
        self._work.record.begin_tool()
        for call in calls:
            yield [call.called()]
        self._answer.add_tool_runs(len(calls))
        if any(call.remote for call in calls):
            self._work.record.left_premises = True
        async with aclosing(run_tools(self._setup.tools, calls)) as outcomes:
            async for call, outcome in outcomes:
                results[call.id] = outcome.content
                frame = [call.answered(outcome)]
                if outcome.cut:
                    frame += self._warning_frame(
                        warning_pb2.WARNING_CODE_TOOL_OUTPUT_CUT, f"the output of {call.tool} was cut"
                    )
                yield frame
        self._rounds_left -= 1
        if not self._rounds_left:
            rounds = self._offer.iterations
            message = f"the model used all {rounds} tool rounds and must answer without further tool calls"
            if told := self._warning_frame(warning_pb2.WARNING_CODE_TOOL_BUDGET_EXHAUSTED, message):
                yield told

    def _warning_frame(self, code: "warning_pb2.WarningCode.ValueType", message: str) -> Frame:
        told = self._answer.note_warning(warning(code, message))
        return [] if told is None else [told]

    def _checked(self, call: FunctionCall) -> CheckedCall:
        tool = self._offer.tools[call.name].name
        arguments = self._setup.tools.check(tool, call.arguments_text)
        return CheckedCall(
            id=call.id,
            tool=tool,
            arguments=arguments,
            as_message=_as_message(tool, arguments),
            remote=self._setup.tools.is_remote(tool),
        )

    def _unique_id(self, given: str) -> str:
        """Returns the engine's call id, or a new one if it is already used: some engines number calls per turn."""
        found = given if given and given not in self._call_ids else new_id("call")
        self._call_ids.add(found)
        return found


def _not_run(tool: str, step: NextStep) -> warning_pb2.Warning:
    why = {
        NextStep.END_WITH_CALLS: "the model called tools of the caller in the same turn",
        NextStep.END_CUT: "the answer ended in the same turn, at its limit",
    }.get(step, "the answer ended with a signal that asks for a decision")
    return warning(warning_pb2.WARNING_CODE_TOOL_CALL_NOT_RUN, f"{tool} was not run: {why}")


def _as_message(name: str, arguments: Mapping[str, Any]) -> json_value_pb2.JsonObject:
    try:
        return json_object(arguments)
    except ValueError as error:
        message = f"the arguments for {name} are wrong: {error}"
        raise WeftError(Reason.TOOL_CALL_INVALID, message, metadata={"tool": name}) from None


async def run_tools(box: ToolBox, calls: Sequence[CheckedCall]) -> AsyncGenerator[tuple[CheckedCall, ToolOutcome]]:
    """Runs calls concurrently; yields each with its outcome as it ends. Closing the generator cancels the others."""
    running = {asyncio.create_task(box.run(call.tool, call.arguments)): call for call in calls}
    try:
        pending = set(running)
        while pending:
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                yield running[task], task.result()
    finally:
        for task in running:
            task.cancel()
        await asyncio.wait(running)


class ConversationHistory:
    """The caller's payload and the messages of later turns."""

    def __init__(self, payload: chat_pb2.ChatPayload, offer: Offer) -> None:
        self._payload = payload
        self._offer = offer
        self._added: _Messages = []

    def turn(self, prompt: str, *, with_tools: bool, max_tokens: int | None) -> chat_pb2.ChatPayload:
        """Returns the payload of the next turn.

        `prompt`: the platform prompt; empty: none. `with_tools`: whether mesh tools are offered. `max_tokens`: what is
        left of the caller's limit; None: no limit.
        """
        turn = with_system_prompt(self._payload, prompt)
        turn.messages.extend(self._added)
        if max_tokens is not None:
            turn.sampling.max_tokens = max_tokens
        # If only exhausted mesh tools were offered, the list stays: it is part of the prompt, and the engine's prefix
        # cache ends at the first difference.
        keeps_list = not with_tools and not self._offer.caller and not self._offer.signals
        turn.tools.extend(self._offer.functions(with_tools=with_tools or keeps_list))
        if keeps_list:
            turn.tool_choice.mode = chat_pb2.ToolChoice.MODE_NONE
        elif self._added and self._must_not_force(turn.tool_choice):
            turn.tool_choice.mode = chat_pb2.ToolChoice.MODE_AUTO
        return turn

    def add_turn(self, turn: TurnReader, calls: Sequence[FunctionCall], results: Sequence[str]) -> None:
        """Adds the model's turn and the results of its calls, in order."""
        said = chat_pb2.ChatMessage(role=chat_pb2.ROLE_ASSISTANT, signed_reasoning=turn.signed_reasoning)
        if turn.text:
            said.content.add(text=turn.text)
        if turn.reasoning:
            said.reasoning = turn.reasoning
        if turn.extra.fields:
            said.extra_fields.CopyFrom(joined_fields(turn.extra))
        for call in calls:
            made = said.tool_calls.add(id=call.id, name=call.name, arguments_text=call.arguments_text or "{}")
            if call.extra.fields:
                made.extra_fields.CopyFrom(joined_fields(call.extra))
        self._added.append(said)
        for call, result in zip(calls, results, strict=True):
            answer = chat_pb2.ChatMessage(role=chat_pb2.ROLE_TOOL, tool_call_id=call.id)
            answer.content.add(text=result)
            self._added.append(answer)

    def _must_not_force(self, choice: chat_pb2.ToolChoice) -> bool:
        """Whether the caller's tool choice would force calls in every further turn."""
        if choice.WhichOneof("kind") == "function_name":
            return choice.function_name not in self._offer.caller
        return choice.mode == chat_pb2.ToolChoice.MODE_REQUIRED and not self._offer.caller


def needs_system_prompt(payload: chat_pb2.ChatPayload, prompt: str) -> bool:
    """Whether `with_system_prompt` would change anything."""
    return bool(prompt) or _leading_systems(payload) > 1


def with_system_prompt(payload: chat_pb2.ChatPayload, prompt: str) -> chat_pb2.ChatPayload:
    """Returns a copy of `payload` that starts with `prompt`, joined with its leading system messages.

    System messages within the conversation are not moved, nor a leading one with content other than text.
    """
    prepared = chat_pb2.ChatPayload()
    prepared.CopyFrom(payload)
    count = _leading_systems(payload)
    systems = list(payload.messages[:count])
    if prompt:
        systems.insert(0, _system(prompt))
    if len(systems) > 1 and all(map(_is_text, systems)):
        systems = [_system(join_system_texts([_text(message) for message in systems]))]
    del prepared.messages[:]
    prepared.messages.extend(systems)
    prepared.messages.extend(payload.messages[count:])
    return prepared


def _leading_systems(payload: chat_pb2.ChatPayload) -> int:
    for index, message in enumerate(payload.messages):
        if message.role not in _SYSTEM_ROLES:
            return index
    return len(payload.messages)


def _system(text: str) -> chat_pb2.ChatMessage:
    return chat_pb2.ChatMessage(role=chat_pb2.ROLE_SYSTEM, content=[chat_pb2.ContentPart(text=text)])


def _is_text(message: chat_pb2.ChatMessage) -> bool:
    return all(part.WhichOneof("kind") == "text" for part in message.content)


def _text(message: chat_pb2.ChatMessage) -> str:
    return "".join(part.text for part in message.content)
