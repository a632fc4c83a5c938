"""Answers of tasks that came from no surface, or whose request is no longer read as it was: by what they ask for."""

from collections.abc import Sequence

from gateway.openai import completion_payload, embedding_payload
from gateway.openai.chat_answer import ChatAnswer
from gateway.openai.completion_answer import CompletionAnswer
from gateway.tasks.base import answer_identity, built
from gateway.tasks.chat import ID_PREFIX as CHAT_PREFIX
from gateway.tasks.completions import ID_PREFIX as COMPLETION_PREFIX
from gateway.tasks.embeddings import vectors_of
from gateway.tasks.surface import Surfaces
from weft.api.common.v1 import chat_pb2, completion_pb2, embedding_pb2
from weft.api.router.v1 import task_pb2
from weft.durable.tasks import Task, TaskDetails, payload_of
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason

_NO_REQUEST = frozenset({Reason.INVALID_ARGUMENT, Reason.MALFORMED_REQUEST})


def answer_of(details: TaskDetails, surfaces: Surfaces, outputs: Sequence[task_pb2.TaskOutput]) -> bytes:
    """What a completed task's endpoint would have answered. Raises BACKEND_PROTOCOL_ERROR for what is no answer."""
    surface = surfaces.of_kind(details.spec.origin_kind)
    if surface is None:
        return plain_answer(details.spec, details.task, outputs)
    try:
        return surface.answer(details.spec.origin, details.task, outputs)
    except WeftError as error:
        if error.reason not in _NO_REQUEST:
            raise
        return plain_answer(details.spec, details.task, outputs)


def plain_answer(spec: task_pb2.TaskSpec, task: Task, outputs: Sequence[task_pb2.TaskOutput]) -> bytes:
    """An answer in the words of OpenAI's API. Raises BACKEND_PROTOCOL_ERROR for what is no answer."""
    match payload_of(spec):
        case chat_pb2.ChatPayload() as chat:
            identity = answer_identity(CHAT_PREFIX, task)
            answer = ChatAnswer(identity, choice_count=chat.choice_count or 1, logprobs=chat.logprobs)
            return built(answer, outputs)
        case completion_pb2.CompletionPayload() as completion:
            count, identity = completion_payload.choice_count(completion), answer_identity(COMPLETION_PREFIX, task)
            logprobs = completion.HasField("logprobs")
            return built(CompletionAnswer(identity, choice_count=count, logprobs=logprobs), outputs)
        case embedding_pb2.EmbeddingPayload() as embedding:
            vectors, receipt = vectors_of(outputs)
            return embedding_payload.to_body(
                vectors,
                expected=len(embedding.inputs),
                model=receipt.model or task.model,
                usage=receipt.usage,
                as_base64=False,
            )
        case _:
            raise WeftError(Reason.BACKEND_PROTOCOL_ERROR, "the task asks for something that is not known here")
