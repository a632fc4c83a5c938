"""Task APIs: translate the JSON of a live endpoint to a task, and a task's stored output to that endpoint's answer.

Submitted tasks and items of batches use both directions. A task of unknown origin is answered in OpenAI's format.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Generic, Protocol, TypeVar

from starlette.types import Scope
from typing_extensions import override

from gateway.answers.answer_builder import AnswerBuilder, AnswerIdentity, unfinished_answer
from gateway.deps import InferenceDeps
from gateway.intake.headers import request_context
from gateway.intake.json_guard import parse, require_few_members
from gateway.intake.request_model import HandledRequest, require_within
from gateway.media import RequestMedia, supply
from gateway.openai import chat as chat_payload
from gateway.openai import completions as completion_payload
from gateway.openai import embeddings as embedding_payload
from gateway.openai.chat import uses_functions
from gateway.openai.chat_answer import ChatAnswer
from gateway.openai.chat_fields import ChatTranslation
from gateway.openai.chat_schema import ChatRequest
from gateway.openai.completions import CompletionAnswer, CompletionRequest, prompt_count
from gateway.openai.embeddings import EmbeddingRequest
from gateway.openai.extension_fields import unknown_extensions
from gateway.responses.document import ResponseState
from gateway.responses.payload import Conversation, own_items, to_response_request, wants_logprobs
from gateway.responses.replay import BackgroundDocument
from gateway.responses.schema import ResponsesRequest
from gateway.responses.stream import ResponsesAnswer
from weft.api.common.v1 import chat_pb2, completion_pb2, embedding_pb2, event_pb2, receipt_pb2, warning_pb2
from weft.api.router.v1 import task_pb2
from weft.durable.durable_call import task_spec
from weft.durable.tasks import TASK_PREFIX, Task, TaskDetails, TaskPayload, payload_of
from weft.kernel.errors import FieldError, WeftError, invalid_field
from weft.kernel.reasons import Reason
from weft.kernel.request import Operation


def _nothing() -> None:
    """Does nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecContext:
    """The context of a submission: its sender and headers.

    Headers of priority, client, session, cache and trace apply as for a live request; the timeout header does not.
    """

    scope: Scope
    """Scope of the submitting request."""
    field: str = ""
    """Where in that request the body is, such as `body`; errors name it. Empty: the body itself."""
    is_repeatable: bool = False
    """Whether the submission has an idempotency key: then the spec holds nothing that differs each time."""
    before_fetching: Callable[[], None] = _nothing
    """Called by `supplied_spec` once the body is valid, before media are fetched; it may raise."""


class TaskApi(Protocol):
    """Translation of one live endpoint to tasks and back."""

    @property
    def kind(self) -> str:
        """`TaskSpec.origin_kind`."""
        ...

    @property
    def endpoint(self) -> str:
        """The live endpoint's path."""
        ...

    def spec(self, raw: bytes, submission: SpecContext) -> task_pb2.TaskSpec:
        """Returns the task of a body, which becomes its origin.

        `stream`, `durable` and `on_disconnect` are ignored. Raises as the live endpoint does; INVALID_ARGUMENT naming
        the field also for an image that would have to be fetched.
        """
        ...

    async def supplied_spec(self, raw: bytes, submission: SpecContext) -> task_pb2.TaskSpec:
        """Returns the task with its media fetched.

        Raises as `spec`, as `SpecContext.before_fetching` and as `MediaSource.fetch`.
        """
        ...

    def answer(self, origin: bytes, task: Task, outputs: Iterable[task_pb2.TaskOutput]) -> bytes:
        """Returns the complete answer as the live endpoint's JSON; deterministic in its outputs.

        Raises BACKEND_PROTOCOL_ERROR for incomplete outputs, INVALID_ARGUMENT or MALFORMED_REQUEST where the origin is
        not a request of this API.
        """
        ...


class TaskApis:
    """The task APIs of one gateway, by kind and by endpoint."""

    def __init__(self, task_apis: Iterable[TaskApi]) -> None:
        self._by_endpoint: Mapping[str, TaskApi] = MappingProxyType({each.endpoint: each for each in task_apis})
        self._by_kind: Mapping[str, TaskApi] = MappingProxyType(
            {each.kind: each for each in self._by_endpoint.values()}
        )

    @property
    def endpoints(self) -> tuple[str, ...]:
        """The supported endpoint paths."""
        return tuple(self._by_endpoint)

    def of_kind(self, kind: str) -> TaskApi | None:
        """Returns the API of a task's `origin_kind`; None: the task came from elsewhere."""
        return self._by_kind.get(kind)

    def of_endpoint(self, endpoint: str, field: str = "endpoint") -> TaskApi:
        """Returns the API of a path. Raises INVALID_ARGUMENT naming `field`."""
        surface = self._by_endpoint.get(endpoint)
        if surface is None:
            raise invalid_field(field, f"must be one of {', '.join(self._by_endpoint)}")
        return surface


ParamsT = TypeVar("ParamsT", bound=HandledRequest)


@dataclass(frozen=True, slots=True)
class _Translated:
    spec: task_pb2.TaskSpec
    media: RequestMedia


class JsonTaskApi(TaskApi, Generic[ParamsT]):
    """A task API whose requests are JSON of one schema; see `TaskApi`."""

    kind: str
    endpoint: str
    operation: Operation
    schema: type[ParamsT]

    def __init__(self, deps: InferenceDeps) -> None:
        self._deps = deps

    @override
    def spec(self, raw: bytes, submission: SpecContext) -> task_pb2.TaskSpec:
        translated = self._translated(raw, submission)
        if translated.media.addresses:
            field = translated.media.addresses[0].field
            raise invalid_field(_within(submission.field, field), "must be a data: URL: addresses are not fetched")
        return translated.spec

    @override
    async def supplied_spec(self, raw: bytes, submission: SpecContext) -> task_pb2.TaskSpec:
        translated = self._translated(raw, submission)
        submission.before_fetching()
        if translated.media.addresses:
            try:
                await supply(translated.spec.chat, translated.media, self._deps.media)
            except FieldError as error:
                raise _renamed(error, submission.field) from None
        return translated.spec

    def _translated(self, raw: bytes, submission: SpecContext) -> _Translated:
        config = self._deps.config
        require_few_members(raw, config.limits.max_json_members)
        try:
            params = self._parsed(raw)
            model = self._model(params)
            context = request_context(submission.scope, config, params, model=model, operation=self.operation)
            require_within(params, config.limits)
            media = self._deps.request_media(params)
            payload = self._payload(params, media)
        except FieldError as error:
            raise _renamed(error, submission.field) from None
        spec = task_spec(context, payload, origin=raw, origin_kind=self.kind)
        if submission.is_repeatable:
            spec.traceparent = ""
        return _Translated(spec, media)

    def _parsed(self, raw: bytes) -> ParamsT:
        return parse(self.schema, raw, max_depth=self._deps.config.limits.max_json_depth)

    @abstractmethod
    def _model(self, params: ParamsT) -> str:
        """Returns the requested model name."""

    @abstractmethod
    def _payload(self, params: ParamsT, media: RequestMedia) -> TaskPayload:
        """Returns the payload. Raises INVALID_ARGUMENT naming the field."""


def answer_identity(prefix: str, task: Task) -> AnswerIdentity:
    """Returns the id and creation time of a task's answer: the same at every retrieval."""
    own = task.id.removeprefix(f"{TASK_PREFIX}-")
    return AnswerIdentity(answer_id=f"{prefix}-{own}", created=int(task.created_at.timestamp()), model=task.model)


def built(
    answer: AnswerBuilder,
    outputs: Iterable[task_pb2.TaskOutput],
    warnings: Sequence[warning_pb2.Warning] = (),
) -> bytes:
    """Builds an answer from stored outputs, with the gateway's warnings beside the runner's."""
    own = [event_pb2.InferenceEvent(warning=warning) for warning in warnings]
    for output in outputs:
        for event in output.events:
            answer.add([event])
            if own and event.HasField("started"):
                answer.add(own)
    return answer.body()


def _renamed(error: FieldError, outer: str) -> FieldError:
    """Prefixes a body field of an error with the body's path; names of headers stay."""
    if not outer or error.field.startswith("X-"):
        return error
    words = error.message.removeprefix(f"{error.field}: ")
    return FieldError(_within(outer, error.field), words, error.reason)


def _within(outer: str, field: str) -> str:
    return f"{outer}.{field}" if outer else field


COMPLETION_ID_PREFIX = "cmpl"


class CompletionTaskApi(JsonTaskApi[CompletionRequest]):
    """`/v1/completions`."""

    kind = "completions"
    endpoint = "/v1/completions"
    operation = Operation.COMPLETION
    schema = CompletionRequest

    @override
    def answer(self, origin: bytes, task: Task, outputs: Iterable[task_pb2.TaskOutput]) -> bytes:
        params = self._parsed(origin)
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

    @override
    def answer(self, origin: bytes, task: Task, outputs: Iterable[task_pb2.TaskOutput]) -> bytes:
        params = self._parsed(origin)
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
            raise invalid_field("background", "must be false: a task always runs in the background")
        if params.store:
            raise invalid_field("store", "must be false: the response is stored with its task")
        if params.previous_response_id is not None:
            raise invalid_field("previous_response_id", "is not supported; send the whole input")
        return self._translate(params, media).payload

    def _translate(self, params: ResponsesRequest, media: RequestMedia) -> ChatTranslation:
        return to_response_request(params, Conversation(own_items(params)), media, self._deps.config.limits)


class EmbeddingTaskApi(JsonTaskApi[EmbeddingRequest]):
    """`/v1/embeddings`."""

    kind = "embeddings"
    endpoint = "/v1/embeddings"
    operation = Operation.EMBEDDING
    schema = EmbeddingRequest

    @override
    def answer(self, origin: bytes, task: Task, outputs: Iterable[task_pb2.TaskOutput]) -> bytes:
        params = self._parsed(origin)
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

    @override
    def answer(self, origin: bytes, task: Task, outputs: Iterable[task_pb2.TaskOutput]) -> bytes:
        params = self._parsed(origin)
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
            raise WeftError(Reason.BACKEND_PROTOCOL_ERROR, "the task has an unknown operation")
