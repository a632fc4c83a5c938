"""Task APIs: translate the JSON of a live endpoint to a task, and a task's stored output to that endpoint's answer.

Tasks and batches use both directions. A task of unknown origin is answered in OpenAI's format.
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from starlette.types import Scope

from gateway.answers.answer_builder import AnswerBuilder, AnswerIdentity
from gateway.deps import InferenceDeps
from gateway.gateway_config import RequestLimits
from gateway.intake.headers import request_context, tenant_of
from gateway.intake.json_guard import parse, require_few_members
from gateway.intake.request_model import HandledRequest, require_within
from gateway.media import RequestMedia, supply
from gateway.tasks.result_content import Link, no_link
from weft.api.common.v1 import event_pb2, warning_pb2
from weft.api.router.v1 import task_pb2, task_service_pb2
from weft.durable.durable_call import task_spec
from weft.durable.tasks import TASK_PREFIX, TaskPayload, payload_of
from weft.extension import Extension, TaskApiHook, load_hook
from weft.kernel.errors.error_tree import FieldError, WeftError, invalid_field
from weft.kernel.errors.reasons import Reason
from weft.kernel.requests.request_values import Operation


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


Params = TypeVar("Params", bound=HandledRequest)
StoredParams_co = TypeVar("StoredParams_co", bound=HandledRequest, covariant=True)
Outputs = Iterable[task_pb2.TaskOutput]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRequest(Generic[StoredParams_co]):
    """A request that was stored as a task, and its output."""

    deps: InferenceDeps
    params: StoredParams_co
    task: task_pb2.Task
    outputs: Outputs
    link: Link = no_link
    """Returns the signed URL of a result."""


def _unchanged(raw: bytes) -> bytes:
    return raw


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskApi(Generic[Params]):
    """Translation of the requests of one live endpoint to tasks, and of their outputs to its answers.

    What `TaskApiHook.place` names.
    """

    operation: Operation
    schema: type[Params]
    to_payload: Callable[[Params, RequestLimits, RequestMedia], TaskPayload]
    """Raises INVALID_ARGUMENT naming the field."""
    to_answer: Callable[[StoredRequest[Params]], bytes]
    """Returns the complete answer as JSON. Raises BACKEND_PROTOCOL_ERROR for incomplete outputs."""
    of_payload: Callable[[Any, task_pb2.Task, Outputs], bytes] | None = None
    """Returns the answer to a task of unknown origin by its payload; None: another API of the operation does it."""
    to_origin: Callable[[bytes], bytes] = _unchanged
    """Returns the part of a body that is stored with the task."""


@dataclass(frozen=True, slots=True)
class ServedTaskApi:
    """A task API over the collaborators of one gateway."""

    deps: InferenceDeps
    endpoint: str
    """The live endpoint's path."""
    kind: str
    """`TaskSpec.origin_kind`."""
    api: TaskApi[Any]

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
        return self.api.to_answer(StoredRequest(deps=self.deps, params=params, task=task, outputs=outputs, link=link))

    def _parsed(self, raw: bytes) -> Any:
        return parse(self.api.schema, raw, max_depth=self.deps.config.limits.max_json_depth)

    def _translated(self, raw: bytes, submission: SpecContext) -> tuple[task_pb2.TaskSpec, RequestMedia]:
        config, api = self.deps.config, self.api
        require_few_members(raw, config.limits.max_json_members)
        try:
            params = self._parsed(raw)
            asked = self.deps.asked(submission.scope, params.model)
            tenant = tenant_of(submission.scope)
            context = request_context(
                submission.scope, config, params, tenant=tenant, asked=asked, operation=api.operation
            )
            require_within(params, config.limits)
            media = self.deps.request_media(params)
            payload = api.to_payload(params, config.limits, media)
            if _names_links(params) and self.deps.links is None:
                raise invalid_field("response_format", "must be 'b64_json': this gateway cannot return result URLs")
        except FieldError as error:
            raise _renamed(error, submission.field) from None
        spec = task_spec(context, payload, origin=api.to_origin(raw), origin_kind=self.kind)
        if submission.is_repeatable:
            spec.traceparent = ""
        return spec, media


def _names_links(params: HandledRequest) -> bool:
    declared = vars(params)  # fields that the API does not know are ignored
    return "url" in (declared.get("response_format"), declared.get("result_format"))


_TASKS = "gateway.tasks.openai_tasks"
TASK_APIS = (
    TaskApiHook(endpoint="/v1/chat/completions", kind="chat", place=f"{_TASKS}:CHATS"),
    TaskApiHook(endpoint="/v1/completions", kind="completions", place=f"{_TASKS}:COMPLETIONS"),
    TaskApiHook(endpoint="/v1/embeddings", kind="embeddings", place=f"{_TASKS}:EMBEDDINGS"),
    TaskApiHook(endpoint="/v1/responses", kind="responses", place="gateway.responses.response_tasks:RESPONSES"),
)
"""APIs of the core whose requests can be tasks."""
_KINDS = {
    "chat": "chat",
    "completion": "completions",
    "embedding": "embeddings",
    "image": "images",
    "transcription": "transcriptions",
    "speech": "speech",
}
"""The kind of origin in whose form tasks of unknown origin are answered, by the field of their payload."""


class TaskApis:
    """The task APIs of one gateway, by kind and by endpoint. Each is imported at its first use, off the event loop."""

    def __init__(self, deps: InferenceDeps, hooks: Iterable[TaskApiHook]) -> None:
        self._deps = deps
        self._by_endpoint = {each.endpoint: each for each in hooks}
        self._by_kind = {each.kind: each for each in self._by_endpoint.values()}
        self._loaded: dict[str, ServedTaskApi] = {}

    @property
    def endpoints(self) -> tuple[str, ...]:
        """The supported endpoint paths."""
        return tuple(self._by_endpoint)

    def endpoint_of(self, kind: str) -> str | None:
        """Returns the endpoint of a task's `origin_kind`; None: the task came from elsewhere."""
        hook = self._by_kind.get(kind)
        return None if hook is None else hook.endpoint

    async def of_kind(self, kind: str) -> ServedTaskApi | None:
        """Returns the API of a task's `origin_kind`; None: the task came from elsewhere."""
        hook = self._by_kind.get(kind)
        return None if hook is None else await self._served(hook)

    async def of_endpoint(self, endpoint: str, field: str = "endpoint") -> ServedTaskApi:
        """Returns the API of a path. Raises INVALID_ARGUMENT naming `field`."""
        hook = self._by_endpoint.get(endpoint)
        if hook is None:
            raise invalid_field(field, f"must be one of {', '.join(self._by_endpoint)}")
        return await self._served(hook)

    async def _served(self, hook: TaskApiHook) -> ServedTaskApi:
        served = self._loaded.get(hook.kind)
        if served is None:
            api = await asyncio.to_thread(load_hook, hook.place, TaskApi)
            served = self._loaded[hook.kind] = ServedTaskApi(self._deps, hook.endpoint, hook.kind, api)
        return served

    async def has_links(self, details: task_service_pb2.GetTaskResponse) -> bool:
        """Whether a task's answer has URLs of its images and recordings."""
        served = await self.of_kind(details.spec.origin_kind)
        try:
            return served is not None and served.has_links(details.spec.origin)
        except WeftError:
            return False

    async def answer(
        self,
        details: task_service_pb2.GetTaskResponse,
        outputs: Sequence[task_pb2.TaskOutput],
        link: Link = no_link,
    ) -> bytes:
        """Returns a completed task's answer as its endpoint would.

        Raises BACKEND_PROTOCOL_ERROR for invalid outputs, UNSUPPORTED_OPERATION if no API has its operation.
        """
        served = await self.of_kind(details.spec.origin_kind)
        if served is not None:
            try:
                return served.answer(details.spec.origin, details.task, outputs, link)
            except WeftError as error:
                if error.reason not in _NO_REQUEST:
                    raise
        return await self._plain_answer(details.spec, details.task, outputs)

    async def _plain_answer(
        self, spec: task_pb2.TaskSpec, task: task_pb2.Task, outputs: Sequence[task_pb2.TaskOutput]
    ) -> bytes:
        """Returns an answer in OpenAI's format, by the payload alone."""
        field = spec.WhichOneof("payload")
        if field not in _KINDS:
            raise WeftError(Reason.BACKEND_PROTOCOL_ERROR, "the task has an unknown operation")
        served = await self.of_kind(_KINDS[field])
        if served is None or served.api.of_payload is None:
            raise WeftError(Reason.UNSUPPORTED_OPERATION, f"no API of this gateway has answers of the kind {field}")
        return served.api.of_payload(payload_of(spec), task, outputs)


def task_apis_of(deps: InferenceDeps, extensions: Iterable[Extension]) -> TaskApis:
    """Returns the task APIs of a gateway with these extensions."""
    return TaskApis(deps, (*TASK_APIS, *(hook for extension in extensions for hook in extension.task_apis)))


_NO_REQUEST = frozenset({Reason.INVALID_ARGUMENT, Reason.MALFORMED_REQUEST})


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
