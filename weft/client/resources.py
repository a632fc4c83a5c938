"""A synchronous client of the registry and its resources as documents.

from weft.client.resources import connect_registry

with connect_registry() as registry:
    for model in registry.documents(ResourceKind.MODEL):
        print(model.name, model.state)
"""

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any, cast

import grpc
from typing_extensions import override

from weft.api.registry.v1 import (
    declaration_service_pb2,
    declaration_service_pb2_grpc,
    event_pb2,
    profile_service_pb2,
    profile_service_pb2_grpc,
    registry_service_pb2,
    registry_service_pb2_grpc,
    runner_pb2,
    settings_service_pb2,
    settings_service_pb2_grpc,
)
from weft.api.registry.v1.declaration_service_pb2 import ApplyResult
from weft.api.registry.v1.profile_service_pb2 import SwitchProfileResponse
from weft.api.registry.v1.resource_pb2 import ResourceDocument
from weft.api.registry.v1.settings_pb2 import MeshSettings
from weft.api.runner.v1 import runner_service_pb2, runner_service_pb2_grpc
from weft.api.runner.v1.load_pb2 import LoadOptions
from weft.client._channel import MeshServiceClient, ServiceClient, open_mesh_channel, registry_failure
from weft.client.operations import requester
from weft.documents.kinds import record_in
from weft.documents.resource_kinds import ResourceKind
from weft.documents.resources import (
    AnyDocument,
    ModelDocument,
    PoolDocument,
    RunnerDocument,
    instance_of,
    model_document,
    observed_document,
    pool_document,
    to_declaration,
)
from weft.kernel.address import metadata_of
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason
from weft.kernel.request import JournalMode
from weft.kernel.rpc import error_from_call

CALL_TIMEOUT_SECONDS = 5.0
APPLY_TIMEOUT_SECONDS = 60.0
FORCED_DELETE_TIMEOUT_SECONDS = 120.0
"""Timeout of a forced delete: the registry waits less than this for the model's requests to end."""
PROFILE_TIMEOUT_SECONDS = 60.0
"""Timeout of a save or a switch: runners with loaded models are asked how they were loaded."""
PAGE_SIZE = 1000

pb = registry_service_pb2


class Registry(MeshServiceClient):
    """Calls on one registry. Every failure is a WeftError with a reason."""

    service = "registry"
    call_timeout_seconds = CALL_TIMEOUT_SECONDS

    def __init__(self, target: str, timeout_seconds: float | None = None) -> None:
        super().__init__(target, timeout_seconds)
        self._stub = registry_service_pb2_grpc.RegistryServiceStub(self._channel)
        self._declarations = declaration_service_pb2_grpc.DeclarationServiceStub(self._channel)
        self._profiles = profile_service_pb2_grpc.ProfileServiceStub(self._channel)
        self._settings = settings_service_pb2_grpc.SettingsServiceStub(self._channel)

    def documents(self, kind: ResourceKind) -> list[AnyDocument]:
        """Returns the resources of one kind, by name."""
        if kind is not ResourceKind.MODEL:
            return [observed_document(kind, message) for message in self._messages(kind)]
        runners = {runner.name: runner for runner in self._messages(ResourceKind.RUNNER)}
        return [
            model_document(model, instance_of(model, runners.get(model.runner)))
            for model in self._messages(ResourceKind.MODEL)
        ]

    def names(self, kind: ResourceKind) -> Iterator[str]:
        """Yields the names of the resources of one kind, fetched lazily."""
        return (resource.name for resource in self._resources(kind))

    def document(self, kind: ResourceKind, name: str) -> AnyDocument:
        """Returns one resource. Raises NOT_FOUND or MODEL_NOT_FOUND."""
        message = self._message(kind, name)
        if kind is not ResourceKind.MODEL:
            return observed_document(kind, message)
        return model_document(message, instance_of(message, self._runner_of(message.runner)))

    def members(self, model: str) -> PoolDocument:
        """Returns the pool of a model. Raises MODEL_NOT_FOUND."""
        response = self._call(self._stub.GetModelMembers, pb.GetModelMembersRequest(name=model))
        return pool_document(response.pool)

    def apply(
        self,
        documents: Iterable[AnyDocument],
        *,
        dry_run: bool = False,
        adopt: bool = False,
        expected: Iterable[AnyDocument] = (),
    ) -> list[ApplyResult]:
        """Declares all of `documents`, or none if one is refused; `adopt` takes over what runners published.

        `expected`: what each was read as. Raises RESOURCE_CHANGED when one is declared otherwise by now.
        """
        request = declaration_service_pb2.ApplyRequest(
            declarations=[to_declaration(document) for document in documents],
            dry_run=dry_run,
            adopt=adopt,
            expected=[to_declaration(document) for document in expected],
        )
        response = self._call(self._declarations.Apply, request, APPLY_TIMEOUT_SECONDS)
        return list(response.results)

    def delete(self, kind: ResourceKind, name: str, *, force: bool = False) -> None:
        """Deletes a resource; `force` unloads it first. Raises NOT_FOUND, MODEL_NOT_FOUND or RESOURCE_IN_USE."""
        request = declaration_service_pb2.DeleteRequest(kind=kind.value, name=name, force=force)
        self._call(self._declarations.Delete, request, FORCED_DELETE_TIMEOUT_SECONDS if force else None)

    def save_profile(
        self, name: str, *, description: str = "", leave_others: bool = False, dry_run: bool = False
    ) -> ApplyResult:
        """Declares a profile of what is now; an empty description stays as it is.

        `leave_others`: a switch to it leaves models alone that are not loaded now, instead of unloading them.
        """
        request = profile_service_pb2.SaveProfileRequest(
            name=name, description=description, leave_others=leave_others, dry_run=dry_run
        )
        result: ApplyResult = self._call(self._profiles.SaveProfile, request, PROFILE_TIMEOUT_SECONDS).result
        return result

    def switch_profile(self, name: str, *, dry_run: bool = False) -> SwitchProfileResponse:
        """Declares what a profile declares, and begins its loads and unloads; does not wait for them."""
        request = profile_service_pb2.SwitchProfileRequest(name=name, dry_run=dry_run, requested_by=requester("cli"))
        found: SwitchProfileResponse = self._call(self._profiles.SwitchProfile, request, PROFILE_TIMEOUT_SECONDS)
        return found

    def settings(self) -> MeshSettings:
        """Returns the settings of the mesh."""
        response = self._call(self._settings.GetSettings, settings_service_pb2.GetSettingsRequest())
        found: MeshSettings = response.settings
        return found

    def update_settings(
        self, *, allow_cloud_fallback: bool | None = None, journal: JournalMode = JournalMode.UNSET
    ) -> MeshSettings:
        """Changes the settings that are given; returns the new settings."""
        request = settings_service_pb2.UpdateSettingsRequest(
            allow_cloud_fallback=allow_cloud_fallback,
            journal=journal.value,  # type: ignore[arg-type]  # same numbers
        )
        updated: MeshSettings = self._call(self._settings.UpdateSettings, request).settings
        return updated

    def events(self, kind: ResourceKind | None = None, name: str = "", limit: int = 0) -> list[event_pb2.Event]:
        """Returns recent events of one resource, one kind, or all, oldest first."""
        request = pb.ListEventsRequest(kind=kind or "", name=name, limit=limit)
        return list(self._call(self._stub.ListEvents, request).events)

    def watch(self, timeout_seconds: float | None = None) -> Iterator[registry_service_pb2.WatchResponse]:
        """Yields the snapshot, then every change. Raises WATCH_LAGGED or SERVICE_UNAVAILABLE when it ends."""
        return self._stream(self._stub.Watch(pb.WatchRequest(), timeout=timeout_seconds))

    def watch_events(self, kind: ResourceKind | None = None, name: str = "") -> Iterator[event_pb2.Event]:
        """Yields new events. Raises WATCH_LAGGED or SERVICE_UNAVAILABLE when it ends."""
        call = self._stub.WatchEvents(pb.WatchEventsRequest(kind=kind or "", name=name))
        return (response.event for response in self._stream(call))

    @override
    def _stream(self, call: Any) -> Iterator[Any]:
        yield from super()._stream(call)
        raise WeftError(Reason.SERVICE_UNAVAILABLE, f"the mesh at {self._target} ended the watch")

    def _runner_of(self, name: str) -> runner_pb2.Runner | None:
        if not name:
            return None
        try:
            return cast("runner_pb2.Runner", self._message(ResourceKind.RUNNER, name))
        except WeftError as error:
            if error.reason is Reason.NOT_FOUND:
                return None
            raise

    def _message(self, kind: ResourceKind, name: str) -> Any:
        return record_in(self._call(self._stub.GetResource, pb.GetResourceRequest(kind=kind.value, name=name)).resource)

    def _messages(self, kind: ResourceKind) -> Iterator[Any]:
        return map(record_in, self._resources(kind))

    def _resources(self, kind: ResourceKind) -> Iterator[ResourceDocument]:
        """Yields every resource of a kind, from all pages."""
        request = pb.ListResourcesRequest(kind=kind.value, page_size=PAGE_SIZE)
        while True:
            response = self._call(self._stub.ListResources, request)
            yield from response.resources
            if not response.next_page_token:
                return
            request.page_token = response.next_page_token

    @override
    def _failure(self, error: grpc.RpcError) -> WeftError:
        return registry_failure(error, self._target)


connect_registry = Registry.connect


def describe_runner(address: str, log_line_count: int = 0) -> runner_service_pb2.DescribeResponse | None:
    """Returns a runner's description of itself; None: it is unreachable."""
    with open_mesh_channel(address) as channel:
        stub = runner_service_pb2_grpc.RunnerServiceStub(channel)
        request = runner_service_pb2.DescribeRequest(log_line_count=log_line_count)
        try:
            return stub.Describe(request, timeout=CALL_TIMEOUT_SECONDS, metadata=metadata_of(address))
        except grpc.RpcError:
            return None


def connect_runner_of(registry: Registry, model: str) -> "RunnerOfModel":
    """Connects to the runner of a model. Raises MODEL_NOT_FOUND, or NO_RUNNER_AVAILABLE when none serves it."""
    document = registry.document(ResourceKind.MODEL, model)
    assert isinstance(document, ModelDocument)
    name = document.observed.runner if document.observed is not None else ""
    if not name:
        raise WeftError(Reason.NO_RUNNER_AVAILABLE, f"no runner serves {model} now")
    runner = registry.document(ResourceKind.RUNNER, name)
    assert isinstance(runner, RunnerDocument)
    observed = runner.observed
    if observed is None or observed.status != runner_pb2.Runner.STATUS_ACTIVE:
        raise WeftError(Reason.NO_RUNNER_AVAILABLE, f"the runner {name}, which serves {model}, is not there")
    return RunnerOfModel(observed.address, document.name, observed.runtime)


class RunnerOfModel(ServiceClient):
    """Calls about one model to its runner, behind a relay or not. Every failure is a WeftError with a reason."""

    def __init__(self, address: str, model: str, runtime: str = "") -> None:
        super().__init__(address, CALL_TIMEOUT_SECONDS)
        self.runtime = runtime
        """The runtime of the model, such as "llama_server"."""
        self._model = model
        self._metadata = metadata_of(address)
        self._stub = runner_service_pb2_grpc.RunnerServiceStub(self._channel)

    def load_options(self) -> LoadOptions:
        """Returns the options of its present or next load."""
        request = runner_service_pb2.DescribeRequest()
        described = self._call(partial(self._stub.Describe, metadata=self._metadata), request)
        found = (one.load_options for one in described.instances if one.model == self._model)
        return next(found, LoadOptions())

    def log_lines(self, line_count: int, *, follow: bool) -> Iterator[runner_service_pb2.TailLogsResponse]:
        """Yields the last lines of its backend's output, and with `follow` every new one."""
        request = runner_service_pb2.TailLogsRequest(model=self._model, line_count=line_count, follow=follow)
        return self._stream(self._stub.TailLogs(request, metadata=self._metadata))

    @override
    def _failure(self, error: grpc.RpcError) -> WeftError:
        return error_from_call(error, Reason.WORKER_LOST)
