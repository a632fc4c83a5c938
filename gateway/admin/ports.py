"""Ports of the admin endpoints: operations, instance descriptions and API keys; tests script them."""

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Literal, Protocol

from pydantic import Field

from weft.api.operations.v1 import operation_pb2
from weft.api.runner.v1 import runner_service_pb2
from weft.dispatch.placement import QueueSource
from weft.documents.document_base import DocumentPart
from weft.documents.operation_documents import AuditList, HostMemoryDocument, OperationDocument, OperationList
from weft.kernel.names import MAX_TENANT_CHARS
from weft.kernel.principal import MAX_SCOPES


@dataclass(frozen=True, slots=True, kw_only=True)
class NewOperation:
    """An operation to create."""

    action: operation_pb2.OperationAction
    """Never modified."""
    request_id: str
    requested_by: str
    authorization: str
    """The token or signatures that governance asks for; empty: none."""


class OperationsPort(Protocol):
    """Creates and follows operations; see `gateway.admin.operations_client.OperationsClient`.

    Every method raises the WeftError that the registry answers, SERVICE_UNAVAILABLE when it cannot be reached, and
    DEADLINE_EXCEEDED when it does not answer in time.
    """

    async def create(self, wanted: NewOperation) -> OperationDocument:
        """Creates the operation, or returns the existing one of the same request id."""
        ...

    async def get(self, name: str) -> OperationDocument:
        """Returns one operation."""
        ...

    async def list_page(self, page_size: int, page_token: str, *, unfinished_only: bool) -> OperationList:
        """Returns a page of operations, newest first; `page_size` 0 means the registry's default."""
        ...

    def watch(self, name: str) -> AsyncGenerator[OperationDocument]:
        """Yields the operation as it is now, then after every change until it has ended."""
        ...

    async def cancel(self, name: str, requested_by: str) -> OperationDocument:
        """Requests cancellation; returns the operation as it is afterwards."""
        ...

    async def audit(self, after_sequence: int, page_size: int) -> AuditList:
        """Returns a part of the audit log."""
        ...

    async def host_memory(self, host: str) -> Sequence[HostMemoryDocument]:
        """Returns the VRAM ledger of one host, or of all for an empty name."""
        ...


class InstanceSource(Protocol):
    """Returns the instance descriptions of runners; see `gateway.admin.operations_client.RunnerDescriptions`."""

    async def instances(self, runners: Sequence[str]) -> dict[str, dict[str, runner_service_pb2.InstanceDescription]]:
        """Returns descriptions by runner and model. A runner that does not answer in time is left out. Never raises."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class AdminPorts:
    """Ports of the endpoints under `/v1/admin`."""

    operations: OperationsPort
    instances: InstanceSource
    queues: QueueSource


MAX_DESCRIPTION_CHARS = 128
MAX_SCOPE_CHARS = 64
MIN_LIFETIME_SECONDS = 60
MAX_LIFETIME_SECONDS = 10 * 366 * 86_400
MAX_GRACE_SECONDS = 30 * 86_400


class KeyDocument(DocumentPart):
    """An API key without its secret."""

    kind: Literal["apiKey"]
    id: str
    """The part of the key's text before the secret."""
    state: Literal["good", "expired", "revoked"]
    tenant: str
    """The tenant of its requests."""
    scopes: tuple[str, ...]
    """The access that it grants, such as `inference:create`."""
    description: str
    """The purpose of the key."""
    create_time: datetime
    expire_time: datetime | None = None
    """Absent: the key does not expire."""
    revoke_time: datetime | None = None
    rotate_time: datetime | None = None
    """When it last got a new secret."""


class KeyList(DocumentPart):
    """All keys, newest first, with those that ended in the last 30 days."""

    kind: Literal["ApiKeyList"]
    items: tuple[KeyDocument, ...]


class NewKeyDocument(KeyDocument):
    """A key with a new secret. This is the only time that the secret is shown."""

    key: str
    """The complete key, `weft_<id>_<secret>`."""
    old_expire_time: datetime | None = None
    """When the previous secret expires."""


class NewKeyBody(DocumentPart):
    """The properties of a new key."""

    description: Annotated[str, Field(max_length=MAX_DESCRIPTION_CHARS)] = ""
    """The purpose of the key; one line."""
    tenant: Annotated[str, Field(max_length=MAX_TENANT_CHARS)] = ""
    """The tenant of its requests. Empty: `default`."""
    scopes: Annotated[
        tuple[Annotated[str, Field(max_length=MAX_SCOPE_CHARS)], ...], Field(max_length=MAX_SCOPES, strict=False)
    ] = ()
    """The access that it grants; empty: `inference:create`, `inference:edit` and `models:view`. The caller must have
    each scope.
    """
    lifetime_seconds: Annotated[int, Field(ge=MIN_LIFETIME_SECONDS, le=MAX_LIFETIME_SECONDS)] | None = None
    """How long the key is valid. Absent: without limit."""


class RotateBody(DocumentPart):
    """Options of a key's rotation."""

    grace_seconds: Annotated[int, Field(ge=0, le=MAX_GRACE_SECONDS)] | None = None
    """How long the old secret stays valid. Absent: the registry's setting, one hour by default."""


class KeysPort(Protocol):
    """Stores the API keys; see `gateway.admin.operations_client.KeysClient`.

    Every method raises the WeftError that the registry answers, SERVICE_UNAVAILABLE when it cannot be reached, and
    DEADLINE_EXCEEDED when it does not answer in time.
    """

    async def list_all(self) -> KeyList:
        """Returns all keys, newest first."""
        ...

    async def create(self, wanted: NewKeyBody) -> NewKeyDocument:
        """Creates a key; returns it with its secret."""
        ...

    async def revoke(self, key_id: str) -> None:
        """Revokes a key. Raises NOT_FOUND."""
        ...

    async def rotate(self, key_id: str, grace_seconds: int | None) -> NewKeyDocument:
        """Gives a key a new secret. Raises NOT_FOUND, also for a key that is expired or revoked."""
        ...
