"""A scripted mesh on a real gRPC server, and the `weft` command run against it in this process."""

import json
import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from unittest.mock import patch

import grpc
from grpc_status import rpc_status
from kit.home_gateway import home_gateway
from kit.resources import declared, page, snapshot
from typer.testing import CliRunner, Result

from weft.api.common.v1 import event_pb2, receipt_pb2
from weft.api.registry.v1 import (
    agent_pb2,
    alias_pb2,
    declaration_service_pb2,
    declaration_service_pb2_grpc,
    key_service_pb2,
    key_service_pb2_grpc,
    lease_pb2,
    lease_service_pb2,
    lease_service_pb2_grpc,
    model_pb2,
    registry_service_pb2,
    registry_service_pb2_grpc,
    route_pb2,
    runner_pb2,
    settings_pb2,
    settings_service_pb2,
    settings_service_pb2_grpc,
)
from weft.api.registry.v1 import (
    event_pb2 as registry_event_pb2,
)
from weft.api.router.v1 import inference_service_pb2, inference_service_pb2_grpc
from weft.api.runner.v1 import load_pb2, runner_service_pb2, runner_service_pb2_grpc
from weft.documents.codec import document_of
from weft.documents.kinds import KINDS, packed
from weft.documents.mesh_state import MeshState, pool_message, pool_of
from weft.documents.resource_kinds import ResourceKind
from weft.documents.resources import declared_document, plain
from weft.kernel.channels.rpc import SERVER_OPTIONS, error_to_status
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.values.unknown_names import unknown_name
from weft_app.cli.follow import WATCH
from weft_app.cli.main import app
from weft_app.cli.mesh_api import MeshApi

pb = registry_service_pb2
APPLY = declaration_service_pb2.ApplyResult


def refuse_with(context: Any, error: WeftError) -> None:
    """Ends the call with an error."""
    refuse(context, error.reason, error.message, **error.metadata)


def refuse(context: Any, reason: Reason, message: str, **metadata: str) -> None:
    """End a call as a service of the mesh does."""
    context.abort_with_status(rpc_status.to_status(error_to_status(WeftError(reason, message, metadata=metadata))))


@dataclass
class ScriptedMesh:
    """What the servicers tell, and what they were asked."""

    home: Path
    state: MeshState = field(default_factory=MeshState)
    events: list[registry_event_pb2.Event] = field(default_factory=list)
    changes: "queue.Queue[Any]" = field(default_factory=queue.Queue)
    """What a watch tells after its snapshot: changes, an outage of the registry, or another error that ends it."""
    denies_routes: bool = False
    new_events: list[registry_event_pb2.Event | WeftError] = field(default_factory=list)
    """What a watch of events tells after those that there are: events, or an error that ends it."""
    reborn: list[registry_event_pb2.Event] | None = None
    """The events of a registry that was away: it counts anew."""
    applied: list[declaration_service_pb2.ApplyRequest] = field(default_factory=list)
    settings: settings_pb2.MeshSettings = field(
        default_factory=lambda: settings_pb2.MeshSettings(allow_cloud_fallback=True, revision=1)
    )
    apply_error: WeftError | None = None
    chat_error: WeftError | None = None
    chat_asides: list[event_pb2.InferenceEvent] = field(default_factory=list)
    """What an answer says beside its text."""
    asked: list[Any] = field(default_factory=list)
    """Requests for inference."""
    media: list[Any] = field(default_factory=list)
    """What answers a request for images, a transcription or speech: events, parts of a recording, or an error."""
    loaded: set[str] = field(default_factory=set)
    """Models that are deleted by force alone."""
    hosts: list[lease_service_pb2.HostMemory] = field(default_factory=list)
    """Accelerators and leases."""
    releases: list[lease_service_pb2.ReleaseProgramLeaseRequest] = field(default_factory=list)
    keys: list[key_service_pb2.Key] = field(default_factory=list)
    watches: int = 0
    gateways: ExitStack = field(default_factory=ExitStack)
    _is_served: bool = False

    def add(
        self, *resources: model_pb2.Model | agent_pb2.Agent | runner_pb2.Runner | route_pb2.Route | alias_pb2.Alias
    ) -> None:
        for resource in resources:
            match resource:
                case model_pb2.Model():
                    self.state.models[resource.manifest.name] = resource
                case agent_pb2.Agent():
                    self.state.declared[ResourceKind.AGENT][resource.manifest.name] = resource
                case alias_pb2.Alias():
                    self.state.declared[ResourceKind.ALIAS][resource.manifest.name] = resource
                case route_pb2.Route():
                    self.state.declared[ResourceKind.ROUTE][resource.manifest.name] = resource
                case _:
                    self.state.runners[resource.name] = resource

    def run(self, *arguments: str, stdin: str | bytes | None = None) -> Result:
        """A `weft` command to its end; one that watches gets Ctrl-C at the end of the script."""
        self.serve()
        stream = MeshApi.stream

        def told(api: MeshApi, path: str, deadline: float | None = None, **query: Any) -> Iterator[Any]:
            if path == WATCH and query["kinds"] == "event":
                return self._stream_of_events()
            if path != WATCH:
                return stream(api, path, deadline, **query)
            return self._stream(query["kinds"].split(","), deadline)

        with patch.object(MeshApi, "stream", told):
            return CliRunner().invoke(app, arguments, input=stdin, env={"WEFT_HOME": str(self.home), "COLUMNS": "200"})

    def _stream(self, kinds: list[str], deadline: float | None) -> Iterator[Any]:
        """What the gateway's watch sends."""
        self.watches += 1
        state = MeshState()
        state.fold(self.snapshot())
        yield from _everything(state, kinds)
        while not self.changes.empty():
            told = self.changes.get()
            if isinstance(told, WeftError):
                if told.reason is not Reason.SERVICE_UNAVAILABLE:
                    raise told
                for kind in kinds:
                    yield {"kind": kind, "change": "unavailable", "message": told.message}
                    yield {"kind": kind, "change": "reset"}
                yield from _everything(state, kinds)
                continue
            response = pb.WatchResponse(revision=2, change=told)
            self.state.fold(response)
            for kind, name in sorted(state.fold(response)):
                found = state.document((kind, name))
                if kind in kinds:
                    change = {"change": "delete"} if found is None else {"change": "put", "object": plain(found)}
                    yield {"kind": kind.value, "name": name, **change}
        if deadline is None:
            raise KeyboardInterrupt
        time.sleep(max(0.0, deadline - time.monotonic()))

    def _stream_of_events(self) -> Iterator[Any]:
        """What the gateway's watch of events sends: those that there are already come again."""
        yield from (_put_event(event) for event in self.events)
        yield {"kind": "event", "change": "synced"}
        while self.new_events:
            told = self.new_events.pop(0)
            if isinstance(told, WeftError):
                self.events[:] = self.reborn or self.events
                raise told
            yield _put_event(told)
        raise KeyboardInterrupt

    def serve(self) -> None:
        """Starts the gateway, which knows of what the mesh has now; the first command does."""
        if not self._is_served:
            self._is_served = True
            address = json.loads((self.home / "run" / "up.json").read_text())["grpc"]
            self.gateways.enter_context(home_gateway(self.home, address, is_ready=True))

    def snapshot(self) -> pb.WatchResponse:
        runners = [pb.WatchedRunner(runner=runner) for runner in self.state.runners.values()]
        declared = (each for rows in self.state.declared.values() for each in rows.values())
        told = snapshot(*self.state.models.values(), *declared, runners=runners, settings=self.settings)
        return pb.WatchResponse(revision=1, snapshot=told)


def _put_event(event: registry_event_pb2.Event) -> dict[str, Any]:
    return {"kind": "event", "change": "put", "name": str(event.sequence), "object": document_of(event)}


def _everything(state: MeshState, kinds: list[str]) -> Iterator[Any]:
    for kind in kinds:
        for document in state.documents(ResourceKind(kind)):
            yield {"kind": kind, "change": "put", "name": document.name, "object": plain(document)}
        yield {"kind": kind, "change": "synced"}


class _Registry(registry_service_pb2_grpc.RegistryServiceServicer):
    def __init__(self, mesh: ScriptedMesh) -> None:
        self._mesh = mesh

    def ListResources(self, request: Any, context: Any) -> Any:  # noqa: N802
        if request.kind == "route" and self._mesh.denies_routes:
            refuse(context, Reason.PERMISSION_DENIED, "the key may not see routes")
        rows = self._rows(request.kind)
        if request.kind != "model":
            return page(rows.values())
        names, start = sorted(rows), int(request.page_token or 0)
        return page((rows[name] for name in names[start : start + 2]), str(start + 2) if names[start + 2 :] else "")

    def GetResource(self, request: Any, context: Any) -> Any:  # noqa: N802
        found = self._one(self._rows(request.kind), request.name, context, request.kind)
        return pb.GetResourceResponse(resource=packed(ResourceKind(request.kind), found))

    def _rows(self, kind: str) -> dict[str, Any]:
        state = self._mesh.state
        if kind == "pool":
            return {name: self._pool(name) for name in sorted({pool_of(model) for model in state.models.values()})}
        others: dict[str, dict[str, Any]] = {"model": state.models, "runner": state.runners}
        return others[kind] if kind in others else state.declared[ResourceKind(kind)]

    def GetModelMembers(self, request: Any, context: Any) -> Any:  # noqa: N802
        model = self._one(self._mesh.state.models, request.name, context, "model")
        return pb.GetModelMembersResponse(pool=self._pool(pool_of(model)))

    def ListEvents(self, request: Any, context: Any) -> Any:  # noqa: N802
        wanted = [
            event
            for event in self._mesh.events
            if (not request.kind or event.kind == request.kind) and (not request.name or event.name == request.name)
        ]
        return pb.ListEventsResponse(events=wanted[-(request.limit or 100) :])

    def WatchEvents(self, request: Any, context: Any) -> Iterator[Any]:  # noqa: N802
        raise NotImplementedError

    def Watch(self, request: Any, context: Any) -> Iterator[Any]:  # noqa: N802
        yield self._mesh.snapshot()
        left = threading.Event()
        context.add_callback(left.set)
        left.wait()

    def _pool(self, name: str) -> Any:
        return pool_message(name, [model for model in self._mesh.state.models.values() if pool_of(model) == name])

    def _one(self, rows: dict[str, Any], name: str, context: Any, kind: str) -> Any:
        name = next((known for known, row in rows.items() if getattr(row, "id", "") == name != ""), name)
        if name not in rows:
            refuse_with(context, unknown_name(kind, name, rows))
        return rows[name]


class _Declarations(declaration_service_pb2_grpc.DeclarationServiceServicer):
    """Declarations with the registry's outcomes: rows are public, runners and pools only looked at."""

    def __init__(self, mesh: ScriptedMesh) -> None:
        self._mesh = mesh

    def Apply(self, request: Any, context: Any) -> Any:  # noqa: N802
        self._mesh.applied.append(request)
        if self._mesh.apply_error is not None:
            context.abort_with_status(rpc_status.to_status(error_to_status(self._mesh.apply_error)))
        for given, expected in zip(request.declarations, request.expected, strict=False):
            if self._known(given.kind, given.name) != expected:
                refuse(context, Reason.RESOURCE_CHANGED, f"the {given.kind} {given.name!r} was changed")
        results = [self._apply(declaration, request.dry_run) for declaration in request.declarations]
        return declaration_service_pb2.ApplyResponse(results=results)

    def Delete(self, request: Any, context: Any) -> Any:  # noqa: N802
        state = self._mesh.state
        others: dict[str, dict[str, Any]] = {"model": state.models, "runner": state.runners}
        rows = others[request.kind] if request.kind in others else state.declared[ResourceKind(request.kind)]
        users = [agent.manifest.model for agent in state.declared[ResourceKind.AGENT].values()]
        users += [name for route in state.declared[ResourceKind.ROUTE].values() for name in route.manifest.candidates]
        if request.kind == "model" and request.name in users:
            refuse(context, Reason.RESOURCE_IN_USE, f"the model {request.name!r} is in use")
        if request.name in rows and request.name in self._mesh.loaded and not request.force:
            refuse(context, Reason.RESOURCE_IN_USE, f"the model {request.name!r} is loaded")
        if rows.pop(request.name, None) is None:
            refuse_with(context, unknown_name("model", request.name, self._mesh.state.models))
        return declaration_service_pb2.DeleteResponse()

    def _apply(self, declaration: Any, dry_run: bool) -> Any:
        kind, name, wanted = declaration.kind, declaration.name, declared_document(declaration).declared
        before = self._known(kind, name)
        if kind in ("runner", "pool"):
            outcome = APPLY.OUTCOME_UNCHANGED if before is not None else APPLY.OUTCOME_UNSPECIFIED
        elif before is None:
            outcome = APPLY.OUTCOME_CREATED
        else:
            outcome = APPLY.OUTCOME_UNCHANGED if before == declaration else APPLY.OUTCOME_CONFIGURED
        if outcome in (APPLY.OUTCOME_CREATED, APPLY.OUTCOME_CONFIGURED) and not dry_run:
            self._store(kind, wanted)
        return APPLY(kind=kind, name=name, outcome=outcome, before=before, after=declaration)

    def _known(self, kind: str, name: str) -> Any:
        state = self._mesh.state
        if kind == "model" and name in state.models:
            found = state.models[name]
            return declared(model=model_pb2.ModelDeclaration(manifest=found.manifest, runner=found.declared_runner))
        if name in state.declared.get(ResourceKind(kind), ()):
            return declared(**{kind: state.declared[ResourceKind(kind)][name].manifest})
        if kind == "runner" and name in state.runners:
            return declared(runner=declaration_service_pb2.RunnerDeclaration(name=name))
        return declared(pool=declaration_service_pb2.PoolDeclaration(name=name)) if kind == "pool" else None

    def _store(self, kind: str, wanted: Any) -> None:
        if kind == "model":
            self._mesh.add(
                model_pb2.Model(
                    manifest=wanted.manifest,
                    declared_runner=wanted.runner,
                    kind=model_pb2.Model.KIND_PUBLIC,
                    status=model_pb2.Model.STATUS_INACTIVE,
                )
            )
        elif kind == "route":
            self._mesh.add(route_pb2.Route(manifest=wanted, status=route_pb2.Route.STATUS_INACTIVE))
        elif kind == "agent":
            self._mesh.add(
                agent_pb2.Agent(
                    manifest=wanted, kind=agent_pb2.Agent.KIND_PUBLIC, status=agent_pb2.Agent.STATUS_INACTIVE
                )
            )
        else:
            record: Any = KINDS[ResourceKind(kind)].record
            self._mesh.state.declared[ResourceKind(kind)][wanted.name] = record(manifest=wanted)


class _Settings(settings_service_pb2_grpc.SettingsServiceServicer):
    def __init__(self, mesh: ScriptedMesh) -> None:
        self._mesh = mesh

    def GetSettings(self, request: Any, context: Any) -> Any:  # noqa: N802
        return settings_service_pb2.GetSettingsResponse(settings=self._mesh.settings)

    def UpdateSettings(self, request: Any, context: Any) -> Any:  # noqa: N802
        if request.HasField("allow_cloud_fallback"):
            self._mesh.settings.allow_cloud_fallback = request.allow_cloud_fallback
            self._mesh.settings.revision += 1
        if request.journal:
            self._mesh.settings.journal = request.journal
            self._mesh.settings.revision += 1
        return settings_service_pb2.UpdateSettingsResponse(settings=self._mesh.settings)


class _Leases(lease_service_pb2_grpc.LeaseServiceServicer):
    def __init__(self, mesh: ScriptedMesh) -> None:
        self._mesh = mesh

    def ListHostMemory(self, request: Any, context: Any) -> lease_service_pb2.ListHostMemoryResponse:  # noqa: N802
        del request, context
        return lease_service_pb2.ListHostMemoryResponse(hosts=self._mesh.hosts)

    def ReleaseProgramLease(self, request: Any, context: Any) -> lease_service_pb2.ReleaseProgramLeaseResponse:  # noqa: N802
        self._mesh.releases.append(request)
        for host in self._mesh.hosts:
            for lease in host.leases:
                if lease.lease_id != request.lease_id:
                    continue
                if lease.holder.kind == lease_pb2.LeaseHolder.KIND_RUNNER:
                    refuse(context, Reason.RESOURCE_IN_USE, f"unload it: weft unload {lease.purpose}")
                lease.state = lease_pb2.Lease.STATE_RELEASING
                return lease_service_pb2.ReleaseProgramLeaseResponse(lease=lease)
        refuse(context, Reason.NOT_FOUND, "there is no lease of this id")
        raise AssertionError("refused")


class _Keys(key_service_pb2_grpc.KeyServiceServicer):
    def __init__(self, mesh: ScriptedMesh) -> None:
        self._mesh = mesh

    def ListKeys(self, request: Any, context: Any) -> key_service_pb2.ListKeysResponse:  # noqa: N802
        del request, context
        return key_service_pb2.ListKeysResponse(keys=self._mesh.keys)

    def CreateKey(self, request: Any, context: Any) -> key_service_pb2.CreateKeyResponse:  # noqa: N802
        del context
        key = key_service_pb2.Key(id=f"key{len(self._mesh.keys)}", description=request.description)
        key.expire_time.FromDatetime(datetime.now(UTC) + request.lifetime.ToTimedelta())
        self._mesh.keys.append(key)
        return key_service_pb2.CreateKeyResponse(key=key, text=f"weft_{key.id}_secret")


class _Runner(runner_service_pb2_grpc.RunnerServiceServicer):
    def Describe(self, request: Any, context: Any) -> Any:  # noqa: N802
        asked_for = dict(context.invocation_metadata()).get("weft-runner", "directly")
        instance = runner_service_pb2.InstanceDescription(
            model="qwen",
            quantizations=["q8_0"],
            process_id=4711,
            restart_count=2,
            last_restart_reason="it died",
            load_options=load_pb2.LoadOptions(quantization="q8_0", pin=True),
            log_lines=[f"asked for {asked_for}", "\x1b[31mred\x1b[0m"][: request.log_line_count],
            cache=runner_service_pb2.CacheFigures(
                stored_prompt_count=3,
                stored_bytes=57 * 1024**2,
                stored_limit_bytes=2 * 1024**3,
                kept_prompt_count=2,
                kept_bytes=3 * 1024**2,
                kept_limit_bytes=1024**3,
            ),
        )
        return runner_service_pb2.DescribeResponse(instances=[instance])

    def TailLogs(self, request: Any, context: Any) -> Iterator[Any]:  # noqa: N802
        del context
        yield runner_service_pb2.TailLogsResponse(lines=[f"engine of {request.model}"])


class _Inference(inference_service_pb2_grpc.InferenceServiceServicer):
    """Waits, wakes, and answers with the name that was asked for."""

    def __init__(self, mesh: ScriptedMesh) -> None:
        self._mesh = mesh

    def Chat(self, request: Any, context: Any) -> Iterator[Any]:  # noqa: N802
        self._mesh.asked.append(request)
        if self._mesh.chat_error is not None:
            refuse(context, self._mesh.chat_error.reason, self._mesh.chat_error.message)
        receipt = receipt_pb2.Receipt(request_id="req-1", host="box", attempts=[receipt_pb2.Attempt(runner="r1")])
        for event in (
            event_pb2.InferenceEvent(queued=event_pb2.Queued(position=1, reason="every slot is taken")),
            event_pb2.InferenceEvent(loading=event_pb2.Loading(progress=0.5, stage="waking")),
            *self._mesh.chat_asides,
            event_pb2.InferenceEvent(delta=event_pb2.Delta(text=f"I am {request.model}")),
            event_pb2.InferenceEvent(finished=event_pb2.Finished(receipt=receipt)),
        ):
            yield inference_service_pb2.ChatResponse(events=[event])

    def StreamImages(self, request: Any, context: Any) -> Iterator[Any]:  # noqa: N802
        for event in self._media(request, context):
            yield inference_service_pb2.StreamImagesResponse(events=[event])

    def StreamTranscription(self, request: Any, context: Any) -> Iterator[Any]:  # noqa: N802
        for event in self._media(request, context):
            yield inference_service_pb2.StreamTranscriptionResponse(events=[event])

    def Speak(self, request: Any, context: Any) -> Iterator[Any]:  # noqa: N802
        yield from self._media(request, context)

    def _media(self, request: Any, context: Any) -> Iterator[Any]:
        self._mesh.asked.append(request)
        for item in self._mesh.media:
            if isinstance(item, WeftError):
                refuse_with(context, item)
            yield item


@contextmanager
def served_home(home: Path, add: Callable[[grpc.Server], None]) -> Iterator[str]:
    """Yields the address of the servicers that `add` adds, written down in `home` like one of `weft up`."""
    (home / "run").mkdir(parents=True, exist_ok=True)
    server = grpc.server(ThreadPoolExecutor(max_workers=16), options=SERVER_OPTIONS)
    add(server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    (home / "run" / "up.json").write_text(json.dumps({"grpc": address}))
    server.start()
    try:
        yield address
    finally:
        server.stop(grace=None).wait()


@contextmanager
def scripted_mesh(home: Path, *, add: Callable[[grpc.Server], None] = lambda _: None) -> Iterator[ScriptedMesh]:
    """A mesh that says what it is told to say, written down in `home` like one of `weft up`.

    `add` adds further servicers.
    """
    mesh = ScriptedMesh(home)
    (home / "state").mkdir(parents=True)

    def add_all(server: grpc.Server) -> None:
        registry_service_pb2_grpc.add_RegistryServiceServicer_to_server(_Registry(mesh), server)
        declaration_service_pb2_grpc.add_DeclarationServiceServicer_to_server(_Declarations(mesh), server)
        settings_service_pb2_grpc.add_SettingsServiceServicer_to_server(_Settings(mesh), server)
        key_service_pb2_grpc.add_KeyServiceServicer_to_server(_Keys(mesh), server)  # type: ignore[abstract]  # see below
        lease_service_pb2_grpc.add_LeaseServiceServicer_to_server(_Leases(mesh), server)  # type: ignore[abstract]  # see below
        runner_service_pb2_grpc.add_RunnerServiceServicer_to_server(_Runner(), server)  # type: ignore[abstract]  # only what the CLI calls
        inference_service_pb2_grpc.add_InferenceServiceServicer_to_server(_Inference(mesh), server)  # type: ignore[abstract]  # see above
        add(server)

    with served_home(home, add_all), mesh.gateways:
        yield mesh
