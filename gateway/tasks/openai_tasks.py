"""Tasks of the OpenAI API: chats, completions and embeddings."""

from contextlib import suppress

from gateway.answers.answer_builder import unfinished_answer, with_warnings
from gateway.gateway_config import RequestLimits
from gateway.media import RequestMedia
from gateway.openai import chat, completions, embeddings
from gateway.openai.chat_answer import ChatAnswer
from gateway.openai.chat_schema import ChatRequest
from gateway.openai.completions import CompletionAnswer, CompletionRequest, prompt_count
from gateway.openai.embeddings import EmbeddingRequest
from gateway.openai.extension_fields import unknown_fields
from gateway.tasks.task_apis import Outputs, StoredRequest, TaskApi, answer_identity, built
from weft.api.common.v1 import chat_pb2, completion_pb2, embedding_pb2, receipt_pb2, warning_pb2
from weft.api.router.v1 import task_pb2
from weft.kernel.errors.error_tree import FieldError
from weft.kernel.requests.request_values import Operation

COMPLETION_ID_PREFIX = "cmpl"
CHAT_ID_PREFIX = "chatcmpl"


def _chat_answer(stored: StoredRequest[ChatRequest]) -> bytes:
    deps, params = stored.deps, stored.params
    answer = ChatAnswer(
        answer_identity(CHAT_ID_PREFIX, stored.task),
        choice_count=params.n or 1,
        logprobs=bool(params.logprobs),
        functions=chat.uses_functions(params),
    )
    converted: list[warning_pb2.Warning] = []
    with suppress(FieldError):  # a limit may have changed since the submission
        converted = chat.to_chat(params, deps.config.limits, deps.request_media(params))[1]
    return built(answer, stored.outputs, converted + chat.warnings_of(params))


def _answer_of_chat(payload: chat_pb2.ChatPayload, task: task_pb2.Task, outputs: Outputs) -> bytes:
    identity = answer_identity(CHAT_ID_PREFIX, task)
    return built(ChatAnswer(identity, choice_count=payload.choice_count or 1, logprobs=payload.logprobs), outputs)


def _completion_payload(
    params: CompletionRequest, limits: RequestLimits, _media: RequestMedia
) -> completion_pb2.CompletionPayload:
    return completions.to_payload(params, limits)


def _completion_answer(stored: StoredRequest[CompletionRequest]) -> bytes:
    params = stored.params
    answer = CompletionAnswer(
        answer_identity(COMPLETION_ID_PREFIX, stored.task),
        choice_count=prompt_count(params.prompt) * (params.n or 1),
        logprobs=params.logprobs is not None,
    )
    return built(answer, stored.outputs, unknown_fields(params))


def _answer_of_completion(payload: completion_pb2.CompletionPayload, task: task_pb2.Task, outputs: Outputs) -> bytes:
    count, identity = completions.choice_count(payload), answer_identity(COMPLETION_ID_PREFIX, task)
    return built(CompletionAnswer(identity, choice_count=count, logprobs=payload.HasField("logprobs")), outputs)


def _embedding_payload(
    params: EmbeddingRequest, limits: RequestLimits, _media: RequestMedia
) -> embedding_pb2.EmbeddingPayload:
    return embeddings.to_payload(params, limits)


def _embedding_answer(stored: StoredRequest[EmbeddingRequest]) -> bytes:
    params = stored.params
    body = embedding_body(
        stored.task,
        stored.outputs,
        expected=prompt_count(params.input),
        as_base64=params.encoding_format == "base64",
        dimensions=params.dimensions,
    )
    return with_warnings(body, unknown_fields(params))


def _answer_of_embedding(payload: embedding_pb2.EmbeddingPayload, task: task_pb2.Task, outputs: Outputs) -> bytes:
    return embedding_body(task, outputs, expected=len(payload.inputs))


def embedding_body(
    task: task_pb2.Task, outputs: Outputs, *, expected: int, as_base64: bool = False, dimensions: int | None = None
) -> bytes:
    """Returns the stored vectors as JSON. Raises BACKEND_PROTOCOL_ERROR if the end is missing."""
    vectors: list[embedding_pb2.Embedding] = []
    receipt: receipt_pb2.Receipt | None = None
    for output in outputs:
        vectors.extend(output.embeddings)
        for event in output.events:
            if event.HasField("finished"):
                receipt = event.finished.receipt
    if receipt is None:
        raise unfinished_answer()
    return embeddings.to_body(
        vectors,
        expected=expected,
        model=receipt.model or task.model,
        usage=receipt.usage,
        as_base64=as_base64,
        dimensions=dimensions,
    )


CHATS = TaskApi(
    operation=Operation.CHAT,
    schema=ChatRequest,
    to_payload=chat.to_payload,
    to_answer=_chat_answer,
    of_payload=_answer_of_chat,
)
COMPLETIONS = TaskApi(
    operation=Operation.COMPLETION,
    schema=CompletionRequest,
    to_payload=_completion_payload,
    to_answer=_completion_answer,
    of_payload=_answer_of_completion,
)
EMBEDDINGS = TaskApi(
    operation=Operation.EMBEDDING,
    schema=EmbeddingRequest,
    to_payload=_embedding_payload,
    to_answer=_embedding_answer,
    of_payload=_answer_of_embedding,
)
