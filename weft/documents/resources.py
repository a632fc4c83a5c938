"""Resources as documents: the declaration, which `apply` reads, and `status`, the observed state, which it ignores."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from types import MappingProxyType
from typing import Any, Generic, TypeVar

from google.protobuf.message import Message

from weft.api.registry.v1.declaration_service_pb2 import ApplyResult, PoolDeclaration, RunnerDeclaration
from weft.api.registry.v1.model_pb2 import Model, ModelDeclaration, ModelManifest
from weft.api.registry.v1.pool_pb2 import Pool
from weft.api.registry.v1.resource_pb2 import ResourceDocument
from weft.api.registry.v1.runner_pb2 import InstanceState, Runner
from weft.documents.codec import document_of, leave_out_defaults, without_defaults, word_of
from weft.documents.conditions import Condition, model_conditions
from weft.documents.kinds import KINDS, packed
from weft.documents.reader import read_message
from weft.documents.resource_kinds import ResourceKind
from weft.kernel.errors.error_tree import invalid_field

DeclaredT = TypeVar("DeclaredT", bound=Message)
ObservedT = TypeVar("ObservedT", bound=Message)


@dataclass(frozen=True, slots=True, kw_only=True)
class Document(Generic[DeclaredT, ObservedT]):
    """A resource. Its messages are never changed. They may hold secrets, so they have no repr."""

    kind: ResourceKind
    declared: DeclaredT = field(repr=False)
    observed: ObservedT | None = field(default=None, repr=False)
    """The observed state; None: unknown, as in a document that was read from a file."""

    @property
    def name(self) -> str:
        """Its name; unique in the mesh, except that a pool may share a model's name."""
        return str(self.manifest.name)

    @property
    def manifest(self) -> Any:
        """The declaration's message that has the name."""
        return self.declared

    @property
    def label(self) -> str:
        """KIND/NAME."""
        return f"{self.kind.value}/{self.name}"

    @property
    def state(self) -> str:
        """Its state: active, inactive, hibernating or unknown; empty: not observed, or a kind without states."""
        if self.observed is None or "status" not in self.observed.DESCRIPTOR.fields_by_name:
            return ""
        return word_of(self.observed, "status")

    @property
    def conditions(self) -> tuple[Condition, ...]:
        """Its conditions; empty if it was not observed."""
        return () if self.observed is None else KINDS[self.kind].conditions(self.observed)

    def status_document(self) -> dict[str, Any] | None:
        """Returns `status` as JSON types; None: not observed."""
        if self.observed is None:
            return None
        conditions = {"conditions": [asdict(condition) for condition in self.conditions]}
        return document_of(self.observed) | self._computed() | conditions

    def _computed(self) -> dict[str, Any]:
        return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDocument(Document[ModelDeclaration, Model]):
    """A model."""

    kind: ResourceKind = ResourceKind.MODEL
    instance: InstanceState | None = field(default=None, repr=False)
    """Its state on its runner; None: unknown."""

    @property
    def manifest(self) -> ModelManifest:
        """The manifest, declared or published."""
        return self.declared.manifest

    @property
    def pool(self) -> str:
        """The model's pool."""
        return self.manifest.pool_name or self.manifest.name

    @property
    def conditions(self) -> tuple[Condition, ...]:
        """See `model_conditions`."""
        return () if self.observed is None else model_conditions(self.observed, self.instance)

    def _computed(self) -> dict[str, Any]:
        instance = {} if self.instance is None else {"instance": document_of(self.instance)}
        return {"pool": self.pool, **instance}


MEMBER_FIELDS = ("kind", "state", "runner")
"""Model fields in the document of its pool."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolDocument(Document[PoolDeclaration, Pool]):
    """A pool. Pools are derived from their models: `apply` checks the declaration and changes nothing."""

    kind: ResourceKind = ResourceKind.POOL

    def _computed(self) -> dict[str, Any]:
        return {"members": [_member(model) for model in self.observed.members] if self.observed is not None else []}


AnyDocument = Document[Any, Any]
_TYPES: Mapping[ResourceKind, type[Document[Any, Any]]] = MappingProxyType(
    {
        ResourceKind.MODEL: ModelDocument,
        ResourceKind.POOL: PoolDocument,
    }
)
"""Kinds that have their own document class."""


def _member(model: Model) -> dict[str, Any]:
    found = document_of(model)
    return {"name": model.manifest.name} | {name: found[name] for name in MEMBER_FIELDS if name in found}


def model_document(model: Model, instance: InstanceState | None = None) -> ModelDocument:
    """Returns the document of a model, with its state on its runner if known."""
    declared = ModelDeclaration(manifest=model.manifest, runner=model.declared_runner)
    return ModelDocument(declared=declared, observed=model, instance=instance)


def instance_of(model: Model, runner: Runner | None) -> InstanceState | None:
    """Returns the model's state on its runner; None: `runner` does not serve it."""
    if runner is None or runner.name != model.runner or runner.status != Runner.STATUS_ACTIVE:
        return None
    return next((state for state in runner.capability.instances if state.model == model.manifest.name), None)


def runner_document(runner: Runner) -> AnyDocument:
    """Returns the document of a runner."""
    return new_document(ResourceKind.RUNNER, RunnerDeclaration(name=runner.name), runner)


def pool_document(pool: Pool) -> PoolDocument:
    """Returns the document of a pool."""
    members = [model.manifest.name for model in pool.members]
    return PoolDocument(declared=PoolDeclaration(name=pool.name, members=members), observed=pool)


def observed_document(kind: ResourceKind, message: Any) -> AnyDocument:
    """Returns the document of a resource from the registry; a model's document lacks its state on its runner."""
    if kind in _OBSERVED:
        return _OBSERVED[kind](message)
    return new_document(kind, message.manifest, message)


_OBSERVED: Mapping[ResourceKind, Callable[[Any], AnyDocument]] = MappingProxyType(
    {
        ResourceKind.MODEL: model_document,
        ResourceKind.RUNNER: runner_document,
        ResourceKind.POOL: pool_document,
    }
)
"""Kinds whose declaration is more than the manifest in their record."""


def declared_document(resource: ResourceDocument, field: str = "resource") -> AnyDocument:
    """Returns a declaration as a document without `status`. Raises INVALID_ARGUMENT naming the field."""
    if resource.kind not in KINDS:
        raise invalid_field(field, f"must be of a known kind: {', '.join(KINDS)}")
    kind = ResourceKind(resource.kind)
    declared = KINDS[kind].declared()
    if not resource.content.Unpack(declared):
        raise invalid_field(f"{field}.{kind.value}", f"must be a {KINDS[kind].declared.DESCRIPTOR.full_name}")
    return new_document(kind, declared)


def to_declaration(document: AnyDocument) -> ResourceDocument:
    """Returns a document's declaration as a message."""
    return packed(document.kind, document.declared)


def read_document(kind: ResourceKind, value: Mapping[str, Any]) -> AnyDocument:
    """Reads a declaration from JSON types without `kind` and `status`. Raises RuleError."""
    return new_document(kind, read_message(value, KINDS[kind].declared))


def new_document(kind: ResourceKind, declared: Any, observed: Any = None) -> AnyDocument:
    """Returns the document of a declaration and, if known, its observed state."""
    return _TYPES.get(kind, Document)(kind=kind, declared=declared, observed=observed)


def plain(document: AnyDocument) -> dict[str, Any]:
    """Returns the whole document as JSON types without unset fields."""
    found = {"kind": document.kind.value} | document_of(document.declared)
    status = document.status_document()
    return found if status is None else found | {"status": status}


def declared(document: AnyDocument) -> dict[str, Any]:
    """Returns the declaration as JSON types, without `status` and without fields that have their default."""
    return {"kind": document.kind.value} | without_defaults(document.declared)


def declared_of(document: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the declaration in the JSON types of a whole document; see `declared`."""
    kind = document["kind"]
    descriptor: Any = KINDS[ResourceKind(kind)].declared.DESCRIPTOR
    given = {name: value for name, value in document.items() if name not in ("kind", "status")}
    return {"kind": kind} | leave_out_defaults(descriptor, given)


def applied_document(result: ApplyResult) -> dict[str, Any]:
    """Returns the result of applying one document as JSON types, as in responses of `/api/v1/apply`."""
    found = {"kind": result.kind, "outcome": word_of(result, "outcome"), "name": result.name}
    states = {name: getattr(result, name) for name in ("before", "after") if result.HasField(name)}
    return found | {name: plain(declared_document(state)) for name, state in states.items()}
