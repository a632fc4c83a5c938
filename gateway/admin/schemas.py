"""Schemas of requests and answers under `/v1/admin`, around the documents of `weft.documents`."""

from datetime import datetime
from typing import Annotated, Literal

from pydantic import Field

from weft.documents.document_base import DocumentPart, Name
from weft.documents.operation_documents import (
    MAX_TAG_CHARS,
    FlushScope,
    HostMemoryDocument,
    LoadParameterDocument,
    LoadSettings,
)
from weft.documents.statuses import MemoryStatus

MAX_AUTHORIZATION_CHARS = 16 * 1024


class LoadBody(LoadSettings):
    """How to load a model."""

    evict_model: Name | None = None
    """A model that is unloaded first."""
    replicas: Annotated[int, Field(ge=1, le=64)] | None = None
    """Of a pool: how many members are loaded afterwards."""
    authorization: Annotated[str, Field(max_length=MAX_AUTHORIZATION_CHARS)] = ""
    """What `weft sign` and `weft approve` made, where governance asks for it."""


class UnloadBody(DocumentPart):
    """Nothing has to be said."""

    authorization: Annotated[str, Field(max_length=MAX_AUTHORIZATION_CHARS)] = ""
    """What `weft sign` and `weft approve` made, where governance asks for it."""


class FlushBody(DocumentPart):
    """What to forget."""

    scope: FlushScope
    """all, model, tenant or tag."""
    model: Name | None = None
    """The model; for the other scopes: of this model alone."""
    tenant: Annotated[str, Field(max_length=64)] = ""
    """The tenant."""
    tag: Annotated[str, Field(max_length=MAX_TAG_CHARS)] = ""
    """The tag."""
    runner: Name | None = None
    """On this runner alone."""
    authorization: Annotated[str, Field(max_length=MAX_AUTHORIZATION_CHARS)] = ""
    """What `weft sign` and `weft approve` made, where governance asks for it."""


class QueueDocument(DocumentPart):
    """How much is asked of a model."""

    waiting: int
    """Requests that wait for it."""
    max_waiting: int
    """How many may."""
    running: int
    """Requests under way."""


class ReplicaDocument(DocumentPart):
    """One engine, or one that could be."""

    model: str
    """Its own name."""
    runner: str | None = None
    """Who serves it."""
    host: str | None = None
    """Where."""
    state: str
    """Where it is in its life, such as ready or hibernating; gone where no runner serves it now."""
    detail: str | None = None
    """Why, when that needs saying."""
    load_progress: float | None = None
    """Share of loading done, 0 to 1."""
    load_eta_seconds: float | None = None
    """How long loading will still take."""
    context_tokens: int | None = None
    """Context of one slot."""
    slots_used: int
    """Requests it works on."""
    slots_total: int
    """Requests it can work on at once."""
    memory: MemoryStatus | None = None
    """Its accelerator memory."""
    unload_at: datetime | None = None
    """When it is unloaded if nothing is asked of it until then."""
    pinned: bool = False
    """Whether it is never evicted for another model."""


class ReplicasDocument(DocumentPart):
    """Everything that answers for a model."""

    ready: int
    """How many take requests."""
    total: int
    """How many there are, asleep ones included."""
    members: tuple[ReplicaDocument, ...]
    """Each of them, by name."""


class DefinitionDocument(DocumentPart):
    """What was declared."""

    operations: tuple[str, ...]
    """What it can be asked for."""
    context_tokens: int | None = None
    """Context of one slot, the smallest of the members'."""
    remote: bool
    """Whether serving it may send bytes off the premises."""
    runtimes: tuple[str, ...]
    """The engines that serve it."""
    model_paths: tuple[str, ...] = ()
    """The files, where the runners that could be asked have any."""


class CapabilitiesDocument(DocumentPart):
    """What it can do."""

    modalities: tuple[Literal["text", "image"], ...]
    """What it takes."""
    streaming: bool
    """Whether answers come as they are made."""
    multi_turn: bool
    """Whether it takes conversations."""
    embeddings: bool
    """Whether it gives vectors."""
    cache_isolation: tuple[str, ...] = ()
    """How prefixes of different tenants are kept apart, for each way that a member has: slots, whole, salt or none."""


class ConstraintsDocument(DocumentPart):
    """What may be set for a load; members that could not be asked are left out."""

    parameters: tuple[LoadParameterDocument, ...] = ()
    """The settings and their ranges."""
    quantizations: tuple[str, ...] = ()
    """The variants."""


class AdminModelDocument(DocumentPart):
    """A model that can be asked for by name, with everything that answers for it."""

    kind: Literal["adminModel"]
    """What it is."""
    name: str
    """Its public name: the pool's, or that of a model without one."""
    state: str
    """The best state of its members."""
    definition: DefinitionDocument
    """What was declared."""
    queue: QueueDocument | None = None
    """How much is asked of it; absent while the router cannot be asked."""
    replicas: ReplicasDocument
    """Who answers for it."""
    capabilities: CapabilitiesDocument
    """What it can do."""
    constraints: ConstraintsDocument
    """What may be set for a load."""


class AdminModelList(DocumentPart):
    """All of them, by name."""

    kind: Literal["AdminModelList"]
    """What it is."""
    items: tuple[AdminModelDocument, ...]
    """The models."""


class ModelMemoryDocument(DocumentPart):
    """What one model takes or would take."""

    model: str
    """Its name."""
    runner: str
    """Who serves it."""
    host: str
    """Where."""
    state: str
    """Where it is in its life."""
    memory: MemoryStatus
    """The figures."""


class GpuMemoryAnswer(DocumentPart):
    """Accelerator memory of every host, and what each model takes of it or would take."""

    kind: Literal["GpuMemory"]
    """What it is."""
    hosts: tuple[HostMemoryDocument, ...]
    """Hosts with accelerators, their devices and leases."""
    models: tuple[ModelMemoryDocument, ...]
    """Models whose runner says what they take."""
