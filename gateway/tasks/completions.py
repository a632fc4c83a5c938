"""Text completions as tasks."""

from collections.abc import Iterable

from gateway.media import RequestMedia
from gateway.openai import completion_payload
from gateway.openai.completion_answer import CompletionAnswer
from gateway.openai.completion_schema import CompletionRequest
from gateway.openai.extension_fields import unknown_extensions
from gateway.openai.prompts import prompt_count
from gateway.tasks.base import JsonSurface, answer_identity, built
from weft.api.common.v1 import completion_pb2
from weft.api.router.v1 import task_pb2
from weft.durable.tasks import Task
from weft.kernel.request import Operation

ID_PREFIX = "cmpl"


class CompletionSurface(JsonSurface[CompletionRequest]):
    """`/v1/completions`."""

    kind = "completions"
    endpoint = "/v1/completions"
    operation = Operation.COMPLETION
    schema = CompletionRequest

    def answer(self, origin: bytes, task: Task, outputs: Iterable[task_pb2.TaskOutput]) -> bytes:
        """See Surface.answer."""
        asked = self._asked(origin)
        answer = CompletionAnswer(
            answer_identity(ID_PREFIX, task),
            choice_count=prompt_count(asked.prompt) * (asked.n or 1),
            logprobs=asked.logprobs is not None,
        )
        return built(answer, outputs, unknown_extensions(asked.model_extra or {}))

    def _model(self, asked: CompletionRequest) -> str:
        return asked.model

    def _payload(self, asked: CompletionRequest, media: RequestMedia) -> completion_pb2.CompletionPayload:  # noqa: ARG002 - a completion has none
        return completion_payload.to_payload(asked, self._parts.config.limits)
