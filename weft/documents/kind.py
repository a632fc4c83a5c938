"""The description of a kind of resource that operators declare. Each kind is one module beside this one."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from google.protobuf.message import Message

from weft.documents.conditions import Condition
from weft.documents.resource_kinds import ResourceKind
from weft.kernel.field_rules import check_message
from weft.kernel.names import require_no_id
from weft.kernel.principal import Resource


class PointsTo(Enum):
    """What a reference may name; the value is the word in errors."""

    MODEL = "model"
    POOL = "pool"
    MODEL_OR_POOL = "model or pool"
    REQUESTABLE = "target"
    """All that a request can name: a model or a pool, `agent/NAME`, `route/NAME` or `workflow/NAME`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceField:
    """A field of a manifest that names other resources, one or several."""

    name: str
    to: PointsTo
    key: str
    """Its word in the metadata of errors."""
    words: str
    """Its words in errors."""


@dataclass(frozen=True, slots=True)
class Reference:
    """A name that a manifest points to."""

    field: ReferenceField
    target: str


def _own_name(manifest: Any) -> Iterable[str]:
    return (manifest.name,)


def check_named(manifest: Any, field: str) -> None:
    """Check the fields of a manifest by their rules, and that its name is no id."""
    check_message(manifest, field)
    require_no_id(manifest.name, f"{field}.name")
    manifest.DiscardUnknownFields()


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A kind of resource."""

    kind: ResourceKind
    declared: type[Message]
    """What is declared of it: a message with a name, such as an AliasManifest."""
    record: type[Message]
    """What is known of it: a message that is watched and shown."""
    summary: str
    """What it is, in a sentence for references."""
    resource: Resource = Resource.MODELS
    """What a role must be granted for to see, declare or delete it."""
    by_name: bool = True
    """Whether rights to some names are enough; else the scope for everything is needed."""
    conditions: Callable[[Any], tuple[Condition, ...]] = lambda _: ()
    """What does or does not hold of a record."""

    @property
    def has_labels(self) -> bool:
        """Whether resources of this kind have an owner, a tier and labels."""
        manifest = getattr(self.record(), "manifest", None)
        return manifest is not None and hasattr(manifest, "tags")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeclaredKind(Kind):
    """A kind of resource that operators declare.

    Its record has the fields `manifest` and `create_time`; it is stored as well.
    """

    check: Callable[[Any, str], None] = check_named
    """Brings what is declared to the form in which it is stored; raises INVALID_ARGUMENT naming the field."""
    references: tuple[ReferenceField, ...] = ()
    names: Callable[[Any], Iterable[str]] = _own_name
    """The names that a declaration is about: its author must be allowed to edit each."""
    scope: Callable[[Any], object] = lambda manifest: manifest.name
    """Of two manifests with the same scope only one may be declared, and a declared one hides a configured one."""
    scope_field: str = "name"
    """The field that errors show of a scope that is taken."""
    prefix: str = ""
    """How requests name it, such as "agent/"; empty: they cannot."""
    shares_namespace: bool = True
    """Whether its name must differ from those of models, agents, runners and the like."""
    configured: str = ""
    """The section of weft.yaml that has some as well; empty: there is none."""
    initial: Mapping[str, Any] = field(default_factory=dict)
    """Fields of a new record, such as its source."""

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
