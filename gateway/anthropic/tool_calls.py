"""Calls of tools in a streamed message: what of their arguments may go out, and when a call is over."""

from gateway.anthropic.blocks import bad_arguments, is_object_so_far, is_whole_object
from weft.api.common.v1 import event_pb2
from weft.kernel.names import new_id

# New text is checked together with all before it. Waiting until it is this share of the whole keeps the work of a long
# call in proportion to its length; a short one goes out piece by piece.
_SHARE_TO_CHECK = 64


class CallInput:
    """The arguments of one call, growing."""

    def __init__(self, call_id: str, name: str) -> None:
        self.id = call_id
        self.name = name
        self.is_told = False
        """Whether its block has begun."""
        self._checked = ""
        self._new: list[str] = []
        self._new_chars = 0

    def add(self, text: str) -> None:
        """Take a piece in."""
        self._new.append(text)
        self._new_chars += len(text)

    @property
    def may_end(self) -> bool:
        """Whether nothing is missing: they are a whole object, or the model gave none."""
        text = self._checked + "".join(self._new)
        return not text.strip() or is_whole_object(text)

    def sendable(self) -> str:
        """What is new and fit to go out now. Raises TOOL_CALL_INVALID for what can be no beginning of an object."""
        if self._new_chars * _SHARE_TO_CHECK < len(self._checked):
            return ""
        return self._take()

    def rest(self, *, is_cut: bool) -> str:
        """What was not sent, at the end. Raises TOOL_CALL_INVALID unless the whole is an object, or `is_cut`."""
        if not (is_cut or self.may_end):
            raise bad_arguments()
        return self._take()

    def _take(self) -> str:
        new = "".join(self._new)
        if not self._checked:
            # Clients parse from the first byte, and find no value in blanks.
            new = new.lstrip()
        text = self._checked + new
        if not is_object_so_far(text):
            raise bad_arguments()
        self._checked = text
        self._new.clear()
        self._new_chars = 0
        return new


class OpenCalls:
    """The calls of one answer by their number, and the one that is being told."""

    def __init__(self) -> None:
        self._calls: dict[int, CallInput] = {}
        self.open: CallInput | None = None

    @property
    def any(self) -> bool:
        """Whether the answer has called a tool."""
        return bool(self._calls)

    @property
    def is_within(self) -> bool:
        """Whether the open call is not over: nothing else can be told."""
        return self.open is not None and not self.open.may_end

    @property
    def waiting(self) -> list[CallInput]:
        """Those that nobody was told of yet, in their order."""
        return [call for _, call in sorted(self._calls.items()) if not call.is_told]

    def take(self, piece: event_pb2.ToolCallDelta) -> CallInput | None:
        """The call that a piece belongs to, with the piece; None for one that is over.

        Raises TOOL_CALL_INVALID for one that is over and goes on all the same.
        """
        call = self._calls.get(piece.index)
        if call is None:
            call = self._calls[piece.index] = CallInput(piece.id or new_id("toolu"), piece.name)
        elif call.is_told and call is not self.open:
            if piece.arguments_text.strip():
                raise bad_arguments()
            return None
        call.add(piece.arguments_text)
        return call

    def begin(self, call: CallInput) -> None:
        """Tell of a call from now on."""
        call.is_told = True
        self.open = call

    def end(self, *, is_cut: bool) -> str:
        """The open call is over: what of it was not sent. Raises TOOL_CALL_INVALID."""
        call, self.open = self.open, None
        return "" if call is None else call.rest(is_cut=is_cut)
