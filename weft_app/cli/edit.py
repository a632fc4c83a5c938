"""`weft edit`: a declared resource in the user's editor, applied when the editor ends."""

import os
import shlex
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from shutil import which
from types import MappingProxyType
from typing import Annotated, NamedTuple, NoReturn

import typer

from weft.documents.resource_kinds import ResourceKind
from weft.documents.resources import declared_of
from weft.documents.yaml_documents import read_documents, yaml_text
from weft.kernel.errors import WeftError, invalid_field
from weft.kernel.reasons import Reason
from weft_app.cli.columns import label_of
from weft_app.cli.completion import complete_named
from weft_app.cli.declare import UNCHANGED, AdoptOption, submit
from weft_app.cli.mesh_documents import Document, connect_documents
from weft_app.cli.options import DEFAULT_HOME, HomeOption, note
from weft_app.cli.output import safe_text, say
from weft_app.cli.targets import one_named

EDITOR_VARIABLES = ("VISUAL", "EDITOR")
USUAL_EDITORS = ("editor", "nano", "vi")
"""Editors that are looked for where no variable names one."""
MAX_TRIES = 100
"""Most times that a wrong text is opened again."""
EDITED = "the edited text"
_COMMENT = "#"
_NOT_DECLARED: Mapping[ResourceKind, str] = MappingProxyType(
    {
        ResourceKind.RUNNER: "a runner registers itself: edit weft.yaml on its host, then weft reload",
        ResourceKind.POOL: "a pool follows from its models: edit their poolName with weft edit model/NAME",
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
"""Refusals that another text may avoid."""


class _Edited(NamedTuple):
    """A text as it left the editor, without the comments on top of it."""

    text: str
    is_empty: bool


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
    """Edit a resource in $VISUAL or $EDITOR as YAML, and apply it when the editor ends.

    A wrong text is opened again with what is wrong on top. A resource that was changed meanwhile is not overwritten:
    the edited text is kept in a file. What a runner publishes is of the weft.yaml of its host, and is taken over by
    --adopt.

    Example: EDITOR=nano weft edit agent/reviewer
    """
    with connect_documents(home) as mesh:
        target = one_named(mesh, resource)
        if target.kind in _NOT_DECLARED:
            raise invalid_field("KIND", _NOT_DECLARED[target.kind])
        original = mesh.document(target.kind, target.name)
    _require_editable(original, adopt=adopt)
    _Session(original, home, _editor(), adopt=adopt).run()


def _require_editable(document: Document, *, adopt: bool) -> None:
    """Raises RESOURCE_IN_USE for what belongs to a weft.yaml, naming which."""
    label, status = label_of(document), document["status"]
    if document["kind"] == ResourceKind.ALIAS and status.get("source") == "configured":
        raise WeftError(
            Reason.RESOURCE_IN_USE,
            f"{label} is of the mesh's weft.yaml (registry.aliases): edit it there, then weft reload",
        )
    if not adopt and status.get("kind") == "virtual":
        raise WeftError(
            Reason.RESOURCE_IN_USE,
            f"{label} is published by the runner {status.get('runner', '')} from the weft.yaml of its host: edit it "
            f"there, then weft reload; or declare it in the mesh, which then counts: weft edit {label} --adopt",
        )


def _editor() -> list[str]:
    """Returns the command line of the user's editor. Raises INVALID_ARGUMENT where there is none."""
    for variable in EDITOR_VARIABLES:
        if words := shlex.split(os.environ.get(variable, "")):
            return words
    for name in USUAL_EDITORS:
        if found := which(name):
            return [found]
    raise invalid_field("EDITOR", "names no editor, and none was found; set it, such as EDITOR=nano")


class _Session:
    """One resource in an editor, until it is applied or given up. Its file stays where an edit would be lost."""

    def __init__(self, original: Document, home: Path, editor: list[str], *, adopt: bool) -> None:
        self._original = original
        self._label = label_of(original)
        self._home = home
        self._editor = editor
        self._adopt = adopt
        name = f"weft-{self._label}-".replace("/", "-").replace(":", "-")
        number, file = tempfile.mkstemp(prefix=name, suffix=".yaml")
        os.close(number)
        self._file = Path(file)

    def run(self) -> None:
        """Opens the editor until its text is applied, unchanged, or refused for a reason that no text avoids."""
        original = yaml_text(declared_of(self._original))
        text, wrong = original, ""
        for _ in range(MAX_TRIES):
            edited = self._edited(text, wrong)
            if edited.is_empty:
                self._discard("the text is empty; nothing was changed")
                return
            if edited.text == original:
                self._discard("nothing was changed")
                return
            if wrong and edited.text == text:
                self._keep(f"the text is still wrong, and was not applied: {wrong}")
            text = edited.text
            try:
                results = self._applied(text)
            except WeftError as error:
                if error.reason not in _RETRIED:
                    self._keep(error.message, error.reason)
                wrong = error.message
                continue
            self._say(results)
            return
        self._keep(f"the text is still wrong, and was not applied: {wrong}")

    def _edited(self, text: str, wrong: str) -> _Edited:
        """Returns what the user made of a text."""
        header = [
            f"Edit {self._label}. It is applied when the editor ends; without a change, or empty, nothing is.",
            *([safe_text(line) for line in f"Not applied: {wrong}".splitlines()] if wrong else []),
        ]
        self._file.write_text("".join(f"{_COMMENT} {line}\n" for line in header) + text, encoding="utf-8")
        try:
            ended = subprocess.run([*self._editor, str(self._file)], check=False)  # noqa: S603 - the user's editor
        except OSError as error:
            self._discard("")
            raise invalid_field("EDITOR", f"{self._editor[0]} cannot be started: {error.strerror}") from error
        if ended.returncode:
            self._keep(f"{self._editor[0]} ended with {ended.returncode}; nothing was applied")
        try:
            lines = self._file.read_text("utf-8").splitlines(keepends=True)
        except ValueError:
            self._keep("the text is not UTF-8; nothing was applied")
        start = next((at for at, line in enumerate(lines) if not line.startswith(_COMMENT)), len(lines))
        found = "".join(lines[start:])
        return _Edited(found, not found.strip())

    def _applied(self, text: str) -> list[Document]:
        """Applies the text as `weft apply` does, where the resource still is as it was read."""
        found = read_documents(text, EDITED)
        if [one.label for one in found] != [self._label]:
            raise invalid_field(EDITED, f"must be {self._label} alone; delete and apply rename a resource")
        try:
            return submit(found, self._home, dry_run=False, adopt=self._adopt, expected=(declared_of(self._original),))
        except WeftError as error:
            if error.reason is Reason.RESOURCE_CHANGED:
                message = f"{self._label} was changed or deleted since it was opened; nothing was applied"
                raise WeftError(error.reason, message) from error
            raise

    def _say(self, results: list[Document]) -> None:
        self._file.unlink(missing_ok=True)
        is_changed = any(result["outcome"] != UNCHANGED for result in results)
        say(f"{self._label} {'configured' if is_changed else 'unchanged'}\n")

    def _discard(self, text: str) -> None:
        self._file.unlink(missing_ok=True)
        if text:
            note(text)

    def _keep(self, why: str, reason: Reason = Reason.INVALID_ARGUMENT) -> NoReturn:
        """Raises an error that says where the edited text is."""
        file = shlex.quote(str(self._file))
        raise WeftError(
            reason, f"{why}; the edited text is in {file}: compare it with weft diff -f, apply it with weft apply -f"
        )
