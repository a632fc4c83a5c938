"""The registry over gRPC: translates documents to messages and back."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import grpc

from weft.api.registry.v1 import (
    declaration_service_pb2,
    declaration_service_pb2_grpc,
    event_pb2,
    model_pb2,
    pool_pb2,
    registry_service_pb2,
    registry_service_pb2_grpc,
    runner_pb2,
    settings_service_pb2,
    settings_service_pb2_grpc,
)
from weft.api.registry.v1.declaration_service_pb2 import ApplyResult
from weft.api.registry.v1.settings_pb2 import MeshSettings
from weft.dispatch.fleet import FleetSource
from weft.documents.field_names import declared_field, document_field
from weft.documents.kinds import record_in
from weft.documents.resource_kinds import ResourceKind
from weft.documents.resources import AnyDocument, ModelDocument, model_document, observed_document, to_declaration
from weft.kernel.channels.rpc import calling, was_answered
from weft.kernel.errors.error_tree import FieldError, WeftError, with_field
from weft.kernel.errors.reasons import REGISTRY_AWAY, Reason


class RegistryCalls:
    """Calls of one client. Every failure is a WeftError, with field names of the HTTP API."""

    def __init__(self, callers_field: Callable[[str], str], *, timeout_seconds: float) -> None:
        """`callers_field` translates the field names of messages; `timeout_seconds` bounds each call."""
        self._callers_field = callers_field
        self._timeout_seconds = timeout_seconds

    async def call(self, method: Any, request: Any, timeout_seconds: float | None = None) -> Any:
        """Returns the answer of a unary call; `timeout_seconds` replaces the default.

        Raises SERVICE_UNAVAILABLE when the registry is unreachable or cannot serve, DEADLINE_EXCEEDED at the timeout.
        """
        timeout_seconds = timeout_seconds or self._timeout_seconds
        with self._explained(timeout_seconds):
            return await method(request, timeout=timeout_seconds)

    async def opened(self, call: Any) -> None:
        """Returns once the registry has accepted a stream. Raises as `call`."""
        try:
            with self._explained(self._timeout_seconds):
                async with asyncio.timeout(self._timeout_seconds):
                    await call.initial_metadata()
        except TimeoutError:
            message = f"the registry did not answer within {self._timeout_seconds:g} seconds"
            raise WeftError(Reason.DEADLINE_EXCEEDED, message) from None

    async def follow(self, call: Any, *, is_endless: bool = False) -> AsyncGenerator[Any]:
        """Yields the messages of a stream. The call ends with the iterator.

        Raises as `call`, and SERVICE_UNAVAILABLE at the end of a stream that `is_endless`.
        """
        try:
            with self._explained(self._timeout_seconds):
                async for response in call:
                    yield response
        finally:
            call.cancel()
        if is_endless:
            raise WeftError(Reason.SERVICE_UNAVAILABLE, "the registry ended the watch; watch again")

    @contextmanager
    def _explained(self, timeout_seconds: float) -> Iterator[None]:
        """Raises the failure of a call as a WeftError, also if its channel is closed under it."""
        try:
            with calling(Reason.SERVICE_UNAVAILABLE):
                yield
        except WeftError as error:
            raise self._error(error, timeout_seconds) from error.__cause__

    def _error(self, found: WeftError, timeout_seconds: float) -> WeftError:
        if found.reason in REGISTRY_AWAY:
            # Only without an answer is it a matter of the network, and not, for example, of a full disk.
            said = "the registry cannot be reached; models continue to answer without it"
            return WeftError(
                Reason.SERVICE_UNAVAILABLE,
                found.message if was_answered(found) else said,
                retry_after_seconds=found.retry_after_seconds,
            )
        if found.reason is Reason.DEADLINE_EXCEEDED and "operation" not in found.metadata:
            return WeftError(
                found.reason,
                f"the registry did not answer within {timeout_seconds:g} seconds; a change may take place nevertheless",
            )
        if isinstance(found, FieldError):
            return with_field(found, self._callers_field(found.field))
        if "field" in found.metadata:
            found.metadata["field"] = self._callers_field(found.metadata["field"])
        return found


_BODY_FIELDS = {"lifetime": "lifetimeSeconds", "grace": "graceSeconds"}


class RegistryService:
    """The registry's keys, secrets or join tokens: the methods of a stub, which raise as `RegistryCalls.call`."""

    def __init__(self, stub: Any, *, timeout_seconds: float) -> None:
        self._stub = stub
        self._calls = RegistryCalls(lambda field: _BODY_FIELDS.get(field, field), timeout_seconds=timeout_seconds)

    def __getattr__(self, method: str) -> Callable[[Any], Awaitable[Any]]:
        return partial(self._calls.call, getattr(self._stub, method))


APPLY_TIMEOUT_SECONDS = 60.0
FORCED_DELETE_TIMEOUT_SECONDS = 120.0
"""Timeout of a forced delete; the registry waits less for the model's requests to end."""
_OUTCOMES = frozenset(ApplyResult.Outcome.values()) - {ApplyResult.OUTCOME_UNSPECIFIED}


Names = tuple[str, ...] | None
"""Names to show, each exact or a prefix followed by `*`; None: all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourcePage:
    """A page of resources of a kind, sorted by name."""

    documents: Sequence[AnyDocument]
    next_page_token: str
    """Empty on the last page."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Author:
    """Who declares resources."""

    name: str = ""
    """Owner of created resources; empty: none."""
    own_only: bool = False
    """Whether it may only change the owner of its own resources, and only own resources that it creates."""


NO_AUTHOR = Author()
"""Author of declarations by callers without a key."""


class RegistryClient:
    """Client of the registry's resources. `fleet` adds a model's state on its runner, which the registry does not have.

    Every method raises the registry's WeftError, SERVICE_UNAVAILABLE if the registry cannot be reached, and
    DEADLINE_EXCEEDED if it does not answer in time.
    """

    def __init__(self, registry: grpc.aio.Channel, fleet: FleetSource, *, timeout_seconds: float) -> None:
        # The generated code types stubs as synchronous.
        self._resources: Any = registry_service_pb2_grpc.RegistryServiceStub(registry)
        self._declarations: Any = declaration_service_pb2_grpc.DeclarationServiceStub(registry)
        self._settings: Any = settings_service_pb2_grpc.SettingsServiceStub(registry)
        self._fleet = fleet
        self._calls = RegistryCalls(_callers_field, timeout_seconds=timeout_seconds)

    async def list_page(
        self, kind: ResourceKind, page_size: int, page_token: str, labels: str = "", names: Names = None
    ) -> ResourcePage:
        """Returns a page of the resources of a kind; `page_size` 0 means the registry's default."""
        request = registry_service_pb2.ListResourcesRequest(
            kind=kind.value, page_size=page_size, page_token=page_token, labels=labels, names=names or ()
        )
        found = await self._calls.call(self._resources.ListResources, request)
        documents = [self._document(kind, record_in(each)) for each in found.resources]
        return ResourcePage(documents=documents, next_page_token=found.next_page_token)

    async def get(self, kind: ResourceKind, name: str) -> AnyDocument:
        """Returns one resource."""
        request = registry_service_pb2.GetResourceRequest(kind=kind.value, name=name)
        return self._document(kind, record_in((await self._calls.call(self._resources.GetResource, request)).resource))

    def _document(self, kind: ResourceKind, message: Any) -> AnyDocument:
        return self._model(message) if kind is ResourceKind.MODEL else observed_document(kind, message)

    async def members(self, model: str) -> tuple[pool_pb2.Pool, Sequence[ModelDocument]]:
        """Returns the pool of a model, and the documents of its members."""
        request = registry_service_pb2.GetModelMembersRequest(name=model)
        pool = (await self._calls.call(self._resources.GetModelMembers, request)).pool
        return pool, [self._model(member) for member in pool.members]

    async def list_events(
        self, wanted: registry_service_pb2.ListEventsRequest
    ) -> registry_service_pb2.ListEventsResponse:
        """Returns the newest events, oldest first."""
        found: registry_service_pb2.ListEventsResponse = await self._calls.call(self._resources.ListEvents, wanted)
        return found

    def watch(self) -> AsyncGenerator[registry_service_pb2.WatchResponse]:
        """Yields a snapshot of all resources, then every change, until closed. Also raises WATCH_LAGGED."""
        return self._calls.follow(self._resources.Watch(registry_service_pb2.WatchRequest()), is_endless=True)

    async def follow_events(self, past: int) -> AsyncGenerator[event_pb2.Event | None]:
        """Yields the newest `past` events, oldest first, then None, then every new one, until closed."""
        call = self._resources.WatchEvents(registry_service_pb2.WatchEventsRequest())
        try:
            # Its headers mean that it listens, so that no event is lost between the list and the watch.
            await self._calls.opened(call)
            last = 0
            for event in (await self.list_events(registry_service_pb2.ListEventsRequest(limit=past))).events:
                last = event.sequence
                yield event
            yield None
            async with aclosing(self._calls.follow(call, is_endless=True)) as responses:
                async for response in responses:
                    if response.event.sequence > last:
                        yield response.event
        finally:
            call.cancel()

    async def watch_events(self, wanted: registry_service_pb2.WatchEventsRequest) -> AsyncGenerator[event_pb2.Event]:
        """Yields new events until closed."""
        call = self._resources.WatchEvents(wanted)
        async with aclosing(self._calls.follow(call, is_endless=True)) as responses:
            async for response in responses:
                yield response.event

    async def apply(
        self,
        documents: Sequence[AnyDocument],
        *,
        dry_run: bool,
        adopt: bool,
        author: Author = NO_AUTHOR,
        expected: Sequence[AnyDocument] = (),
    ) -> Sequence[ApplyResult]:
        """Brings all resources to their declared state, or none; `expected`: the document as read, of each resource."""
        request = declaration_service_pb2.ApplyRequest(
            declarations=[to_declaration(document) for document in documents],
            dry_run=dry_run,
            adopt=adopt,
            requested_by=author.name,
            own_only=author.own_only,
            expected=[to_declaration(document) for document in expected],
        )
        answer = await self._calls.call(self._declarations.Apply, request, APPLY_TIMEOUT_SECONDS)
        return [_known(result) for result in answer.results]

    async def delete(self, kind: ResourceKind, name: str, *, force: bool, requested_by: str) -> None:
        """Removes a resource; `force`: unload its loaded models first."""
        request = declaration_service_pb2.DeleteRequest(
            kind=kind.value, name=name, force=force, requested_by=requested_by
        )
        timeout_seconds = FORCED_DELETE_TIMEOUT_SECONDS if force else None
        await self._calls.call(self._declarations.Delete, request, timeout_seconds)

    async def settings(self) -> MeshSettings:
        """Returns the mesh's settings."""
        request = settings_service_pb2.GetSettingsRequest()
        found: MeshSettings = (await self._calls.call(self._settings.GetSettings, request)).settings
        return found

    async def update_settings(self, settings: MeshSettings) -> MeshSettings:
        """Updates the mesh's settings, all but an unset `journal`; returns them once they are stored."""
        request = settings_service_pb2.UpdateSettingsRequest(
            allow_cloud_fallback=settings.allow_cloud_fallback, journal=settings.journal
        )
        updated: MeshSettings = (await self._calls.call(self._settings.UpdateSettings, request)).settings
        return updated

    def _model(self, model: model_pb2.Model) -> ModelDocument:
        return model_document(model, self._instance_of(model))

    def _instance_of(self, model: model_pb2.Model) -> runner_pb2.InstanceState | None:
        """Returns the model's state on its runner; None: unknown."""
        runner = self._fleet.view.runners.get(model.runner)
        instance = None if runner is None else runner.instances.get(model.manifest.name)
        if runner is None or instance is None or not runner.active:
            return None
        return instance


def _known(result: ApplyResult) -> ApplyResult:
    if result.outcome not in _OUTCOMES:
        raise WeftError(Reason.INTERNAL, "the registry returned an unknown outcome; it may have another version")
    return result


def _callers_field(field: str) -> str:
    """Returns the HTTP name of a field of a request to the registry."""
    found = declared_field(field)
    if found is None:
        return document_field(field)
    index, own = found
    return f"documents[{index}].{own}" if own else f"documents[{index}]"
