"""`weft apply`, `weft config diff` and `weft delete`: declared resources against those of the mesh."""

import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from difflib import unified_diff
from pathlib import Path
from types import MappingProxyType
from typing import Annotated

import typer

from weft.documents.resource_kinds import ResourceKind
from weft.documents.resources import declared_of, plain
from weft.documents.yaml_documents import (
    MAX_FILE_BYTES,
    SourcedDocument,
    read_texts,
    refuse_repeats,
    yaml_text,
)
from weft.kernel.errors.error_tree import FieldError, WeftError, invalid_field
from weft.kernel.errors.reasons import Reason
from weft_app.cli.columns import label_of
from weft_app.cli.completion import complete_with_tasks
from weft_app.cli.mesh_api import Document, MeshApi, connect
from weft_app.cli.options import DEFAULT_HOME, EXIT_USAGE, HomeOption, act_on_each, reporting
from weft_app.cli.output import json_text
from weft_app.cli.secrets import delete_secrets
from weft_app.cli.targets import (
    MISSING,
    SelectorOption,
    Target,
    parse_targets,
    record_kind,
    selected_names,
)
from weft_app.cli.tasks import delete_tasks
from weft_app.cli.terminal import note, say

APPLY_TIMEOUT_SECONDS = 60.0
FORCED_DELETE_TIMEOUT_SECONDS = 120.0
"""Timeout of a forced delete, above the registry's wait for the model's requests."""
UNCHANGED = "unchanged"
STDIN = "-"
_FIELD = re.compile(r"documents\[(\d+)\]\.?(.*)")
FILE_SUFFIXES = frozenset({".yaml", ".yml", ".json"})
EXIT_DIFFERENT = 1
EXIT_DIFF_FAILED = EXIT_USAGE
"""As in diff(1) and kubectl, 1 means differences, so failures use a higher code."""

FilesOption = Annotated[
    list[Path],
    typer.Option("--file", "-f", help="YAML or JSON file, a folder of files, or - for standard input.", metavar="FILE"),
]
AdoptOption = Annotated[
    bool,
    typer.Option(
        "--adopt",
        help="Adopt resources that runners publish: they may then differ, and stay when the runners are gone.",
    ),
]


def apply(
    files: FilesOption,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would be done.")] = False,
    adopt: AdoptOption = False,
    output: Annotated[
        str, typer.Option("--output", "-o", help="table, json or name.", metavar="[table|json|name]")
    ] = "table",
    home: HomeOption = DEFAULT_HOME,
) -> None:
    """Declare resources. All documents are applied, or none if one is invalid or refused.

    Example: weft get agents -o yaml | weft apply -f -
    """
    if output not in ("table", "json", "name"):
        raise invalid_field("--output", "must be table, json or name")
    documents = read_files(files)
    applied = submit(documents, home, dry_run=dry_run, adopt=adopt)
    say(_render(applied, output, dry_run=dry_run))


def diff(files: FilesOption, adopt: AdoptOption = False, home: HomeOption = DEFAULT_HOME) -> None:
    """Show what apply would change. Exit code 0: no differences, 1: differences, higher: the comparison failed.

    Example: weft config diff -f agents.yaml
    """
    with reporting(failed=EXIT_DIFF_FAILED):
        documents = read_files(files)
        changed = [
            (result, sourced)
            for result, sourced in zip(submit(documents, home, dry_run=True, adopt=adopt), documents, strict=True)
            if result["outcome"] != UNCHANGED
        ]
        for result, sourced in changed:
            say(difference(result, sourced.where))
        if changed:
            raise typer.Exit(EXIT_DIFFERENT)


def read_files(files: Iterable[Path]) -> tuple[SourcedDocument, ...]:
    """Reads documents from files, folders and standard input. Raises an error that lists all invalid ones."""
    documents = read_texts(_texts(files))
    refuse_repeats(documents)
    return documents


def submit(
    documents: tuple[SourcedDocument, ...],
    home: Path,
    *,
    dry_run: bool,
    adopt: bool,
    expected: tuple[Document, ...] = (),
) -> list[Document]:
    """Applies documents. Errors name the document. Accepts an empty list.

    `expected`: the documents as read before; raises RESOURCE_CHANGED for one that has changed since.
    """
    if not documents:
        note("there is nothing to apply")
        return []
    try:
        with connect(home, APPLY_TIMEOUT_SECONDS) as api:
            wanted = [plain(sourced.document) for sourced in documents]
            return post_apply(api, wanted, dry_run=dry_run, adopt=adopt, expected=expected)
    except WeftError as error:
        raise _placed(error, documents) from error


def post_apply(
    api: MeshApi,
    documents: list[Document],
    *,
    dry_run: bool = False,
    adopt: bool = False,
    expected: tuple[Document, ...] = (),
) -> list[Document]:
    """Returns the outcome for each document; see `submit`. Errors name `documents[<index>]` and the field."""
    body = {"documents": documents, "dryRun": dry_run, "adopt": adopt, "expected": expected}
    results: list[Document] = api.post("/api/v1/apply", body)["results"]
    return results


def difference(result: Document, where: str) -> str:
    """Returns a unified diff between a resource in the mesh and its declaration in `where`."""
    name = label_of(result)
    before, after = _lines(result.get("before")), _lines(result.get("after"))
    if before == after:
        return f"# {name}: published by a runner, would be declared\n"
    return "".join(unified_diff(before, after, f"{name} (mesh)", f"{name} ({where})"))


def _lines(document: Document | None) -> list[str]:
    return [] if document is None else yaml_text(declared_of(document)).splitlines(keepends=True)


def _render(applied: list[Document], output: str, *, dry_run: bool) -> str:
    if output == "json":
        return json_text({"kind": "ApplyAnswer", "dryRun": dry_run, "results": applied})
    suffix = " (dry run)" if dry_run else ""
    words = (f" {result['outcome']}{suffix}" if output == "table" else "" for result in applied)
    return "".join(f"{label_of(result)}{word}\n" for result, word in zip(applied, words, strict=True))


def _placed(error: WeftError, documents: tuple[SourcedDocument, ...]) -> WeftError:
    """Replaces "documents[2].model" in an error by its place in the files."""
    found = _FIELD.fullmatch(error.field) if isinstance(error, FieldError) else None
    if not isinstance(error, FieldError) or found is None or int(found[1]) >= len(documents):
        return error
    index, field = int(found[1]), found[2]
    why = error.message.removeprefix(f"{error.field}: ")
    return FieldError(f"{documents[index].where}: {field}" if field else documents[index].where, why, error.reason)


def _texts(files: Iterable[Path]) -> Iterator[tuple[str, str]]:
    for file in files:
        if str(file) == STDIN:
            yield _decoded(sys.stdin.buffer.read(MAX_FILE_BYTES + 1), "standard input"), "standard input"
        elif file.is_dir():
            inside = sorted(path for path in file.iterdir() if path.suffix in FILE_SUFFIXES and path.is_file())
            if not inside:
                raise invalid_field("--file", f"{file} has no .yaml, .yml or .json file")
            yield from ((_read(path), str(path)) for path in inside)
        else:
            yield _read(file), str(file)


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return _decoded(file.read(MAX_FILE_BYTES + 1), str(path))
    except OSError as error:
        raise invalid_field("--file", f"{path} cannot be read: {error.strerror}") from error


def _decoded(content: bytes, source: str) -> str:
    if len(content) > MAX_FILE_BYTES:
        raise WeftError(
            Reason.REQUEST_TOO_LARGE, f"{source}: larger than {MAX_FILE_BYTES // 1024**2} MiB; apply it in parts"
        )
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise WeftError(Reason.MALFORMED_REQUEST, f"{source} (line {line}): this is not UTF-8 text") from error


def delete(
    resources: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KIND NAME...]",
            help="A kind and names; or KIND/NAME...; also task and ids, secret and names",
            autocompletion=complete_with_tasks,
        ),
    ] = None,
    files: Annotated[
        list[Path] | None,
        typer.Option(
            "--file", "-f", help="Delete the resources that a file declares; - for standard input.", metavar="FILE"
        ),
    ] = None,
    selector: SelectorOption = "",
    ignore_not_found: Annotated[
        bool, typer.Option("--ignore-not-found", help="Treat a resource that does not exist as deleted.")
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Unload a loaded model first; delete a secret even if models use it.")
    ] = False,
    home: HomeOption = DEFAULT_HOME,
) -> None:
    """Delete resources, agents and routes first, finished tasks or secrets. A failure does not stop the others.

    A model that an active runner has loaded is not deleted: unload it first, or use --force.

    Example: weft delete agent reviewer; weft delete models -l team=a
    """
    record = record_kind(resources[0]) if resources else ""
    if selector and (files or not resources or record in ("task", "secret")):
        raise invalid_field("--selector", "needs a kind and no names: models or agents")
    if resources and not files and record == "task":
        delete_tasks(resources, home, ignore_not_found=ignore_not_found)
        return
    if resources and not files and record == "secret":
        delete_secrets(resources, home, ignore_not_found=ignore_not_found, force=force)
        return
    targets = [] if selector else _targets(resources or [], files or [])
    if selector:
        targets = _selected(home, resources or [], selector)
    with connect(home, FORCED_DELETE_TIMEOUT_SECONDS) as api:
        act_on_each(
            targets, lambda target: _delete(api, target, force=force), ignored=MISSING if ignore_not_found else ()
        )


def _selected(home: Path, words: list[str], selector: str) -> list[Target]:
    """Returns the resources of a kind that match a selector. Raises INVALID_ARGUMENT if names are given, too."""
    kind, named = parse_targets(words)
    if named:
        raise invalid_field("--selector", "cannot be combined with names")
    return [Target(kind, name) for name in selected_names(home, kind, selector, "deleted")]


def _targets(words: list[str], files: list[Path]) -> list[Target]:
    if bool(words) == bool(files):
        raise invalid_field("KIND", "name resources, or a file that declares them with -f")
    if files:
        found = [Target(one.document.kind, one.document.name) for one in read_files(files)]
    else:
        _, named = parse_targets(words)
        if not named:
            raise invalid_field("NAME", "name what to delete")
        found = list(named)
    # Targets of aliases, agents and routes cannot be deleted before them.
    return sorted(found, key=lambda target: _DELETED_FIRST.get(target.kind, len(_DELETED_FIRST)))


_DELETED_FIRST: Mapping[ResourceKind, int] = MappingProxyType(
    {ResourceKind.ALIAS: 0, ResourceKind.AGENT: 1, ResourceKind.ROUTE: 1, ResourceKind.WORKFLOW: 1}
)
"""Deletion order of kinds; others are deleted last."""


def _delete(api: MeshApi, target: Target, *, force: bool) -> None:
    path = f"/api/v1/{target.kind.plural}/{target.name}"
    runner = _returns_with(api.get(path)) if force else ""
    api.delete(path, force=force)
    say(f"{target} deleted\n")
    if target.kind is ResourceKind.TRIAL:
        note("its pairs are tasks, which stay until their retention ends; delete them earlier with weft delete task")
    if runner:
        note(
            f"{target} is published again when {runner} restarts (weft mesh restart), "
            "unless it is removed from its weft.yaml"
        )


def _returns_with(document: Document) -> str:
    """Returns the live runner with a model in its configuration, which would bring it back; empty if there is none."""
    instance = document["status"].get("instance", {})
    return document["status"].get("runner", "") if instance and not instance.get("addedSource") else ""
