"""The HTTP API's answers over gRPC: for homes without a gateway, and for keys, which not every gateway serves."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from typing import Any, Self

import grpc
from google.protobuf.json_format import ParseDict
from google.protobuf.message import Message
from typing_extensions import override

from weft.api.gateway.v1.mesh_router_pb2 import MeshRouterList
from weft.api.registry.v1.key_service_pb2 import RotateKeyResponse
from weft.client._channel import open_mesh_channel, registry_failure
from weft.client._home import Service, mesh_address
from weft.client.operations import requester
from weft.client.resources import Registry, describe_runner
from weft.dispatch.fleet import FleetView, apply_watch
from weft.dispatch.mesh_routers import mesh_routers
from weft.documents.codec import UNKNOWN, document_of
from weft.documents.computed import key_state
from weft.documents.resource_kinds import ResourceKind
from weft.documents.resources import plain
from weft.durable.usage import groups_of, moment_of, usage_request
from weft.kernel.field_rules import enum_words
from weft.kernel.reasons import Reason
from weft.kernel.rpc import error_from_call
from weft_app.cli.mesh_api import Api

READ_TIMEOUT_SECONDS = 5.0
MAX_ASKED_AT_ONCE = 16
"""Runners that are asked concurrently; one that does not answer must not delay the others."""
_KEYS = ("registry", "KeyService")
_TOKENS = ("registry", "JoinTokenService")
_NAMES = {"state": "selection", "after": "afterSequence", "unfinished": "unfinishedOnly"}
"""Names of parameters that are others in messages."""
_KINDS = {kind.plural: kind for kind in ResourceKind}


class GrpcApi(Api):
    """Answers paths of the HTTP API by the mesh's gRPC services."""

    def __init__(self, home: Path, timeout_seconds: float) -> None:
        self._home = home
        self._timeout_seconds = timeout_seconds
        self._channels: dict[Service, grpc.Channel] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for channel in self._channels.values():
            channel.close()

    @override
    def ask(
        self, method: str, path: str, query: dict[str, Any], body: dict[str, Any] | None = None, tenant: str = ""
    ) -> Any:
        given = {name: value for name, value in query.items() if value not in ("", None, 0) and name != "allTenants"}
        given |= (body or {}) | ({"tenant": tenant} if tenant else {})
        for known, pattern, answer in _ROUTES:
            if known == method and (found := re.fullmatch(pattern, path)):
                return answer(self, found.groupdict() | given)
        raise AssertionError(f"no gRPC call stands for {method} {path}")

    def registry(self) -> Registry:
        """Returns a client of the registry."""
        return Registry.connect(home=self._home, timeout_seconds=self._timeout_seconds)

    def call(self, rpc: "_Rpc", request: Message) -> Any:
        """Returns the answer of an rpc."""
        service: Service = "router" if rpc.package == "router" else "registry"
        target = mesh_address(self._home, service)
        if service not in self._channels:
            self._channels[service] = open_mesh_channel(target)
        stub = getattr(rpc.module("_grpc"), f"{rpc.service}Stub")(self._channels[service])
        try:
            return getattr(stub, rpc.name)(request, timeout=self._timeout_seconds)
        except grpc.RpcError as error:
            if service == "registry":
                raise registry_failure(error, target) from error
            raise error_from_call(error, Reason.SERVICE_UNAVAILABLE) from error


@dataclass(frozen=True, slots=True)
class _Rpc:
    """A unary rpc whose request has the parameters of a path, and whose answer is its document."""

    package: str
    service: str
    name: str
    part: str = ""
    """The field of the answer that is the document; empty: all of it."""

    def module(self, end: str = "") -> Any:
        """Returns the generated module of its messages, or with `end` another one."""
        noun = re.sub(r"(?<!^)(?=[A-Z])", "_", self.service).lower()
        return import_module(f"weft.api.{self.package}.v1.{noun}_pb2{end}")

    def called(self, api: GrpcApi, values: Mapping[str, Any]) -> Any:
        """Returns the answer as a message."""
        return api.call(self, _message(getattr(self.module(), f"{self.name}Request"), values))

    def __call__(self, api: GrpcApi, values: Mapping[str, Any], /) -> Any:
        answer = self.called(api, values)
        return document_of(getattr(answer, self.part) if self.part else answer)


def _message(kind: type[Message], values: Mapping[str, Any]) -> Message:
    fields: Any = kind.DESCRIPTOR.fields_by_camelcase_name
    found: dict[str, Any] = {}
    for given, value in values.items():
        name = _NAMES.get(given, given)
        field = fields.get(name)
        if field is None:
            found[name.removesuffix("Seconds")] = f"{value}s"
        elif field.enum_type is not None:
            found[name] = {word: number for number, word in enum_words(field.enum_type).items()}[value]
        else:
            found[name] = value
    return ParseDict(found, kind())


def _listed_resources(api: GrpcApi, values: Mapping[str, Any]) -> Any:
    with api.registry() as registry:
        return {"items": [plain(document) for document in registry.documents(_KINDS[values["plural"]])]}


def _resource(api: GrpcApi, values: Mapping[str, Any]) -> Any:
    with api.registry() as registry:
        return plain(registry.document(_KINDS[values["plural"]], values["name"]))


def _events(api: GrpcApi, values: Mapping[str, Any]) -> Any:
    kind = values.get("kind")
    with api.registry() as registry:
        found = registry.events(ResourceKind(kind) if kind else None, values.get("name", ""), values.get("limit", 0))
        return {"items": list(map(document_of, found))}


def _settings(rpc: _Rpc) -> Callable[[GrpcApi, Mapping[str, Any]], Any]:
    def answer(api: GrpcApi, values: Mapping[str, Any]) -> Any:
        document = rpc(api, values)
        is_set = document["journal"] != UNKNOWN
        return {name: document[name] for name in ("allowCloudFallback", *(["journal"] if is_set else []))}

    return answer


def _keys(api: GrpcApi, values: Mapping[str, Any]) -> Any:
    found, now = _Rpc(*_KEYS, "ListKeys").called(api, values), datetime.now(UTC)
    return {"items": [document_of(key) | {"state": key_state(key, now)} for key in found.keys]}


def _new_key(rpc: _Rpc) -> Callable[[GrpcApi, Mapping[str, Any]], Any]:
    def answer(api: GrpcApi, values: Mapping[str, Any]) -> Any:
        made = rpc.called(api, values)
        new = RotateKeyResponse(key=made.key, text=made.text)
        if rpc.name == "RotateKey":
            new.old_expire_time.CopyFrom(made.old_expire_time)
        return document_of(new) | {"state": key_state(made.key, datetime.now(UTC))}

    return answer


def _new_token(api: GrpcApi, values: Mapping[str, Any]) -> Any:
    made = _Rpc(*_TOKENS, "CreateJoinToken").called(api, values)
    return document_of(made.join_token) | {"token": made.token}


def _usage(api: GrpcApi, values: Mapping[str, Any]) -> Any:
    now = datetime.now(UTC)
    times = {name: moment_of(values[name], name, now) if name in values else None for name in ("since", "until")}
    request = usage_request(
        groups_of(values.get("by", ""), "by"),
        **times,
        tenant=values.get("tenant", ""),
        model=values.get("model", ""),
        limit=values["limit"],
    )
    return document_of(api.call(_Rpc("router", "UsageService", "ListUsage"), request))


def _processes(api: GrpcApi, values: Mapping[str, Any]) -> Any:
    """Returns the processes of engines, for which active runners are asked, without all else of a model."""
    del values
    with api.registry() as registry:
        runners = [plain(document) for document in registry.documents(ResourceKind.RUNNER)]
    return {"items": [], "unowned": list(described_processes(runners))}


def described_processes(runners: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yields what active runners say of their engines."""
    active = [runner for runner in runners if runner["status"]["state"] == "active"]
    with ThreadPoolExecutor(MAX_ASKED_AT_ONCE) as pool:
        answers = list(pool.map(lambda runner: describe_runner(runner["status"]["address"]), active))
    for runner, answer in zip(active, answers, strict=True):
        for instance in answer.instances if answer is not None else ():
            yield document_of(instance) | {"runner": runner["name"]}


def _routers(api: GrpcApi, values: Mapping[str, Any]) -> Any:
    """Returns the routers that the first view of the registry's watch has."""
    del values
    with api.registry() as registry:
        view = next(registry.watch(READ_TIMEOUT_SECONDS))
    return document_of(MeshRouterList(routers=mesh_routers(apply_watch(FleetView(), view))))


def _released(api: GrpcApi, values: Mapping[str, Any]) -> Any:
    rpc = _Rpc("registry", "LeaseService", "ReleaseProgramLease", "lease")
    return rpc(api, {**values, "requestedBy": requester("cli")})


_REQUEST = r"/v1/requests/(?P<requestId>.+)"
_KEY = r"/api/v1/keys/(?P<id>[^/]+)"
_SECRET, _SECRETS = r"/v1/admin/secrets/(?P<name>[^/]+)", ("registry", "SecretService")
_OPERATIONS = ("operations", "OperationService")
_SETTINGS = ("registry", "SettingsService")
_ROUTES: tuple[tuple[str, str, Callable[[GrpcApi, Mapping[str, Any]], Any]], ...] = (
    ("GET", "/api/v1/events", _events),
    ("GET", "/api/v1/config", _settings(_Rpc(*_SETTINGS, "GetSettings", "settings"))),
    ("PUT", "/api/v1/config", _settings(_Rpc(*_SETTINGS, "UpdateSettings", "settings"))),
    ("GET", "/api/v1/routers", _routers),
    ("GET", "/api/v1/keys", _keys),
    ("POST", "/api/v1/keys", _new_key(_Rpc(*_KEYS, "CreateKey"))),
    ("POST", f"{_KEY}/rotate", _new_key(_Rpc(*_KEYS, "RotateKey"))),
    ("DELETE", _KEY, _Rpc(*_KEYS, "RevokeKey")),
    ("GET", rf"/api/v1/(?P<plural>{'|'.join(_KINDS)})", _listed_resources),
    ("GET", rf"/api/v1/(?P<plural>{'|'.join(_KINDS)})/(?P<name>.+)", _resource),
    ("GET", "/v1/admin/audit", _Rpc(*_OPERATIONS, "ListAuditEntries")),
    ("GET", "/v1/admin/operations", _Rpc(*_OPERATIONS, "ListOperations")),
    ("GET", r"/v1/admin/(?P<name>operations/[^/]+)", _Rpc(*_OPERATIONS, "GetOperation", "operation")),
    ("GET", "/v1/admin/figures", _Rpc("router", "RequestService", "GetFigures", "figures")),
    ("GET", "/v1/admin/gpu-memory", _Rpc("registry", "LeaseService", "ListHostMemory")),
    ("DELETE", r"/v1/admin/leases/(?P<leaseId>[^/]+)", _released),
    ("GET", "/v1/admin/join-tokens", _Rpc(*_TOKENS, "ListJoinTokens")),
    ("POST", "/v1/admin/join-tokens", _new_token),
    ("DELETE", r"/v1/admin/join-tokens/(?P<id>[^/]+)", _Rpc(*_TOKENS, "RevokeJoinToken")),
    ("GET", "/v1/admin/models", _processes),
    ("GET", "/v1/admin/secrets", _Rpc(*_SECRETS, "ListSecrets")),
    ("POST", "/v1/admin/secrets", _Rpc(*_SECRETS, "CreateSecret", "secret")),
    ("PUT", _SECRET, _Rpc(*_SECRETS, "UpdateSecret", "secret")),
    ("DELETE", _SECRET, _Rpc(*_SECRETS, "DeleteSecret")),
    ("GET", "/v1/admin/usage", _usage),
    ("GET", "/v1/clients", _Rpc("router", "RequestService", "ListClients")),
    ("GET", "/v1/requests", _Rpc("router", "RequestService", "ListRequests")),
    ("POST", f"{_REQUEST}/cancel", _Rpc("router", "RequestService", "CancelRequest", "request")),
    ("GET", _REQUEST, _Rpc("router", "RequestService", "GetRequest", "request")),
)
"""Method and path, and what answers them; the first that matches."""
