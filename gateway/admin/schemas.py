"""Schemas of requests and answers under `/v1/admin`, around the documents of `weft.documents`."""

from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import Field

from gateway.operations import MAX_AUTHORIZATION_CHARS
from weft.api.registry.v1 import lease_service_pb2, runner_pb2
from weft.api.runner.v1 import load_pb2
from weft.documents.document_base import DocumentPart, Name
from weft.documents.json_schema import embedded
from weft.documents.operation_actions import MAX_TAG_CHARS, FlushScope, LoadSettings

MemoryJson = Annotated[dict[str, Any], embedded(runner_pb2.InstanceMemory, checked=False)]
LoadParameterJson = Annotated[dict[str, Any], embedded(load_pb2.LoadParameter)]
HostMemoryJson = Annotated[dict[str, Any], embedded(lease_service_pb2.HostMemory)]


class LoadBody(LoadSettings):
    """Options of a load."""

    evict_model: Name | None = None
    """A model to unload first."""
    replicas: Annotated[int, Field(ge=1, le=64)] | None = None
    """For a pool: the number of members that are loaded afterwards."""
    authorization: Annotated[str, Field(max_length=MAX_AUTHORIZATION_CHARS)] = ""
    """The signatures that `weft sign` and `weft approve` made, where governance requires them."""


class UnloadBody(DocumentPart):
    """Options of an unload."""

    authorization: Annotated[str, Field(max_length=MAX_AUTHORIZATION_CHARS)] = ""
    """The signatures that `weft sign` and `weft approve` made, where governance requires them."""


class FlushBody(DocumentPart):
    """The cached prefixes to delete."""

    scope: FlushScope
    """`all`, `model`, `tenant` or `tag`."""
    model: Name | None = None
    """The model; with another scope, the flush is limited to this model."""
    tenant: Annotated[str, Field(max_length=64)] = ""
    """The tenant, for scope `tenant`."""
    tag: Annotated[str, Field(max_length=MAX_TAG_CHARS)] = ""
    """The tag, for scope `tag`."""
    runner: Name | None = None
    """Limits the flush to this runner."""
    authorization: Annotated[str, Field(max_length=MAX_AUTHORIZATION_CHARS)] = ""
    """The signatures that `weft sign` and `weft approve` made, where governance requires them."""


class QueueDocument(DocumentPart):
    """The queue of a model."""

    waiting: int
    """Waiting requests."""
    max_waiting: int
    """Maximum number of waiting requests."""
    running: int
    """Running requests."""


class ReplicaDocument(DocumentPart):
    """One engine of a model, running or not."""

    model: str
    """The replica's own model name."""
    runner: str | None = None
    """The runner that serves it."""
    host: str | None = None
    """The runner's host."""
    state: str
    """Its phase, such as ready or hibernating; `gone` where no runner serves it now."""
    detail: str | None = None
    """The reason for the state, where there is one."""
    load_progress: float | None = None
    """Share of the load that is done, 0 to 1."""
    load_eta_seconds: float | None = None
    """Estimated time until it is loaded."""
    context_tokens: int | None = None
    """Context of one slot."""
    slots_used: int
    """Running requests."""
    slots_total: int
    """Maximum number of concurrent requests."""
    memory: MemoryJson | None = None
    """Its accelerator memory."""
    unload_at: datetime | None = None
    """When its idle timer unloads it, if no request comes until then."""
    pinned: bool = False
    """Whether it is never evicted for another model."""


class ReplicasDocument(DocumentPart):
    """The replicas of a model."""

    ready: int
    """Replicas that take requests."""
    total: int
    """All replicas, including hibernating ones."""
    members: tuple[ReplicaDocument, ...]
    """The replicas, by name."""


class DefinitionDocument(DocumentPart):
    """The declaration of a model."""

    operations: tuple[str, ...]
    """The supported operations."""
    context_tokens: int | None = None
    """Context of one slot, the smallest of the members'."""
    remote: bool
    """Whether serving it may send bytes off the premises."""
    runtimes: tuple[str, ...]
    """The runtimes that serve it."""
    model_paths: tuple[str, ...] = ()
    """Model files, of runners that were reachable and have any."""


class CapabilitiesDocument(DocumentPart):
    """The capabilities of a model."""

    modalities: tuple[Literal["text", "image"], ...]
    """Input modalities."""
    streaming: bool
    """Whether answers can be streamed."""
    multi_turn: bool
    """Whether it supports conversations."""
    embeddings: bool
    """Whether it produces embeddings."""
    cache_isolation: tuple[str, ...] = ()
    """The ways in which members isolate the cached prefixes of tenants: slots, whole, salt or none."""


class ConstraintsDocument(DocumentPart):
    """The options of a load; members that were unreachable are left out."""

    parameters: tuple[LoadParameterJson, ...] = ()
    """The parameters and their ranges."""
    quantizations: tuple[str, ...] = ()
    """The quantizations."""


class AdminModelDocument(DocumentPart):
    """A model by its public name, with its replicas."""

    kind: Literal["adminModel"]
    """Always `adminModel`."""
    name: str
    """Its public name: that of the pool, or of the model where it has no pool."""
    state: str
    """The best state of its replicas."""
    definition: DefinitionDocument
    """The declaration."""
    queue: QueueDocument | None = None
    """The queue; absent while the router is unreachable."""
    replicas: ReplicasDocument
    """The replicas."""
    capabilities: CapabilitiesDocument
    """The capabilities."""
    constraints: ConstraintsDocument
    """The options of a load."""


class AdminModelList(DocumentPart):
    """All models, by public name."""

    kind: Literal["AdminModelList"]
    """Always `AdminModelList`."""
    items: tuple[AdminModelDocument, ...]
    """The models."""


class ModelMemoryDocument(DocumentPart):
    """The accelerator memory of one model."""

    model: str
    """The model's name."""
    runner: str
    """The runner that serves it."""
    host: str
    """The runner's host."""
    state: str
    """Its phase."""
    memory: MemoryJson
    """Its accelerator memory, used or estimated."""


class GpuMemoryAnswer(DocumentPart):
    """Accelerator memory of every host, and what each model uses or would use of it."""

    kind: Literal["GpuMemory"]
    """Always `GpuMemory`."""
    hosts: tuple[HostMemoryJson, ...]
    """Hosts with accelerators, their devices and leases."""
    models: tuple[ModelMemoryDocument, ...]
    """Models whose runner reports their memory."""
