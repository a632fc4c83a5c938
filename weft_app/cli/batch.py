"""`weft batch`: batches of requests in the format of OpenAI's Batch API."""

import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import typer
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn

from weft.kernel.errors.error_tree import WeftError, invalid_field
from weft.kernel.errors.reasons import Reason
from weft.kernel.values.names import MAX_REQUEST_ID_CHARS, require_request_id, require_token
from weft.kernel.values.unknown_names import FOR_TASKS
from weft_app.cli.follow import RETRY_LIMIT_SECONDS, Breaks
from weft_app.cli.mesh_api import Document, MeshApi, connect
from weft_app.cli.options import DEFAULT_HOME, EXIT_FAILED, HomeOption, NamedFormat, OutputFormat, act_on_each
from weft_app.cli.output import Listing, ProgressStyle, age, custom_columns, print_page, shown_progress
from weft_app.cli.short_ids import BATCHES as BATCH_IDS
from weft_app.cli.short_ids import full_id
from weft_app.cli.terminal import note, safe_text, say, say_bytes
from weft_app.cli.wait import parse_duration

BATCHES, FILES = "/v1/batches", "/v1/files"
MAX_PAGE = 100
SILENCE_SECONDS = 900.0
"""Timeout of a response: a batch is acknowledged once all its lines, up to 50,000, are on disk."""
POLL_SECONDS = 1.0
MAX_LISTED = 1_000
MAX_SHOWN_ERRORS = 10
MAX_FIRST_LINE_BYTES = 16 * 1024 * 1024
_FOR_LINES = " (--wait-for-model accepts models that do not exist yet)"
"""`FOR_TASKS` with the option of this command."""
_OVER = frozenset({"completed", "failed", "expired", "cancelled"})

app = typer.Typer()


Endpoint = Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"]
"""Endpoint of the lines of a file."""
FormatOption = Annotated[NamedFormat, typer.Option("--output", "-o", help="Output format; `name` prints only the id.")]
IdArgument = Annotated[str, typer.Argument(metavar="ID", help="Id of the batch, or its beginning.")]
WatchOption = Annotated[bool, typer.Option("--watch", "-w", help="Show progress, and wait for its end.")]


def _done_words(batch: Document) -> str:
    counts = batch["request_counts"]
    return f"{counts['completed']}/{counts['total']}"


def _age(record: Document) -> str:
    return age(datetime.fromtimestamp(record["created_at"], UTC))


_BATCHES = Listing(
    empty="there are no batches; weft batch submit FILE submits one",
    columns=custom_columns(
        "BATCH:id STATUS:status DONE FAILED:request_counts.failed ENDPOINT:endpoint? AGE~ OUTPUT:output_file_id "
        "ERRORS:error_file_id",
        DONE=_done_words,
        AGE=_age,
    ),
    name=lambda batch: batch["id"],
    kind="BatchList",
)

_FILES = Listing(
    empty="there are no files; weft batch submit FILE uploads one",
    columns=custom_columns("FILE:id PURPOSE:purpose SIZE:bytes:size AGE~ NAME:filename", AGE=_age),
    name=lambda file: file["id"],
    kind="FileList",
)


@app.command("submit")
def submit(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="JSON lines with custom_id, method, url and body.")],
    *,
    endpoint: Annotated[
        Endpoint | None, typer.Option(help="Endpoint of all lines. Default: the one in the first line.")
    ] = None,
    window: Annotated[
        str | None, typer.Option(metavar="TIME", help="Completion window, such as 2h. Default: 24h.")
    ] = None,
    metadata: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="Metadata to store with the batch (repeatable).")
    ] = None,
    wait_for_model: Annotated[
        bool, typer.Option("--wait-for-model", help="Accept models that do not exist yet, and wait until they do.")
    ] = False,
    watch: WatchOption = False,
    output: FormatOption = NamedFormat.NAME,
    home: HomeOption = DEFAULT_HOME,
) -> None:
    """Submit a file of requests as a batch. Its id goes to stdout; once printed, every line is durable.

    Exit code 1 if the lines are invalid or, with --watch, if not every line was answered.

    Example: weft batch submit requests.jsonl --watch
    """
    if file.exists() and not file.is_file():
        # The file is read twice, and the second read of a pipe would be empty.
        raise invalid_field("FILE", f"{file} is not a regular file; save the output of a pipe to a file first")
    body: Document = {"endpoint": endpoint or _endpoint_of(file), "completion_window": "24h"}
    if metadata:
        body["metadata"] = _pairs(metadata)
    if window is not None:
        body["window_seconds"] = int(parse_duration(window, "--window"))
    if wait_for_model:
        body["wait_for_model"] = True
    with connect(home, SILENCE_SECONDS) as api:
        batch = _submitted(api, file, body)
        if output is NamedFormat.NAME:
            say(f"{batch['id']}\n")
        batch = _followed(api, batch) if watch else batch
    if output is not NamedFormat.NAME:
        _BATCHES.print([batch], output, lambda: batch)
    _end(batch, watched=watch)


@app.command("list")
def list_batches(
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, max=MAX_LISTED, help="Maximum number of results.")] = 20,
    output: FormatOption = NamedFormat.TABLE,
    home: HomeOption = DEFAULT_HOME,
) -> None:
    """List batches, newest first.

    Example: weft batch list
    """
    with connect(home) as api:
        _BATCHES.print(islice(api.newest(BATCHES, min(MAX_PAGE, limit)), limit), output)


@app.command("get")
def get(
    batch_id: IdArgument,
    *,
    watch: WatchOption = False,
    output: FormatOption = NamedFormat.TABLE,
    home: HomeOption = DEFAULT_HOME,
) -> None:
    """Show one batch. With --watch: wait until it has ended; exit code 1 if not every line was answered.

    Example: weft batch get batch-5f0c0d2b7a9e4c31d6a8b2f4 --watch
    """
    with connect(home) as api:
        batch = api.get(f"{BATCHES}/{full_id(api, BATCH_IDS, _id(batch_id))}")
        batch = _followed(api, batch) if watch else batch
    _BATCHES.print([batch], output, lambda: batch)
    _end(batch, watched=watch)


@app.command("cancel")
def cancel(batch_id: IdArgument, home: HomeOption = DEFAULT_HOME) -> None:
    """Cancel every line that has not finished. Existing answers stay.

    Example: weft batch cancel batch-5f0c0d2b7a9e4c31d6a8b2f4
    """
    cancel_batches([batch_id], OutputFormat.TABLE, home)


def cancel_batches(ids: Sequence[str], output: OutputFormat, home: Path) -> None:
    """Cancels batches and prints the progress of each. A failure of one does not stop the others."""
    with connect(home) as api:

        def cancel_one(batch_id: str) -> None:
            batch = api.post(f"{BATCHES}/{full_id(api, BATCH_IDS, _id(batch_id))}/cancel")
            line = f"{batch['id']}: {batch['status']}, {_done_words(batch)} answered\n"
            print_page(output, lambda: line, lambda: batch)

        act_on_each(ids, cancel_one)


@app.command("results")
def results(
    batch_id: IdArgument,
    *,
    errors: Annotated[bool, typer.Option("--errors", help="The failed lines instead of the answers.")] = (False),
    to: Annotated[Path | None, typer.Option(metavar="FILE", help="Output file. Default: stdout.")] = None,
    home: HomeOption = DEFAULT_HOME,
) -> None:
    """Fetch the answers of a finished batch as JSON lines.

    Example: weft batch results batch-5f0c0d2b7a9e4c31d6a8b2f4 --to answers.jsonl
    """
    with connect(home, SILENCE_SECONDS) as api:
        batch_id = full_id(api, BATCH_IDS, _id(batch_id))
        batch = api.get(f"{BATCHES}/{batch_id}")
        show = f"`weft batch get {batch_id}"
        if batch["status"] not in _OVER:
            message = f"batch {batch_id} is {batch['status']}; {show} --watch` waits"
            raise WeftError(Reason.RESOURCE_IN_USE, message)
        if batch["status"] == "failed":
            message = f"batch {batch_id} failed before any line was started; {show}` shows why"
            raise WeftError(Reason.INVALID_ARGUMENT, message)
        file_id = batch.get("error_file_id" if errors else "output_file_id")
        if file_id is None:
            note("no line failed" if errors else "no line was answered; --errors shows why")
            return
        _write(api.content(f"{FILES}/{file_id}/content"), to)


@app.command("files")
def list_files(
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, max=MAX_LISTED, help="Maximum number of results.")] = 20,
    output: FormatOption = NamedFormat.TABLE,
    home: HomeOption = DEFAULT_HOME,
) -> None:
    """List the files of batches, newest first: those that were uploaded, and answers and errors.

    Example: weft batch files
    """
    with connect(home) as api:
        _FILES.print(islice(api.newest(FILES, min(MAX_PAGE, limit)), limit), output)


@app.command("delete-file")
def delete_file(
    file_id: Annotated[str, typer.Argument(metavar="FILE", help="Id of the file, from `weft batch files`.")],
    home: HomeOption = DEFAULT_HOME,
) -> None:
    """Delete a file of a batch: its requests, or its answers.

    Example: weft batch delete-file file-5f0c0d2b7a9e4c31d6a8b2f4
    """
    with connect(home) as api:
        api.delete(f"{FILES}/{_id(file_id)}")
    say(f"{file_id} deleted\n")


def _submitted(api: MeshApi, file: Path, body: Document) -> Document:
    """Uploads a file and creates a batch of it. Once this returns, all requests are durable."""
    kept = api.upload(FILES, file, "application/jsonl", purpose="batch")
    try:
        made: Document = api.post(BATCHES, {"input_file_id": kept["id"], **body})
    except WeftError as error:
        if error.reason is not Reason.SERVICE_UNAVAILABLE:
            # The batch was rejected, so its file is useless.
            with suppress(WeftError):
                api.delete(f"{FILES}/{kept['id']}")
        raise
    return made


def _write(content: Iterator[bytes], to: Path | None) -> None:
    try:
        if to is None:
            say_bytes(content)
            return
        _save(content, to)
    except BrokenPipeError:
        raise
    except OSError as error:
        if to is None:
            raise WeftError(Reason.INTERNAL, f"stdout cannot be written: {error.strerror}") from error
        raise invalid_field("--to", f"{to} cannot be written: {error.strerror}") from error


def _save(content: Iterator[bytes], to: Path) -> None:
    """Writes a file, which replaces an existing one once it is complete. A pipe or device is written directly."""
    if to.exists() and not to.is_file():
        with to.open("wb") as file:
            file.writelines(content)
        return
    to = to.resolve()
    part = to.with_name(f"{to.name}.part")
    try:
        with part.open("wb") as file:
            if to.exists():
                shutil.copymode(to, part)
            file.writelines(content)
        part.replace(to)
    finally:
        part.unlink(missing_ok=True)


def _followed(api: MeshApi, batch: Document) -> Document:
    """Polls the batch until it has ended, with progress on stderr. Retries during a short outage of the gateway."""
    if batch["status"] in _OVER:
        return batch
    breaks = Breaks(RETRY_LIMIT_SECONDS, {Reason.SERVICE_UNAVAILABLE}, began=True, is_quiet=True)
    with shown_progress(_PROGRESS) as show:
        show(batch)
        while batch["status"] not in _OVER:
            time.sleep(POLL_SECONDS)
            try:
                batch = api.get(f"{BATCHES}/{batch['id']}")
            except WeftError as error:
                breaks.note(error)
                continue
            breaks.none()
            show(batch)
    return batch


def _bar(batch: Document) -> dict[str, Any]:
    counts = batch["request_counts"]
    return {
        "description": batch["status"],
        "total": counts["total"],
        "completed": counts["completed"] + counts["failed"],
        "failed": (f"{counts['failed']} failed" if counts["failed"] else "") + escape(_trouble(batch)),
    }


def _line(batch: Document) -> str:
    failed = batch["request_counts"]["failed"]
    return f"{batch['id']}: {batch['status']}, {_done_words(batch)} answered, {failed} failed{_trouble(batch)}"


_PROGRESS = ProgressStyle(
    line=_line,
    columns=lambda: (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[failed]}"),
        TimeElapsedColumn(),
    ),
    bar=_bar,
)


def _trouble(batch: Document) -> str:
    """Returns why the results of a watched batch are not written yet; empty if unknown."""
    errors = _errors_of(batch)
    return safe_text(f" ({_said(errors[0])})") if errors and batch["status"] not in _OVER else ""


def _end(batch: Document, *, watched: bool) -> None:
    """Prints the failures of a batch, if any, and exits with the matching code."""
    errors = _errors_of(batch)
    for error in errors[:MAX_SHOWN_ERRORS]:
        where = f"line {error['line']}: " if error.get("line") else ""
        note(safe_text(f"{where}{_said(error)}"))
    if len(errors) > MAX_SHOWN_ERRORS:
        note(f"and {len(errors) - MAX_SHOWN_ERRORS} more; -o json shows them")
    if batch["status"] == "failed":
        raise typer.Exit(EXIT_FAILED)
    counts = batch["request_counts"]
    if watched and counts["completed"] < counts["total"]:
        left = counts["total"] - counts["completed"]
        note(f"{left} lines failed; `weft batch results {batch['id']} --errors` shows why")
        raise typer.Exit(EXIT_FAILED)


def _errors_of(batch: Document) -> list[Document]:
    return ((batch.get("errors") or {}).get("data")) or []


def _said(error: Document) -> str:
    """Returns the message of an error, with this command's option in place of the API's field."""
    return str(error["message"]).replace(FOR_TASKS, _FOR_LINES)


def _endpoint_of(file: Path) -> str:
    """Returns the endpoint in the first line. Raises INVALID_ARGUMENT if it is missing or unknown."""
    import json  # noqa: PLC0415 - only without --endpoint

    try:
        with file.open("rb") as lines:
            url = json.loads(lines.readline(MAX_FIRST_LINE_BYTES)).get("url")
    except OSError as error:
        raise invalid_field("FILE", f"{file} cannot be read: {error.strerror}") from error
    except (ValueError, AttributeError):
        url = None
    if url not in get_args(Endpoint):
        raise invalid_field("--endpoint", f"the first line of {file} has none; set it, such as {get_args(Endpoint)[0]}")
    return str(url)


def _pairs(texts: list[str]) -> dict[str, str]:
    pairs = [text.partition("=") for text in texts]
    if any(not (name and separator) for name, separator, _ in pairs):
        raise invalid_field("--metadata", "must be NAME=VALUE")
    return {name: value for name, _, value in pairs}


def _id(text: str) -> str:
    # The id becomes part of a path.
    return require_request_id(require_token(text.removesuffix("…"), "ID", MAX_REQUEST_ID_CHARS), "ID")
