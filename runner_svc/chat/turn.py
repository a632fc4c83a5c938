"""One engine turn: frames for the caller, calls for the mesh, and the repetition check."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from runner_svc.backend.port import CallInfo
from runner_svc.chat.call_repair import CallRepair
from runner_svc.chat.chat_request import ChatEngine
from runner_svc.chat.chat_settings import ChatSettings
from runner_svc.chat.offered_tools import CallKind, Offer
from runner_svc.chat.receipt import AnswerReceipt, dropped_prompt, must_call, warning
from runner_svc.policy.repetition import Repetition, RepetitionDetector, RepetitionLimits
from runner_svc.policy.text_calls import JsonExtent, TextCall, TextCallParser
from weft.api.common.v1 import (
    agent_behaviour_pb2,
    chat_pb2,
    event_pb2,
    json_value_pb2,
    receipt_pb2,
    usage_pb2,
    warning_pb2,
)
from weft.dispatch.frames import Frame, GenerationPayload, is_content, is_seal
from weft.dispatch.token_counts import TokenCounter
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.values.names import new_id

MAX_SAMPLE_CHARS = 100
MIN_ASKED_CHARS = 12
"""Minimum length of a repeated line that counts as requested by the caller: shorter ones match by chance."""
MAX_ASKED_CHARS = 16_384
"""How much of the caller's text is searched."""
_WORD = re.compile(r"\w+")
_POLICIES = MappingProxyType(
    {
        agent_behaviour_pb2.REPETITION_POLICY_OFF: "off",
        agent_behaviour_pb2.REPETITION_POLICY_WARN: "warn",
        agent_behaviour_pb2.REPETITION_POLICY_KILL: "kill",
    }
)
MAX_ARGUMENT_CHARS = 1_048_576
"""Maximum length of the arguments of a call for the mesh."""


@dataclass(slots=True, kw_only=True)
class FunctionCall:
    """A function call, complete or in progress."""

    id: str = ""
    name: str = ""
    """Name as the model wrote it."""
    kind: CallKind | None = None
    """Who handles it; None until the name is known."""
    complete: bool = False
    pieces: list[str] = field(default_factory=list)
    chars: int = 0
    extent: JsonExtent | None = None
    """Finds the end of a signal's arguments, where the signal is raised."""
    caller_index: int = 0
    extra: json_value_pb2.JsonObject = field(default_factory=json_value_pb2.JsonObject)
    """Unknown fields of the call."""

    @property
    def arguments_text(self) -> str:
        """Arguments as the model wrote them."""
        return "".join(self.pieces)


class CallCollector:
    """The calls of one turn."""

    def __init__(self, offer: Offer, *, with_tools: bool, limit: int) -> None:
        """`limit`: maximum number of calls for the mesh; more raise TOOL_CALL_INVALID."""
        self._offer = offer
        self._with_tools = with_tools
        self._limit = limit
        self._by_index: dict[int, FunctionCall] = {}
        self._raised = 0
        self.calls: list[FunctionCall] = []
        self.caller_calls = 0

    def of_kind(self, kind: CallKind) -> list[FunctionCall]:
        """Returns the calls of one kind, in order."""
        return [call for call in self.calls if call.kind is kind]

    def add(self, piece: event_pb2.ToolCallDelta) -> event_pb2.ToolCallDelta | None:
        """Takes a chunk of a call; returns its part for the caller. Raises TOOL_CALL_INVALID."""
        call = self._call_of(piece)
        is_new = call.kind is None
        call.id = call.id or piece.id
        call.extra.MergeFrom(piece.extra_fields)
        if piece.arguments_text:
            self._add_arguments(call, piece.arguments_text)
        if is_new and piece.name:
            self._name(call, piece.name)
        if call.kind is not CallKind.CALLER:
            return None
        told = event_pb2.ToolCallDelta(index=call.caller_index)
        if is_new:
            told.id, told.name, told.arguments_text = call.id, call.name, call.arguments_text
        else:
            told.arguments_text = piece.arguments_text
        if piece.HasField("extra_fields"):
            told.extra_fields.CopyFrom(piece.extra_fields)
        call.pieces.clear()
        return told

    def add_text_call(self, found: TextCall) -> event_pb2.ToolCallDelta | None:
        """Takes a call written as text; returns its part for the caller. Raises TOOL_CALL_INVALID."""
        piece = event_pb2.ToolCallDelta(
            index=-1 - len(self.calls),
            id=new_id("call"),
            name=found.name,
            arguments_text=found.arguments_text,
        )
        told = self.add(piece)
        self.calls[-1].complete = True
        return told

    def end(self, *, cut_off: bool) -> None:
        """Ends the turn. Raises TOOL_CALL_INVALID for a call without a name.

        `cut_off`: the turn was cut, so calls may be incomplete.
        """
        if cut_off:
            return
        for call in self.calls:
            if call.kind is None:
                raise WeftError(Reason.TOOL_CALL_INVALID, "the model called a function without naming it")
            call.complete = True

    def take_signals(self) -> list[FunctionCall]:
        """Returns signals completed since the last call, in order."""
        signals = self.of_kind(CallKind.SIGNAL)
        ready = []
        while self._raised < len(signals) and signals[self._raised].complete:
            ready.append(signals[self._raised])
            self._raised += 1
        return ready

    def _call_of(self, piece: event_pb2.ToolCallDelta) -> FunctionCall:
        call = self._by_index.get(piece.index)
        if call is None:
            call = self._by_index[piece.index] = FunctionCall()
            self.calls.append(call)
        return call

    def _name(self, call: FunctionCall, name: str) -> None:
        call.name, call.kind = name, self._offer.kind_of(name, with_tools=self._with_tools)
        if call.kind is CallKind.CALLER:
            call.caller_index = self.caller_calls
            self.caller_calls += 1
        elif len(self.calls) - self.caller_calls > self._limit:
            raise WeftError(Reason.TOOL_CALL_INVALID, f"the model made more than {self._limit} calls in one turn")
        if call.kind is CallKind.SIGNAL:
            call.extent = JsonExtent()
            call.pieces = [call.arguments_text]
            self._follow(call, call.arguments_text)

    def _add_arguments(self, call: FunctionCall, text: str) -> None:
        if call.kind is CallKind.SIGNAL and call.complete:
            return
        call.pieces.append(text)
        if call.kind is CallKind.CALLER:
            return
        call.chars += len(text)
        if call.chars > MAX_ARGUMENT_CHARS:
            message = f"the arguments of a call have more than {MAX_ARGUMENT_CHARS} characters"
            raise WeftError(Reason.TOOL_CALL_INVALID, message)
        if call.extent is not None:
            self._follow(call, text)

    def _follow(self, call: FunctionCall, text: str) -> None:
        """Completes a signal at the end of its arguments. Drops text after them, which engines reject in a history."""
        end = None if call.extent is None else call.extent.feed(text)
        if end is not None:
            call.pieces[-1] = text[:end]
            call.complete, call.extent = True, None


_CUT = (event_pb2.FINISH_REASON_LENGTH, event_pb2.FINISH_REASON_CONTENT_FILTER)


class TurnReader:
    """One turn of one choice."""

    def __init__(self, calls: CallCollector, parser: TextCallParser | None) -> None:
        """`parser` finds calls written as text; None: they are not searched for."""
        self.calls = calls
        self._parser = parser
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._sealed_pieces = 0
        """Reasoning pieces that belong to an earlier signature."""
        self.signed_reasoning: list[chat_pb2.SignedReasoning] = []
        """Reasoning signed or encrypted by the provider, to send back to it."""
        self._held_logprobs: list[event_pb2.TokenLogprob] = []
        self.extra = json_value_pb2.JsonObject()
        """Unknown fields of the engine's message, to send back to it."""
        self.stop_sequence = ""
        """The stop string that ended the turn; empty: none."""
        self.has_answer = False
        """Whether the caller received text, not counting blank lines before a call."""
        self.finish = event_pb2.FINISH_REASON_UNSPECIFIED
        self.receipt: receipt_pb2.Receipt | None = None
        """The engine's receipt, once the turn has finished."""

    @property
    def text(self) -> str:
        """The text of this turn without calls."""
        return "".join(self._text)

    @property
    def reasoning(self) -> str:
        """The reasoning of this turn."""
        return "".join(self._reasoning)

    @property
    def was_cut(self) -> bool:
        """Whether the token limit or a filter ended the turn."""
        return self.finish in _CUT

    def read(self, frame: Frame) -> Frame:
        """Returns a frame's part for the caller. Raises TOOL_CALL_INVALID.

        Calls for the mesh, the finish reason, usage and `finished` are withheld.
        """
        out: Frame = []
        for event in frame:
            match event.WhichOneof("event"):
                case "delta":
                    self._delta(event, out)
                case "finished":
                    self.receipt = event.finished.receipt
                    # Repeated because some servers send chunks of calls after the finish reason.
                    self.calls.end(cut_off=self.was_cut)
                case "usage":
                    pass
                case _:
                    out.append(event)
        return out

    def _delta(self, event: event_pb2.InferenceEvent, out: Frame) -> None:
        delta = event.delta
        if delta.reasoning:
            self._reasoning.append(delta.reasoning)
        if is_seal(delta):
            self._seal(delta)
        if delta.HasField("extra_fields"):
            self.extra.MergeFrom(delta.extra_fields)
        if delta.tool_calls or delta.finish_reason or not self._is_certain(delta):
            self._rebuild(delta, out)
            return
        if delta.text:
            self._text.append(delta.text)
        self.has_answer = self.has_answer or bool(delta.text.strip() or delta.refusal)
        out.append(event)

    def _seal(self, delta: event_pb2.Delta) -> None:
        if delta.reasoning_signature:
            text = "".join(self._reasoning[self._sealed_pieces :])
            self._sealed_pieces = len(self._reasoning)
            signature = delta.reasoning_signature
            self.signed_reasoning.append(chat_pb2.SignedReasoning(text=text, signature=signature))
        if delta.redacted_reasoning:
            self.signed_reasoning.append(chat_pb2.SignedReasoning(redacted=delta.redacted_reasoning))

    def _is_certain(self, delta: event_pb2.Delta) -> bool:
        """Whether a delta is certainly plain text, by far the most frequent case, which is passed on unchanged."""
        return self._parser is None or not delta.text or self._parser.passes(delta.text)

    def _rebuild(self, delta: event_pb2.Delta, out: Frame) -> None:
        told = event_pb2.Delta(
            index=delta.index,
            reasoning=delta.reasoning,
            refusal=delta.refusal,
            reasoning_signature=delta.reasoning_signature,
            redacted_reasoning=delta.redacted_reasoning,
        )
        if delta.HasField("extra_fields"):
            told.extra_fields.CopyFrom(delta.extra_fields)
        self._held_logprobs += delta.logprobs
        pieces: list[str | TextCall] = [delta.text] if delta.text else []
        if self._parser is not None:
            pieces = self._parser.feed(delta.text)
        self._take(pieces, told)
        told.tool_calls.extend(filter(None, map(self.calls.add, delta.tool_calls)))
        if delta.finish_reason:
            self.finish, self.stop_sequence = delta.finish_reason, delta.stop_sequence
            if self._parser is not None:
                self._take(self._parser.finish(cut_off=self.was_cut), told)
            self.calls.end(cut_off=self.was_cut)
        if self._parser is None or not self._parser.holds:
            told.logprobs.extend(self._held_logprobs)
            self._held_logprobs.clear()
        self.has_answer = self.has_answer or bool(told.text.strip() or told.refusal)
        if is_content(told) or told.logprobs or told.HasField("extra_fields"):
            out.append(event_pb2.InferenceEvent(delta=told))

    def _take(self, pieces: list[str | TextCall], told: event_pb2.Delta) -> None:
        for piece in pieces:
            if isinstance(piece, TextCall):
                # The tokens of a call are not part of the answer.
                self._held_logprobs.clear()
                passed_on = self.calls.add_text_call(piece)
                if passed_on is not None:
                    told.tool_calls.append(passed_on)
            else:
                self._text.append(piece)
                told.text += piece


class RepetitionWatch:
    """Checks the choices of one turn for repetition, including reasoning and call arguments."""

    def __init__(self, payload: GenerationPayload, *, kills: bool, limits: RepetitionLimits | None = None) -> None:
        """A repeated line from the caller's text only causes a warning."""
        self._payload = payload
        self._kills = kills
        self._limits = limits
        self._detectors: dict[int, RepetitionDetector] = {}
        self._untold: list[Repetition] = []

    def look(self, frame: Frame) -> warning_pb2.Warning | None:
        """Checks the next frame. Returns a warning once per repetitive choice, or raises REPEATED_LINE_LOOP to kill."""
        # Hot path: once per frame and choice, not per token.
        written: dict[int, list[str]] = {}
        for event in frame:
            if not event.HasField("delta"):
                continue
            delta = event.delta
            text = delta.text or delta.reasoning
            if not text and delta.tool_calls:
                text = "".join([call.arguments_text for call in delta.tool_calls])
            if text:
                written.setdefault(delta.index, []).append(text)
        for choice, pieces in written.items():
            detector = self._detectors.get(choice)
            if detector is None:
                detector = self._detectors[choice] = RepetitionDetector(self._limits)
            if (found := detector.feed("".join(pieces))) is not None:
                self._untold.append(found)
        return self._verdict(self._untold.pop(0)) if self._untold else None

    def _verdict(self, found: Repetition) -> warning_pb2.Warning:
        what = "a line" if found.kind == "line" else "a piece of text"
        message = f"the model repeats {what}, {found.count} times so far: {_cut(found.sample)!r}"
        if self._kills and not self._was_asked_for(found.sample):
            metadata = {"count": str(found.count), "sample": _cut(found.sample)}
            raise WeftError(Reason.REPEATED_LINE_LOOP, message, metadata=metadata)
        return warning(warning_pb2.WARNING_CODE_REPETITION, message)

    def _was_asked_for(self, sample: str) -> bool:
        words = _words(sample)
        return len(words) >= MIN_ASKED_CHARS and words in _words(_asked(self._payload))


def repetition_watch(
    behaviour: agent_behaviour_pb2.AgentBehaviour, settings: ChatSettings, payload: GenerationPayload
) -> RepetitionWatch | None:
    """Returns the repetition check by the agent's policy, else the model's; None: disabled."""
    policy = _policy(behaviour, settings)
    if policy == "off":
        return None
    return RepetitionWatch(payload, kills=policy == "kill")


def kills_repetition(behaviour: agent_behaviour_pb2.AgentBehaviour, settings: ChatSettings) -> bool:
    """Whether a repetitive answer is ended, by the agent's policy, else the model's."""
    return _policy(behaviour, settings) == "kill"


def _policy(behaviour: agent_behaviour_pb2.AgentBehaviour, settings: ChatSettings) -> str:
    # An enum value unknown to this version counts as unset.
    return _POLICIES.get(behaviour.repetition_policy, settings.repetition)


def _asked(payload: GenerationPayload) -> str:
    """Returns the last user message of a chat; empty for a completion, because the model continues its prompt."""
    if not isinstance(payload, chat_pb2.ChatPayload):
        return ""
    last = next((each for each in reversed(payload.messages) if each.role == chat_pb2.ROLE_USER), None)
    return "" if last is None else "\n".join(part.text for part in last.content)[:MAX_ASKED_CHARS]


def _words(text: str) -> str:
    """Returns a text's words without punctuation, which is ignored when comparing lines."""
    return " ".join(_WORD.findall(text.casefold()))


def _cut(text: str) -> str:
    return text if len(text) <= MAX_SAMPLE_CHARS else text[:MAX_SAMPLE_CHARS] + "..."


class TurnMonitor:
    """Observes an engine turn: counts tokens, repairs calls, detects repetition and ignored parts of the request."""

    def __init__(
        self,
        payload: GenerationPayload,
        answer: AnswerReceipt,
        watch: RepetitionWatch | None,
        *,
        whole: bool,
        repairs: bool,
    ) -> None:
        """`watch`: None if the policy is off. `whole`: the answer is not streamed. `repairs`: of tool calls."""
        self._repair: CallRepair | None = None
        if repairs and isinstance(payload, chat_pb2.ChatPayload) and payload.tools:
            self._repair = CallRepair(payload)
        self._answer = answer
        self._watch = watch
        self._seen = TokenCounter(payload, whole=whole)
        self._payload = payload
        self._lacks_call = must_call(payload)
        """Whether the request requires a call and the engine has made none so far."""

    def take(self, frame: Frame) -> Sequence[Frame]:
        """Returns what can be passed on of the next frame, behind a warning about it.

        Raises REPEATED_LINE_LOOP to kill.
        """
        warned = self._look(frame)
        frames = [warned, frame] if warned else [frame]
        return frames if self._repair is None else list(filter(None, map(self._repair.read, frames)))

    async def rest(self, work: ChatEngine, call: CallInfo) -> Frame:
        """Returns the events that waited for the end of a call, at the end of the turn. They are valid then."""
        if self._repair is None or not self._repair.held:
            return []
        await self._repair.end(work, call)
        return self._repair.held

    def _look(self, frame: Frame) -> Frame:
        self._seen.note(frame)
        if self._lacks_call and any(event.HasField("delta") and event.delta.tool_calls for event in frame):
            self._lacks_call = False
        found = None if self._watch is None else self._watch.look(frame)
        return [] if found is None else [event_pb2.InferenceEvent(warning=found)]

    def late_warnings(self, usage: usage_pb2.Usage) -> Frame:
        """Returns the warnings that need the engine's figures at the end of the turn."""
        late: list[warning_pb2.Warning] = []
        if self._lacks_call:
            message = "required a tool call, but the engine answered without one"
            code = warning_pb2.WARNING_CODE_UNSUPPORTED_PARAMETER
            late.append(warning_pb2.Warning(code=code, field="tool_choice", message=message))
        if said := dropped_prompt(self._payload, usage.prompt_tokens):
            late.append(warning(warning_pb2.WARNING_CODE_PROMPT_DROPPED, said))
        return list(filter(None, map(self._answer.note_warning, late)))

    def end_unfinished(self) -> None:
        """Counts what was received of a turn that ended before the engine reported its figures."""
        self._answer.add_unfinished_turn(self._seen)

    def usage_so_far(self) -> Frame:
        """Ends the turn unfinished; returns the event with the counts so far."""
        self.end_unfinished()
        return self._answer.usage_so_far()
