"""`weft config edit`: a declared resource in the user's editor, applied when the editor ends."""

import os
import shlex
import signal
import subprocess
import tempfile
from collections.abc import Mapping
from itertools import dropwhile
from pathlib import Path
from shutil import which
from types import MappingProxyType
from typing import Annotated

import typer

from weft.documents.resource_kinds import ResourceKind
from weft.documents.resources import declared_of
from weft.documents.yaml_documents import read_documents, yaml_text
from weft.kernel.errors.error_tree import WeftError, invalid_field
from weft.kernel.errors.reasons import Reason
from weft_app.cli.columns import label_of
from weft_app.cli.completion import complete_named
from weft_app.cli.declare import UNCHANGED, AdoptOption, submit
from weft_app.cli.mesh_api import Document, connect
from weft_app.cli.options import DEFAULT_HOME, HomeOption, handled
from weft_app.cli.targets import one_named
from weft_app.cli.terminal import note, safe_text, say

EDITOR_VARIABLES = ("VISUAL", "EDITOR")
USUAL_EDITORS = ("editor", "nano", "vi")
"""Editors to search for if no variable specifies one."""
MAX_TRIES = 100
"""Maximum number of times to reopen an invalid text."""
EDITED = "the edited text"
_COMMENT = "#"
_NOT_DECLARED: Mapping[ResourceKind, str] = MappingProxyType(
    {
        ResourceKind.RUNNER: "a runner registers itself: edit weft.yaml on its host, then weft mesh reload",
        ResourceKind.POOL: "a pool is defined by its models: edit their poolName with weft config edit model/NAME",
    }
)
_RETRIED = frozenset(
    {
        Reason.INVALID_ARGUMENT,
        Reason.MALFORMED_REQUEST,
        Reason.REQUEST_TOO_LARGE,
        Reason.NOT_FOUND,
        Reason.MODEL_NOT_FOUND,
        Reason.ALREADY_EXISTS,
        Reason.RESOURCE_IN_USE,
    }
)
"""Errors that another text may avoid."""


def edit(
    resource: Annotated[
        list[str],
        typer.Argument(
            metavar="KIND NAME", help="One resource, as KIND NAME, KIND/NAME or NAME.", autocompletion=complete_named
        ),
    ],
    adopt: AdoptOption = False,
    home: HomeOption = DEFAULT_HOME,
) -> None:
    """Edit a resource as YAML in $VISUAL or $EDITOR, and apply it when the editor exits.

    Invalid text is opened again with the errors at the top. A resource that was changed meanwhile is not overwritten:
    the edited text is kept in a file. What a runner publishes comes from weft.yaml on its host; --adopt takes it over.

    Example: EDITOR=nano weft config edit agent/reviewer
    """
    with connect(home) as mesh:
        target = one_named(mesh, resource)
        if target.kind in _NOT_DECLARED:
            raise invalid_field("KIND", _NOT_DECLARED[target.kind])
        original = mesh.document(target.kind, target.name)
    _require_editable(original, adopt=adopt)
    _edit(original, home, _editor(), adopt=adopt)


def _require_editable(document: Document, *, adopt: bool) -> None:
    """Raises RESOURCE_IN_USE, naming the weft.yaml, if the resource comes from one."""
    label, status = label_of(document), document["status"]
    if document["kind"] == ResourceKind.ALIAS and status.get("source") == "configured":
        raise WeftError(
            Reason.RESOURCE_IN_USE,
            f"{label} is in the mesh's weft.yaml (registry.aliases): edit it there, then weft mesh reload",
        )
    if not adopt and status.get("kind") == "virtual":
        raise WeftError(
            Reason.RESOURCE_IN_USE,
            f"{label} is published by the runner {status.get('runner', '')} from the weft.yaml of its host: edit it "
            "there, then weft mesh reload; or declare it in the mesh, which takes precedence: "
            f"weft config edit {label} --adopt",
        )


def _editor() -> list[str]:
    """Returns the command line of the user's editor. Raises INVALID_ARGUMENT if there is none."""
    for variable in EDITOR_VARIABLES:
        given = os.environ.get(variable, "")
        try:
            words = shlex.split(given)
        except ValueError as error:
            raise invalid_field(variable, f"{given[:64]!r} is no command line: {error}") from None
        if words:
            return words
    for name in USUAL_EDITORS:
        if found := which(name):
            return [found]
    raise invalid_field("EDITOR", "is not set, and no editor was found; set it, such as EDITOR=nano")


def _edit(original: Document, home: Path, editor: list[str], *, adopt: bool) -> None:
    """Opens the editor until its text is applied, unchanged, or rejected for a reason that no text avoids.

    Keeps the file if an edit would be lost, and the error contains its path.
    """
    label, begin = label_of(original), yaml_text(declared_of(original))
    number, path = tempfile.mkstemp(prefix=f"weft-{label}-".replace("/", "-").replace(":", "-"), suffix=".yaml")
    os.close(number)
    file, text, wrong = Path(path), begin, ""
    for _ in range(MAX_TRIES):
        edited = _edited(file, editor, label, text, wrong)
        if edited == begin or not edited.strip():
            file.unlink(missing_ok=True)
            note("nothing was changed" if edited.strip() else "the text is empty; nothing was changed")
            return
        if wrong and edited == text:
            break
        text = edited
        try:
            results = _applied(text, original, home, adopt=adopt)
        except WeftError as error:
            if error.reason not in _RETRIED:
                raise _kept(file, error.message, error.reason) from error
            wrong = error.message
            continue
        file.unlink(missing_ok=True)
        is_changed = any(result["outcome"] != UNCHANGED for result in results)
        say(f"{label} {'configured' if is_changed else 'unchanged'}\n")
        return
    raise _kept(file, f"the text is still invalid and was not applied: {wrong}")


def _edited(file: Path, editor: list[str], label: str, text: str, wrong: str) -> str:
    """Returns the edited text, without the comments at the top."""
    header = [
        f"Edit {label}. The text is applied when the editor exits, unless it is unchanged or empty.",
        *([safe_text(line) for line in f"Not applied: {wrong}".splitlines()] if wrong else []),
    ]
    file.write_text("".join(f"{_COMMENT} {line}\n" for line in header) + text, encoding="utf-8")
    try:
        # An editor decides what these keys do, such as stop a command that it runs; it has their default actions.
        with handled((signal.SIGINT, signal.SIGQUIT), lambda _number, _frame: None):
            ended = subprocess.run([*editor, str(file)], check=False)  # noqa: S603 - the user's editor
    except OSError as error:
        file.unlink(missing_ok=True)
        raise invalid_field("EDITOR", f"{editor[0]} cannot be started: {error.strerror}") from error
    if ended.returncode:
        raise _kept(file, f"{editor[0]} ended with {ended.returncode}; nothing was applied")
    try:
        lines = file.read_text("utf-8").splitlines(keepends=True)
    except ValueError:
        raise _kept(file, "the text is not UTF-8; nothing was applied") from None
    return "".join(dropwhile(lambda line: line.startswith(_COMMENT), lines))


def _applied(text: str, original: Document, home: Path, *, adopt: bool) -> list[Document]:
    """Applies the text as `weft apply` does, unless the resource has changed since it was read."""
    label, found = label_of(original), read_documents(text, EDITED)
    if [one.label for one in found] != [label]:
        raise invalid_field(
            EDITED, f"must contain only {label}; to rename a resource, delete it and apply it with the new name"
        )
    try:
        return submit(found, home, dry_run=False, adopt=adopt, expected=(declared_of(original),))
    except WeftError as error:
        if error.reason is Reason.RESOURCE_CHANGED:
            message = f"{label} was changed or deleted since it was opened; nothing was applied"
            raise WeftError(error.reason, message) from error
        raise


def _kept(file: Path, why: str, reason: Reason = Reason.INVALID_ARGUMENT) -> WeftError:
    """Returns an error with the path of the edited text."""
    place = f"the edited text is in {shlex.quote(str(file))}"
    return WeftError(reason, f"{why}; {place}: compare it with weft config diff -f, apply it with weft apply -f")
