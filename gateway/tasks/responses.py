"""Responses as tasks of other APIs, such as lines of batches: each by itself, neither kept nor continued.

A response in the background is another thing (`gateway.responses.background`): it has an id that leads to it.
"""

from collections.abc import Iterable

from gateway.media import RequestMedia
from gateway.responses.answer import ResponsesAnswer
from gateway.responses.background_answer import BackgroundDocument
from gateway.responses.document import ResponseState
from gateway.responses.payload import AskedResponse, Conversation, own_items, to_asked, wants_logprobs
from gateway.responses.schema import ResponsesRequest
from gateway.tasks.base import JsonSurface, built
from weft.api.common.v1 import chat_pb2
from weft.api.router.v1 import task_pb2
from weft.durable.tasks import Task
from weft.kernel.errors import invalid_field
from weft.kernel.request import Operation


class ResponsesSurface(JsonSurface[ResponsesRequest]):
    """`/v1/responses`."""

    kind = "responses"
    endpoint = "/v1/responses"
    operation = Operation.CHAT
    schema = ResponsesRequest

    def answer(self, origin: bytes, task: Task, outputs: Iterable[task_pb2.TaskOutput]) -> bytes:
        """See Surface.answer."""
        asked = self._asked(origin)
        document = BackgroundDocument(asked, task, self._parts.clock)
        document.ended_at = task.ended_at
        state = ResponseState(model=asked.model, is_stored=False)
        answer = ResponsesAnswer(document, state, logprobs=wants_logprobs(asked))
        made = self._translate(asked, self._parts.request_media(asked))
        return built(answer, outputs, made.warnings)

    def _model(self, asked: ResponsesRequest) -> str:
        return asked.model

    def _payload(self, asked: ResponsesRequest, media: RequestMedia) -> chat_pb2.ChatPayload:
        if asked.background:
            raise invalid_field("background", "must be false: nobody waits for it anyway")
        if asked.store:
            raise invalid_field("store", "must be false: such a response is kept with its task, and nowhere else")
        if asked.previous_response_id is not None:
            raise invalid_field("previous_response_id", "is not offered here; send the whole input")
        return self._translate(asked, media).payload

    def _translate(self, asked: ResponsesRequest, media: RequestMedia) -> AskedResponse:
        return to_asked(asked, Conversation(own_items(asked)), media, self._parts.config.limits)
