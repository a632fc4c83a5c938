"""Operations, memory and the audit log as documents: what `/v1/admin` answers and what commands print with -o json."""

import math
from datetime import datetime
from typing import Annotated, Literal

from pydantic import Field, PlainValidator, WithJsonSchema

from weft.documents.document_base import Count, DocumentPart, Name

MAX_LOAD_PARAMETERS = 64
MAX_MEMORY_MB = 16_777_216
MAX_WORD_CHARS = 128
MAX_TAG_CHARS = 64


def _load_value(value: object) -> object:
    """One error that names the field, where a union would name each of its members."""
    if isinstance(value, str) and 0 < len(value) <= MAX_WORD_CHARS:
        return value
    if isinstance(value, (bool, int)) or (isinstance(value, float) and math.isfinite(value)):
        return value
    raise ValueError(f"must be a number, true, false, or a word of at most {MAX_WORD_CHARS} characters")


def _keep_alive(value: object) -> object:
    if isinstance(value, (str, int, float)) and not isinstance(value, bool):
        return value
    raise ValueError('must be seconds, or a length such as "5m"')


LoadValue = bool | int | float | str
CheckedLoadValue = Annotated[
    LoadValue,
    PlainValidator(_load_value),
    WithJsonSchema({"type": ["boolean", "number", "string"], "maxLength": MAX_WORD_CHARS}),
]
KeepAlive = Annotated[
    int | float | str, PlainValidator(_keep_alive), WithJsonSchema({"type": ["number", "string"], "maxLength": 32})
]
OperationState = Literal["pending", "running", "succeeded", "failed", "cancelled", "unknown"]
FlushScope = Literal["all", "model", "tenant", "tag"]


class LoadSettings(DocumentPart):
    """How a model is loaded this time; what is left out is as it is configured."""

    context_tokens: Annotated[int, Field(ge=16, le=16_777_216)] | None = None
    """Context of one slot."""
    quantization: Annotated[str, Field(min_length=1, max_length=64)] | None = None
    """One of the model's declared variants, such as q8_0."""
    memory_budget_mb: Annotated[int, Field(ge=1, le=MAX_MEMORY_MB)] | None = None
    """The most accelerator memory it may take, in MiB."""
    keep_alive: KeepAlive | None = None
    """How long it stays loaded after a request: seconds, a length such as "5m", 0, or -1 for ever (the default)."""
    pin: bool = False
    """Whether it is never evicted for another model."""
    parameters: dict[Annotated[str, Field(max_length=64)], CheckedLoadValue] = Field(
        default={}, max_length=MAX_LOAD_PARAMETERS
    )
    """Further settings of its engine by name; `GET /v1/admin/models` says which there are, and their ranges."""


class OperationActionDocument(DocumentPart):
    """What an operation does."""

    type: Literal["load", "unload", "flush", "unknown"]
    """Which of the following apply."""
    model: str | None = None
    """The model or pool; for a flush: of all models where it is left out."""
    settings: LoadSettings | None = None
    """For load: how."""
    evict_model: str | None = None
    """For load: the model that is unloaded first."""
    replicas: int | None = None
    """For load, of a pool: how many members are loaded afterwards."""
    scope: FlushScope | None = None
    """For flush: what is forgotten."""
    tenant: str | None = None
    """For flush."""
    tag: str | None = None
    """For flush."""
    runner: str | None = None
    """For flush: only this runner's."""


class OperationResultDocument(DocumentPart):
    """What came of an operation."""

    models: tuple[str, ...] = ()
    """The models that it concerned."""
    memory_bytes: int | None = None
    """For load: accelerator memory that is held now; 0: none."""
    memory_measured: bool | None = None
    """For load: whether that was measured."""
    load_seconds: float | None = None
    """For load: how long it took."""
    memory_freed_bytes: int | None = None
    """Accelerator memory that was given up."""
    cache_flushed: bool | None = None
    """For unload: whether caches went with it."""
    entry_count: int | None = None
    """For flush: cached prefixes that were forgotten."""
    token_count: int | None = None
    """For flush: tokens that they held, where that is known."""
    reusable_bytes: int | None = None
    """For flush: memory of the KV cache that other prefixes can use now, where that is known."""


class OperationDocument(DocumentPart):
    """Governed work on the mesh itself."""

    kind: Literal["operation"]
    """What it is."""
    name: str
    """"operations/<id>"."""
    state: OperationState
    """Where it is in its life."""
    action: OperationActionDocument
    """What it does."""
    progress: float | None = None
    """Share done, 0 to 1, where that is known."""
    stage: str | None = None
    """What is being done."""
    detail: str | None = None
    """What is happening or went wrong, in words."""
    reason: str | None = None
    """Why it failed, in one word for programs."""
    eta_seconds: float | None = None
    """How long it will still take, from earlier ones."""
    runner: str | None = None
    """Who carries it out."""
    requested_by: str | None = None
    """Who asked for it, in their own words."""
    signers: tuple[str, ...] = ()
    """Who signed it, by key id."""
    request_id: str
    """The caller's id of the request that created it."""
    created_at: datetime | None = None
    """When it was accepted."""
    started_at: datetime | None = None
    """When it was begun."""
    ended_at: datetime | None = None
    """When it ended."""
    result: OperationResultDocument | None = None
    """What came of it, once it has succeeded."""

    @property
    def is_over(self) -> bool:
        """Whether it has ended."""
        return self.state in ("succeeded", "failed", "cancelled")


class OperationList(DocumentPart):
    """Operations, newest first."""

    kind: Literal["OperationList"]
    """What it is."""
    items: tuple[OperationDocument, ...]
    """The operations."""
    next_page_token: str = ""
    """Asks for the page after this one; empty on the last."""


class DeviceDocument(DocumentPart):
    """The book of one device."""

    index: Count
    """Its number on the host, in the order of the PCI bus."""
    id: str
    """The driver's own id of it."""
    name: str
    """What it is called."""
    total_bytes: int
    """Its memory."""
    used_bytes: int | None = None
    """In use by whomever, where that can be seen."""
    booked_bytes: int
    """Booked by leases."""
    foreign_bytes: int | None = None
    """Held by processes without a lease, where that can be seen."""
    free_bytes: int
    """What a new lease could get now."""
    margin_bytes: int
    """What is never booked."""
    utilization: float | None = None
    """Share of time it computed lately, 0 to 1."""


class LeaseDocument(DocumentPart):
    """A right to memory on devices of a host."""

    lease_id: str
    """Unique."""
    fencing_number: int
    """Of two holders the one with the lower number is stale."""
    holder_kind: Literal["runner", "program", "unknown"]
    """What holds it."""
    holder: str
    """Who holds it, by name."""
    purpose: str
    """What for: a model's name, or a program's words."""
    state: Literal["held", "releasing", "orphaned", "unknown"]
    """Where it is in its life."""
    bytes_by_device: dict[str, int]
    """The memory by number of the device."""
    seen_bytes: int | None = None
    """What its processes were last seen to hold."""
    priority: Literal["system", "high", "normal", "low", "durable"]
    """The band of the last request that it worked for."""
    pinned: bool
    """Whether its holder never gives it up."""
    active_requests: int
    """Requests under way."""
    created_at: datetime | None = None
    """When it was granted."""
    last_used_at: datetime | None = None
    """When its holder last worked under it."""


class HostMemoryDocument(DocumentPart):
    """A host's devices and who holds them."""

    host: str
    """The host, by name."""
    source: Literal["nvml", "declared", "unknown"]
    """Where the figures come from."""
    seen_at: datetime | None = None
    """When they were last seen."""
    devices: tuple[DeviceDocument, ...]
    """The devices."""
    leases: tuple[LeaseDocument, ...]
    """The leases, oldest first."""
    waiting_count: int
    """How many wait in line for memory there."""


class AuditEntryDocument(DocumentPart):
    """One line of the audit log."""

    sequence: int
    """Counted from 1, without gaps."""
    time: datetime
    """When."""
    event: str
    """What happened, such as operation.accepted."""
    actor: str
    """Who, in the caller's own words."""
    operation: str | None = None
    """What it is about."""
    detail: str
    """The rest, a JSON object."""
    previous_hash: str
    """Hash of the entry before it."""
    hash: str
    """Its own."""


class AuditList(DocumentPart):
    """A part of the audit log, oldest entry first."""

    kind: Literal["AuditList"]
    """What it is."""
    items: tuple[AuditEntryDocument, ...]
    """The entries."""
    head_sequence: int
    """Number of the newest entry of the whole log."""
    head_hash: str
    """Its hash: keep it elsewhere, and a log that was cut or rewritten shows."""


class LoadParameterDocument(DocumentPart):
    """Something that may be set for one load."""

    name: Name
    """Its name."""
    description: str
    """What it does."""
    type: Literal["integer", "number", "word", "flag"]
    """What kind of value it takes."""
    words: tuple[str, ...] = ()
    """The words it may be."""
    minimum: float | None = None
    """The least it may be."""
    maximum: float | None = None
    """The most it may be."""
    default: LoadValue | None = None
    """What it is when nothing is said; absent: the engine's own."""
