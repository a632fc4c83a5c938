"""Targets of a command: `KIND [NAME...]` or `KIND/NAME...`."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weft.api.registry.v1.tags_pb2 import Tags
from weft.documents.resource_kinds import ResourceKind, parse_kind
from weft.documents.selectors import Selector, parse_selector, selects
from weft.kernel.errors import WeftError, invalid_field
from weft.kernel.names import close_names, require_name
from weft.kernel.reasons import Reason

if TYPE_CHECKING:
    from weft.client.resources import Registry
    from weft.documents.resources import AnyDocument

REQUEST_WORDS = frozenset({"request", "requests"})
CLIENT_WORDS = frozenset({"client", "clients"})
TASK_WORDS = frozenset({"task", "tasks", "inference-task", "inference-tasks"})
"""Names of what a router stores, which are no kinds of resources."""
SECRET_WORDS = frozenset({"secret", "secrets"})
"""Names of what the registry keeps, and which is never declared."""
LABELLED = frozenset({ResourceKind.MODEL, ResourceKind.AGENT})
"""Kinds of resources that have labels."""
SelectorOption = Annotated[
    str,
    typer.Option("--selector", "-l", metavar="SELECTOR", help="Models or agents with such labels: tier=fast,team=a."),
]
_NOT_FOUND = frozenset({Reason.NOT_FOUND, Reason.MODEL_NOT_FOUND})


@dataclass(frozen=True, slots=True)
class Target:
    """One resource."""

    kind: ResourceKind
    name: str

    def __str__(self) -> str:
        return f"{self.kind.value}/{self.name}"


def parse_targets(words: list[str]) -> tuple[ResourceKind, tuple[Target, ...]]:
    """Returns the kind and the resources that `words` name; no resources for a kind alone.

    Raises INVALID_ARGUMENT for an unknown kind, an invalid name, and a mixture of both forms.
    """
    if "/" in words[0]:
        targets = tuple(_pair(word) for word in words)
        return targets[0].kind, targets
    kind = parse_kind(words[0])
    return kind, tuple(Target(kind, require_name(name, "NAME")) for name in words[1:])


def one_target(words: list[str]) -> Target:
    """Returns the one resource that `words` name. Raises INVALID_ARGUMENT for none or several."""
    _, targets = parse_targets(words)
    if len(targets) != 1:
        raise invalid_field("NAME", "name one resource, as KIND NAME or KIND/NAME")
    return targets[0]


def find(registry: "Registry", target: Target) -> "AnyDocument":
    """Returns a resource. Raises NOT_FOUND with a suggestion for a misspelt name."""
    try:
        return registry.document(target.kind, target.name)
    except WeftError as error:
        raise with_suggestion(registry, target, error) from error


def with_suggestion(registry: "Registry", target: Target, error: WeftError) -> WeftError:
    """Adds names that are close to `target` to an error that says it does not exist."""
    if error.reason not in _NOT_FOUND:
        return error
    try:
        close = close_names(target.name, registry.names(target.kind))
    except WeftError:
        close = ""
    meant = close or f"`weft get {target.kind.plural}` lists them"
    return WeftError(error.reason, f"there is no {target}; {meant}", metadata=error.metadata)


def selector_of(text: str, kind: ResourceKind) -> Selector:
    """Returns the selector of `-l`. Raises INVALID_ARGUMENT for a wrong one, and for a kind without labels."""
    if text and kind not in LABELLED:
        raise invalid_field("--selector", f"goes with models and agents; {kind.plural} have no labels")
    return parse_selector(text, "--selector")


def selected(documents: "list[AnyDocument]", selector: Selector) -> "list[AnyDocument]":
    """Returns the documents of a kind with labels that a selector selects."""
    return [document for document in documents if selects(selector, tags_of(document))] if selector else documents


def tags_of(document: "AnyDocument") -> Tags:
    """Returns tier, labels and owner of a model or an agent."""
    declared: Any = document.declared
    tags: Tags = declared.manifest.tags if document.kind is ResourceKind.MODEL else declared.tags
    return tags


def is_missing(error: WeftError) -> bool:
    """Whether the error says that something does not exist."""
    return error.reason in _NOT_FOUND


def _pair(word: str) -> Target:
    kind, separator, name = word.partition("/")
    if not separator:
        raise invalid_field("NAME", f"{word[:64]!r} has no kind; write KIND/NAME for each, or KIND NAME...")
    return Target(parse_kind(kind), require_name(name, "NAME"))
