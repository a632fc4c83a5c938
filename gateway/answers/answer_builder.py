"""Builders of unary (non-streaming) answers from frames of events."""

from abc import ABC, abstractmethod

from gateway.answers.answer_fields import MAX_NOTICES_TOLD, AnswerIdentity, signal_json, unfinished_answer, warning_json
from gateway.answers.sse import encode_json
from weft.api.common.v1 import event_pb2, usage_pb2


class AnswerBuilder(ABC):
    """Builds one unary answer: call `add` with each frame in order, then `body`."""

    def __init__(self, identity: AnswerIdentity, *, choice_count: int) -> None:
        self._identity = identity
        self._model = identity.model
        self._choice_count = choice_count
        self._open_choices = set(range(choice_count))
        self._is_complete = False
        self.usage = usage_pb2.Usage()
        """Token counts; zero until the engine reports them."""
        self._signals: list[dict[str, object]] = []
        self.warnings: list[dict[str, object]] = []
        """Warnings for the caller, as JSON values."""

    def add(self, frame: list[event_pb2.InferenceEvent]) -> None:
        """Adds one frame; events of waiting, progress and mesh tools are not part of an answer."""
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
        """Adds a delta of a choice."""

    @abstractmethod
    def _forget(self) -> None:
        """Resets the builder for another attempt; an earlier attempt had no content yet."""


class DocumentAnswer(AnswerBuilder):
    """A builder of one JSON document, with signals and warnings beside the answer."""

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
