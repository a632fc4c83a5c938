"""Options that several commands share, and how an error ends a command."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from weft.client import WeftError
from weft.client._address import DEFAULT_HOME, HOME_VARIABLE
from weft.kernel.reasons import Reason

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130


class OutputFormat(StrEnum):
    """How a read command prints."""

    TABLE = "table"
    JSON = "json"
    YAML = "yaml"


HomeOption = Annotated[
    Path,
    typer.Option(
        "--home", envvar=HOME_VARIABLE, help="Folder of the mesh: state, sockets and logs.", show_default=True
    ),
]
ConfigOption = Annotated[
    Path | None,
    typer.Option("--config", "-c", help="Configuration file; weft.local.yaml beside it is merged over it."),
]
OutputOption = Annotated[OutputFormat, typer.Option("--output", "-o", help="How to print.")]

__all__ = ["DEFAULT_HOME", "ConfigOption", "HomeOption", "OutputFormat", "OutputOption", "reporting"]

_USAGE_REASONS = frozenset({Reason.INVALID_ARGUMENT, Reason.MALFORMED_REQUEST})


@contextmanager
def reporting() -> Iterator[None]:
    """End the command with one clear line and an exit code: 2 for a wrong call, 1 for a failure, 130 for Ctrl-C."""
    try:
        yield
    except WeftError as error:
        sys.stderr.write(f"weft: {error.message}\n")
        raise typer.Exit(EXIT_USAGE if error.reason in _USAGE_REASONS else EXIT_FAILED) from error
    except KeyboardInterrupt:
        sys.stderr.write("\n")
        raise typer.Exit(EXIT_INTERRUPTED) from None
    except BrokenPipeError:
        # The reader of our output left (`weft get models | head -1`); that is not a failure.
        sys.stderr.close()
        raise typer.Exit(0) from None
