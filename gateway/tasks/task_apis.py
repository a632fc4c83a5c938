"""The task APIs of chat, completions, embeddings and responses, and answers of tasks without one."""

from collections.abc import Iterable, Sequence

from gateway.answers.answer_fields import unfinished_answer
from gateway.deps import InferenceDeps
from gateway.media import RequestMedia
from gateway.openai import chat as chat_payload
from gateway.openai import completions as completion_payload
from gateway.openai import embeddings as embedding_payload
from gateway.openai.chat_answer import ChatAnswer
from gateway.openai.chat_schema import ChatRequest
from gateway.openai.chat_tools import uses_functions
from gateway.openai.completion_answer import CompletionAnswer
from gateway.openai.completions import CompletionRequest
from gateway.openai.embeddings import EmbeddingRequest
from gateway.openai.extension_fields import unknown_extensions
from gateway.openai.prompts import prompt_count
from gateway.responses.document import ResponseState
from gateway.responses.payload import Conversation, ResponsePayload, own_items, to_response_request, wants_logprobs
from gateway.responses.replay import BackgroundDocument
from gateway.responses.schema import ResponsesRequest
from gateway.responses.stream import ResponsesAnswer
from gateway.tasks.task_api import JsonTaskApi, TaskApi, TaskApis, answer_identity, built
from weft.api.common.v1 import chat_pb2, completion_pb2, embedding_pb2, receipt_pb2
from weft.api.router.v1 import task_pb2
from weft.durable.tasks import Task, TaskDetails, payload_of
from weft.kernel.errors import WeftError, invalid_field
from weft.kernel.reasons import Reason
from weft.kernel.request import Operation

COMPLETION_ID_PREFIX = "cmpl"


class CompletionTaskApi(JsonTaskApi[CompletionRequest]):
    """`/v1/completions`."""

    kind = "completions"
    endpoint = "/v1/completions"
    operation = Operation.COMPLETION
    schema = CompletionRequest

    def answer(self, origin: bytes, task: Task, outputs: Iterable[task_pb2.TaskOutput]) -> bytes:
        """See TaskApi.answer."""
        params = self._tenant_and_id(origin)
        answer = CompletionAnswer(
            answer_identity(COMPLETION_ID_PREFIX, task),
            choice_count=prompt_count(params.prompt) * (params.n or 1),
            logprobs=params.logprobs is not None,
        )
        return built(answer, outputs, unknown_extensions(params.model_extra or {}))

    def _model(self, params: CompletionRequest) -> str:
        return params.model

    def _payload(self, params: CompletionRequest, media: RequestMedia) -> completion_pb2.CompletionPayload:  # noqa: ARG002 - a completion has none
        return completion_payload.to_payload(params, self._deps.config.limits)


class ResponsesTaskApi(JsonTaskApi[ResponsesRequest]):
    """`/v1/responses`."""

    kind = "responses"
    endpoint = "/v1/responses"
    operation = Operation.CHAT
    schema = ResponsesRequest

    def answer(self, origin: bytes, task: Task, outputs: Iterable[task_pb2.TaskOutput]) -> bytes:
        """See TaskApi.answer."""
        params = self._tenant_and_id(origin)
        document = BackgroundDocument(params, task, self._deps.clock)
        document.ended_at = task.ended_at
        state = ResponseState(model=params.model, is_stored=False)
        answer = ResponsesAnswer(document, state, logprobs=wants_logprobs(params))
        made = self._translate(params, self._deps.request_media(params))
        return built(answer, outputs, made.warnings)

    def _model(self, params: ResponsesRequest) -> str:
        return params.model

    def _payload(self, params: ResponsesRequest, media: RequestMedia) -> chat_pb2.ChatPayload:
        if params.background:
            raise invalid_field("background", "must be false: nobody waits for it anyway")
        if params.store:
            raise invalid_field("store", "must be false: such a response is kept with its task, and nowhere else")
        if params.previous_response_id is not None:
            raise invalid_field("previous_response_id", "is not offered here; send the whole input")
        return self._translate(params, media).payload

    def _translate(self, params: ResponsesRequest, media: RequestMedia) -> ResponsePayload:
        return to_response_request(params, Conversation(own_items(params)), media, self._deps.config.limits)


class EmbeddingTaskApi(JsonTaskApi[EmbeddingRequest]):
    """`/v1/embeddings`."""

    kind = "embeddings"
    endpoint = "/v1/embeddings"
    operation = Operation.EMBEDDING
    schema = EmbeddingRequest

    def answer(self, origin: bytes, task: Task, outputs: Iterable[task_pb2.TaskOutput]) -> bytes:
        """See TaskApi.answer."""
        params = self._tenant_and_id(origin)
        vectors, receipt = vectors_of(outputs)
        return embedding_payload.to_body(
            vectors,
            expected=prompt_count(params.input),
            model=receipt.model or task.model,
            usage=receipt.usage,
            as_base64=params.encoding_format == "base64",
            dimensions=params.dimensions,
        )

    def _model(self, params: EmbeddingRequest) -> str:
        return params.model

    def _payload(self, params: EmbeddingRequest, media: RequestMedia) -> embedding_pb2.EmbeddingPayload:  # noqa: ARG002 - an embedding has none
        return embedding_payload.to_payload(params, self._deps.config.limits)


def vectors_of(
    outputs: Iterable[task_pb2.TaskOutput],
) -> tuple[list[embedding_pb2.Embedding], receipt_pb2.Receipt]:
    """Returns the stored vectors and the receipt. Raises BACKEND_PROTOCOL_ERROR where the end is missing."""
    vectors: list[embedding_pb2.Embedding] = []
    receipt: receipt_pb2.Receipt | None = None
    for output in outputs:
        vectors.extend(output.embeddings)
        for event in output.events:
            if event.HasField("finished"):
                receipt = event.finished.receipt
    if receipt is None:
        raise unfinished_answer()
    return vectors, receipt


CHAT_ID_PREFIX = "chatcmpl"


class ChatTaskApi(JsonTaskApi[ChatRequest]):
    """`/v1/chat/completions`."""

    kind = "chat"
    endpoint = "/v1/chat/completions"
    operation = Operation.CHAT
    schema = ChatRequest

    def answer(self, origin: bytes, task: Task, outputs: Iterable[task_pb2.TaskOutput]) -> bytes:
        """See TaskApi.answer."""
        params = self._tenant_and_id(origin)
        answer = ChatAnswer(
            answer_identity(CHAT_ID_PREFIX, task),
            choice_count=params.n or 1,
            logprobs=bool(params.logprobs),
            functions=uses_functions(params),
        )
        return built(answer, outputs, chat_payload.warnings_of(params))

    def _model(self, params: ChatRequest) -> str:
        return params.model

    def _payload(self, params: ChatRequest, media: RequestMedia) -> chat_pb2.ChatPayload:
        return chat_payload.to_payload(params, self._deps.config.limits, media)


def task_apis_of(deps: InferenceDeps, further: Sequence[TaskApi] = ()) -> TaskApis:
    """Returns the task APIs of one gateway."""
    return TaskApis(
        [ChatTaskApi(deps), CompletionTaskApi(deps), EmbeddingTaskApi(deps), ResponsesTaskApi(deps), *further]
    )


_NO_REQUEST = frozenset({Reason.INVALID_ARGUMENT, Reason.MALFORMED_REQUEST})


def answer_of(details: TaskDetails, task_apis: TaskApis, outputs: Sequence[task_pb2.TaskOutput]) -> bytes:
    """Returns a completed task's answer as its endpoint would. Raises BACKEND_PROTOCOL_ERROR for invalid outputs."""
    surface = task_apis.of_kind(details.spec.origin_kind)
    if surface is None:
        return plain_answer(details.spec, details.task, outputs)
    try:
        return surface.answer(details.spec.origin, details.task, outputs)
    except WeftError as error:
        if error.reason not in _NO_REQUEST:
            raise
        return plain_answer(details.spec, details.task, outputs)


def plain_answer(spec: task_pb2.TaskSpec, task: Task, outputs: Sequence[task_pb2.TaskOutput]) -> bytes:
    """Returns an answer in OpenAI's format. Raises BACKEND_PROTOCOL_ERROR for invalid outputs."""
    match payload_of(spec):
        case chat_pb2.ChatPayload() as chat:
            identity = answer_identity(CHAT_ID_PREFIX, task)
            answer = ChatAnswer(identity, choice_count=chat.choice_count or 1, logprobs=chat.logprobs)
            return built(answer, outputs)
        case completion_pb2.CompletionPayload() as completion:
            count, identity = completion_payload.choice_count(completion), answer_identity(COMPLETION_ID_PREFIX, task)
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
