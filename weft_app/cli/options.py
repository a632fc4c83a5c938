"""Options that several commands share, and the exit of a command on an error."""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from weft.client._home import DEFAULT_HOME, HOME_VARIABLE, FoundHome
from weft.kernel.errors import FieldError, WeftError
from weft.kernel.reasons import Reason

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_NOT_FOUND = 3
EXIT_CONFLICT = 4
EXIT_TIMEOUT = 5
EXIT_INTERRUPTED = 130

EXIT_CODES: Mapping[Reason, int] = {
    Reason.INVALID_ARGUMENT: EXIT_USAGE,
    Reason.MALFORMED_REQUEST: EXIT_USAGE,
    Reason.REQUEST_TOO_LARGE: EXIT_USAGE,
    Reason.CONTEXT_LENGTH_EXCEEDED: EXIT_USAGE,
    Reason.NOT_FOUND: EXIT_NOT_FOUND,
    Reason.MODEL_NOT_FOUND: EXIT_NOT_FOUND,
    Reason.ALREADY_EXISTS: EXIT_CONFLICT,
    Reason.IDEMPOTENCY_CONFLICT: EXIT_CONFLICT,
    Reason.RESOURCE_IN_USE: EXIT_CONFLICT,
    Reason.RESOURCE_CHANGED: EXIT_CONFLICT,
    Reason.DEADLINE_EXCEEDED: EXIT_TIMEOUT,
}
"""Exit code by reason; EXIT_FAILED for all others. docs/cli.md shows the same table."""


class OutputFormat(StrEnum):
    """Output format of commands with rows of their own."""

    TABLE = "table"
    JSON = "json"
    YAML = "yaml"


class WideFormat(StrEnum):
    """Output format of commands with rows of their own and further columns."""

    TABLE = "table"
    WIDE = "wide"
    JSON = "json"
    YAML = "yaml"


class NamedFormat(StrEnum):
    """Output format of commands with rows that have names."""

    TABLE = "table"
    JSON = "json"
    YAML = "yaml"
    NAME = "name"


class ResourceFormat(StrEnum):
    """Output format of commands that show resources."""

    TABLE = "table"
    WIDE = "wide"
    JSON = "json"
    YAML = "yaml"
    NAME = "name"


def _home(context: typer.Context, home: Path) -> Path:
    """Returns a home, as a `FoundHome` where it is not from the option."""
    source = context.get_parameter_source("home")
    return home if source is not None and source.name == "COMMANDLINE" else FoundHome(home)


HomeOption = Annotated[
    Path,
    typer.Option(
        "--home",
        envvar=HOME_VARIABLE,
        callback=_home,
        help="Folder of the mesh: state, sockets and logs.",
        show_default=True,
    ),
]
ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config",
        "-c",
        help="Configuration file; weft.local.yaml in its folder is merged over it. "
        "Default: the environment variable LLM_POOL_SETTINGS_PATH, else ./weft.yaml.",
    ),
]
OutputOption = Annotated[OutputFormat, typer.Option("--output", "-o", help="How to print.")]
PageOutputOption = Annotated[OutputFormat, typer.Option("--output", "-o", help="Output format; table is text.")]
WideOutputOption = Annotated[WideFormat, typer.Option("--output", "-o", help="How to print.")]
ResourceOutputOption = Annotated[ResourceFormat, typer.Option("--output", "-o", help="How to print.")]
WatchOption = Annotated[bool, typer.Option("--watch", "-w", help="Watch for changes until Ctrl-C.")]

__all__ = ["DEFAULT_HOME", "ConfigOption", "HomeOption", "OutputFormat", "OutputOption", "reporting"]


def exit_code(error: WeftError) -> int:
    """Returns the exit code for an error."""
    return EXIT_CODES.get(error.reason, EXIT_FAILED)


def note(text: str) -> None:
    """Prints a note for the user on stderr."""
    sys.stderr.write(f"weft: {text}\n")
    sys.stderr.flush()


@contextmanager
def naming_fields(option_of: Callable[[str], str]) -> Iterator[None]:
    """Renames the fields of errors raised in the block by `option_of`."""
    try:
        yield
    except WeftError as error:
        field = error.metadata.get("field", "")
        if not error.message.startswith(f"{field}: "):
            raise
        why = error.message.removeprefix(f"{field}: ")
        raise FieldError(option_of(field), why, error.reason) from error


@contextmanager
def reporting(*, failed: int = EXIT_FAILED, interrupted: int = EXIT_INTERRUPTED) -> Iterator[None]:
    """Ends the command with one clear line and the exit code of the error's reason.

    `failed` replaces EXIT_FAILED where a command gives that code a meaning of its own; `interrupted` is the code for
    Ctrl-C.
    """
    try:
        yield
    except WeftError as error:
        note(error.message)
        code = exit_code(error)
        raise typer.Exit(failed if code == EXIT_FAILED else code) from error
    except KeyboardInterrupt:
        sys.stderr.write("\n")
        raise typer.Exit(interrupted) from None
    except BrokenPipeError:
        # The reader of the output closed it (`weft get models | head -1`); that is no failure.
        sys.stderr.close()
        raise typer.Exit(EXIT_OK) from None
