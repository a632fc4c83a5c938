"""`weft logs`: logs of the mesh, its services, runners and engines, and the answers of tasks."""

import time
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

from weft.documents.resource_kinds import ResourceKind
from weft.kernel.errors.error_tree import WeftError, invalid_field
from weft.kernel.errors.reasons import Reason
from weft.kernel.values.names import MAX_REQUEST_ID_CHARS, is_name, require_name_of_model, require_token
from weft_app.cli.completion import complete_logged
from weft_app.cli.follow import RETRY_LIMIT_SECONDS
from weft_app.cli.mesh_api import Document, MeshApi, connect
from weft_app.cli.mesh_logs import (
    COMPONENTS,
    DEFAULT_LINES,
    MAX_LINES,
    MESH,
    RUNNER_PREFIX,
    Filter,
    LinesFormat,
    LogFolder,
    Logs,
    print_logs,
)
from weft_app.cli.options import DEFAULT_HOME, HomeOption, reporting
from weft_app.cli.output import json_line
from weft_app.cli.short_ids import REQUESTS, full_id
from weft_app.cli.targets import record_kind
from weft_app.cli.tasks import print_answer
from weft_app.cli.terminal import note, safe_text, say
from weft_app.cli.wait import parse_duration
from weft_app.compose.home import WeftHome

MODEL_PREFIX = "model/"
REQUEST_PREFIX = "request/"


def logs(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="NAME",
            help="A model; gateway, router, registry or runner/NAME; task/ID; request/ID, over all services and "
            "engines. Default: mesh, all of this mesh.",
            autocompletion=complete_logged,
        ),
    ] = None,
    *,
    follow_on: Annotated[bool, typer.Option("--follow", "-f", help="Follow new lines until Ctrl-C.")] = False,
    lines: Annotated[
        int | None,
        typer.Option(
            "--lines",
            "--tail",
            "-n",
            min=0,
            max=MAX_LINES,
            help=f"Number of last lines. Default {DEFAULT_LINES}; with --since or --request {MAX_LINES}.",
        ),
    ] = None,
    since: Annotated[
        str | None, typer.Option(metavar="TIME", help="Only lines since 10m ago, or since 2026-05-04T10:00:00Z.")
    ] = None,
    request: Annotated[str, typer.Option(metavar="ID", help="Only lines of this request or trace.")] = "",
    output: Annotated[
        LinesFormat, typer.Option("--output", "-o", help="text: for people; json: lines as they were written.")
    ] = LinesFormat.TEXT,
    home: HomeOption = DEFAULT_HOME,
) -> None:
    """Show the log of the mesh, a service, a runner, an engine or one request, or the answer of a task.

    Logs of the mesh, of services and of runners are files of the home, also there when weft is stopped.

    Example: weft logs -f, for the last minutes of one service weft logs gateway --since 10m, for one request
    weft logs request/req-4279b8fd43b847a39a784f13
    """
    with reporting(interrupted=0):
        named = words or [MESH]
        wanted = _filter_of(since, request, time.time())
        is_plain = since is None and not request and output is LinesFormat.TEXT
        only_files = invalid_field(
            "--since, --request, --output", "are only for the logs of the mesh, a service or a runner"
        )
        if record_kind(named[0]) == "task":
            if not is_plain:
                raise only_files
            print_answer(named, home, follow=follow_on)
            return
        if len(named) != 1:
            raise invalid_field(
                "NAME", "name one model, service or runner, one task as task/ID or request as request/ID"
            )
        if named[0].startswith(REQUEST_PREFIX):
            if request:
                raise invalid_field("--request", "cannot be combined with request/ID, which means the same")
            request = named[0].removeprefix(REQUEST_PREFIX).removesuffix("…")
            require_token(request, "request/ID", MAX_REQUEST_ID_CHARS)
            request = _whole_id(request, home)
            wanted = replace(_filter_of(since, request, time.time()), in_text=True)
            folder = LogFolder(WeftHome(home.expanduser().absolute()))
            shown = print_logs(folder.everything(), wanted, output, lines=lines, follow=follow_on, says_none=False)
            if not shown + _print_engine_lines(request, home, output):
                note("there are no such lines")
            return
        found = _resolved(named[0], home)
        if isinstance(found, Logs):
            print_logs(found, wanted, output, lines=lines, follow=follow_on)
            return
        if not is_plain:
            raise only_files
        _print_output(home, found, DEFAULT_LINES if lines is None else lines, follow=follow_on)


def _whole_id(request: str, home: Path) -> str:
    """Returns the request id that `request` is or begins, if a mesh runs. Raises INVALID_ARGUMENT for several."""
    try:
        with connect(home) as api:
            return full_id(api, REQUESTS, request)
    except WeftError as error:
        if error.reason is Reason.INVALID_ARGUMENT:
            raise
        return request


def _filter_of(since: str | None, request: str, now: float) -> Filter:
    """Returns the filter of the options --since and --request. Raises INVALID_ARGUMENT naming the option."""
    if request:
        require_token(request, "--request", MAX_REQUEST_ID_CHARS)
    return Filter(since=None if since is None else _time_of(since, now), request=request)


def _time_of(text: str, now: float) -> float:
    if text[:4].isdecimal() and text[4:5] == "-":
        try:
            return datetime.fromisoformat(text).timestamp()
        except (ValueError, OverflowError, OSError):
            why = "must be a time such as 2026-05-04T10:00:00Z, or an age such as 10m"
            raise invalid_field("--since", why) from None
    return now - parse_duration(text, "--since")


def _resolved(name: str, home: Path) -> Logs | Document:
    """Returns the log files for a name, or the model.

    A model takes precedence over a runner of the same name. Raises NOT_FOUND, or SERVICE_UNAVAILABLE if the name may be
    a model but no mesh runs.
    """
    folder = LogFolder(WeftHome(home.expanduser().absolute()))
    if name == MESH or name in COMPONENTS or name.startswith(RUNNER_PREFIX):
        return folder.require(name)
    model = require_name_of_model(name.removeprefix(MODEL_PREFIX), "NAME")
    own = folder.find(name) if is_name(name) else None
    try:
        with connect(home) as mesh:
            try:
                return mesh.document(ResourceKind.MODEL, model)
            except WeftError as error:
                if error.reason is not Reason.MODEL_NOT_FOUND:
                    raise
                if own is None:
                    raise folder.unknown(model, mesh.names(ResourceKind.MODEL)) from error
    except WeftError as error:
        if error.reason is not Reason.SERVICE_UNAVAILABLE:
            raise
        if own is None:
            raise (folder.unknown(model) if folder.is_close(model) else error) from error
    return own


def _print_engine_lines(request: str, home: Path, output: LinesFormat) -> int:
    """Prints the last engine lines with a request id, if a mesh runs; returns their number."""
    count = 0
    with suppress(WeftError), connect(home) as api:
        for model in api.names(ResourceKind.MODEL):
            with suppress(WeftError):
                for line in api.get(_path_of(model), lines=MAX_LINES)["lines"]:
                    if request in line:
                        count += 1
                        # Lines of engines have no time.
                        record = {"event": line, "model": model, "component": "engine"}
                        text = f"engine of {model}: {safe_text(line)}\n"
                        say(json_line(record) if output is LinesFormat.JSON else text)
    return count


def _path_of(model: str) -> str:
    return f"/v1/admin/models/{model}/logs"


def _print_output(home: Path, model: Document, lines: int, *, follow: bool) -> None:
    name = model["name"]
    with connect(home, RETRY_LIMIT_SECONDS) as api:
        # As text, so that 0 is sent, too.
        path, count = _path_of(name), str(lines)
        last = {"lines": []} if follow else api.get(path, lines=count)
        if not last["lines"] and (why := _why_no_output(api, model)):
            note(f"{name}: {why}")
            return
        for batch in filter(None, api.stream(path, follow=True, lines=count) if follow else [last]):
            if batch.get("lostLineCount"):
                note(f"{batch['lostLineCount']} lines were lost, because this reader is too slow")
            say("".join(f"{safe_text(line)}\n" for line in batch["lines"]))


def _why_no_output(api: MeshApi, model: Document) -> str:
    """Returns why the runtime of a model has no output; empty: it may have some."""
    from runner_svc.runtimes.table import find_runtime  # noqa: PLC0415 - with the settings of all runtimes

    runner = model["status"].get("runner")
    served_by = api.document(ResourceKind.RUNNER, runner) if runner else {"status": {}}
    runtime = find_runtime(served_by["status"].get("runtime", ""))
    return "" if runtime is None else runtime.no_output
