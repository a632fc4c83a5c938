"""Prompts and answers of tenants whose declaration has `capture`: bounded, encrypted, and each reading audited.

Plain text is in memory only while a capture is stored or read. Logs and errors never contain it.
"""

from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any

import grpc
from google.protobuf import json_format
from typing_extensions import override

from registry_svc.mesh.core import RegistryCore
from registry_svc.registry_config import MEBIBYTE
from registry_svc.secrets.secrets import Secrets
from registry_svc.wire_values import to_actor
from registry_svc.writer import SingleWriter
from weft.api.registry.v1 import capture_service_pb2 as pb
from weft.api.registry.v1 import capture_service_pb2_grpc
from weft.dispatch.captured import MAX_TEXT_BYTES
from weft.documents.resource_kinds import ResourceKind
from weft.kernel.access.rpc_auth import caller
from weft.kernel.channels.rpc import AnsweringServicer
from weft.kernel.errors.error_tree import WeftError, invalid_field
from weft.kernel.errors.reasons import Reason
from weft.kernel.telemetry.log import get_logger
from weft.kernel.time.clock import seconds_ahead
from weft.kernel.time.timestamps import stamp_of
from weft.kernel.values.names import MAX_REQUEST_ID_CHARS, MAX_TENANT_CHARS, require_token
from weft.sql.store import Store

log = get_logger("weft.registry.captures")

MAX_CAPTURES = 10_000
"""Maximum number of captures; beyond it, as beyond `max_mb`, the oldest are deleted."""
MAX_WAITING = 64
"""Maximum captures that wait to be written: at most 32 MiB of text."""

Audit = Callable[[str, Mapping[str, object], str], Awaitable[None]]
"""Writes an audit entry: event, detail, actor. Raises if it cannot."""


@dataclass(frozen=True, slots=True)
class _Kept:
    """What is known of a stored capture without reading it."""

    captured_at: datetime
    byte_count: int


class Captures:
    """The captures of one registry."""

    def __init__(self, core: RegistryCore, database: Store, secrets: Secrets, audit: Audit) -> None:
        """`secrets` has the keys that encrypt."""
        self._core = core
        self._database = database
        self._secrets = secrets
        self._audit = audit
        self._writer = SingleWriter(lambda: database.is_in_doubt)
        self._kept: dict[str, _Kept] = {}
        """By id, oldest first."""

    async def start(self) -> None:
        """Loads what is stored, once the secrets have started. Deletes what no key decrypts."""
        rows = await self._database.read(
            lambda tx: tx.rows("SELECT id, key_id, captured_at, length(sealed) AS byte_count FROM captures")
        )
        known = sorted((row for row in rows if self._secrets.has_key(row.key_id)), key=lambda row: row.captured_at)
        self._kept = {row.id: _Kept(row.captured_at, row.byte_count) for row in known}
        lost = {row.id for row in rows} - self._kept.keys()
        if lost:
            await self._delete(lost)
            log.warning("captures deleted: their key is not in the file", count=len(lost))

    async def stop(self, grace_seconds: float) -> None:
        """Completes writes within the grace period."""
        await self._writer.drain(grace_seconds)
        self._kept = {}

    async def store(self, capture: pb.Capture) -> None:
        """Stores a capture, in place of one with its id. Does nothing if its tenant has no `capture`.

        Raises QUEUE_FULL, UNSUPPORTED_OPERATION without a key file, SERVICE_UNAVAILABLE.
        """
        self._core.require_open()
        if not self._is_on(capture.tenant):
            return
        if self._writer.waiting >= MAX_WAITING:
            raise WeftError(Reason.QUEUE_FULL, f"{MAX_WAITING} captures wait to be written")
        await self._writer.run(lambda: self._store(capture))

    async def read(self, request_id: str, tenant: str, reader: str) -> pb.Capture:
        """Returns the newest capture of a request, once the audit log has its reader. An empty tenant: any.

        Raises NOT_FOUND, and what the audit log raises.
        """
        self._core.require_open()
        ids = (f"{tenant} {request_id}",) if tenant else reversed(self._kept)
        found = next((each for each in ids if each in self._kept and each.endswith(f" {request_id}")), None)
        owner = "" if found is None else _tenant_of(found)
        row = await self._row(found) if found is not None and self._is_on(owner) else None
        if row is None:
            raise WeftError(
                Reason.NOT_FOUND,
                f"the prompt and answer of request {request_id} are not stored: its tenant had no capture, or they are "
                "deleted; see docs/security.md#captured-prompts-and-answers",
            )
        await self._audit("capture.read", {"request_id": request_id, "tenant": owner}, reader)
        text = self._secrets.cipher().open(_bound_name(row.id), 1, row.key_id, row.sealed)
        return json_format.Parse(text, pb.Capture())

    async def note_switch(self, tenant: str, is_on: bool, actor: str) -> None:
        """Records that an operator switches capture on or off.

        Raises UNSUPPORTED_OPERATION without a key file, and what the audit log raises.
        """
        if is_on:
            self._secrets.cipher()
        await self._audit("capture.switch_requested", {"tenant": tenant, "capture": is_on}, actor)

    async def sweep(self) -> None:
        """Deletes captures that are too old, and those of tenants without `capture`. Raises SERVICE_UNAVAILABLE."""
        if self._over():
            await self._writer.run(self._sweep)

    async def _sweep(self) -> None:
        # Anew, as a write before this one may have replaced a capture.
        if over := self._over():
            await self._delete(over)
            log.info("captures deleted", count=len(over))

    def _over(self) -> Collection[str]:
        """Returns the captures to delete."""
        now, kept = self._core.clock.utc_now(), self._kept.items()
        oldest = now - timedelta(seconds=self._core.config.captures.keep_seconds)
        for name, each in kept:
            if seconds_ahead(each.captured_at, now):
                # The clock was set back, which must not extend its retention.
                self._kept[name] = replace(each, captured_at=now)
        return {name for name, each in kept if each.captured_at < oldest or not self._is_on(_tenant_of(name))}

    def _is_on(self, tenant: str) -> bool:
        declared = self._core.mesh.documents[ResourceKind.TENANT].declared(tenant)
        return declared is not None and declared.manifest.capture

    async def _store(self, capture: pb.Capture) -> None:
        cipher, now = self._secrets.cipher(), self._core.clock.utc_now()
        capture.capture_time.CopyFrom(stamp_of(now))
        name = f"{capture.tenant} {capture.request_id}"
        sealed = cipher.seal(_bound_name(name), 1, json_format.MessageToJson(capture, indent=None))
        row = {"id": name, "key_id": cipher.key_id, "sealed": sealed, "captured_at": now}
        await self._delete(self._displaced(name, len(sealed)))
        await self._database.run(lambda tx: tx.replace("captures", "id", row))
        self._kept.pop(name, None)
        self._kept[name] = _Kept(now, len(sealed))

    def _displaced(self, name: str, byte_count: int) -> Collection[str]:
        """Returns the oldest captures that must go to make room for a new one."""
        others = {each: kept.byte_count for each, kept in self._kept.items() if each != name}
        excess = sum(others.values()) + byte_count - self._core.config.captures.max_mb * MEBIBYTE
        displaced: list[str] = []
        for each, size in others.items():
            if excess <= 0 and len(others) - len(displaced) < MAX_CAPTURES:
                break
            displaced.append(each)
            excess -= size
        return displaced

    async def _delete(self, ids: Collection[str]) -> None:
        await self._database.run(lambda tx: tx.delete("captures", "id", ids))
        for each in ids:
            self._kept.pop(each, None)

    async def _row(self, name: str) -> Any:
        return await self._database.read(lambda tx: tx.row("SELECT * FROM captures WHERE id = :id", id=name))


def _tenant_of(name: str) -> str:
    return name.partition(" ")[0]


def _bound_name(name: str) -> str:
    """Returns the name that the cipher binds a capture to; no secret has it, as names of secrets have no spaces."""
    return f"capture {name}"


Context = grpc.aio.ServicerContext[Any, Any]


class CaptureServicer(AnsweringServicer, capture_service_pb2_grpc.CaptureServiceServicer):
    """See CaptureService in the contract."""

    def __init__(self, captures: Captures) -> None:
        self._captures = captures

    @override
    async def StoreCapture(self, request: pb.StoreCaptureRequest, context: Context) -> pb.StoreCaptureResponse:
        capture = request.capture
        require_token(capture.request_id, "capture.request_id", MAX_REQUEST_ID_CHARS)
        require_token(capture.tenant, "capture.tenant", MAX_TENANT_CHARS)
        for field in ("prompt", "answer"):
            if len(getattr(capture, field).encode()) > MAX_TEXT_BYTES:
                raise invalid_field(f"capture.{field}", f"must have at most {MAX_TEXT_BYTES:,} bytes")
        await self._captures.store(capture)
        return pb.StoreCaptureResponse()

    @override
    async def GetCapture(self, request: pb.GetCaptureRequest, context: Context) -> pb.GetCaptureResponse:
        request_id = require_token(request.request_id, "request_id", MAX_REQUEST_ID_CHARS)
        tenant = require_token(request.tenant, "tenant", MAX_TENANT_CHARS) if request.tenant else ""
        known = caller()
        own = tenant if known.names_tenants else known.tenant_for(tenant, "tenant")
        reader = to_actor(request.requested_by) or known.name
        return pb.GetCaptureResponse(capture=await self._captures.read(request_id, own, reader))
