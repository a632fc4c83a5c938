"""Events to one `text_completion`."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from gateway.answers.answer_builder import DocumentAnswer
from gateway.answers.chunks import AnswerIdentity, text_finish_reason, usage_json
from gateway.openai.completion_logprobs import LogprobsWriter
from weft.api.common.v1 import event_pb2


@dataclass(slots=True)
class _Choice:
    text: list[str] = field(default_factory=list)
    logprobs: list[event_pb2.TokenLogprob] = field(default_factory=list)
    finish_reason: str = ""


class CompletionAnswer(DocumentAnswer):
    """One text completion, growing."""

    def __init__(self, identity: AnswerIdentity, *, choice_count: int, logprobs: bool) -> None:
        super().__init__(identity, choice_count=choice_count)
        self._wants_logprobs = logprobs
        self._choices: dict[int, _Choice] = {}

    def _add_delta(self, delta: event_pb2.Delta) -> None:
        choice = self._choices.get(delta.index)
        if choice is None:
            choice = self._choices[delta.index] = _Choice()
        # See CompletionStream: reasoning is text here.
        choice.text += (delta.reasoning, delta.text)
        choice.logprobs += delta.logprobs
        if delta.finish_reason:
            self._close_choice(delta.index)
            choice.finish_reason = text_finish_reason(delta.finish_reason)

    def _forget(self) -> None:
        self._choices.clear()

    def _document(self) -> dict[str, object]:
        return {
            "id": self._identity.answer_id,
            "object": "text_completion",
            "created": self._identity.created,
            "model": self._model,
            "system_fingerprint": None,
            "choices": [
                {
                    "index": index,
                    "text": "".join(choice.text),
                    "logprobs": self._logprobs(choice.logprobs),
                    "finish_reason": choice.finish_reason,
                }
                for index, choice in sorted(self._choices.items())
            ],
            "usage": usage_json(self.usage),
        }

    def _logprobs(self, logprobs: Iterable[event_pb2.TokenLogprob]) -> dict[str, list[object]] | None:
        return LogprobsWriter().take(logprobs) if self._wants_logprobs else None
