"""gRPC clients of the admin endpoints: operations, API keys, and instance descriptions of runners."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal

import grpc
from typing_extensions import override

from gateway.admin.ports import (
    InstanceSource,
    KeyDocument,
    KeyList,
    KeysPort,
    NewKeyBody,
    NewKeyDocument,
    NewOperation,
    OperationsPort,
)
from gateway.resources.registry_client import RegistryCalls
from weft.api.operations.v1 import operation_service_pb2 as pb
from weft.api.operations.v1 import operation_service_pb2_grpc
from weft.api.registry.v1 import key_service_pb2 as key_pb
from weft.api.registry.v1 import key_service_pb2_grpc, lease_service_pb2, lease_service_pb2_grpc
from weft.api.runner.v1 import runner_service_pb2, runner_service_pb2_grpc
from weft.dispatch.fleet import FleetSource
from weft.documents.field_names import operation_field
from weft.documents.operation_documents import AuditList, HostMemoryDocument, OperationDocument, OperationList
from weft.documents.operation_messages import audit_document, host_memory_document, operation_document
from weft.kernel.address import metadata_of
from weft.kernel.clock import Clock
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason
from weft.kernel.rpc import ChannelPool

if TYPE_CHECKING:
    from google.protobuf.timestamp_pb2 import Timestamp


class OperationsClient(OperationsPort):
    """The registry's operations as `OperationsPort`."""

    def __init__(self, registry: grpc.aio.Channel, *, timeout_seconds: float) -> None:
        # Typed as synchronous by the generated code, whatever the channel.
        self._operations: Any = operation_service_pb2_grpc.OperationServiceStub(registry)
        self._leases: Any = lease_service_pb2_grpc.LeaseServiceStub(registry)
        self._calls = RegistryCalls(operation_field, timeout_seconds=timeout_seconds)

    @override
    async def create(self, wanted: NewOperation) -> OperationDocument:
        request = pb.CreateOperationRequest(
            request_id=wanted.request_id,
            action=wanted.action,
            requested_by=wanted.requested_by,
            authorization=wanted.authorization,
        )
        return operation_document((await self._calls.call(self._operations.CreateOperation, request)).operation)

    @override
    async def get(self, name: str) -> OperationDocument:
        found = await self._calls.call(self._operations.GetOperation, pb.GetOperationRequest(name=name))
        return operation_document(found.operation)

    @override
    async def list_page(self, page_size: int, page_token: str, *, unfinished_only: bool) -> OperationList:
        request = pb.ListOperationsRequest(page_size=page_size, page_token=page_token, unfinished_only=unfinished_only)
        page = await self._calls.call(self._operations.ListOperations, request)
        items = tuple(operation_document(one) for one in page.operations)
        return OperationList(kind="OperationList", items=items, next_page_token=page.next_page_token)

    @override
    async def watch(self, name: str) -> AsyncGenerator[OperationDocument]:
        call = self._operations.WatchOperation(pb.WatchOperationRequest(name=name))
        last: OperationDocument | None = None
        async with aclosing(self._calls.follow(call)) as responses:
            async for response in responses:
                last = operation_document(response.operation)
                yield last
        if last is None or not last.is_over:
            raise WeftError(Reason.SERVICE_UNAVAILABLE, "the registry ended the watch; the operation continues")

    @override
    async def cancel(self, name: str, requested_by: str) -> OperationDocument:
        request = pb.CancelOperationRequest(name=name, requested_by=requested_by)
        return operation_document((await self._calls.call(self._operations.CancelOperation, request)).operation)

    @override
    async def audit(self, after_sequence: int, page_size: int) -> AuditList:
        request = pb.ListAuditEntriesRequest(page_size=page_size, after_sequence=after_sequence)
        page = await self._calls.call(self._operations.ListAuditEntries, request)
        return AuditList(
            kind="AuditList",
            items=tuple(audit_document(entry) for entry in page.entries),
            head_sequence=page.head.sequence,
            head_hash=page.head.hash,
        )

    @override
    async def host_memory(self, host: str) -> Sequence[HostMemoryDocument]:
        request = lease_service_pb2.ListHostMemoryRequest(host=host)
        found = await self._calls.call(self._leases.ListHostMemory, request)
        return [host_memory_document(one) for one in found.hosts]


_FIELDS = {"lifetime": "lifetimeSeconds", "grace": "graceSeconds"}


class KeysClient(KeysPort):
    """The registry's API keys as `KeysPort`."""

    def __init__(self, registry: grpc.aio.Channel, clock: Clock, *, timeout_seconds: float) -> None:
        # Typed as synchronous by the generated code, whatever the channel.
        self._keys: Any = key_service_pb2_grpc.KeyServiceStub(registry)
        self._clock = clock
        self._calls = RegistryCalls(_key_field, timeout_seconds=timeout_seconds)

    @override
    async def list_all(self) -> KeyList:
        found = await self._calls.call(self._keys.ListKeys, key_pb.ListKeysRequest())
        return KeyList(kind="ApiKeyList", items=tuple(KeyDocument(**self._fields(key)) for key in found.keys))

    @override
    async def create(self, wanted: NewKeyBody) -> NewKeyDocument:
        request = key_pb.CreateKeyRequest(description=wanted.description, tenant=wanted.tenant, scopes=wanted.scopes)
        if wanted.lifetime_seconds is not None:
            request.lifetime.FromSeconds(wanted.lifetime_seconds)
        created = await self._calls.call(self._keys.CreateKey, request)
        return NewKeyDocument(**self._fields(created.key), key=created.text)

    @override
    async def revoke(self, key_id: str) -> None:
        await self._calls.call(self._keys.RevokeKey, key_pb.RevokeKeyRequest(id=key_id))

    @override
    async def rotate(self, key_id: str, grace_seconds: int | None) -> NewKeyDocument:
        request = key_pb.RotateKeyRequest(id=key_id)
        if grace_seconds is not None:
            request.grace.FromSeconds(grace_seconds)
        rotated = await self._calls.call(self._keys.RotateKey, request)
        until = _moment(rotated.old_expire_time)
        return NewKeyDocument(**self._fields(rotated.key), key=rotated.text, old_expire_time=until)

    def _fields(self, key: key_pb.Key) -> dict[str, Any]:
        return {
            "kind": "apiKey",
            "id": key.id,
            "state": self._state(key),
            "tenant": key.tenant,
            "scopes": tuple(key.scopes),
            "description": key.description,
            "create_time": _moment(key.create_time),
            "expire_time": _moment(key.expire_time) if key.HasField("expire_time") else None,
            "revoke_time": _moment(key.revoke_time) if key.HasField("revoke_time") else None,
            "rotate_time": _moment(key.rotate_time) if key.HasField("rotate_time") else None,
        }

    def _state(self, key: key_pb.Key) -> Literal["good", "expired", "revoked"]:
        if key.HasField("revoke_time"):
            return "revoked"
        is_over = key.HasField("expire_time") and _moment(key.expire_time) <= self._clock.utc_now()
        return "expired" if is_over else "good"


def _key_field(field: str) -> str:
    return _FIELDS.get(field, field)


def _moment(stamp: "Timestamp") -> datetime:
    return stamp.ToDatetime(tzinfo=UTC)


TIMEOUT_SECONDS = 2.0
"""Deadline of one runner's answer, so that one runner does not delay the others'."""
FRESH_SECONDS = 5.0
"""Maximum age of a cached answer: the interval at which runners report."""
MAX_ASKED_AT_ONCE = 16
MAX_REMEMBERED = 1024

Instances = dict[str, runner_service_pb2.InstanceDescription]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answer:
    incarnation: str
    at: float
    instances: Instances


class RunnerDescriptions(InstanceSource):
    """Instance descriptions from the runners as `InstanceSource`, cached for FRESH_SECONDS."""

    def __init__(self, fleet: FleetSource, channels: ChannelPool, clock: Clock) -> None:
        self._fleet = fleet
        self._channels = channels
        self._clock = clock
        self._answers: dict[str, _Answer] = {}
        self._turns = asyncio.Semaphore(MAX_ASKED_AT_ONCE)

    @override
    async def instances(self, runners: Sequence[str]) -> dict[str, Instances]:
        names = list(dict.fromkeys(runners))
        found = await asyncio.gather(*(self._instances(name) for name in names))
        return {name: instances for name, instances in zip(names, found, strict=True) if instances is not None}

    async def _instances(self, name: str) -> Instances | None:
        runner = self._fleet.view.runners.get(name)
        if runner is None or not runner.active:
            return None
        known = self._answers.get(name)
        now = self._clock.monotonic()
        if known is not None and known.incarnation == runner.incarnation and now - known.at < FRESH_SECONDS:
            return known.instances
        async with self._turns:
            instances = await self._ask(runner.address)
        if instances is not None:
            while len(self._answers) >= MAX_REMEMBERED:
                del self._answers[next(iter(self._answers))]
            self._answers[name] = _Answer(incarnation=runner.incarnation, at=now, instances=instances)
        return instances

    async def _ask(self, address: str) -> Instances | None:
        stub: Any = runner_service_pb2_grpc.RunnerServiceStub(await self._channels.get(address))
        request = runner_service_pb2.DescribeRequest()
        try:
            answer = await stub.Describe(request, timeout=TIMEOUT_SECONDS, metadata=metadata_of(address))
        except grpc.aio.AioRpcError:
            return None
        return {instance.model: instance for instance in answer.instances}
