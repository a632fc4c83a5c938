"""Chats as tasks."""

from collections.abc import Iterable

from gateway.media import RequestMedia
from gateway.openai import chat_payload
from gateway.openai.chat_answer import ChatAnswer
from gateway.openai.chat_schema import ChatRequest
from gateway.openai.chat_tools import speaks_of_functions
from gateway.tasks.base import JsonSurface, answer_identity, built
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
        return built(answer, outputs, chat_payload.warnings_of(asked))

    def _model(self, asked: ChatRequest) -> str:
        return asked.model

    def _payload(self, asked: ChatRequest, media: RequestMedia) -> chat_pb2.ChatPayload:
        return chat_payload.to_payload(asked, self._parts.config.limits, media)
