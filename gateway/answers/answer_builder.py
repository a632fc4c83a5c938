"""What chat and text answers share when they are collected instead of streamed."""

from abc import ABC, abstractmethod

from gateway.answers.answer_fields import MAX_NOTICES_TOLD, AnswerIdentity, signal_json, unfinished_answer, warning_json
from gateway.answers.sse import encode_json
from weft.api.common.v1 import event_pb2, usage_pb2


class AnswerBuilder(ABC):
    """Collects one answer's events. Feed it each frame in order, then ask for the body."""

    def __init__(self, identity: AnswerIdentity, *, choice_count: int) -> None:
        self._identity = identity
        self._model = identity.model
        self._choice_count = choice_count
        self._open_choices = set(range(choice_count))
        self._is_complete = False
        self.usage = usage_pb2.Usage()
        """Token counts, as far as known."""
        self._signals: list[dict[str, object]] = []
        self.warnings: list[dict[str, object]] = []
        """What the caller should know and did not stop the request."""

    def add(self, frame: list[event_pb2.InferenceEvent]) -> None:
        """Take in one frame; waiting, progress and tools of the mesh say nothing that an answer holds."""
        for event in frame:
            kind = event.WhichOneof("event")
            if kind == "delta":
                self._add_delta(event.delta)
            elif kind == "usage":
                self.usage = event.usage
            elif kind == "started":
                self._begin_again(event.started.model or self._model)
            elif kind == "signal" and len(self._signals) < MAX_NOTICES_TOLD:
                self._signals.append(signal_json(event.signal))
            elif kind == "warning" and len(self.warnings) < MAX_NOTICES_TOLD:
                self.warnings.append(warning_json(event.warning))
            elif kind == "finished":
                self._is_complete = True
                if not (self.usage.prompt_tokens or self.usage.completion_tokens):
                    self.usage = event.finished.receipt.usage

    @abstractmethod
    def body(self) -> bytes:
        """The answer as JSON. Raises BACKEND_PROTOCOL_ERROR unless it and every choice of it came to an end."""

    def _begin_again(self, model: str) -> None:
        self._model = model
        self._open_choices = set(range(self._choice_count))
        self._signals.clear()
        self.warnings.clear()
        self._forget()

    def _close_choice(self, index: int) -> None:
        self._open_choices.discard(index)

    @abstractmethod
    def _add_delta(self, delta: event_pb2.Delta) -> None:
        """Take in a piece of a choice."""

    @abstractmethod
    def _forget(self) -> None:
        """Another attempt starts: what an earlier one left, none of it content, does not count."""


class DocumentAnswer(AnswerBuilder):
    """An answer that is put together at its end, with what was noticed beside it."""

    def body(self) -> bytes:
        """See AnswerBuilder.body."""
        if self._open_choices or not self._is_complete:
            raise unfinished_answer()
        document = self._document()
        if self.warnings:
            document["warnings"] = self.warnings
        if self._signals:
            document["signals"] = self._signals
        return encode_json(document)

    @abstractmethod
    def _document(self) -> dict[str, object]:
        """The answer as JSON values."""
