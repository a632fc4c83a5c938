"""`weft mesh log-level`: the level of the log of one process, for a time."""

from datetime import UTC
from typing import Annotated

import typer

from weft.kernel.errors import WeftError, invalid_field
from weft.kernel.log_threshold import LEVELS
from weft.kernel.reasons import Reason
from weft_app.cli.mesh_api import Document, connect
from weft_app.cli.mesh_logs import MESH, RUNNER_PREFIX
from weft_app.cli.options import DEFAULT_HOME, HomeOption
from weft_app.cli.output import moment_in, say
from weft_app.cli.wait import parse_duration
from weft_app.compose.home import WeftHome

SERVICES = ("registry", "router", "gateway")
RESET = "reset"
MAX_WORDS = 2


def log_level(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[PROCESS] [LEVEL]",
            help="gateway, router, registry or runner/NAME (default: mesh), then "
            f"{', '.join(LEVELS)}, or {RESET} for the configured level. Without a level, the current one is shown.",
        ),
    ] = None,
    *,
    duration: Annotated[
        str, typer.Option("--for", metavar="TIME", help="Duration, such as 30s or 1h, at most 4h.")
    ] = "10m",
    home: HomeOption = DEFAULT_HOME,
) -> None:
    """Change the log level of a process of the mesh for a limited time.

    The change does not survive a restart, and is recorded in the audit log. The services of weft up are one process.

    Example: weft mesh log-level runner/local debug --for 10m
    """
    process, level = _parsed(words or [])
    shown = MESH if process in SERVICES and WeftHome(home.expanduser().absolute()).running() else process
    body: Document = {"process": process, "level": level}
    if level and level != RESET:
        body["seconds"] = int(parse_duration(duration, "--for"))
    try:
        with connect(home) as api:
            if not level:
                health = api.get("/v1/admin/process-health", process=process)
                say(f"{shown}: {health['logLevel']}{_until(health, 'logLevelEndTime')}\n")
                return
            answer = api.put("/v1/admin/log-level", body)
    except WeftError as error:
        if error.reason is Reason.UNSUPPORTED_OPERATION:
            raise WeftError(
                error.reason, f"{shown} is an older release that does not support changing its log level"
            ) from error
        raise
    say(f"{shown}: {answer['previousLevel']} -> {answer['level']}{_until(answer, 'endTime')}\n")


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


def _until(document: Document, key: str) -> str:
    return f" until {moment_in(document[key]).astimezone(UTC):%Y-%m-%dT%H:%M:%SZ}" if key in document else ""
