"""`weft load`, `weft unload` and `weft flush`, and `weft operation` for what they have started."""

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn

from weft.api.operations.v1.operation_pb2 import Operation, OperationAction, OperationResult
from weft.api.operations.v1.operation_service_pb2 import ListOperationsResponse
from weft.client.operations import Operations, connect_operations, has_ended
from weft.documents.codec import document_of, seconds_of, word_of
from weft.kernel.errors import WeftError, invalid_field
from weft.kernel.names import require_request_id
from weft.kernel.reasons import Reason
from weft.kernel.units import size_words
from weft_app.cli import verbs
from weft_app.cli.completion import complete_model
from weft_app.cli.options import DEFAULT_HOME, HomeOption, OutputFormat, OutputOption, note
from weft_app.cli.output import Column, Listing, safe_text, say
from weft_app.cli.progress import ProgressStyle, shown_progress

MAX_DETAIL_CHARS = 100
DONE_SHARE = 100.0
DEFAULT_LIMIT = 50
MAX_LIMIT = 10_000
MAX_TOKEN_BYTES = 16 * 1024

app = typer.Typer(
    help="List, follow and cancel loads, unloads and flushes.",
    epilog="Example: weft operation list --unfinished",
    no_args_is_help=True,
)

NameArgument = Annotated[str, typer.Argument(metavar="ID", help='An operation: its id, or "operations/<id>".')]
ModelArgument = Annotated[str, typer.Argument(metavar="MODEL", help="A model.", autocompletion=complete_model)]

WatchOption = Annotated[bool, typer.Option("--watch", "-w", help="Show progress, even without a terminal.")]

NoWaitOption = Annotated[
    bool, typer.Option("--no-wait", help="Print the operation's name without waiting for its end.")
]

TokenOption = Annotated[
    str | None,
    typer.Option("--token", metavar="FILE", help="Token from `weft sign` and `weft approve`; - for standard input."),
]

RequestIdOption = Annotated[
    str, typer.Option("--request-id", help="Idempotency id: the same id is never carried out twice.")
]


def carry_out(
    action: OperationAction,
    *,
    token: TokenOption = None,
    watch: WatchOption = False,
    no_wait: NoWaitOption = False,
    request_id: RequestIdOption = "",
    home: HomeOption = DEFAULT_HOME,
) -> None:
    """Carries out an action as an operation, and prints its outcome."""
    if request_id:
        require_request_id(request_id, "--request-id")
    authorization = "" if token is None else read_token(token)
    with connect_operations(home=home) as operations:
        operation = operations.create(action, request_id=request_id, authorization=authorization)
        if no_wait:
            say(f"{operation.name}\n")
            return
        say(f"{outcome_text(follow(operations, operation, shown=watch or sys.stderr.isatty()))}\n")


load = verbs.command(
    verbs.load,
    carry_out,
    """Load a model, and keep it loaded until it is unloaded. Other settings than the current ones reload it.

    A source such as hf:Qwen/Qwen3-8B-GGUF:Q4_K_M is pulled, served by a runner without a line in weft.yaml, and loaded.

    Example: weft load qwen --ctx 8192 --watch
    """,
)
unload = verbs.command(
    verbs.unload,
    carry_out,
    """Drain the requests of a model, then unload it; the next request loads it again.

    Example: weft unload qwen
    """,
)
flush = verbs.command(
    verbs.flush,
    carry_out,
    """Drop cached prefixes. Running requests keep theirs until they end.

    Example: weft flush --tenant acme
    """,
)


def read_token(place: str) -> str:
    """Reads a token from a file, or from standard input for `-`. Raises INVALID_ARGUMENT naming --token."""
    try:
        with sys.stdin.buffer if place == "-" else Path(place).expanduser().open("rb") as file:
            data = file.read(MAX_TOKEN_BYTES + 1)
    except OSError as error:
        raise invalid_field("--token", f"{place} cannot be read: {error.strerror}") from error
    if len(data) > MAX_TOKEN_BYTES:
        raise invalid_field("--token", f"is longer than {MAX_TOKEN_BYTES} bytes")
    try:
        return data.decode("utf-8").strip()
    except UnicodeDecodeError:
        raise invalid_field("--token", "is not UTF-8 text") from None


def follow(
    operations: Operations, first: Operation, *, shown: bool, interrupted: Callable[[Operation], None] | None = None
) -> Operation:
    """Follows an operation to its end and returns it; with `shown`, prints its progress. Raises its failure.

    `interrupted` is called after Ctrl-C; None: the operation is left running, with a note how to cancel it.
    """
    last = first
    try:
        with shown_progress(_PROGRESS, is_shown=shown) as show:
            show(last)
            if not has_ended(last):
                for last in operations.watch(first.name):
                    show(last)
    except KeyboardInterrupt:
        if interrupted is not None:
            interrupted(last)
        elif not has_ended(last):
            note(f"{first.name} continues; follow it with `weft operation watch`, end it with `weft operation cancel`")
        raise
    if not has_ended(last):
        raise WeftError(Reason.SERVICE_UNAVAILABLE, f"the registry ended the watch; {last.name} continues")
    require_success(last)
    return last


def require_success(operation: Operation) -> None:
    """Raises the error of an operation unless it succeeded."""
    if operation.state == Operation.STATE_CANCELLED:
        raise WeftError(Reason.CANCELLED, f"{operation.name} was cancelled")
    if operation.state == Operation.STATE_FAILED:
        reason = Reason.__members__.get(word_of(operation, "reason").upper(), Reason.INTERNAL)
        field = _FIELD.match(operation.detail)
        metadata = {} if field is None else {"field": field[1]}
        raise WeftError(reason, operation.detail or f"{operation.name} failed", metadata=metadata)


_FIELD = re.compile(r"(options(?:\.\w+)+): ")
"""The field at the beginning of a runner's refusal of a load."""


def outcome_text(operation: Operation) -> str:
    """Returns the outcome of a successful operation, in one line."""
    result, kind = operation.result, operation.action.WhichOneof("kind")
    target = ", ".join(result.models) or _model_of(operation.action) or "nothing"
    if not operation.HasField("result") or result.added.HasField("server"):
        return _server_text(result, is_attached=kind == "load_model") or word_of(operation, "state")
    if kind == "load_model":
        took = f"in {seconds_of(result, 'load_time') or 0.0:.1f} s"
        held = f" ({took}, holds {size_words(result.memory_bytes)})" if result.memory_bytes else ""
        chosen = "".join(f"\n  {safe_text(reason)}" for reason in result.added.reasons)
        return f"model/{target} loaded{held}{chosen}"
    if kind == "unload_model":
        freed = f" ({size_words(result.memory_freed_bytes)} freed)" if result.memory_freed_bytes else ""
        return f"model/{target} unloaded{freed}"
    if kind == "pull_model":
        return f"{result.pulled.source}: {size_words(result.pulled.size_bytes)}, {result.pulled.digest}"
    if kind == "remove_model":
        freed = f" ({size_words(result.memory_freed_bytes)} freed)" if result.memory_freed_bytes else ""
        return f"model/{target} removed{freed}; its files are kept: weft models ls"
    tokens = f", {result.token_count} tokens" if result.HasField("token_count") else ""
    return f"cache flushed: {result.entry_count} prefixes{tokens}"


def _server_text(result: OperationResult, *, is_attached: bool) -> str:
    """Returns what became of a server; empty: the operation was about none."""
    if not result.added.HasField("server"):
        return ""
    if not is_attached:
        return f"server/{result.added.name} detached; it runs on"
    names = ", ".join(result.models) or "no models yet; those that it lists later are served"
    return f"server/{result.added.name} attached: {safe_text(names)}"


def _model_of(action: OperationAction) -> str:
    work = getattr(action, action.WhichOneof("kind") or "load_model")
    return str(getattr(work, "model", "") or getattr(work, "source", ""))


def _bar(operation: Operation) -> dict[str, Any]:
    known = operation.progress if operation.HasField("progress") else None
    share = 1.0 if operation.state == Operation.STATE_SUCCEEDED else known
    return {
        "description": _words(operation),
        "total": None if share is None else DONE_SHARE,
        "completed": (share or 0.0) * DONE_SHARE,
    }


def _words(operation: Operation) -> str:
    """Returns stage, detail and remaining time in one line that is safe for a terminal."""
    stage = operation.stage or word_of(operation, "state")
    parts = [stage]
    if operation.detail:
        # The runner's own text names what it waits for.
        parts.append(operation.detail.removeprefix(f"{stage}: ")[:MAX_DETAIL_CHARS])
    if operation.HasField("progress") and not has_ended(operation):
        parts.append(f"{operation.progress:.0%}")
    eta = seconds_of(operation, "eta")
    if eta is not None and not has_ended(operation):
        parts.append(f"about {eta:.0f} s left")
    # Rich would read square brackets as markup.
    return safe_text(": ".join(parts)).replace("[", "(").replace("]", ")")


_PROGRESS = ProgressStyle(
    line=_words,
    columns=lambda: (
        SpinnerColumn(),
        BarColumn(bar_width=30),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    ),
    bar=_bar,
)


def action_text(operation: Operation) -> str:
    """Returns the action of an operation as short text."""
    action = operation.action
    if not action.HasField("flush_cache"):
        return f"{document_of(action)['type']} {_model_of(action)}"
    flush, scope = action.flush_cache, word_of(action.flush_cache, "scope")
    what = {"model": flush.model, "tenant": flush.tenant, "tag": flush.tag}.get(scope, "")
    return f"flush {scope} {what}".rstrip()


_COLUMNS = (
    Column("ID", lambda one: one.name.partition("/")[2]),
    Column("ACTION", action_text),
    Column("STATE", "{state}"),
    Column("STAGE", lambda one: one.stage or "-" if not has_ended(one) else "-"),
    Column("PROGRESS", "[{progress:.0%}]"),
    Column("RUNNER", "{runner}"),
    Column("BY", "{requested_by}"),
    Column("AGE", "[{create_time:age}]", ticks=True),
    Column("DETAIL", "{detail}"),
)
_OPERATIONS = Listing(columns=_COLUMNS, empty="there are no such operations; weft load MODEL begins one")


@app.command("list")
def list_operations(
    unfinished: Annotated[bool, typer.Option("--unfinished", help="Only unfinished ones.")] = False,
    limit: Annotated[
        int, typer.Option("--limit", min=1, max=MAX_LIMIT, help="Maximum number of results, newest first.")
    ] = DEFAULT_LIMIT,
    home: HomeOption = DEFAULT_HOME,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """List operations, newest first.

    Example: weft operation list --unfinished
    """
    with connect_operations(home=home) as operations:
        found = list(operations.newest(limit, unfinished_only=unfinished))
    _OPERATIONS.print(found, output, lambda: document_of(ListOperationsResponse(operations=found)))


@app.command("get")
def get_operation(
    name: NameArgument, home: HomeOption = DEFAULT_HOME, output: OutputOption = OutputFormat.YAML
) -> None:
    """Show one operation in full.

    Example: weft operation get op-3f2a -o json
    """
    with connect_operations(home=home) as operations:
        found = operations.get(name)
    _OPERATIONS.print([found], output, lambda: document_of(found))


@app.command("watch")
def watch_operation(name: NameArgument, home: HomeOption = DEFAULT_HOME) -> None:
    """Follow one operation until it has ended; exit code 0 when it succeeded.

    Example: weft operation watch op-3f2a
    """
    with connect_operations(home=home) as operations:
        say(f"{outcome_text(follow(operations, operations.get(name), shown=True))}\n")


@app.command("cancel")
def cancel_operation(name: NameArgument, home: HomeOption = DEFAULT_HOME) -> None:
    """Cancel an operation. What a load has loaded so far is unloaded.

    Example: weft operation cancel op-3f2a
    """
    with connect_operations(home=home) as operations:
        last = operations.cancel(name)
        if not has_ended(last):
            for last in operations.watch(name):
                if has_ended(last):
                    break
        say(f"{last.name} {word_of(last, 'state')}\n")
