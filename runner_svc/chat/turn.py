"""Reads one turn of the engine: what the caller gets at once, and what the mesh keeps for itself."""

from runner_svc.chat.calls import CallCollector
from runner_svc.policy.text_calls import TextCall, TextCallParser
from weft.api.common.v1 import event_pb2, receipt_pb2
from weft.dispatch.frames import Frame

_CUT = (event_pb2.FINISH_REASON_LENGTH, event_pb2.FINISH_REASON_CONTENT_FILTER)


class TurnReader:
    """One turn of one choice."""

    def __init__(self, calls: CallCollector, parser: TextCallParser | None) -> None:
        """`parser` finds calls that are written as text; None: text is text."""
        self.calls = calls
        self._parser = parser
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._held_logprobs: list[event_pb2.TokenLogprob] = []
        self.has_answer = False
        """Whether the caller got any words of it; blank lines before a call are none."""
        self.finish = event_pb2.FINISH_REASON_UNSPECIFIED
        """Why the engine ended the turn."""
        self.receipt: receipt_pb2.Receipt | None = None
        """The engine's own figures, once the turn has ended by itself."""

    @property
    def text(self) -> str:
        """The answer of this turn, calls left out."""
        return "".join(self._text)

    @property
    def reasoning(self) -> str:
        """The reasoning of this turn."""
        return "".join(self._reasoning)

    @property
    def was_cut(self) -> bool:
        """Whether the engine ended the turn before the model did."""
        return self.finish in _CUT

    def read(self, frame: Frame) -> Frame:
        """What of a frame the caller gets. Raises TOOL_CALL_INVALID.

        Calls for the mesh, the finish reason, usage and `finished` are kept back.
        """
        out: Frame = []
        for event in frame:
            match event.WhichOneof("event"):
                case "delta":
                    self._delta(event, out)
                case "finished":
                    self.receipt = event.finished.receipt
                    # Once more: some servers send pieces of calls after the finish reason.
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
        if delta.tool_calls or delta.finish_reason or not self._is_certain(delta):
            self._rebuild(delta, out)
            return
        if delta.text:
            self._text.append(delta.text)
        self.has_answer = self.has_answer or bool(delta.text.strip() or delta.refusal)
        out.append(event)

    def _is_certain(self, delta: event_pb2.Delta) -> bool:
        """Whether all text of a delta is plain text: the most frequent case by far, and passed on as it is."""
        return self._parser is None or not delta.text or self._parser.passes(delta.text)

    def _rebuild(self, delta: event_pb2.Delta, out: Frame) -> None:
        told = event_pb2.Delta(index=delta.index, reasoning=delta.reasoning, refusal=delta.refusal)
        self._held_logprobs += delta.logprobs
        pieces: list[str | TextCall] = [delta.text] if delta.text else []
        if self._parser is not None:
            pieces = self._parser.feed(delta.text)
        self._take(pieces, told)
        told.tool_calls.extend(filter(None, map(self.calls.add, delta.tool_calls)))
        if delta.finish_reason:
            self.finish = delta.finish_reason
            if self._parser is not None:
                self._take(self._parser.finish(cut_off=self.was_cut), told)
            self.calls.end(cut_off=self.was_cut)
        if self._parser is None or not self._parser.holds:
            told.logprobs.extend(self._held_logprobs)
            self._held_logprobs.clear()
        self.has_answer = self.has_answer or bool(told.text.strip() or told.refusal)
        if told.text or told.reasoning or told.refusal or told.tool_calls or told.logprobs:
            out.append(event_pb2.InferenceEvent(delta=told))

    def _take(self, pieces: list[str | TextCall], told: event_pb2.Delta) -> None:
        for piece in pieces:
            if isinstance(piece, TextCall):
                # The tokens of a call are no part of the answer.
                self._held_logprobs.clear()
                passed_on = self.calls.add_text_call(piece)
                if passed_on is not None:
                    told.tool_calls.append(passed_on)
            else:
                self._text.append(piece)
                told.text += piece
