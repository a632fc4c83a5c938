"""Answers and streams of choices, common to chat completions and text completions."""

from abc import abstractmethod
from typing import ClassVar, Generic, TypeVar

from typing_extensions import override

from gateway.answers.answer_builder import AnswerIdentity, DocumentAnswer, notice_json, usage_json
from gateway.answers.sse import StreamEncoder
from weft.api.common.v1 import event_pb2, receipt_pb2
from weft.kernel.text.json_lines import encode_json

_DONE = b"data: [DONE]\n\n"

ChoiceT = TypeVar("ChoiceT")


def stop_reason(stop_sequence: str) -> dict[str, object]:
    """Returns the member of a choice with the stop string that ended it, as vLLM writes it; empty: none."""
    return {"stop_reason": stop_sequence} if stop_sequence else {}


def stop_member(delta: event_pb2.Delta) -> bytes:
    """Returns the same member as JSON, to append to other members."""
    return b',"stop_reason":' + encode_json(delta.stop_sequence) if delta.stop_sequence else b""


class ChoicesAnswer(DocumentAnswer, Generic[ChoiceT]):
    """Builds a document of choices. Subclasses define a choice and its JSON."""

    _object: str
    _constant: ClassVar[dict[str, object]]
    """Additional members of each document."""

    def __init__(self, identity: AnswerIdentity, *, choice_count: int, logprobs: bool) -> None:
        super().__init__(identity, choice_count=choice_count)
        self._wants_logprobs = logprobs
        self._choices: dict[int, ChoiceT] = {}

    def _forget(self) -> None:
        self._choices.clear()

    def _document(self) -> dict[str, object]:
        return {
            "id": self._identity.answer_id,
            "object": self._object,
            "created": self._identity.created,
            "model": self._model,
            **self._constant,
            "choices": [self._choice_json(index, choice) for index, choice in sorted(self._choices.items())],
            "usage": usage_json(self.usage),
        }

    @abstractmethod
    def _choice_json(self, index: int, choice: ChoiceT) -> dict[str, object]:
        """Returns a choice as JSON values."""


class ChunkStream(StreamEncoder):
    """Encodes an answer as chunks of choices, followed by `[DONE]`."""

    _object: bytes
    _constant: bytes
    """Additional members of each chunk, with a comma after each."""
    _content: bytes
    """The member of a choice that has its content."""

    def __init__(
        self,
        identity: AnswerIdentity,
        *,
        choice_count: int,
        logprobs: bool,
        include_usage: bool = False,
        include_events: bool = False,
    ) -> None:
        """`include_usage`: whether the last chunk has the usage; others as in `StreamEncoder`."""
        super().__init__(identity, choice_count=choice_count, include_events=include_events)
        self._wants_logprobs = logprobs
        self._include_usage = include_usage
        self._heads: dict[int, bytes] = {}
        """First bytes of the chunks up to the content, by choice."""

    def _notice(self, event: event_pb2.InferenceEvent, kind: str, out: list[bytes]) -> None:
        notice = encode_json({kind: notice_json(event, kind)})
        out.append(self._opening() + b'"choices":[],"weft":' + notice + b"}\n\n")

    @override
    def _encode_end(self, receipt: receipt_pb2.Receipt, out: list[bytes]) -> None:
        self._complete(receipt, out)
        if self._include_usage:
            usage = encode_json(usage_json(self.usage))
            out.append(self._opening() + b'"choices":[],"usage":' + usage + b"}\n\n")
        out += (self._receipt_comment(receipt), _DONE)
        self.is_done = True

    def _opening(self) -> bytes:
        """Returns the first bytes of every chunk, before its choices."""
        identity = self._identity
        return b'data: {"id":%b,"object":"%b","created":%d,"model":%b,%b' % (
            encode_json(identity.answer_id),
            self._object,
            identity.created,
            encode_json(self._model),
            self._constant,
        )

    def _new_head(self, index: int) -> bytes:
        head = self._heads[index] = self._opening() + b'"choices":[{"index":%d,%b:' % (index, self._content)
        return head
