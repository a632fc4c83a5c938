"""Descriptions of the resource kinds that operators declare. Each kind is a module in `weft/documents/kinds`."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from google.protobuf.message import Message

from weft.documents.conditions import Condition
from weft.documents.resource_kinds import ResourceKind
from weft.kernel.access.principal import Resource
from weft.kernel.schemas.field_rules import check_message
from weft.kernel.values.names import require_no_id


class PointsTo(Enum):
    """What a reference may point to; errors show the value."""

    MODEL = "model"
    POOL = "pool"
    MODEL_OR_POOL = "model or pool"
    REQUESTABLE = "target"
    """Anything a request can name: a model or a pool, `agent/NAME`, `route/NAME` or `workflow/NAME`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceField:
    """A manifest field that names one or more other resources."""

    name: str
    to: PointsTo
    key: str
    """Its key in error metadata."""
    words: str
    """Its name in error messages."""


@dataclass(frozen=True, slots=True)
class Reference:
    """A name that a manifest points to."""

    field: ReferenceField
    target: str


def _own_name(manifest: Any) -> Iterable[str]:
    return (manifest.name,)


def check_named(manifest: Any, field: str) -> None:
    """Checks a manifest by its field rules, and that its name does not have the form of an id."""
    check_message(manifest, field)
    require_no_id(manifest.name, f"{field}.name")
    manifest.DiscardUnknownFields()


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A kind of resource."""

    kind: ResourceKind
    declared: type[Message]
    """The declaration: a message with a name, such as an AliasManifest."""
    record: type[Message]
    """The observed state: a message that is watched and shown."""
    summary: str
    """One sentence for the reference documentation."""
    resource: Resource = Resource.MODELS
    """The permission that a role needs to see, declare or delete it."""
    by_name: bool = True
    """Whether permission for single names is enough; otherwise the unrestricted scope is needed."""
    shares_namespace: bool = True
    """Whether its name must differ from those of models, agents, runners and other kinds that share names."""
    conditions: Callable[[Any], tuple[Condition, ...]] = lambda _: ()
    """Returns the conditions of a record."""

    @property
    def has_labels(self) -> bool:
        """Whether this kind has an owner, a tier and labels."""
        manifest = getattr(self.record(), "manifest", None)
        return manifest is not None and hasattr(manifest, "tags")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeclaredKind(Kind):
    """A kind of resource that operators declare.

    Its record has the fields `manifest` and `create_time`; it is stored as well.
    """

    check: Callable[[Any, str], None] = check_named
    """Converts a declaration to its stored form. Raises INVALID_ARGUMENT naming the field."""
    references: tuple[ReferenceField, ...] = ()
    names: Callable[[Any], Iterable[str]] = _own_name
    """The names a declaration affects: its author needs edit permission for each."""
    scope: Callable[[Any], object] = lambda manifest: manifest.name
    """Identity of a manifest: only one may be declared per scope, and it overrides a configured one."""
    scope_field: str = "name"
    """The field that errors name when a scope is taken."""
    prefix: str = ""
    """Its prefix in requests, such as "agent/"; empty: requests cannot name it."""
    configured: str = ""
    """Section of weft.yaml that can also define it; empty: none."""
    initial: Mapping[str, Any] = field(default_factory=dict)
    """Initial fields of a new record, such as its source."""

    def references_of(self, manifest: Any) -> Iterator[Reference]:
        """Yields the names that a manifest points to."""
        for each in self.references:
            value = getattr(manifest, each.name)
            for target in (value,) if isinstance(value, str) else value:
                if target:
                    yield Reference(each, target)

    def rename_references(self, manifest: Any, name_of: Callable[[str], str]) -> None:
        """Replaces the names that a manifest points to, such as ids by names."""
        for each in self.references:
            value = getattr(manifest, each.name)
            if not isinstance(value, str):
                value[:] = map(name_of, value)
            elif value:
                setattr(manifest, each.name, name_of(value))
