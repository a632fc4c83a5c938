"""Events to one response object: what a caller gets who did not ask for a stream."""

from gateway.answers.answer_builder import AnswerBuilder
from gateway.answers.chunks import AnswerIdentity, unfinished_answer
from gateway.responses.document import IN_PROGRESS, ResponseDocument, ResponseState
from gateway.responses.output import NobodyListens, OutputItems
from weft.api.common.v1 import event_pb2, receipt_pb2
from weft.kernel.errors import WeftError


class ResponsesAnswer(AnswerBuilder):
    """One response, growing."""

    def __init__(self, document: ResponseDocument, state: ResponseState, *, logprobs: bool) -> None:
        identity = AnswerIdentity(answer_id=document.response_id, created=document.created, model=state.model)
        super().__init__(identity, choice_count=1)
        self._state = state
        self._response = document
        self._wants_logprobs = logprobs
        self._items = self._no_items()
        self._final_status = ""
        self._receipt: receipt_pb2.Receipt | None = None

    def add(self, frame: list[event_pb2.InferenceEvent]) -> None:
        """See AnswerBuilder."""
        super().add(frame)
        for event in frame:
            if event.HasField("finished"):
                self._receipt = event.finished.receipt

    def snapshot(self, status: str = IN_PROGRESS) -> bytes:
        """The response as it is now, as JSON; once it is concluded, as it has become."""
        state = self._state
        state.model, state.warnings, state.signals = self._model, self.warnings, self._signals
        state.usage = self.usage if self.usage.prompt_tokens or self.usage.completion_tokens else None
        return self._response.render(self._final_status or status, state, self._items)

    def conclude(self, receipt: receipt_pb2.Receipt) -> bytes:
        """Its end is next: the whole response as JSON. Raises BACKEND_PROTOCOL_ERROR where it cannot be its end."""
        if self._open_choices:
            raise unfinished_answer()
        if not (self.usage.prompt_tokens or self.usage.completion_tokens):
            self.usage = receipt.usage
        self._final_status = self._response.conclude(self._state, self._items, receipt)
        return self.snapshot()

    def not_kept(self, why: WeftError) -> None:
        """It was to be kept and is not."""
        self._state.warnings = self.warnings
        self._state.note_not_kept(why)

    def body(self) -> bytes:
        """See AnswerBuilder."""
        if self._receipt is None:
            raise unfinished_answer()
        return self.snapshot() if self._final_status else self.conclude(self._receipt)

    def _add_delta(self, delta: event_pb2.Delta) -> None:
        self._items.add(delta)
        if delta.finish_reason:
            self._close_choice(delta.index)

    def _forget(self) -> None:
        self._items = self._no_items()

    def _no_items(self) -> OutputItems:
        return OutputItems(self._response.response_id, NobodyListens(), logprobs=self._wants_logprobs)
