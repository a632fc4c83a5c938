"""A surface: what turns the JSON of a live route into a task, and what is kept of a task into that route's answer.

Whoever takes in requests that nobody waits for (tasks, lines of batches) needs both ways, and no request under way.
`gateway.tasks.surfaces` has those that there are.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

from starlette.types import Scope

from weft.api.router.v1 import task_pb2
from weft.durable.tasks import Task
from weft.kernel.errors import invalid_field


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


class Surface(Protocol):
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


class Surfaces:
    """Those of one gateway."""

    def __init__(self, surfaces: Iterable[Surface]) -> None:
        self._by_endpoint: Mapping[str, Surface] = MappingProxyType({each.endpoint: each for each in surfaces})
        self._by_kind: Mapping[str, Surface] = MappingProxyType(
            {each.kind: each for each in self._by_endpoint.values()}
        )

    @property
    def endpoints(self) -> tuple[str, ...]:
        """The paths that there are surfaces for."""
        return tuple(self._by_endpoint)

    def of_kind(self, kind: str) -> Surface | None:
        """The surface of a task's `origin_kind`; None: it came from elsewhere."""
        return self._by_kind.get(kind)

    def of_endpoint(self, endpoint: str, field: str = "endpoint") -> Surface:
        """The surface of a path. Raises INVALID_ARGUMENT naming `field`."""
        surface = self._by_endpoint.get(endpoint)
        if surface is None:
            raise invalid_field(field, f"must be one of {', '.join(self._by_endpoint)}")
        return surface
