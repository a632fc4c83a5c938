"""A surface: what turns the JSON of a live route into a task, and what is kept of a task into that route's answer.

Whoever takes in requests that nobody waits for (tasks, lines of batches) needs both ways, and no request under way.
`gateway.tasks.task_apis` has those that there are.
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
    """What a submission says beside the body that is to be done: who sends it, and its headers.

    Those that count for a live request count here too: priority, client, session, cache, trace. That of the time that a
    caller waits does not: nobody does.
    """

    scope: Scope
    """Of the request that brings it."""
    field: str = ""
    """Where in that request the body is, such as `body`; errors name it. Empty: it is the whole."""
    is_repeatable: bool = False
    """Whether the submission has an idempotency key: then the spec holds nothing that differs each time."""
    before_fetching: Callable[[], None] = _nothing
    """Called by `supplied_spec` once the body is found right, and before it fetches anything; it may refuse."""


class TaskApi(Protocol):
    """One API."""

    @property
    def kind(self) -> str:
        """`TaskSpec.origin_kind`."""
        ...

    @property
    def endpoint(self) -> str:
        """The live route's path."""
        ...

    def spec(self, raw: bytes, about: SpecContext) -> task_pb2.TaskSpec:
        """The task that a body asks for, which it has as its origin.

        `stream`, `durable` and `on_disconnect` say nothing here. Raises as the live route does; INVALID_ARGUMENT naming
        the field also for an image that would have to be fetched.
        """
        ...

    async def supplied_spec(self, raw: bytes, about: SpecContext) -> task_pb2.TaskSpec:
        """The same, with the images that it has addresses of.

        Raises as `spec`, as `SpecContext.before_fetching` and as `MediaSource.fetch`.
        """
        ...

    def answer(self, origin: bytes, task: Task, outputs: Iterable[task_pb2.TaskOutput]) -> bytes:
        """The whole answer as the live route's JSON; the same outputs have the same answer.

        Raises BACKEND_PROTOCOL_ERROR for outputs that are no whole answer, INVALID_ARGUMENT or MALFORMED_REQUEST where
        the origin is no request of this surface.
        """
        ...


class TaskApis:
    """Those of one gateway."""

    def __init__(self, task_apis: Iterable[TaskApi]) -> None:
        self._by_endpoint: Mapping[str, TaskApi] = MappingProxyType({each.endpoint: each for each in task_apis})
        self._by_kind: Mapping[str, TaskApi] = MappingProxyType(
            {each.kind: each for each in self._by_endpoint.values()}
        )

    @property
    def endpoints(self) -> tuple[str, ...]:
        """The paths that there are surfaces for."""
        return tuple(self._by_endpoint)

    def of_kind(self, kind: str) -> TaskApi | None:
        """The surface of a task's `origin_kind`; None: it came from elsewhere."""
        return self._by_kind.get(kind)

    def of_endpoint(self, endpoint: str, field: str = "endpoint") -> TaskApi:
        """The surface of a path. Raises INVALID_ARGUMENT naming `field`."""
        surface = self._by_endpoint.get(endpoint)
        if surface is None:
            raise invalid_field(field, f"must be one of {', '.join(self._by_endpoint)}")
        return surface


AskedT = TypeVar("AskedT", bound=HandledRequest)


@dataclass(frozen=True, slots=True)
class _Translated:
    spec: task_pb2.TaskSpec
    media: RequestMedia


class JsonTaskApi(ABC, Generic[AskedT]):
    """A surface whose requests are JSON of one model; see `gateway.tasks.task_api.TaskApi`."""

    kind: str
    endpoint: str
    operation: Operation
    schema: type[AskedT]

    def __init__(self, deps: InferenceDeps) -> None:
        self._deps = deps

    def spec(self, raw: bytes, about: SpecContext) -> task_pb2.TaskSpec:
        """See Surface.spec."""
        translated = self._translated(raw, about)
        if translated.media.addresses:
            field = translated.media.addresses[0].field
            raise invalid_field(_within(about.field, field), "must be a data: URL: addresses are not fetched here")
        return translated.spec

    async def supplied_spec(self, raw: bytes, about: SpecContext) -> task_pb2.TaskSpec:
        """See Surface.supplied_spec."""
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

    def _tenant_and_id(self, raw: bytes) -> AskedT:
        return parse(self.schema, raw, max_depth=self._deps.config.limits.max_json_depth)

    @abstractmethod
    def answer(self, origin: bytes, task: Task, outputs: Iterable[task_pb2.TaskOutput]) -> bytes:
        """See Surface.answer."""

    @abstractmethod
    def _model(self, params: AskedT) -> str:
        """The name that is asked for."""

    @abstractmethod
    def _payload(self, params: AskedT, media: RequestMedia) -> TaskPayload:
        """What the mesh is asked. Raises INVALID_ARGUMENT naming the field."""


def answer_identity(prefix: str, task: Task) -> AnswerIdentity:
    """The id and birth of a task's answer: the same whenever somebody asks for it."""
    own = task.id.removeprefix(f"{TASK_PREFIX}-")
    return AnswerIdentity(answer_id=f"{prefix}-{own}", created=int(task.created_at.timestamp()), model=task.model)


def built(
    answer: AnswerBuilder,
    outputs: Iterable[task_pb2.TaskOutput],
    warnings: Sequence[warning_pb2.Warning] = (),
) -> bytes:
    """An answer of what is kept, with warnings of the edge's own beside those of the runner."""
    own = [event_pb2.InferenceEvent(warning=warning) for warning in warnings]
    for output in outputs:
        for event in output.events:
            answer.add([event])
            if own and event.HasField("started"):
                answer.add(own)
    return answer.body()


def _renamed(error: FieldError, outer: str) -> FieldError:
    """Header names stay; fields of the body are told with where the body is."""
    if not outer or error.field.startswith("X-"):
        return error
    words = error.message.removeprefix(f"{error.field}: ")
    return FieldError(_within(outer, error.field), words, error.reason)


def _within(outer: str, field: str) -> str:
    return f"{outer}.{field}" if outer else field
