"""Options shared by commands, and the exit of a command on an error."""

import re
import signal
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum
from importlib import import_module
from inspect import Parameter, Signature
from pathlib import Path
from types import FrameType, MappingProxyType
from typing import Annotated, Any, NoReturn, TypeVar

import typer

from weft.client._home import DEFAULT_HOME, HOME_VARIABLE, FoundHome
from weft.kernel.errors.error_tree import FieldError, WeftError
from weft.kernel.errors.reasons import Reason
from weft_app.cli.terminal import close_err, note, tell

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_NOT_FOUND = 3
EXIT_CONFLICT = 4
EXIT_TIMEOUT = 5
EXIT_INTERRUPTED = 130
WINDOWS = "win32"
SIGNAL_STATUS = 128
"""Base of a shell's exit code after a signal, to which the signal's number is added."""

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
"""Exit code by reason; EXIT_FAILED for all others. docs/start.md shows the same table."""


OutputFormat = StrEnum("OutputFormat", [("TABLE", "table"), ("JSON", "json"), ("YAML", "yaml")])
WideFormat = StrEnum("WideFormat", [("TABLE", "table"), ("WIDE", "wide"), ("JSON", "json"), ("YAML", "yaml")])
NamedFormat = StrEnum("NamedFormat", [("TABLE", "table"), ("JSON", "json"), ("YAML", "yaml"), ("NAME", "name")])
ResourceFormat = StrEnum(
    "ResourceFormat", [("TABLE", "table"), ("WIDE", "wide"), ("JSON", "json"), ("YAML", "yaml"), ("NAME", "name")]
)


AllowRemoteOption = Annotated[
    bool, typer.Option("--allow-remote", help="Allow remote models (outside your own machines).")
]


def _home(context: typer.Context, home: Path) -> Path:
    """Returns a home, as a `FoundHome` unless it comes from the option."""
    source = context.get_parameter_source("home")
    return home if source is not None and source.name == "COMMANDLINE" else FoundHome(home)


HomeOption = Annotated[
    Path,
    typer.Option(
        "--home",
        envvar=HOME_VARIABLE,
        callback=_home,
        help="Home folder of the mesh: state, sockets and logs.",
        show_default=True,
    ),
]
ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config",
        "-c",
        help="Configuration file; weft.local.yaml beside it is merged over it. Default: the environment variable "
        "LLM_POOL_SETTINGS_PATH, else ./weft.yaml.",
    ),
]
MeshConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config",
        "-c",
        help="Configuration file; weft.local.yaml beside it is merged over it. Default: that of the running mesh; "
        "if none runs, the environment variable LLM_POOL_SETTINGS_PATH, else ./weft.yaml.",
    ),
]
OutputOption = Annotated[OutputFormat, typer.Option("--output", "-o", help="Output format.")]
PageOutputOption = Annotated[OutputFormat, typer.Option("--output", "-o", help="Output format; table is text.")]
WideOutputOption = Annotated[WideFormat, typer.Option("--output", "-o", help="Output format.")]
ResourceOutputOption = Annotated[ResourceFormat, typer.Option("--output", "-o", help="Output format.")]
WatchOption = Annotated[bool, typer.Option("--watch", "-w", help="Watch for changes until Ctrl-C.")]

__all__ = ["DEFAULT_HOME", "ConfigOption", "HomeOption", "OutputFormat", "OutputOption", "reporting"]


def as_command(run: Callable[..., None], parameters: Iterable[Parameter], text: str | None) -> Callable[..., None]:
    """Gives a function of keywords the signature of a command with these parameters; `text` is its help."""
    given = [each.replace(kind=Parameter.KEYWORD_ONLY) for each in parameters]
    run.__signature__ = Signature(given, return_annotation=None)  # type: ignore[attr-defined]
    run.__annotations__ = {each.name: each.annotation for each in given}
    run.__doc__ = text
    return run


def exit_code(error: WeftError) -> int:
    """Returns the exit code for an error."""
    return EXIT_CODES.get(error.reason, EXIT_FAILED)


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


_OTHER_OPTIONS: Mapping[str, str] = MappingProxyType(
    {
        "page_size": "limit",
        "after_sequence": "after",
        "lifetime": "expires",
        "lifetime_seconds": "expires",
        "grace_seconds": "grace",
        "authorization": "token",
        "pool_name": "pool",
        "operations": "embeddings",
        "seconds": "for",
        "bytes": "memory",
        "device_indexes": "devices",
        "wait_seconds": "wait",
        "images": "from",
        "negative_prompt": "negative",
        "output_format": "output",
        "audio": "recording",
        "input": "text",
        "response_format": "format",
    }
)
"""Parameters of commands by differing field names in errors."""
_OF_SUBJECTS = frozenset({"name", "id", "request_id", "operation", "lease_id", "model", "runner", "source"})
"""Fields with the subject of a request: without an option, the last argument of the command."""


def words_of(error: WeftError) -> str:
    """Returns the message of an error, with the command's name of a field that a service rejected."""
    field = error.metadata.get("field", "")
    is_of_service = type(error.__cause__).__module__.partition(".")[0] in ("grpc", "http")
    if not (field and is_of_service and error.message.startswith(f"{field}: ")):
        return error.message
    return f"{parameter_of(field)}: {error.message.removeprefix(f'{field}: ')}"


def parameter_of(field: str) -> str:
    """Returns the running command's option or argument for a field or an object around it, else the last step."""
    steps = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", re.sub(r"\[[^\]]*\]", "", field)).lower().split(".")
    return next(filter(None, map(_parameter_named, reversed(steps))), steps[-1])


def _parameter_named(step: str) -> str:
    name = _OTHER_OPTIONS.get(step, step)
    option = f"--{name.replace('_', '-')}"
    parameters = _running_parameters()
    arguments = [each for each in parameters if each.param_type_name == "argument"]
    for each in parameters:
        if option in each.opts or (each.name == name and each not in arguments):
            return str(max(each.opts, key=len))
    named = [each for each in arguments if each.name == name] or (arguments[-1:] if step in _OF_SUBJECTS else [])
    if not named:
        return ""
    words: list[str] = re.findall(r"[A-Z][A-Z_-]*", named[0].metavar or named[0].name.upper())
    return next(word for word in words if word != "KIND")


def _running_parameters() -> list[Any]:
    """Returns the options and arguments of the running command; empty if none runs."""
    # The context comes from click in some releases of typer.
    package = typer.Context.__mro__[1].__module__.rpartition(".")[0]
    context = import_module(f"{package}.globals").get_current_context(silent=True)
    return [] if context is None else context.command.params


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Ends the block on SIGTERM and SIGHUP as on Ctrl-C, with a shell's exit code for the signal.

    Ignored signals stay ignored: `nohup weft ...` survives the end of its terminal.
    """
    received: list[int] = []

    def end(number: int, _frame: FrameType | None) -> NoReturn:
        received.append(number)
        raise KeyboardInterrupt

    with handled((signal.SIGTERM, signal.SIGHUP), end):
        try:
            yield
        except KeyboardInterrupt:
            if not received:
                raise
            raise typer.Exit(SIGNAL_STATUS + received[0]) from None


@contextmanager
def handled(numbers: Iterable[signal.Signals], handler: "signal._HANDLER") -> Iterator[None]:
    """Handles signals during the block, except ignored ones."""
    caught = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, handler) for number in caught}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


Item = TypeVar("Item")


def act_on_each(
    items: Iterable[Item],
    act: Callable[[Item], None],
    words: Callable[[Item, WeftError], str] = lambda _, error: words_of(error),
    *,
    ignored: Collection[Reason] = (),
) -> None:
    """Calls `act` for each item. A failure is printed as `words` and does not stop the others.

    Ends the command with the exit code of the first failure. `ignored` has reasons that do not count as failures.
    """
    codes = []
    for item in items:
        try:
            act(item)
        except WeftError as error:
            if error.reason in ignored:
                continue
            note(words(item, error))
            codes.append(exit_code(error))
    if codes:
        raise typer.Exit(codes[0])


@contextmanager
def reporting(*, failed: int = EXIT_FAILED, interrupted: int = EXIT_INTERRUPTED) -> Iterator[None]:
    """Ends the command with one line and the exit code of the error's reason.

    `failed` replaces EXIT_FAILED if the command uses that code otherwise; `interrupted` is the code for Ctrl-C.
    """
    try:
        yield
    except WeftError as error:
        note(words_of(error))
        code = exit_code(error)
        raise typer.Exit(failed if code == EXIT_FAILED else code) from error
    except KeyboardInterrupt:
        tell("\n")
        raise typer.Exit(interrupted) from None
    except BrokenPipeError:
        # The reader closed the output (`weft get models | head -1`), which is not a failure.
        close_err()
        raise typer.Exit(EXIT_OK) from None
