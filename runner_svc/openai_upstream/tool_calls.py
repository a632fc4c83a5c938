"""The normalizer of tool calls: pieces of calls as servers send them, as well-formed calls for every API.

Servers number parallel calls alike or not at all, reuse ids, leave them out, or change them with every piece. What
leaves this module has one number and one unique id per call, its name once, and `{}` where a call has no arguments.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from runner_svc.policy.text_calls import JsonExtent
from weft.api.common.v1 import event_pb2, json_value_pb2
from weft.kernel.errors import WeftError
from weft.kernel.json_objects import to_json_object
from weft.kernel.names import new_id
from weft.kernel.reasons import Reason

MAX_CALLS = 1_024
"""Maximum number of calls in one choice."""
NO_ARGUMENTS = "{}"
_NULL = "null"
"""What some servers write for a call without arguments."""


@dataclass(slots=True, kw_only=True)
class CallPiece:
    """A piece of a call as a server sent it."""

    index: int | None = None
    """None: the server sent none."""
    id: str = ""
    name: str = ""
    arguments: str = ""
    extra: dict[str, Any] = field(default_factory=dict)
    """Fields of the call that weft does not know; those of its function are under `function`."""


@dataclass(slots=True, kw_only=True)
class _Call:
    place: int
    index: int | None
    """The server's number; None: none so far."""
    chunk: int
    """Number of the chunk in which it began."""
    sent_id: str = ""
    """The server's id."""
    name: str = ""
    text: list[str] = field(default_factory=list)
    """Its arguments so far."""
    held: str = ""
    """Arguments that were not passed on yet: white space, and the beginning of `null`."""
    has_begun: bool = False
    """Whether arguments were passed on."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Unknown fields that were not passed on yet."""
    extent: JsonExtent | None = field(default_factory=JsonExtent)
    """Finds the end of the arguments; None: they are a whole object."""

    @property
    def is_whole(self) -> bool:
        """Whether its arguments are a whole JSON object."""
        return self.extent is None

    def is_repeated_by(self, piece: CallPiece) -> bool:
        """Whether a piece only repeats the whole call."""
        return bool(piece.id) and piece.id == self.sent_id and piece.arguments.strip() == "".join(self.text).strip()

    def add(self, text: str) -> str:
        """Add arguments; returns those to pass on."""
        self.text.append(text)
        if self.extent is not None and self.extent.feed(text) is not None:
            self.extent = None
        if self.has_begun:
            return text
        self.held += text
        return "" if _NULL.startswith(self.held.strip()) else self.take_held()

    def take_held(self) -> str:
        """Returns the arguments that were held back."""
        held, self.held = self.held, ""
        self.has_begun = True
        return held


class ToolCallNormalizer:
    """The calls of one choice. `take` is called for each chunk with pieces of calls, `end` at the end of the answer.

    A new name, or a new id with a name, starts a call, whatever its index. So does a repeated name behind whole
    arguments, or a second time in one chunk. A piece with neither continues the last call of its index.
    """

    def __init__(self, used_ids: Collection[str] = ()) -> None:
        """`used_ids`: ids of the conversation so far, which are not given again."""
        self._used_ids = set(used_ids)
        self._calls: list[_Call] = []
        self._by_index: dict[int, _Call] = {}
        self._last: _Call | None = None
        self._chunks = 0
        self._named = 0

    def take(self, pieces: Sequence[CallPiece]) -> list[event_pb2.ToolCallDelta]:
        """Take the pieces of one chunk; returns what to pass on. Raises BACKEND_PROTOCOL_ERROR for too many calls."""
        self._chunks += 1
        return [delta for piece in pieces if (delta := self._take(piece)) is not None]

    def end(self, *, cut_off: bool) -> list[event_pb2.ToolCallDelta]:
        """End the answer; returns the arguments of calls without any. Raises TOOL_CALL_INVALID for a nameless call.

        `cut_off`: the answer was cut, so that arguments may be lacking.
        """
        found: list[event_pb2.ToolCallDelta] = []
        for call in self._calls:
            if not call.name:
                if cut_off or not "".join(call.text).strip():
                    continue
                raise WeftError(Reason.TOOL_CALL_INVALID, "the model called a function without saying which")
            if not call.has_begun and not cut_off:
                found.append(event_pb2.ToolCallDelta(index=call.place, arguments_text=NO_ARGUMENTS))
        return found

    def _take(self, piece: CallPiece) -> event_pb2.ToolCallDelta | None:
        call = self._continued(piece)
        if call is None:
            call = self._begin(piece)
        elif piece.name and call.is_whole and call.is_repeated_by(piece):
            return None
        if piece.index is not None:
            call.index = piece.index
            self._by_index[piece.index] = call
        self._last = call
        text = call.add(piece.arguments) if piece.arguments else ""
        call.extra |= piece.extra
        if not call.name and piece.name:
            return self._introduce(call, piece, text)
        if not call.name:
            # Nothing is passed on until the name is known.
            call.held, call.has_begun = call.held + text, False
            return None
        if not text and not call.extra:
            return None
        return _delta(call, text)

    def _begin(self, piece: CallPiece) -> _Call:
        if len(self._calls) >= MAX_CALLS:
            message = f"the engine sent over {MAX_CALLS:,} tool calls in one answer"
            raise WeftError(Reason.BACKEND_PROTOCOL_ERROR, message)
        call = _Call(place=-1, index=piece.index, chunk=self._chunks, sent_id=piece.id)
        self._calls.append(call)
        return call

    def _introduce(self, call: _Call, piece: CallPiece, text: str) -> event_pb2.ToolCallDelta:
        call.name, call.place = piece.name, self._named
        self._named += 1
        call.sent_id = call.sent_id or piece.id
        fresh = call.sent_id if call.sent_id and call.sent_id not in self._used_ids else new_id("call")
        self._used_ids.add(fresh)
        if not text and not _NULL.startswith(call.held.strip()):
            text = call.take_held()
        delta = _delta(call, text)
        delta.id, delta.name = fresh, call.name
        return delta

    def _continued(self, piece: CallPiece) -> _Call | None:
        """Returns the call that a piece continues; None: it begins one."""
        call = self._current(piece)
        if call is None or self._begins_another(call, piece):
            return None
        return call

    def _current(self, piece: CallPiece) -> _Call | None:
        """Returns the latest call to which a piece may belong, by its index and its id."""
        call = self._last if piece.index is None else self._by_index.get(piece.index)
        if piece.id and (call is None or call.sent_id != piece.id) and not piece.name:
            same_id = (known for known in reversed(self._calls) if known.sent_id == piece.id)
            call = next(same_id, call)
        if call is None and not (piece.id or piece.name) and self._last is not None and self._last.index is None:
            # The server numbers only the pieces that continue a call.
            call = self._last
        return call

    def _begins_another(self, call: _Call, piece: CallPiece) -> bool:
        has_new_id = bool(piece.id and call.sent_id) and piece.id != call.sent_id
        if not piece.name:
            # Some servers invent an id for every piece.
            return has_new_id and call.is_whole
        if not call.name:
            return has_new_id
        if has_new_id or piece.name != call.name:
            return True
        if call.chunk == self._chunks:
            return call.is_whole or not piece.id
        begins_anew = call.is_whole and piece.arguments.lstrip().startswith("{")
        return begins_anew and not call.is_repeated_by(piece)


def _delta(call: _Call, text: str) -> event_pb2.ToolCallDelta:
    """Returns a piece of a call with what is known of it now."""
    delta = event_pb2.ToolCallDelta(index=call.place, arguments_text=text)
    if (extra := as_message(call.extra)) is not None:
        delta.extra_fields.CopyFrom(extra)
    call.extra = {}
    return delta


def as_message(extra: dict[str, Any]) -> json_value_pb2.JsonObject | None:
    """Returns unknown fields as a message; None: there are none, or no message can hold them."""
    if not extra:
        return None
    try:
        return to_json_object(extra, "extra_fields")
    except (WeftError, ValueError):  # nested too deeply, or text with half a character
        return None
