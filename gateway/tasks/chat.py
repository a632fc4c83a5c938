"""Chats as tasks."""

from collections.abc import Iterable

from gateway.media import RequestMedia
from gateway.schemas import ChatRequest
from gateway.tasks.base import JsonSurface, answer_identity, built
from gateway.translate import chat
from gateway.translate.chat_answer import ChatAnswer
from gateway.translate.chat_tools import speaks_of_functions
from weft.api.common.v1 import chat_pb2
from weft.api.router.v1 import task_pb2
from weft.durable.tasks import Task
from weft.kernel.request import Operation

ID_PREFIX = "chatcmpl"


class ChatSurface(JsonSurface[ChatRequest]):
    """`/v1/chat/completions`."""

    kind = "chat"
    endpoint = "/v1/chat/completions"
    operation = Operation.CHAT
    schema = ChatRequest

    def answer(self, origin: bytes, task: Task, outputs: Iterable[task_pb2.TaskOutput]) -> bytes:
        """See Surface.answer."""
        asked = self._asked(origin)
        answer = ChatAnswer(
            answer_identity(ID_PREFIX, task),
            choice_count=asked.n or 1,
            logprobs=bool(asked.logprobs),
            functions=speaks_of_functions(asked),
        )
        return built(answer, outputs, chat.warnings_of(asked))

    def _model(self, asked: ChatRequest) -> str:
        return asked.model

    def _payload(self, asked: ChatRequest, media: RequestMedia) -> chat_pb2.ChatPayload:
        return chat.to_payload(asked, self._parts.config.limits, media)
