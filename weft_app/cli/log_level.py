"""`weft log-level`: the level of the log of one process, for a time."""

from datetime import UTC
from typing import Annotated

import typer

from weft.api.operations.v1 import process_service_pb2 as pb
from weft.kernel.errors import WeftError, invalid_field
from weft.kernel.log_threshold import LEVELS
from weft.kernel.reasons import Reason
from weft.kernel.timestamps import datetime_of, duration_of
from weft_app.cli.options import DEFAULT_HOME, HomeOption, reporting
from weft_app.cli.output import say
from weft_app.cli.process_calls import MESH, RUNNER_PREFIX, SERVICES, address_of, call_process, health_of
from weft_app.cli.wait import parse_duration
from weft_app.compose.home import WeftHome

RESET = "reset"
MAX_WORDS = 2


def log_level(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[PROCESS] [LEVEL]",
            help="gateway, router, registry or runner/NAME (default: mesh), then "
            f"{', '.join(LEVELS)}, or {RESET} for the configured level. Without a level the present one is shown.",
        ),
    ] = None,
    *,
    duration: Annotated[
        str, typer.Option("--for", metavar="TIME", help="Duration, such as 30s or 1h, at most 4h.")
    ] = "10m",
    home: HomeOption = DEFAULT_HOME,
) -> None:
    """Change the lowest level that a process of the mesh logs, for a time; then the configured one holds again.

    The change does not survive a restart, and the audit log has it. The services of weft up are one process.

    Example: weft log-level runner/local debug --for 10m
    """
    with reporting():
        process, level = _parsed(words or [])
        address = address_of(process, home)
        shown = MESH if process in SERVICES and WeftHome(home.expanduser().absolute()).running() else process
        try:
            if not level:
                health = health_of(address)
                say(f"{shown}: {health.log_level}{_until(health, 'log_level_end_time')}\n")
                return
            request = pb.SetLogLevelRequest(level="" if level == RESET else level)
            if level != RESET:
                request.duration.CopyFrom(duration_of(parse_duration(duration, "--for")))
            answer: pb.SetLogLevelResponse = call_process(address, "SetLogLevel", request)
        except WeftError as error:
            if error.reason is Reason.UNSUPPORTED_OPERATION:
                raise WeftError(error.reason, f"{shown} is of a release whose log level cannot be changed") from error
            raise
        say(f"{shown}: {answer.previous_level} -> {answer.level}{_until(answer, 'end_time')}\n")


def _parsed(words: list[str]) -> tuple[str, str]:
    """Returns the process and the level, empty for none. Raises INVALID_ARGUMENT."""
    level = words[-1] if words and words[-1] in (*LEVELS, RESET) else ""
    process = words[: len(words) - bool(level)]
    if len(process) > 1 or len(words) > MAX_WORDS:
        raise invalid_field("LEVEL", f"must be one of {', '.join((*LEVELS, RESET))}")
    named = process[0] if process else MESH
    if named not in (MESH, *SERVICES) and not named.startswith(RUNNER_PREFIX):
        what = f"{', '.join(SERVICES)} or runner/NAME, and a level one of {', '.join((*LEVELS, RESET))}"
        raise invalid_field("PROCESS", f"must be {what}")
    return named, level


def _until(message: pb.GetHealthResponse | pb.SetLogLevelResponse, field: str) -> str:
    if not message.HasField(field):  # type: ignore[arg-type]  # a field of either message
        return ""
    return f" until {datetime_of(getattr(message, field)).astimezone(UTC):%Y-%m-%dT%H:%M:%SZ}"
