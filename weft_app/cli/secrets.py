"""Secrets of the mesh: `weft keys secret create`, `weft keys secret rotate` and `weft delete secret`.

A value comes from a file, an environment variable or standard input, never from an argument, which other users of the
machine can read.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from weft.kernel.errors.error_tree import WeftError, invalid_field
from weft.kernel.errors.reasons import Reason
from weft.kernel.values.names import require_name
from weft.kernel.values.unknown_names import SECRET, unknown_name
from weft_app.cli.completion import SECRETS, complete_secret
from weft_app.cli.mesh_api import Document, MeshApi, connect
from weft_app.cli.options import DEFAULT_HOME, HomeOption, NamedFormat, act_on_each
from weft_app.cli.output import print_outcome
from weft_app.cli.targets import record_ids
from weft_app.cli.terminal import say

MAX_VALUE_CHARS = 8_192
STDIN = "-"

app = typer.Typer()

NameArgument = Annotated[
    str, typer.Argument(metavar="NAME", help="Name of the secret.", autocompletion=complete_secret)
]
SourceArgument = Annotated[
    str | None, typer.Argument(metavar="[-]", help="- reads the value from standard input.", show_default=False)
]
FileOption = Annotated[Path | None, typer.Option("--from-file", metavar="FILE", help="Read the value from a file.")]
VariableOption = Annotated[
    str | None, typer.Option("--from-env", metavar="VARIABLE", help="Read the value from an environment variable.")
]
FormatOption = Annotated[NamedFormat, typer.Option("--output", "-o", help="Output format; the value is never shown.")]


@app.command("create")
def create_secret(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the secret.")],
    source: SourceArgument = None,
    *,
    from_file: FileOption = None,
    from_env: VariableOption = None,
    home: HomeOption = DEFAULT_HOME,
    output: FormatOption = NamedFormat.TABLE,
) -> None:
    """Create a secret, such as the API key of a provider. It is stored encrypted, and never shown.

    The value comes from a file, an environment variable or standard input; on a terminal it is typed without an echo.

    Example: weft keys secret create example-key --from-env EXAMPLE_API_KEY
    """
    require_name(name, "NAME")
    body = {"name": name, "value": _value(name, source, from_file, from_env)}
    with connect(home) as api:
        _show(api.post(SECRETS, body), "created", output)


@app.command("rotate")
def rotate_secret(
    name: NameArgument,
    source: SourceArgument = None,
    *,
    from_file: FileOption = None,
    from_env: VariableOption = None,
    home: HomeOption = DEFAULT_HOME,
    output: FormatOption = NamedFormat.TABLE,
) -> None:
    """Give a secret a new value. Models take it for their next request, without a restart; running requests finish.

    Example: weft keys secret rotate example-key --from-file ./new-key
    """
    require_name(name, "NAME")
    body = {"value": _value(name, source, from_file, from_env)}
    with connect(home) as api:
        try:
            updated = api.put(f"{SECRETS}/{name}", body)
        except WeftError as error:
            raise _with_suggestion(api, name, error) from error.__cause__
    _show(updated, f"rotated, version {updated['version']}", output)


def delete_secrets(words: Sequence[str], home: Path, *, ignore_not_found: bool, force: bool) -> None:
    """Deletes the secrets named in `words`. A failure of one does not stop the others."""
    mixed = invalid_field("KIND", "secrets and other resources cannot be deleted in one command")
    names = [require_name(name, "NAME") for name in record_ids(words, "secret", lambda _: mixed)]
    if not names:
        raise invalid_field("NAME", "name what to delete")
    with connect(home) as api:

        def delete(name: str) -> None:
            try:
                api.delete(f"{SECRETS}/{name}", force=force)
            except WeftError as error:
                if ignore_not_found:
                    # Nobody sees a suggestion, and a key that may delete secrets may not be allowed to list them.
                    raise
                raise _with_suggestion(api, name, error) from error.__cause__
            say(f"secret/{name} deleted\n")

        act_on_each(names, delete, ignored=(Reason.NOT_FOUND,) if ignore_not_found else ())


def _value(name: str, source: str | None, from_file: Path | None, from_env: str | None) -> str:
    """Returns the value without the final newline. Raises INVALID_ARGUMENT naming the option."""
    given = [each for each in (source, from_file, from_env) if each is not None]
    if len(given) > 1:
        raise invalid_field("--from-file", "cannot be combined with --from-env or -: choose one source of the value")
    if source not in (None, STDIN):
        # The value must not appear in the error either.
        raise invalid_field(
            "NAME", "cannot be an argument, which other users can read: use --from-file, --from-env or -"
        )
    if from_env is not None:
        return _bounded(os.environ.get(from_env, ""), f"--from-env {from_env[:64]}")
    if from_file is not None:
        try:
            with from_file.open("rb") as file:
                return _bounded(_decoded(file.read(MAX_VALUE_CHARS + 2), "--from-file"), "--from-file")
        except OSError as error:
            raise invalid_field("--from-file", f"{from_file} cannot be read: {error.strerror}") from error
    if source is None:
        if not sys.stdin.isatty():
            raise WeftError(
                Reason.INVALID_ARGUMENT,
                f"the value of {name} is missing: use --from-file FILE, --from-env VARIABLE, or - for standard input",
            )
        return _bounded(typer.prompt(f"value of {name}", hide_input=True, err=True), "the value")
    return _bounded(_decoded(sys.stdin.buffer.read(MAX_VALUE_CHARS + 2), STDIN), STDIN)


def _decoded(content: bytes, option: str) -> str:
    try:
        return content.decode("ascii")
    except UnicodeDecodeError:
        raise invalid_field(option, "must contain printable ASCII characters") from None


def _bounded(text: str, option: str) -> str:
    value = text.removesuffix("\n").removesuffix("\r")
    if not value:
        raise invalid_field(option, "is empty")
    if len(value) > MAX_VALUE_CHARS:
        raise invalid_field(option, f"must have at most {MAX_VALUE_CHARS:,} characters")
    return value


def _show(secret: Document, done: str, output: NamedFormat) -> None:
    name = f"secret/{secret['name']}"
    print_outcome(output, f"{name} {done}", name, secret)


def names_of_secrets(api: MeshApi) -> list[str]:
    """Returns the names of the secrets of a mesh."""
    return [str(secret["name"]) for secret in api.get(SECRETS)["items"]]


def _with_suggestion(api: MeshApi, name: str, error: WeftError) -> WeftError:
    return unknown_name(SECRET, name, names_of_secrets(api)) if error.reason is Reason.NOT_FOUND else error
