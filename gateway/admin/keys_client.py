"""API keys over gRPC, as `gateway.admin.keys_port.KeysPort`."""

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal

import grpc

from gateway.admin.keys_port import KeyDocument, KeyList, NewKeyBody, NewKeyDocument
from gateway.resources.registry_calls import RegistryCalls
from weft.api.registry.v1 import key_service_pb2 as pb
from weft.api.registry.v1 import key_service_pb2_grpc
from weft.kernel.clock import Clock

if TYPE_CHECKING:
    from google.protobuf.timestamp_pb2 import Timestamp

_FIELDS = {"lifetime": "lifetimeSeconds", "grace": "graceSeconds"}


class KeysClient:
    """See KeysPort."""

    def __init__(self, registry: grpc.aio.Channel, clock: Clock, *, timeout_seconds: float) -> None:
        # Typed as synchronous by the generated code, whatever the channel.
        self._keys: Any = key_service_pb2_grpc.KeyServiceStub(registry)
        self._clock = clock
        self._calls = RegistryCalls(_callers_field, timeout_seconds=timeout_seconds)

    async def list_all(self) -> KeyList:
        """See KeysPort.list_all."""
        found = await self._calls.ask(self._keys.ListKeys, pb.ListKeysRequest())
        return KeyList(kind="ApiKeyList", items=tuple(KeyDocument(**self._fields(key)) for key in found.keys))

    async def create(self, wanted: NewKeyBody) -> NewKeyDocument:
        """See KeysPort.create."""
        request = pb.CreateKeyRequest(description=wanted.description, tenant=wanted.tenant, scopes=wanted.scopes)
        if wanted.lifetime_seconds is not None:
            request.lifetime.FromSeconds(wanted.lifetime_seconds)
        created = await self._calls.ask(self._keys.CreateKey, request)
        return NewKeyDocument(**self._fields(created.key), key=created.text)

    async def revoke(self, key_id: str) -> None:
        """See KeysPort.revoke."""
        await self._calls.ask(self._keys.RevokeKey, pb.RevokeKeyRequest(id=key_id))

    async def rotate(self, key_id: str, grace_seconds: int | None) -> NewKeyDocument:
        """See KeysPort.rotate."""
        request = pb.RotateKeyRequest(id=key_id)
        if grace_seconds is not None:
            request.grace.FromSeconds(grace_seconds)
        rotated = await self._calls.ask(self._keys.RotateKey, request)
        until = _moment(rotated.old_expire_time)
        return NewKeyDocument(**self._fields(rotated.key), key=rotated.text, old_expire_time=until)

    def _fields(self, key: pb.Key) -> dict[str, Any]:
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

    def _state(self, key: pb.Key) -> Literal["good", "expired", "revoked"]:
        if key.HasField("revoke_time"):
            return "revoked"
        is_over = key.HasField("expire_time") and _moment(key.expire_time) <= self._clock.utc_now()
        return "expired" if is_over else "good"


def _callers_field(field: str) -> str:
    return _FIELDS.get(field, field)


def _moment(stamp: "Timestamp") -> datetime:
    return stamp.ToDatetime(tzinfo=UTC)
