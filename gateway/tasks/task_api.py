"""Task APIs: translate the JSON of a live endpoint into a task, and a task's stored output into that endpoint's answer.

Submitted tasks and batch items use both directions. `gateway.tasks.task_apis` has the implementations.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Generic, Protocol, TypeVar

from starlette.types import Scope

from gateway.answers.answer_builder import AnswerBuilder
from gateway.answers.answer_fields import AnswerIdentity
from gateway.deps import InferenceDeps
from gateway.intake.headers import request_context
from gateway.intake.json_guard import parse, require_few_members
from gateway.intake.request_model import HandledRequest, require_within
from gateway.media import RequestMedia, supply
from weft.api.common.v1 import event_pb2, warning_pb2
from weft.api.router.v1 import task_pb2
from weft.durable.durable_call import task_spec
from weft.durable.tasks import TASK_PREFIX, Task, TaskPayload
from weft.kernel.errors import FieldError, invalid_field
from weft.kernel.request import Operation


def _nothing() -> None:
    """Nothing to do."""


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

    def spec(self, raw: bytes, about: SpecContext) -> task_pb2.TaskSpec:
        """Returns the task of a body, which becomes its origin.

        `stream`, `durable` and `on_disconnect` are ignored. Raises as the live endpoint does; INVALID_ARGUMENT naming
        the field also for an image that would have to be fetched.
        """
        ...

    async def supplied_spec(self, raw: bytes, about: SpecContext) -> task_pb2.TaskSpec:
        """Returns the task with its media fetched.

        Raises as `spec`, as `SpecContext.before_fetching` and as `MediaSource.fetch`.
        """
        ...

    def answer(self, origin: bytes, task: Task, outputs: Iterable[task_pb2.TaskOutput]) -> bytes:
        """Returns the complete answer as the live endpoint's JSON; deterministic in its outputs.

        Raises BACKEND_PROTOCOL_ERROR for outputs that are no whole answer, INVALID_ARGUMENT or MALFORMED_REQUEST where
        the origin is no request of this API.
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


class JsonTaskApi(ABC, Generic[ParamsT]):
    """A task API whose requests are JSON of one schema; see `gateway.tasks.task_api.TaskApi`."""

    kind: str
    endpoint: str
    operation: Operation
    schema: type[ParamsT]

    def __init__(self, deps: InferenceDeps) -> None:
        self._deps = deps

    def spec(self, raw: bytes, about: SpecContext) -> task_pb2.TaskSpec:
        """See TaskApi.spec."""
        translated = self._translated(raw, about)
        if translated.media.addresses:
            field = translated.media.addresses[0].field
            raise invalid_field(_within(about.field, field), "must be a data: URL: addresses are not fetched here")
        return translated.spec

    async def supplied_spec(self, raw: bytes, about: SpecContext) -> task_pb2.TaskSpec:
        """See TaskApi.supplied_spec."""
        translated = self._translated(raw, about)
        about.before_fetching()
        if translated.media.addresses:
            try:
                await supply(translated.spec.chat, translated.media, self._deps.media)
            except FieldError as error:
                raise _renamed(error, about.field) from None
        return translated.spec

    def _translated(self, raw: bytes, about: SpecContext) -> _Translated:
        config = self._deps.config
        require_few_members(raw, config.limits.max_json_members)
        try:
            params = self._tenant_and_id(raw)
            model = self._model(params)
            context = request_context(about.scope, config, params, model=model, operation=self.operation)
            require_within(params, config.limits)
            media = self._deps.request_media(params)
            payload = self._payload(params, media)
        except FieldError as error:
            raise _renamed(error, about.field) from None
        spec = task_spec(context, payload, origin=raw, origin_kind=self.kind)
        if about.is_repeatable:
            spec.traceparent = ""
        return _Translated(spec, media)

    def _tenant_and_id(self, raw: bytes) -> ParamsT:
        return parse(self.schema, raw, max_depth=self._deps.config.limits.max_json_depth)

    @abstractmethod
    def answer(self, origin: bytes, task: Task, outputs: Iterable[task_pb2.TaskOutput]) -> bytes:
        """See TaskApi.answer."""

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
    """Prefixes a body field of an error with the body's place; header names stay."""
    if not outer or error.field.startswith("X-"):
        return error
    words = error.message.removeprefix(f"{error.field}: ")
    return FieldError(_within(outer, error.field), words, error.reason)


def _within(outer: str, field: str) -> str:
    return f"{outer}.{field}" if outer else field
