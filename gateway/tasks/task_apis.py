"""Task APIs: translate the JSON of a live endpoint to a task, and a task's stored output to that endpoint's answer.

Tasks and batches use both directions. A task of unknown origin is answered in OpenAI's format.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

from starlette.types import Scope

from gateway.answers.answer_builder import AnswerBuilder, AnswerIdentity, unfinished_answer, with_warnings
from gateway.answers.server_tools import require_no_failing_tool
from gateway.deps import InferenceDeps
from gateway.gateway_config import RequestLimits
from gateway.intake.headers import request_context, tenant_of
from gateway.intake.json_guard import parse, require_few_members
from gateway.intake.request_model import require_within
from gateway.media import RequestMedia, supply
from gateway.openai import chat as chat_payload
from gateway.openai import completions as completion_payload
from gateway.openai import embeddings as embedding_payload
from gateway.openai.chat import uses_functions
from gateway.openai.chat_answer import ChatAnswer
from gateway.openai.chat_schema import ChatRequest
from gateway.openai.completions import CompletionAnswer, CompletionRequest, prompt_count
from gateway.openai.embeddings import EmbeddingRequest
from gateway.openai.extension_fields import unknown_fields
from gateway.openai.image_schema import ImageRequest
from gateway.openai.speech import SpeechRequest
from gateway.openai.transcriptions import TranscriptionRequest
from gateway.responses.payload import Conversation, own_items, to_response_request
from gateway.responses.replay import task_document
from gateway.responses.response_stream import ResponsesAnswer
from gateway.responses.schema import ResponsesRequest
from gateway.tasks import media_answers, media_requests
from gateway.tasks.media_answers import Link, no_link
from weft.api.common.v1 import (
    audio_pb2,
    chat_pb2,
    completion_pb2,
    embedding_pb2,
    event_pb2,
    image_pb2,
    receipt_pb2,
    warning_pb2,
)
from weft.api.router.v1 import task_pb2, task_service_pb2
from weft.durable.durable_call import task_spec
from weft.durable.tasks import TASK_PREFIX, TaskPayload, payload_of
from weft.kernel.errors.error_tree import FieldError, WeftError, invalid_field
from weft.kernel.errors.reasons import Reason
from weft.kernel.requests.request_values import Operation
from weft.kernel.time.timestamps import optional_datetime


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
    """Path of the body in that request, such as `body`, for errors; empty: the request's body itself."""
    is_repeatable: bool = False
    """Whether the submission has an idempotency key, so that its spec must be the same on every retry."""
    before_fetching: Callable[[], None] = _nothing
    """Called by `supplied_spec` once the body is valid, before media are fetched; it may raise."""


Params = TypeVar(
    "Params",
    bound=ChatRequest
    | CompletionRequest
    | EmbeddingRequest
    | ResponsesRequest
    | ImageRequest
    | TranscriptionRequest
    | SpeechRequest,
)
Outputs = Iterable[task_pb2.TaskOutput]
_WITHOUT_WARNINGS = frozenset({Operation.EMBEDDING, Operation.IMAGE, Operation.TRANSCRIPTION, Operation.SPEECH})
"""Operations of which `to_answer` adds no warnings about the request."""


@dataclass(frozen=True, slots=True)
class TaskApi(Generic[Params]):
    """Translation of the requests of one live endpoint to tasks, and of their outputs to its answers."""

    deps: InferenceDeps
    endpoint: str
    """The live endpoint's path."""
    kind: str
    """`TaskSpec.origin_kind`."""
    operation: Operation
    schema: type[Params]
    to_payload: Callable[[Params, RequestLimits, RequestMedia], TaskPayload]
    """Raises INVALID_ARGUMENT naming the field."""
    to_answer: Callable[[Params, task_pb2.Task, Outputs, Link], bytes]
    """Raises as `answer`."""
    has_files: bool = False
    """Whether its bodies contain files, which are not stored with a task."""

    def spec(self, raw: bytes, submission: SpecContext) -> task_pb2.TaskSpec:
        """Returns the task of a body, which becomes its origin.

        `stream`, `durable` and `on_disconnect` are ignored. Raises as the live endpoint, and INVALID_ARGUMENT naming
        the field of an image that would have to be fetched.
        """
        spec, media = self._translated(raw, submission)
        if media.addresses:
            field = _within(submission.field, media.addresses[0].field)
            raise invalid_field(field, "must be a data: URL: addresses are not fetched")
        return spec

    async def supplied_spec(self, raw: bytes, submission: SpecContext) -> task_pb2.TaskSpec:
        """Returns the task with its media fetched. Raises as `spec`, `before_fetching` and `MediaSource.fetch`."""
        spec, media = self._translated(raw, submission)
        submission.before_fetching()
        if media.addresses:
            try:
                await supply(spec.chat, media, self.deps.media)
            except FieldError as error:
                raise _renamed(error, submission.field) from None
        return spec

    def has_links(self, origin: bytes) -> bool:
        """Whether the answer to a request has URLs of its images and recordings. Raises as `answer`."""
        return _names_links(self._parsed(origin))

    def answer(self, origin: bytes, task: task_pb2.Task, outputs: Outputs, link: Link = no_link) -> bytes:
        """Returns the complete answer as the live endpoint's JSON. Apart from URLs, it depends only on the outputs.

        Raises BACKEND_PROTOCOL_ERROR for incomplete outputs, INVALID_ARGUMENT or MALFORMED_REQUEST if the origin is not
        a request of this API.
        """
        params = self._parsed(origin)
        body = self.to_answer(params, task, outputs, link)
        return with_warnings(body, unknown_fields(params)) if self.operation in _WITHOUT_WARNINGS else body

    def _parsed(self, raw: bytes) -> Params:
        return parse(self.schema, raw, max_depth=self.deps.config.limits.max_json_depth)

    def _translated(self, raw: bytes, submission: SpecContext) -> tuple[task_pb2.TaskSpec, RequestMedia]:
        config = self.deps.config
        require_few_members(raw, config.limits.max_json_members)
        try:
            params = self._parsed(raw)
            asked = self.deps.asked(submission.scope, params.model)
            tenant = tenant_of(submission.scope)
            context = request_context(
                submission.scope, config, params, tenant=tenant, asked=asked, operation=self.operation
            )
            require_within(params, config.limits)
            media = self.deps.request_media(params)
            payload = self.to_payload(params, config.limits, media)
            if _names_links(params) and self.deps.links is None:
                raise invalid_field("response_format", "must be 'b64_json': this gateway cannot return result URLs")
        except FieldError as error:
            raise _renamed(error, submission.field) from None
        spec = task_spec(
            context, payload, origin=media_requests.without_files(raw) if self.has_files else raw, origin_kind=self.kind
        )
        if submission.is_repeatable:
            spec.traceparent = ""
        return spec, media


def _names_links(params: Params) -> bool:
    declared = vars(params)  # fields that the API does not know are ignored
    return "url" in (declared.get("response_format"), declared.get("result_format"))


AnyTaskApi = TaskApi[Any]


class TaskApis:
    """The task APIs of one gateway, by kind and by endpoint."""

    def __init__(self, task_apis: Sequence[AnyTaskApi]) -> None:
        self._by_endpoint = {each.endpoint: each for each in task_apis}
        self._by_kind = {each.kind: each for each in task_apis}

    @property
    def endpoints(self) -> tuple[str, ...]:
        """The supported endpoint paths."""
        return tuple(self._by_endpoint)

    def of_kind(self, kind: str) -> AnyTaskApi | None:
        """Returns the API of a task's `origin_kind`; None: the task came from elsewhere."""
        return self._by_kind.get(kind)

    def of_endpoint(self, endpoint: str, field: str = "endpoint") -> AnyTaskApi:
        """Returns the API of a path. Raises INVALID_ARGUMENT naming `field`."""
        surface = self._by_endpoint.get(endpoint)
        if surface is None:
            raise invalid_field(field, f"must be one of {', '.join(self._by_endpoint)}")
        return surface


def answer_identity(prefix: str, task: task_pb2.Task) -> AnswerIdentity:
    """Returns the id and creation time of a task's answer, which are the same at every retrieval."""
    own = task.id.removeprefix(f"{TASK_PREFIX}-")
    return AnswerIdentity(answer_id=f"{prefix}-{own}", created=task.create_time.seconds, model=task.model)


def built(
    answer: AnswerBuilder,
    outputs: Outputs,
    warnings: Sequence[warning_pb2.Warning] = (),
) -> bytes:
    """Builds an answer from stored outputs, with the gateway's warnings in addition to the runner's."""
    own = [event_pb2.InferenceEvent(warning=warning) for warning in warnings]
    for output in outputs:
        for event in output.events:
            answer.add([event])
            if own and event.HasField("started"):
                answer.add(own)
    return answer.body()


def _renamed(error: FieldError, outer: str) -> FieldError:
    """Prefixes the field of an error with the body's path, unless it is a header."""
    if not outer or error.field.startswith("X-"):
        return error
    words = error.message.removeprefix(f"{error.field}: ")
    return FieldError(_within(outer, error.field), words, error.reason)


def _within(outer: str, field: str) -> str:
    return f"{outer}.{field}" if outer else field


COMPLETION_ID_PREFIX = "cmpl"
CHAT_ID_PREFIX = "chatcmpl"


def _chat_answer(deps: InferenceDeps, params: ChatRequest, task: task_pb2.Task, outputs: Outputs, _link: Link) -> bytes:
    answer = ChatAnswer(
        answer_identity(CHAT_ID_PREFIX, task),
        choice_count=params.n or 1,
        logprobs=bool(params.logprobs),
        functions=uses_functions(params),
    )
    converted: list[warning_pb2.Warning] = []
    with suppress(FieldError):  # a limit may have changed since the submission
        converted = chat_payload.to_chat(params, deps.config.limits, deps.request_media(params))[1]
    return built(answer, outputs, converted + chat_payload.warnings_of(params))


def _completion_answer(params: CompletionRequest, task: task_pb2.Task, outputs: Outputs, _link: Link) -> bytes:
    answer = CompletionAnswer(
        answer_identity(COMPLETION_ID_PREFIX, task),
        choice_count=prompt_count(params.prompt) * (params.n or 1),
        logprobs=params.logprobs is not None,
    )
    return built(answer, outputs, unknown_fields(params))


def _embedding_answer(params: EmbeddingRequest, task: task_pb2.Task, outputs: Outputs, _link: Link) -> bytes:
    return embedding_body(
        task,
        outputs,
        expected=prompt_count(params.input),
        as_base64=params.encoding_format == "base64",
        dimensions=params.dimensions,
    )


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
    return embedding_payload.to_body(
        vectors,
        expected=expected,
        model=receipt.model or task.model,
        usage=receipt.usage,
        as_base64=as_base64,
        dimensions=dimensions,
    )


def _response_payload(params: ResponsesRequest, limits: RequestLimits, media: RequestMedia) -> chat_pb2.ChatPayload:
    if params.background:
        raise invalid_field("background", "must be false: a task always runs in the background")
    if params.store:
        raise invalid_field("store", "must be false: the response is stored with its task")
    if params.previous_response_id is not None:
        raise invalid_field("previous_response_id", "is not supported; send the whole input")
    made = to_response_request(params, Conversation(own_items(params)), media, limits)
    require_no_failing_tool(made.failing)
    return made.payload


def _response_answer(
    deps: InferenceDeps, params: ResponsesRequest, task: task_pb2.Task, outputs: Outputs, _link: Link
) -> bytes:
    document = task_document(params, task, deps.clock, is_stored=False, envelope=deps.config.response_envelope)
    document.ended_at = optional_datetime(task, "end_time")
    made = to_response_request(params, Conversation(own_items(params)), deps.request_media(params), deps.config.limits)
    return built(ResponsesAnswer(document), outputs, made.warnings)


def _completion_payload(
    params: CompletionRequest, limits: RequestLimits, _media: RequestMedia
) -> completion_pb2.CompletionPayload:
    return completion_payload.to_payload(params, limits)


def _embedding_payload(
    params: EmbeddingRequest, limits: RequestLimits, _media: RequestMedia
) -> embedding_pb2.EmbeddingPayload:
    return embedding_payload.to_payload(params, limits)


def task_apis_of(deps: InferenceDeps) -> TaskApis:
    """Returns the task APIs of one gateway."""
    api, audio = partial(TaskApi, deps), "/v1/audio"
    of_image, of_words = media_answers.image_answer, media_answers.transcription_answer
    to_words, words = media_requests.transcription_payload, media_requests.TranscriptionTask
    heard, translated = partial(to_words, translates=False), partial(to_words, translates=True)
    edit, to_edit, to_image = media_requests.ImageEditTask, media_requests.edit_payload, media_requests.image_payload
    speech, to_speech, of_speech = media_requests.SpeechTask, media_requests.speech_payload, media_answers.speech_answer
    chat, text, vectors = Operation.CHAT, Operation.COMPLETION, Operation.EMBEDDING
    image, transcription = Operation.IMAGE, Operation.TRANSCRIPTION
    of_response, of_translation = partial(_response_answer, deps), partial(of_words, translates=True)
    of_chat = partial(_chat_answer, deps)
    return TaskApis(
        [
            api("/v1/chat/completions", "chat", chat, ChatRequest, chat_payload.to_payload, of_chat),
            api("/v1/completions", "completions", text, CompletionRequest, _completion_payload, _completion_answer),
            api("/v1/embeddings", "embeddings", vectors, EmbeddingRequest, _embedding_payload, _embedding_answer),
            api("/v1/responses", "responses", chat, ResponsesRequest, _response_payload, of_response),
            api("/v1/images/generations", "images", image, ImageRequest, to_image, of_image),
            api("/v1/images/edits", "image_edits", image, edit, to_edit, of_image, has_files=True),
            api(f"{audio}/transcriptions", "transcriptions", transcription, words, heard, of_words, has_files=True),
            api(
                f"{audio}/translations",
                "translations",
                transcription,
                words,
                translated,
                of_translation,
                has_files=True,
            ),
            api(f"{audio}/speech", "speech", Operation.SPEECH, speech, to_speech, of_speech),
        ]
    )


_NO_REQUEST = frozenset({Reason.INVALID_ARGUMENT, Reason.MALFORMED_REQUEST})


def has_links(details: task_service_pb2.GetTaskResponse, task_apis: TaskApis) -> bool:
    """Whether a task's answer has URLs of its images and recordings."""
    surface = task_apis.of_kind(details.spec.origin_kind)
    try:
        return surface is not None and surface.has_links(details.spec.origin)
    except WeftError:
        return False


def answer_of(
    details: task_service_pb2.GetTaskResponse,
    task_apis: TaskApis,
    outputs: Sequence[task_pb2.TaskOutput],
    link: Link = no_link,
) -> bytes:
    """Returns a completed task's answer as its endpoint would. Raises BACKEND_PROTOCOL_ERROR for invalid outputs."""
    surface = task_apis.of_kind(details.spec.origin_kind)
    if surface is None:
        return plain_answer(details.spec, details.task, outputs)
    try:
        return surface.answer(details.spec.origin, details.task, outputs, link)
    except WeftError as error:
        if error.reason not in _NO_REQUEST:
            raise
        return plain_answer(details.spec, details.task, outputs)


def plain_answer(spec: task_pb2.TaskSpec, task: task_pb2.Task, outputs: Sequence[task_pb2.TaskOutput]) -> bytes:
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
            return embedding_body(task, outputs, expected=len(embedding.inputs))
        case image_pb2.ImagePayload():
            return media_answers.image_answer(None, task, outputs, no_link)
        case audio_pb2.TranscriptionPayload():
            return media_answers.transcription_answer(None, task, outputs, no_link)
        case audio_pb2.SpeechPayload():
            return media_answers.speech_answer(None, task, outputs, no_link)
        case _:
            raise WeftError(Reason.BACKEND_PROTOCOL_ERROR, "the task has an unknown operation")
