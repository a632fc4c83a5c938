"""The tool loop of a chat: turn, tool calls, turn, until the model has answered."""

import asyncio
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from runner_svc.chat.history import ConversationHistory
from runner_svc.chat.offer import CallKind, Offer, json_object
from runner_svc.chat.receipt import AnswerReceipt, warning
from runner_svc.chat.repetition_watch import repetition_watch
from runner_svc.chat.request import ChatEngine, ChatRequest, ChatSetup
from runner_svc.chat.turn import CallCollector, FunctionCall, TurnMonitor, TurnReader
from runner_svc.policy.text_calls import TextCallParser
from runner_svc.policy.tool_budget import NextStep, ToolBudget, TurnFacts, next_step
from runner_svc.tools.port import ToolOutcome
from runner_svc.tools.schemas import ArgumentCheck
from runner_svc.tools.tool_box import ToolBox
from weft.api.common.v1 import chat_pb2, event_pb2, json_value_pb2, signal_pb2, warning_pb2
from weft.dispatch.frames import Frame, has_content
from weft.kernel.errors import WeftError
from weft.kernel.names import new_id
from weft.kernel.reasons import Reason

_GOES_ON = (NextStep.RUN_TOOLS, NextStep.GO_ON)
MAX_TOLD_CHARS = 64 * 1024
"""Maximum content of a `tool_result` event. The model may receive more."""
NOTED = "noted"
"""Result that a model receives for its signal in a further turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedCall:
    """A tool call whose arguments have been validated."""

    id: str
    tool: str
    """The tool's name in the configuration."""
    arguments: Mapping[str, Any]
    """Arguments that fit the tool's schema."""
    as_message: json_value_pb2.JsonObject
    """The same as a message for events."""
    remote: bool = False
    """Whether the call sends data off the premises."""

    def called(self) -> event_pb2.InferenceEvent:
        """Returns the event of the call."""
        return event_pb2.InferenceEvent(
            tool_call=event_pb2.ToolCall(id=self.id, name=self.tool, arguments=self.as_message, remote=self.remote)
        )

    def answered(self, outcome: ToolOutcome) -> event_pb2.InferenceEvent:
        """Returns the event of the result."""
        content = outcome.content
        if len(content) > MAX_TOLD_CHARS:
            content = f"{content[:MAX_TOLD_CHARS]}\n[cut: the model was told {len(content)} characters]"
        return event_pb2.InferenceEvent(
            tool_result=event_pb2.ToolResult(id=self.id, content=content, failed=outcome.failed)
        )


class ToolLoop:
    """One chat with one choice."""

    def __init__(
        self, work: ChatEngine, request: ChatRequest, payload: chat_pb2.ChatPayload, setup: ChatSetup, offer: Offer
    ) -> None:
        self._work = work
        self._request = request
        self._setup = setup
        self._offer = offer
        self._answer = AnswerReceipt(work.record)
        self._budget = ToolBudget(offer.iterations if offer.tools else 0)
        self._max_tokens = payload.sampling.max_tokens if payload.sampling.HasField("max_tokens") else None
        behaviour = request.behaviour
        self._reads_text = not behaviour.HasField("parse_text_tool_calls") or behaviour.parse_text_tool_calls
        self._stops = not behaviour.HasField("stop_on_decision_request") or behaviour.stop_on_decision_request
        joined = setup.settings.system_messages == "joined"
        self._conversation = ConversationHistory(payload, offer, joined=joined)
        self._call_ids: set[str] = set()
        self._has_begun = False
        self._has_answer = False
        self._has_gone_on = False
        self._decision_asked = False

    async def frames(self) -> AsyncGenerator[Frame]:
        """Yields the frames of the answer; see `converse`."""
        while True:
            self._work.record.tool_iterations_left = self._budget.left if self._offer.tools else None
            turn = self._new_turn()
            async with aclosing(self._run_turn(turn)) as frames:
                async for frame in frames:
                    yield frame
            step = self._next_step(turn)
            if step not in _GOES_ON:
                for frame in self._end(turn, step):
                    yield frame
                return
            async with aclosing(self._go_on(turn)) as frames:
                async for frame in frames:
                    yield frame

    def _new_turn(self) -> TurnReader:
        with_tools = not self._budget.exhausted
        limit = self._setup.settings.max_tool_calls_per_turn
        calls = CallCollector(self._offer, with_tools=with_tools, limit=limit)
        names = self._offer.names(with_tools=with_tools)
        return TurnReader(calls, TextCallParser(names) if self._reads_text and names else None)

    def _payload(self) -> chat_pb2.ChatPayload:
        prompt = self._setup.prompt(
            self._request, self._offer, iterations_left=self._budget.left, text_calls=self._reads_text
        )
        left = None if self._max_tokens is None else self._max_tokens - self._answer.completion_tokens
        return self._conversation.turn(prompt, with_tools=not self._budget.exhausted, max_tokens=left)

    async def _run_turn(self, turn: TurnReader) -> AsyncGenerator[Frame]:
        """Run a turn; yields its frames for the caller. A signal that asks for a decision ends it early."""
        watch = repetition_watch(self._request.behaviour, self._setup.settings, self._request.payload)
        record, answer, payload = self._work.record, self._answer, self._payload()
        monitor = TurnMonitor(payload, answer, watch, whole=self._request.call.whole)
        async with aclosing(self._work.generate(payload, self._request.call)) as frames:
            async for frame in frames:
                try:
                    warned = monitor.look(frame)
                except WeftError as loop:
                    # The engine stops before the caller receives the error.
                    await frames.aclose()
                    yield monitor.usage_so_far()
                    raise answer.with_usage(loop) from None
                if warned:
                    yield warned
                for part in self._in_parts(self._passed_on(turn.read(frame))):
                    yield part
                for call in turn.calls.take_signals():
                    yield [answer.note_signal(self._signal(call))]
                if self._decision_asked:
                    break
        # The engine is idle until the next turn.
        record.with_caller = True
        if turn.receipt is not None:
            answer.add_turn(turn.receipt)
            if missed := monitor.late_warnings(turn.receipt.usage):
                yield missed
        else:
            monitor.end_unfinished()
        self._has_answer = self._has_answer or turn.has_answer

    def _passed_on(self, frame: Frame) -> Frame:
        """Returns the frame without warnings that were sent before."""
        out: Frame = []
        for event in frame:
            kind = event.WhichOneof("event")
            if kind == "delta" and (text := event.delta.text or event.delta.reasoning):
                self._work.record.note_output(text)
            if kind != "warning" or self._answer.note_warning(event.warning) is not None:
                out.append(event)
        return out

    def _in_parts(self, frame: Frame) -> Iterator[Frame]:
        """Split the frame so that the first content of the answer is alone in one: held-back text arrives in bulk."""
        if not self._has_begun and has_content(frame):
            self._has_begun = True
            at = next(at for at, event in enumerate(frame) if has_content([event]))
            yield from filter(None, (frame[:at], [frame[at]], frame[at + 1 :]))
        elif frame:
            yield frame

    def _signal(self, call: FunctionCall) -> signal_pb2.Signal:
        """Returns the signal of a call. Raises TOOL_CALL_INVALID for arguments that do not fit."""
        description = self._offer.signals[call.name]
        arguments = ArgumentCheck(call.name, description.parameters).parse(call.arguments_text)
        if description.asks_for_decision and self._stops:
            self._decision_asked = True
        return signal_pb2.Signal(name=call.name, arguments=_as_message(call.name, arguments))

    def _next_step(self, turn: TurnReader) -> NextStep:
        facts = TurnFacts(
            cut=turn.was_cut,
            # An answer that waits for a decision ends with this turn.
            mesh_calls=0 if self._decision_asked else len(turn.calls.of_kind(CallKind.MESH)),
            caller_calls=turn.calls.caller_calls,
            signals=len(turn.calls.of_kind(CallKind.SIGNAL)),
            has_answer=self._has_answer or self._decision_asked,
            has_gone_on=self._has_gone_on,
        )
        step = next_step(facts)
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
            # A caller that received no calls must not be told to answer them.
            finish = event_pb2.FINISH_REASON_STOP
        yield [event_pb2.InferenceEvent(delta=event_pb2.Delta(finish_reason=finish)), *self._answer.end()]

    async def _go_on(self, turn: TurnReader) -> AsyncGenerator[Frame]:
        """Run the tools that the model called, and add the turn to the history."""
        calls = turn.calls.calls
        for call in calls:
            call.id = self._unique_id(call.id)
        # Every call is validated before the first one has an effect.
        checked = [self._checked(call) for call in calls if call.kind is CallKind.MESH]
        results = {call.id: NOTED for call in calls if call.kind is CallKind.SIGNAL}
        if checked:
            async with aclosing(self._run_tools(checked, results)) as frames:
                async for frame in frames:
                    yield frame
        else:
            self._has_gone_on = True
        self._conversation.add_turn(turn.text, turn.reasoning, calls, [results[call.id] for call in calls])

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
                    frame += self._told(warning_pb2.WARNING_CODE_TOOL_OUTPUT_CUT, f"the output of {call.tool} was cut")
                yield frame
        self._budget = self._budget.spend()
        if self._budget.exhausted:
            rounds = self._offer.iterations
            message = f"the model had its {rounds} rounds of tools and must answer without more of them"
            if told := self._told(warning_pb2.WARNING_CODE_TOOL_BUDGET_EXHAUSTED, message):
                yield told

    def _told(self, code: "warning_pb2.WarningCode.ValueType", message: str) -> Frame:
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
        """Returns the engine's id of a call, or a new one if an earlier turn used it: some engines restart per turn."""
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
    """Run calls concurrently; yields each with its outcome as it ends. Closing the generator cancels the others."""
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
