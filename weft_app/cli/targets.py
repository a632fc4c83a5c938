"""Targets of a command: `KIND [NAME...]`, `KIND/NAME...`, or names alone."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from weft.documents.resource_kinds import ResourceKind, kind_words, parse_kind
from weft.documents.selectors import TAG_FIELDS, Selector, parse_selector
from weft.kernel.errors.error_tree import WeftError, invalid_field
from weft.kernel.errors.reasons import Reason
from weft.kernel.errors.removed_features import removed_kind
from weft.kernel.values.names import require_name_of_model
from weft.kernel.values.unknown_names import RESOURCE, unknown_name
from weft_app.cli.extension_commands import kinds_off_here
from weft_app.cli.mesh_api import Document, MeshApi, connect
from weft_app.cli.terminal import note

_RECORDS = {
    **{word: word for word in ("request", "client", "task", "secret", "lease", "router", "batch", "operation")},
    "inference-task": "task",
}
_RECORDS |= {"batches" if word == "batch" else f"{word}s": kind for word, kind in _RECORDS.items()}
"""Kinds of records that are never declared, by their words."""
TENANTS = (ResourceKind.TENANT,)
LABELLED = frozenset({ResourceKind.MODEL, ResourceKind.AGENT, ResourceKind.ROUTE})
SelectorOption = Annotated[
    str,
    typer.Option(
        "--selector", "-l", metavar="SELECTOR", help="Label selector of models, agents or routes, such as tier=fast."
    ),
]
MAX_SELECTED = 100
"""Maximum number of resources that a selector changes or deletes."""
ALL = "all"
OTHER_KINDS = ("requests", "clients", "tasks", "secrets", "leases", "routers")
"""Kinds of `weft get` besides resources."""
MISSING = frozenset({Reason.NOT_FOUND, Reason.MODEL_NOT_FOUND})
"""Reasons of errors about missing objects."""


def record_kind(word: str) -> str:
    """Returns the kind of record in a word, or in its part before a slash, such as "task"; empty if there is none."""
    return _RECORDS.get(word.partition("/")[0].lower(), "")


def record_ids(words: Sequence[str], kind: str, mixed: Callable[[str], WeftError]) -> list[str]:
    """Returns the ids in `KIND ID...` or `KIND/ID...`. Raises `mixed` for a word with another kind."""
    if "/" not in words[0]:
        return list(words[1:])
    if others := [word for word in words if record_kind(word) != kind]:
        raise mixed(others[0])
    return [word.partition("/")[2] for word in words]


@dataclass(frozen=True, slots=True)
class Target:
    """A resource by kind and name."""

    kind: ResourceKind
    name: str

    def __str__(self) -> str:
        return f"{self.kind.value}/{self.name}"


@dataclass(frozen=True, slots=True)
class Scope:
    """The subject of a command: whole kinds, or named resources."""

    kinds: tuple[ResourceKind, ...]
    """Distinct kinds in display order."""
    targets: tuple[Target, ...] = ()
    """Resources of these kinds; empty: all."""


def scope_of(mesh: MeshApi, words: list[str]) -> Scope:
    """Parses `all`, `KIND[,KIND...]`, `KIND NAME...`, `KIND/NAME...`, or names of any kind.

    Raises INVALID_ARGUMENT for a name in several kinds, and NOT_FOUND for an unknown one.
    """
    if kinds := whole_kinds(words):
        return Scope(kinds)
    if words[0].partition("/")[0].lower() in kind_words():
        _, targets = parse_targets(words)
    else:
        targets = tuple(named(mesh, word) for word in words)
    return Scope(_each_once(target.kind for target in targets), targets)


def whole_kinds(words: list[str]) -> tuple[ResourceKind, ...]:
    """Returns the kinds in `words` without names; empty if there are names."""
    if words == [ALL]:
        off = kinds_off_here()
        return tuple(kind for kind in ResourceKind if kind not in off)
    kinds = words[0].lower().split(",")
    if len(words) > 1 or not all(kind in kind_words() for kind in kinds):
        return ()
    return _each_once(map(_kind, kinds))


def _kind(word: str) -> ResourceKind:
    """Returns the kind that a word names. Raises INVALID_ARGUMENT for none, and for one whose extension is off."""
    kind = parse_kind(word)
    if why := kinds_off_here().get(kind):
        raise invalid_field("KIND", why)
    return kind


def tenants_named(words: list[str]) -> frozenset[str] | None:
    """Returns the tenants in `words` (empty: all tenants); None if they are also about other kinds."""
    if kinds := whole_kinds(words):
        return frozenset() if kinds == TENANTS else None
    if kind_words().get(words[0].partition("/")[0].lower()) is not ResourceKind.TENANT:
        return None
    _, targets = parse_targets(words)
    return frozenset(each.name for each in targets) if _each_once(each.kind for each in targets) == TENANTS else None


def one_named(mesh: MeshApi, words: list[str]) -> Target:
    """Parses one resource, see `scope_of`. Raises INVALID_ARGUMENT for none or several."""
    targets = scope_of(mesh, words).targets
    if len(targets) != 1:
        raise invalid_field("NAME", "name one resource, as KIND NAME, KIND/NAME, or NAME alone")
    return targets[0]


def _each_once(kinds: Iterable[ResourceKind]) -> tuple[ResourceKind, ...]:
    return tuple(dict.fromkeys(kinds))


def named(mesh: MeshApi, name: str) -> Target:
    """Returns the resource with a name in any kind. A pool of a single model is that model.

    Raises INVALID_ARGUMENT for a name in several kinds, and NOT_FOUND for an unknown one.
    """
    name = require_name_of_model(name, "NAME")
    found = [document for kind in ResourceKind if (document := _document(mesh, Target(kind, name))) is not None]
    if len(found) > 1:
        found = [
            document
            for document in found
            if not (document["kind"] == ResourceKind.POOL and not document["status"]["explicit"])
        ]
    match found:
        case [one]:
            return Target(ResourceKind(one["kind"]), name)
        case []:
            error = unknown_name(RESOURCE, name, {each for kind in ResourceKind for each in mesh.names(kind)})
            if removed := removed_kind(name.partition("/")[0].lower()):
                error.message += f"; {removed}"
                raise error
            every = _listed([*(kind.plural for kind in ResourceKind), *OTHER_KINDS], "and")
            separator = "" if error.message.endswith("?") else ";"
            error.message += f"{separator} {name} is not a kind either; the kinds are {every}"
            raise error
        case _:
            kinds = [document["kind"] for document in found]
            raise invalid_field(
                "NAME",
                f"{name} is the name of {_listed(map(_with_article, kinds), 'and')}; "
                f"write {_listed((f'{kind}/{name}' for kind in kinds), 'or')}",
            )


def _document(mesh: MeshApi, target: Target) -> Document | None:
    try:
        return mesh.document(target.kind, target.name)
    except WeftError as error:
        if error.reason not in MISSING:
            raise
        return None


def _with_article(noun: str) -> str:
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"


def _listed(words: Iterable[str], last: str) -> str:
    """Returns words as a list in a sentence: "a, b or c"."""
    *before, end = words
    return f"{', '.join(before)} {last} {end}" if before else end


def parse_targets(words: list[str]) -> tuple[ResourceKind, tuple[Target, ...]]:
    """Parses a kind and its resources; no resources for a kind alone.

    Raises INVALID_ARGUMENT for an unknown kind, an invalid name, and a mixture of both forms.
    """
    if "/" in words[0]:
        targets = tuple(_pair(word) for word in words)
        return targets[0].kind, targets
    kind = _kind(words[0])
    return kind, tuple(Target(kind, require_name_of_model(name, "NAME")) for name in words[1:])


def one_target(words: list[str]) -> Target:
    """Parses one resource. Raises INVALID_ARGUMENT for none or several."""
    _, targets = parse_targets(words)
    if len(targets) != 1:
        raise invalid_field("NAME", "name one resource, as KIND NAME or KIND/NAME")
    return targets[0]


def labelled(scope: Scope, selector: str) -> Scope:
    """Restricts a scope to kinds with labels if there is a selector.

    Raises INVALID_ARGUMENT if no kind has labels.
    """
    kinds = tuple(kind for kind in scope.kinds if kind in LABELLED)
    if not selector or kinds == scope.kinds:
        return scope
    if not kinds or scope.targets:
        without = next(kind for kind in scope.kinds if kind not in LABELLED)
        raise invalid_field("--selector", f"is only for models, agents and routes; {without.plural} have no labels")
    return Scope(kinds)


def selector_of(text: str, kind: ResourceKind) -> Selector:
    """Parses the selector of `-l`. Raises INVALID_ARGUMENT if it is invalid or the kind has no labels."""
    labelled(Scope((kind,)), text)
    return parse_selector(text, "--selector")


def selected(documents: list[Document], selector: Selector) -> list[Document]:
    """Returns the documents that match a selector."""
    return [
        document
        for document in documents
        if all(
            each.accepts(str((document if each.key in TAG_FIELDS else document.get("labels", {})).get(each.key, "")))
            for each in selector
        )
    ]


def selected_names(home: Path, kind: ResourceKind, selector: str, done: str) -> list[str]:
    """Returns the names of a kind's resources that match `-l`, with a note on stderr if there are none.

    Raises INVALID_ARGUMENT for more than MAX_SELECTED, with the participle `done`, such as "deleted".
    """
    wanted = selector_of(selector, kind)
    with connect(home) as mesh:
        found = [document["name"] for document in selected(mesh.documents(kind), wanted)]
    if len(found) > MAX_SELECTED:
        why = f"selects {len(found)} {kind.plural}; at most {MAX_SELECTED} are {done} at a time"
        raise invalid_field("--selector", why)
    if not found:
        note(f"no {kind.plural} match these labels")
    return found


def _pair(word: str) -> Target:
    kind, separator, name = word.partition("/")
    if not separator:
        raise invalid_field("NAME", f"{word[:64]!r} has no kind; write KIND/NAME for each resource, or KIND NAME...")
    return Target(_kind(kind), require_name_of_model(name, "NAME"))
