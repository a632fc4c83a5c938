"""Calls of functions that a model makes in one turn, put together from their pieces."""

from dataclasses import dataclass, field

from runner_svc.chat.offer import CallKind, Offer
from runner_svc.policy.json_extent import JsonExtent
from runner_svc.policy.text_calls import TextCall
from weft.api.common.v1 import event_pb2
from weft.kernel.errors import WeftError
from weft.kernel.names import new_id
from weft.kernel.reasons import Reason

MAX_ARGUMENT_CHARS = 1_048_576
"""Of one call that is not the caller's."""


@dataclass(slots=True, kw_only=True)
class FunctionCall:
    """One call."""

    id: str = ""
    name: str = ""
    """As the model wrote it."""
    kind: CallKind | None = None
    """None until its name is known."""
    complete: bool = False
    """Whether nothing of it is still to come."""
    pieces: list[str] = field(default_factory=list)
    chars: int = 0
    extent: JsonExtent | None = None
    """Follows the arguments of a signal, which is raised as soon as they are there."""
    caller_index: int = 0
    """Of a caller's call, which of them it is."""

    @property
    def arguments_text(self) -> str:
        """The arguments as the model wrote them."""
        return "".join(self.pieces)


class CallCollector:
    """The calls of one turn."""

    def __init__(self, offer: Offer, *, with_tools: bool, limit: int) -> None:
        """`limit`: calls for the mesh that a turn may hold; one more raises TOOL_CALL_INVALID."""
        self._offer = offer
        self._with_tools = with_tools
        self._limit = limit
        self._by_index: dict[int, FunctionCall] = {}
        self._raised = 0
        self.calls: list[FunctionCall] = []
        """All of them, in order."""
        self.caller_calls = 0

    def of_kind(self, kind: CallKind) -> list[FunctionCall]:
        """The calls of one kind, in order."""
        return [call for call in self.calls if call.kind is kind]

    def add(self, piece: event_pb2.ToolCallDelta) -> event_pb2.ToolCallDelta | None:
        """Take a piece; what of it the caller is to get. Raises TOOL_CALL_INVALID."""
        call = self._call_of(piece)
        is_new = call.kind is None
        call.id = call.id or piece.id
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
        call.pieces.clear()
        return told

    def add_text_call(self, found: TextCall) -> event_pb2.ToolCallDelta | None:
        """Take a call that was written as text; what the caller is to get. Raises TOOL_CALL_INVALID."""
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
        """The turn is over. Raises TOOL_CALL_INVALID for a call without a name.

        `cut_off`: the model was not done, so what has no end yet stays without.
        """
        if cut_off:
            return
        for call in self.calls:
            if call.kind is None:
                raise WeftError(Reason.TOOL_CALL_INVALID, "the model called a function without saying which")
            call.complete = True

    def take_signals(self) -> list[FunctionCall]:
        """Signals that have become complete since the last time, in order."""
        signals = self.of_kind(CallKind.SIGNAL)
        ready = []
        while self._raised < len(signals) and signals[self._raised].complete:
            ready.append(signals[self._raised])
            self._raised += 1
        return ready

    def _call_of(self, piece: event_pb2.ToolCallDelta) -> FunctionCall:
        call = self._by_index.get(piece.index)
        # Some servers give every call of a turn the same index.
        if call is not None and piece.name and piece.id and call.id and piece.id != call.id:
            call = None
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
        """The signal is raised where its arguments end. What follows is dropped: engines refuse it in a history."""
        end = None if call.extent is None else call.extent.feed(text)
        if end is not None:
            call.pieces[-1] = text[:end]
            call.complete, call.extent = True, None
