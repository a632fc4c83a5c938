"""Text completion answers: events to one `text_completion`, or to streamed chunks."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from gateway.answers.answer_builder import DocumentAnswer
from gateway.answers.answer_fields import AnswerIdentity, finite_logprob, text_finish_reason, usage_json
from gateway.answers.sse import StreamEncoder, encode_json
from weft.api.common.v1 import event_pb2


@dataclass(slots=True)
class LogprobsWriter:
    """Writes log probabilities with the character offset of each token in its choice."""

    offset: int = field(default=0)

    def take(self, logprobs: Iterable[event_pb2.TokenLogprob]) -> dict[str, list[object]]:
        """Returns the four lists for the next tokens of the choice."""
        lists: dict[str, list[object]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for entry in logprobs:
            lists["tokens"].append(entry.token)
            lists["token_logprobs"].append(finite_logprob(entry.logprob))
            lists["top_logprobs"].append({top.token: finite_logprob(top.logprob) for top in entry.top})
            lists["text_offset"].append(self.offset)
            self.offset += len(entry.token)
        return lists


@dataclass(slots=True)
class _Choice:
    text: list[str] = field(default_factory=list)
    logprobs: list[event_pb2.TokenLogprob] = field(default_factory=list)
    finish_reason: str = ""


class CompletionAnswer(DocumentAnswer):
    """Builds one text completion."""

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


_GOES_ON = b',"logprobs":null,"finish_reason":null}]}\n\n'


class CompletionStream(StreamEncoder):
    """Encodes one streamed text completion."""

    def __init__(
        self,
        identity: AnswerIdentity,
        *,
        choice_count: int,
        logprobs: bool,
        include_usage: bool = False,
        include_events: bool = False,
    ) -> None:
        super().__init__(
            identity, choice_count=choice_count, include_usage=include_usage, include_events=include_events
        )
        self._wants_logprobs = logprobs
        self._heads: dict[int, bytes] = {}
        self._logprobs: dict[int, LogprobsWriter] = {}

    def _encode_delta(self, delta: event_pb2.Delta, out: list[bytes]) -> None:
        index = delta.index
        head = self._heads.get(index)
        if head is None:
            head = self._heads[index] = self._opening() + b'"choices":[{"index":%d,"text":' % index
        # This API has no field for reasoning; dropping it would hide billed tokens.
        text = delta.reasoning + delta.text
        if text or (self._wants_logprobs and delta.logprobs):
            out += (head, encode_json(text), self._tail(delta, index))
        if delta.finish_reason:
            self._close_choice(index)
            reason = text_finish_reason(delta.finish_reason).encode()
            out += (head, b'"","logprobs":null,"finish_reason":"', reason, b'"}]}\n\n')

    def _tail(self, delta: event_pb2.Delta, index: int) -> bytes:
        if not (self._wants_logprobs and delta.logprobs):
            return _GOES_ON
        writer = self._logprobs.setdefault(index, LogprobsWriter())
        return b',"logprobs":' + encode_json(writer.take(delta.logprobs)) + b',"finish_reason":null}]}\n\n'

    def _opening(self) -> bytes:
        identity = self._identity
        return b'data: {"id":%b,"object":"text_completion","created":%d,"model":%b,"system_fingerprint":null,' % (
            encode_json(identity.answer_id),
            identity.created,
            encode_json(self._model),
        )
