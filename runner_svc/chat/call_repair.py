"""Repairs the tool calls of one engine turn: arguments that are no JSON object, else the call is made again.

Arguments are held back until they are complete, at most MAX_HELD_CHARS; longer ones continue as they come while they
can be a JSON object. Whatever follows held arguments waits for them, so that the order of an answer stays.
"""

import asyncio
from collections.abc import Mapping
from contextlib import aclosing
from dataclasses import dataclass, field

from pydantic_core import from_json

from runner_svc.backend.port import CallInfo
from runner_svc.chat.chat_request import ChatEngine
from runner_svc.chat.receipt import AnswerReceipt
from runner_svc.policy.text_calls import JsonExtent
from runner_svc.tools.argument_repair import MAX_REPAIRED_CHARS, is_object, repaired_arguments
from runner_svc.tools.schemas import ArgumentCheck
from weft.api.common.v1 import chat_pb2, event_pb2, receipt_pb2
from weft.dispatch.frames import Frame
from weft.dispatch.token_counts import TokenCounter
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.text.json_objects import plain_object

MAX_HELD_CHARS = 2_048
"""Length of arguments from which on they are passed on before they are complete."""
_SHARE_TO_CHECK = 64
"""All text is checked again when it has grown by this share, so that the work stays proportional to its length."""
_CUT = (event_pb2.FINISH_REASON_LENGTH, event_pb2.FINISH_REASON_CONTENT_FILTER)


@dataclass(slots=True, kw_only=True)
class _Call:
    """One call as it arrives."""

    name: str = ""
    pieces: list[str] = field(default_factory=list)
    chars: int = 0
    passed: int = 0
    """Number of characters passed on."""
    checked: int = 0
    """Number of characters that can be the start of an object."""
    extent: JsonExtent | None = field(default_factory=JsonExtent)
    """Finds the end of the arguments; None: found."""
    waits: bool = False
    """Whether its arguments are held back."""

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    def add(self, text: str) -> None:
        if not self.chars:
            text = text.lstrip()
        if text:
            self.pieces.append(text)
            self.chars += len(text)
            self.waits = not self._is_ready(text)

    def _is_ready(self, text: str) -> bool:
        """Whether the arguments can be passed on: they are an object, or long and may become one."""
        if self.extent is None:
            return not text.strip() and not self.waits
        if self.pieces[0][:1] == "{" and (end := self.extent.feed(text)) is not None:
            self.extent = None
            # Some servers write an empty object before the arguments.
            return not text[end:].strip() and self.text.strip() != "{}" and is_object(self.text)
        if self.chars > MAX_REPAIRED_CHARS:
            return True
        if self.chars < MAX_HELD_CHARS or (self.chars - self.checked) * _SHARE_TO_CHECK < self.checked:
            return False
        if not _may_be_object(self.text):
            return False
        self.checked = self.chars
        return True


class CallRepair:
    """Makes the tool calls of one engine turn valid, and holds back the events that wait for the end of a call.

    The receipt counts repaired calls, calls that were made again, and the tokens of both attempts.
    """

    def __init__(self, payload: chat_pb2.ChatPayload) -> None:
        self._payload = payload
        self._calls: dict[tuple[int, int], _Call] = {}
        self._is_cut = False
        self.held: Frame = []
        """The events that wait."""

    def read(self, frame: Frame) -> Frame:
        """Takes the next frame; returns what can be passed on."""
        out: Frame = []
        for event in frame:
            delta = event.delta if event.HasField("delta") else None
            if delta is not None and delta.finish_reason in _CUT:
                self._is_cut = True
            if delta is None or not delta.tool_calls:
                (self.held or out).append(event)
                continue
            self._read_calls(event, out)
        return out

    def _read_calls(self, event: event_pb2.InferenceEvent, out: Frame) -> None:
        delta = event.delta
        for piece in delta.tool_calls:
            call = self._calls.setdefault((delta.index, piece.index), _Call())
            call.name = call.name or piece.name
            call.add(piece.arguments_text)
        if any(call.waits for call in self._calls.values()):
            if not self.held and any(piece.name for piece in delta.tool_calls):
                out.append(_opening(event))
            self.held.append(event)
            return
        out += [*self.held, event]
        self.held = []
        for call in self._calls.values():
            call.passed = call.chars

    async def end(self, work: ChatEngine, call: CallInfo) -> None:
        """Makes the held calls valid, if the turn was not cut."""
        broken = {place: each for place, each in self._calls.items() if each.passed < each.chars}
        broken = {place: each for place, each in broken.items() if not is_object(each.text or "{}")}
        if self._is_cut or not broken or not self.held[-1].HasField("finished"):
            return
        checks = {tool.function.name: ArgumentCheck(tool.function.name, _schema(tool)) for tool in self._payload.tools}
        receipt = self._receipt()
        for place, each in list(broken.items()):
            check = checks.get(each.name, ArgumentCheck(each.name, {}))
            text = await asyncio.to_thread(repaired_arguments, check, each.text, each.text[: each.passed])
            if text is not None:
                self._replace(place, text[each.passed :])
                receipt.repaired_call_count += 1
                del broken[place]
        if len(broken) != 1 or self._payload.choice_count > 1:
            return
        place, each = broken.popitem()
        if each.passed or each.name not in checks:
            return
        text = await self._made_again(work, call, checks[each.name])
        if text is not None:
            self._replace(place, text)

    async def _made_again(self, work: ChatEngine, call: CallInfo, check: ArgumentCheck) -> str | None:
        """Asks the model once for a call of the same tool; returns its arguments, None: they are wrong too."""
        payload = chat_pb2.ChatPayload()
        payload.CopyFrom(self._payload)
        payload.tool_choice.function_name = check.tool
        made: list[event_pb2.ToolCallDelta] = []
        seen, is_counted = TokenCounter(payload, whole=call.whole), False
        try:
            async with aclosing(work.generate(payload, call)) as frames:
                async for frame in frames:
                    seen.note(frame)
                    for event in frame:
                        made += [piece for piece in event.delta.tool_calls if not piece.index]
                        if event.HasField("finished"):
                            self._add(event.finished.receipt, work)
                            is_counted = True
            text = "".join(piece.arguments_text for piece in made) or "{}"
            check.parse(text)
        except WeftError:
            if seen.has_begun and not is_counted:
                self._add(receipt_pb2.Receipt(usage=seen.usage), work)
            return None
        # Engines that ignore the tool choice answer with text, or call another tool.
        return text if any(piece.name == check.tool for piece in made) else None

    def _receipt(self) -> receipt_pb2.Receipt:
        return self.held[-1].finished.receipt

    def _add(self, again: receipt_pb2.Receipt, work: ChatEngine) -> None:
        """Adds the second attempt's figures to the receipt and the usage event of the first."""
        receipt = self._receipt()
        receipt.retried_call_count += 1
        both = AnswerReceipt(work.record)
        both.add_turn(receipt)
        both.add_turn(again)
        both.write(receipt)
        for event in self.held:
            if event.HasField("usage"):
                event.usage.CopyFrom(receipt.usage)

    def _replace(self, place: tuple[int, int], text: str) -> None:
        """Replaces the held arguments of a call, and drops the events that have nothing left."""
        for event in self.held:
            for piece in event.delta.tool_calls:
                if (event.delta.index, piece.index) == place:
                    piece.arguments_text, text = text, ""
        self.held = [event for event in self.held if not _is_emptied(event)]


def _is_emptied(event: event_pb2.InferenceEvent) -> bool:
    """Whether an event only has pieces of calls without id, name and arguments."""
    pieces = [event_pb2.ToolCallDelta(index=piece.index) for piece in event.delta.tool_calls]
    return bool(pieces) and event.delta == event_pb2.Delta(index=event.delta.index, tool_calls=pieces)


def _opening(event: event_pb2.InferenceEvent) -> event_pb2.InferenceEvent:
    """Takes everything but arguments from an event, and returns it as one to pass on immediately."""
    opening = event_pb2.InferenceEvent()
    opening.CopyFrom(event)
    for piece in opening.delta.tool_calls:
        piece.arguments_text = ""
    held = [
        event_pb2.ToolCallDelta(index=piece.index, arguments_text=piece.arguments_text)
        for piece in event.delta.tool_calls
    ]
    event.delta.CopyFrom(event_pb2.Delta(index=event.delta.index, tool_calls=held))
    return opening


def _schema(tool: chat_pb2.Tool) -> Mapping[str, object]:
    return plain_object(tool.function.parameters)


def _may_be_object(text: str) -> bool:
    try:
        from_json(text, allow_inf_nan=False, allow_partial="trailing-strings")
    except ValueError:
        return False
    return True
