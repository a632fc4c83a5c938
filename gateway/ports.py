"""The registry as a port of the gateway: `gateway.resources.registry_client` implements it; tests script it."""

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Protocol

from weft.api.registry.v1 import event_pb2, pool_pb2, profile_service_pb2, registry_service_pb2, settings_pb2
from weft.api.registry.v1.declaration_service_pb2 import ApplyResult
from weft.documents.resource_kinds import ResourceKind
from weft.documents.resources import AnyDocument, ModelDocument

Names = tuple[str, ...] | None
"""Names that are shown, each a name or a beginning and `*`; None: all."""


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
    """The name that becomes the owner of what is created; empty: it owns nothing."""
    own_only: bool = False
    """Whether it may only change the owner of what it owns, and own what it creates."""


NOBODY = Author()
"""Author of what callers without a key declare."""


class RegistryPort(Protocol):
    """The registry's resources; see `gateway.resources.registry_client.RegistryClient`.

    Every method raises the WeftError that the registry answers, SERVICE_UNAVAILABLE when it cannot be reached, and
    DEADLINE_EXCEEDED when it does not answer in time.
    """

    async def list_page(
        self, kind: ResourceKind, page_size: int, page_token: str, labels: str = "", names: Names = None
    ) -> ResourcePage:
        """Returns a page of the resources of a kind; `page_size` 0 means the registry's default."""
        ...

    async def get(self, kind: ResourceKind, name: str) -> AnyDocument:
        """Returns one resource."""
        ...

    async def members(self, model: str) -> tuple[pool_pb2.Pool, Sequence[ModelDocument]]:
        """Returns the pool of a model, and the documents of its members."""
        ...

    async def list_events(
        self, wanted: registry_service_pb2.ListEventsRequest
    ) -> registry_service_pb2.ListEventsResponse:
        """Returns the newest events, oldest first."""
        ...

    def watch(self) -> AsyncGenerator[registry_service_pb2.WatchResponse]:
        """Yields a snapshot of all resources, then every change, until it is closed. Raises WATCH_LAGGED, too."""
        ...

    def follow_events(self, past: int) -> AsyncGenerator[event_pb2.Event | None]:
        """Yields the newest `past` events, oldest first, then None, then every new one until it is closed."""
        ...

    def watch_events(self, wanted: registry_service_pb2.WatchEventsRequest) -> AsyncGenerator[event_pb2.Event]:
        """Yields new events until it is closed."""
        ...

    async def apply(
        self,
        documents: Sequence[AnyDocument],
        *,
        dry_run: bool,
        adopt: bool,
        author: Author = NOBODY,
        expected: Sequence[AnyDocument] = (),
    ) -> Sequence[ApplyResult]:
        """Brings all resources to their declared state, or none; `expected`: what each was read as."""
        ...

    async def delete(self, kind: ResourceKind, name: str, *, force: bool) -> None:
        """Removes a resource; `force`: unload its loaded models first."""
        ...

    async def save_profile(self, wanted: profile_service_pb2.SaveProfileRequest) -> ApplyResult:
        """Declares a profile of what is now."""
        ...

    async def switch_profile(
        self, wanted: profile_service_pb2.SwitchProfileRequest
    ) -> profile_service_pb2.SwitchProfileResponse:
        """Switches to a profile; its loads and unloads have begun when it returns."""
        ...

    async def settings(self) -> settings_pb2.MeshSettings:
        """Returns the mesh's settings."""
        ...

    async def update_settings(self, settings: settings_pb2.MeshSettings) -> settings_pb2.MeshSettings:
        """Updates the mesh's settings, all but an unset `journal`; returns them once they are stored."""
        ...
