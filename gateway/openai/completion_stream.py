"""Events to streamed `text_completion` chunks."""

from gateway.answers.chunks import AnswerIdentity, text_finish_reason
from gateway.answers.sse import StreamEncoder, encode_json
from gateway.openai.completion_logprobs import LogprobsWriter
from weft.api.common.v1 import event_pb2

_GOES_ON = b',"logprobs":null,"finish_reason":null}]}\n\n'


class CompletionStream(StreamEncoder):
    """One streamed text completion."""

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
        # Reasoning has no place on this surface; dropping it would hide tokens that were paid for.
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
