"""Targets of a command: `KIND [NAME...]`, `KIND/NAME...`, or names alone."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated

import typer

from weft.documents.resource_kinds import ResourceKind, kind_words, parse_kind
from weft.documents.selectors import TAG_FIELDS, Selector, parse_selector
from weft.kernel.errors import WeftError, invalid_field
from weft.kernel.names import require_name_of_model
from weft.kernel.reasons import Reason
from weft.kernel.unknown_names import RESOURCE, unknown_name
from weft_app.cli.mesh_documents import Document, MeshDocuments

REQUEST_WORDS = frozenset({"request", "requests"})
CLIENT_WORDS = frozenset({"client", "clients"})
TASK_WORDS = frozenset({"task", "tasks", "inference-task", "inference-tasks"})
"""Names of what a router stores, which are no kinds of resources."""
SECRET_WORDS = frozenset({"secret", "secrets"})
"""Names of what the registry keeps, and which is never declared."""
BATCH_WORDS = frozenset({"batch", "batches"})
OPERATION_WORDS = frozenset({"operation", "operations"})
"""Names of what is cancelled, and not listed by `weft get`."""
LEASE_WORDS = frozenset({"lease", "leases"})
"""Names of the leases of accelerator memory."""
ROUTER_WORDS = frozenset({"router", "routers"})
"""Names of the routers, which register themselves."""
RECORD_WORDS = CLIENT_WORDS | LEASE_WORDS | ROUTER_WORDS | SECRET_WORDS
"""Names of what is listed by reading it; see `weft_app.cli.records`."""
TENANTS = (ResourceKind.TENANT,)
LABELLED = frozenset({ResourceKind.MODEL, ResourceKind.AGENT})
"""Kinds of resources that have labels."""
SelectorOption = Annotated[
    str,
    typer.Option("--selector", "-l", metavar="SELECTOR", help="Models or agents with such labels: tier=fast,team=a."),
]
ALL = "all"
"""What stands for every kind in `weft get all`."""
OTHER_KINDS = ("requests", "clients", "tasks", "secrets", "leases", "routers")
"""What `weft get` lists besides resources."""
_NOT_FOUND = frozenset({Reason.NOT_FOUND, Reason.MODEL_NOT_FOUND})


@dataclass(frozen=True, slots=True)
class Target:
    """One resource."""

    kind: ResourceKind
    name: str

    def __str__(self) -> str:
        return f"{self.kind.value}/{self.name}"


@dataclass(frozen=True, slots=True)
class Scope:
    """What a command is about: whole kinds, or the resources that are named."""

    kinds: tuple[ResourceKind, ...]
    """The kinds, each once, in the order in which they are shown."""
    targets: tuple[Target, ...] = ()
    """Resources of these kinds; none: all of them."""


def scope_of(mesh: MeshDocuments, words: list[str]) -> Scope:
    """Returns what `words` name: `all`, `KIND[,KIND...]`, `KIND NAME...`, `KIND/NAME...`, or names of any kind.

    Raises INVALID_ARGUMENT for a name that several kinds have, and NOT_FOUND for one that none has.
    """
    if kinds := whole_kinds(words):
        return Scope(kinds)
    if words[0].partition("/")[0].lower() in kind_words():
        _, targets = parse_targets(words)
    else:
        targets = tuple(named(mesh, word) for word in words)
    return Scope(_each_once(target.kind for target in targets), targets)


def whole_kinds(words: list[str]) -> tuple[ResourceKind, ...]:
    """Returns the kinds of which `words` mean all resources; none: they name resources."""
    if words == [ALL]:
        return tuple(ResourceKind)
    kinds = words[0].lower().split(",")
    if len(words) > 1 or not all(kind in kind_words() for kind in kinds):
        return ()
    return _each_once(kind_words()[kind] for kind in kinds)


def tenants_named(words: list[str]) -> frozenset[str] | None:
    """Returns the tenants that `words` name (none: all of them); None where they are about others, too."""
    if kinds := whole_kinds(words):
        return frozenset() if kinds == TENANTS else None
    if kind_words().get(words[0].partition("/")[0].lower()) is not ResourceKind.TENANT:
        return None
    _, targets = parse_targets(words)
    return frozenset(each.name for each in targets) if _each_once(each.kind for each in targets) == TENANTS else None


def one_named(mesh: MeshDocuments, words: list[str]) -> Target:
    """Returns the one resource that `words` name, see `scope_of`. Raises INVALID_ARGUMENT for none or several."""
    targets = scope_of(mesh, words).targets
    if len(targets) != 1:
        raise invalid_field("NAME", "name one resource, as KIND NAME, KIND/NAME, or NAME alone")
    return targets[0]


def _each_once(kinds: Iterable[ResourceKind]) -> tuple[ResourceKind, ...]:
    return tuple(dict.fromkeys(kinds))


def named(mesh: MeshDocuments, name: str) -> Target:
    """Returns the one resource of a name, whatever its kind. A pool of one model alone is that model.

    Raises INVALID_ARGUMENT for a name that several kinds have, and NOT_FOUND for one that none has.
    """
    name = require_name_of_model(name, "NAME")
    found = [document for kind in ResourceKind if (document := _document(mesh, Target(kind, name))) is not None]
    if len(found) > 1:
        found = [document for document in found if not _is_pool_of_one(document)]
    match found:
        case [one]:
            return Target(ResourceKind(one["kind"]), name)
        case []:
            error = unknown_name(RESOURCE, name, {each for kind in ResourceKind for each in mesh.names(kind)})
            every = _listed([*(kind.plural for kind in ResourceKind), *OTHER_KINDS], "and")
            separator = "" if error.message.endswith("?") else ";"
            error.message += f"{separator} {name} is no kind either: the kinds are {every}"
            raise error
        case _:
            kinds = [document["kind"] for document in found]
            raise invalid_field(
                "NAME",
                f"{name} is the name of {_listed(map(_with_article, kinds), 'and')}; "
                f"write {_listed((f'{kind}/{name}' for kind in kinds), 'or')}",
            )


def _document(mesh: MeshDocuments, target: Target) -> Document | None:
    try:
        return mesh.document(target.kind, target.name)
    except WeftError as error:
        if error.reason not in _NOT_FOUND:
            raise
        return None


def _is_pool_of_one(document: Document) -> bool:
    return bool(document["kind"] == ResourceKind.POOL and not document["status"]["explicit"])


def _with_article(noun: str) -> str:
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"


def _listed(words: Iterable[str], last: str) -> str:
    """Returns words as a list in a sentence: "a, b or c"."""
    *before, end = words
    return f"{', '.join(before)} {last} {end}" if before else end


def parse_targets(words: list[str]) -> tuple[ResourceKind, tuple[Target, ...]]:
    """Returns the kind and the resources that `words` name; no resources for a kind alone.

    Raises INVALID_ARGUMENT for an unknown kind, an invalid name, and a mixture of both forms.
    """
    if "/" in words[0]:
        targets = tuple(_pair(word) for word in words)
        return targets[0].kind, targets
    kind = parse_kind(words[0])
    return kind, tuple(Target(kind, require_name_of_model(name, "NAME")) for name in words[1:])


def one_target(words: list[str]) -> Target:
    """Returns the one resource that `words` name. Raises INVALID_ARGUMENT for none or several."""
    _, targets = parse_targets(words)
    if len(targets) != 1:
        raise invalid_field("NAME", "name one resource, as KIND NAME or KIND/NAME")
    return targets[0]


def labelled(scope: Scope, selector: str) -> Scope:
    """Returns the part of a scope that has labels, where there is a selector.

    Raises INVALID_ARGUMENT where no part has.
    """
    kinds = tuple(kind for kind in scope.kinds if kind in LABELLED)
    if not selector or kinds == scope.kinds:
        return scope
    if not kinds or scope.targets:
        without = next(kind for kind in scope.kinds if kind not in LABELLED)
        raise invalid_field("--selector", f"goes with models and agents; {without.plural} have no labels")
    return Scope(kinds)


def selector_of(text: str, kind: ResourceKind) -> Selector:
    """Returns the selector of `-l`. Raises INVALID_ARGUMENT for a wrong one, and for a kind without labels."""
    labelled(Scope((kind,)), text)
    return parse_selector(text, "--selector")


def selected(documents: list[Document], selector: Selector) -> list[Document]:
    """Returns the documents of a kind with labels that a selector selects."""
    return [document for document in documents if all(each.accepts(_tag(document, each.key)) for each in selector)]


def _tag(document: Document, key: str) -> str:
    return str((document if key in TAG_FIELDS else document.get("labels", {})).get(key, ""))


def is_missing(error: WeftError) -> bool:
    """Whether the error says that something does not exist."""
    return error.reason in _NOT_FOUND


def _pair(word: str) -> Target:
    kind, separator, name = word.partition("/")
    if not separator:
        raise invalid_field("NAME", f"{word[:64]!r} has no kind; write KIND/NAME for each, or KIND NAME...")
    return Target(parse_kind(kind), require_name_of_model(name, "NAME"))
