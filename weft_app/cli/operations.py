"""`weft load`, `weft unload` and `weft models flush`, and `weft mesh operation` for what they have started."""

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weft.api.operations.v1.operation_pb2 import OperationAction
from weft.documents.codec import document_of
from weft.kernel.errors.error_tree import WeftError, invalid_field
from weft.kernel.errors.reasons import Reason
from weft.kernel.models.model_source import is_hub_id
from weft.kernel.models.short_names import short_source
from weft.kernel.values.names import require_request_id
from weft.kernel.values.units import size_words
from weft_app.cli import verbs
from weft_app.cli.follow import RecordChanges
from weft_app.cli.follow import follow as follow_mesh
from weft_app.cli.mesh_api import Document, MeshApi, connect
from weft_app.cli.options import DEFAULT_HOME, EXIT_OK, HomeOption, OutputFormat, OutputOption, act_on_each, reporting
from weft_app.cli.output import Listing, ProgressStyle, custom_columns, document_text, print_page, shown_progress
from weft_app.cli.short_ids import OPERATIONS, full_id
from weft_app.cli.terminal import is_err_terminal, note, safe_text, say

if TYPE_CHECKING:
    from rich.progress import ProgressColumn

ADMIN = "/v1/admin"
OPERATION_PREFIX = "operations/"
WATCH_TIMEOUT_SECONDS = 60.0
"""Timeout of a watch without events; the gateway sends something more often."""
MAX_DETAIL_CHARS = 100
DONE_SHARE = 100.0
DEFAULT_LIMIT = 50
MAX_LIMIT = 10_000
MAX_PAGE = 1000
MAX_TOKEN_BYTES = 16 * 1024

app = typer.Typer()

NameArgument = Annotated[
    str, typer.Argument(metavar="ID", help='Id of the operation or its beginning, or "operations/<id>".')
]
WatchOption = Annotated[bool, typer.Option("--watch", "-w", help="Show progress, even without a terminal.")]


TokenOption = Annotated[
    str | None,
    typer.Option("--token", metavar="FILE", help="Token from `weft keys sign`; - for standard input."),
]


def carry_out(
    action: OperationAction,
    *,
    token: TokenOption = None,
    watch: WatchOption = False,
    no_wait: Annotated[
        bool, typer.Option("--no-wait", help="Print the operation's name without waiting for its end.")
    ] = False,
    request_id: Annotated[
        str, typer.Option("--request-id", help="Idempotency id: an operation with the same id is never repeated.")
    ] = "",
    home: HomeOption = DEFAULT_HOME,
) -> None:
    """Runs an action as an operation and prints its outcome."""
    if request_id:
        require_request_id(request_id, "--request-id")
    authorization = "" if token is None else read_token(token)
    with connect(home, WATCH_TIMEOUT_SECONDS) as api:
        operation = begin(api, document_of(action), request_id=request_id, authorization=authorization)
        if no_wait:
            say(f"{operation['name']}\n")
        else:
            say_outcome(api, operation, shown=watch)


def say_outcome(api: MeshApi, operation: Document, *, shown: bool = False) -> None:
    """Follows an operation to its end and prints its outcome. `shown`: show progress even without a terminal."""
    say(f"{outcome_text(follow(api, operation, shown=shown or is_err_terminal()))}\n")


def begin(api: MeshApi, action: Document, *, request_id: str = "", authorization: str = "") -> Document:
    """Starts an action and returns its operation. An unknown model to load may be a short name of a source.

    Raises the mesh's errors.
    """
    try:
        return _created(api, action, request_id, authorization)
    except WeftError as refusal:
        model = action.get("model", "")
        if refusal.reason is not Reason.MODEL_NOT_FOUND or action["type"] != "load" or action.get("source"):
            raise
        if is_hub_id(model):
            refusal.message += f"; the hub's repository of this name is hf:{model}"
        source = short_source(model)
        # A token is only valid for the signed action.
        if source is None or authorization:
            raise
    note(f"{model} is {source}")
    return _created(api, action | {"source": source}, request_id, "")


_PATHS = {"flush": "cache/flush", "pull": "pulls"}
"""Paths of actions without a model."""


def _created(api: MeshApi, action: Document, request_id: str, authorization: str) -> Document:
    given = {name: value for name, value in action.items() if name not in ("type", "settings") and value}
    body = given | action.get("settings", {}) | ({"authorization": authorization} if authorization else {})
    path = _PATHS.get(action["type"], "models")
    if action["type"] == "load" and body.get("source"):
        body |= {"name": body.pop("model")} if "model" in body else {}
    elif path == "models":
        path = f"{'servers' if action['type'] == 'detach' else path}/{body.pop('model')}/{action['type']}"
    if body.get("form") == "unknown":
        del body["form"]
    created: Document = api.post(f"{ADMIN}/{path}", body, {"Idempotency-Key": request_id})
    return created


load = verbs.command(
    verbs.load,
    carry_out,
    """Load a model and keep it loaded until it is unloaded. Different options reload it.

    A source such as hf:Qwen/Qwen3-8B-GGUF:Q4_K_M, or a short name such as llama3.2, is pulled, served, and loaded.

    Example: weft load qwen --ctx 8192 --watch
    """,
)
unload = verbs.command(
    verbs.unload,
    carry_out,
    """Drain and unload a model. The next request loads it again.

    With -l: all models with these labels, one after the other.

    Example: weft unload qwen, or weft unload -l team=a
    """,
    selects=True,
)
flush = verbs.command(
    verbs.flush,
    carry_out,
    """Drop cached prefixes. Running requests keep theirs until they end.

    With -l: of all models with these labels, one after the other.

    Example: weft models flush --tenant acme, or weft models flush -l team=a
    """,
    selects=True,
)


def restart_model(name: str, home: Path) -> None:
    """Unloads a model and loads it with the options of its last load: two operations in the audit log."""
    with connect(home, WATCH_TIMEOUT_SECONDS) as api:
        settings = instance_of(api, name).get("loadOptions", {})
        follow(api, begin(api, {"type": "unload", "model": name}), shown=is_err_terminal())
        try:
            say_outcome(api, begin(api, {"type": "load", "model": name, "settings": settings}))
        except WeftError as error:
            message = (
                f"{name} was unloaded but could not be loaded again: {error.message}; the next request retries the load"
            )
            raise WeftError(error.reason, message) from error


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
    api: MeshApi, first: Document, *, shown: bool, interrupted: Callable[[Document], None] | None = None
) -> Document:
    """Follows an operation to its end and returns it; with `shown`, prints its progress. Raises its failure.

    `interrupted` is called after Ctrl-C; None: the operation continues, with a note how to cancel it.
    """
    last = first
    try:
        with shown_progress(_PROGRESS, is_shown=shown) as show:
            show(last)
            for last in _news(api, first):
                show(last)
    except KeyboardInterrupt:
        if interrupted is not None:
            interrupted(last)
        elif not has_ended(last):
            name = first["name"]
            note(
                f"{name} continues; watch it with `weft mesh operation watch`, cancel it with "
                "`weft mesh operation cancel`"
            )
        raise
    except WeftError as error:
        if error.reason is Reason.SERVICE_UNAVAILABLE:
            raise WeftError(error.reason, f"{error.message}; {first['name']} continues") from error
        raise
    require_success(last)
    return last


def _news(api: MeshApi, operation: Document) -> Iterator[Document]:
    """Yields an operation at each change until it has ended."""
    if not has_ended(operation):
        yield from filter(None, api.stream(f"{ADMIN}/{operation['name']}", watch=True))


def has_ended(operation: Document) -> bool:
    """Whether an operation has succeeded, failed or was cancelled."""
    return operation["state"] in ("succeeded", "failed", "cancelled")


def operation_name(name: str) -> str:
    """Returns the name of an operation from its name or id."""
    return name if name.startswith(OPERATION_PREFIX) else OPERATION_PREFIX + name


def _operation_named(api: MeshApi, name: str) -> str:
    """Returns the name of an operation from its name or id, or the beginning of its id."""
    return operation_name(full_id(api, OPERATIONS, name.removeprefix(OPERATION_PREFIX)))


def require_success(operation: Document) -> None:
    """Raises the error of an operation unless it succeeded."""
    if operation["state"] == "cancelled":
        raise WeftError(Reason.CANCELLED, f"{operation['name']} was cancelled")
    if operation["state"] == "failed":
        reason = Reason.__members__.get(operation.get("reason", "").upper(), Reason.INTERNAL)
        detail = operation.get("detail", "")
        field = _FIELD.match(detail)
        metadata = {} if field is None else {"field": field[1]}
        raise WeftError(reason, detail or f"{operation['name']} failed", metadata=metadata)


_FIELD = re.compile(r"(options(?:\.\w+)+): ")
"""The field at the start of a runner's error of a load."""


def outcome_text(operation: Document) -> str:
    """Returns the outcome of a successful operation, in one line."""
    result, action = operation.get("result"), operation["action"]
    if result is None:
        return str(operation["state"])
    kind, added = action["type"], result.get("added", {})
    target = ", ".join(result.get("models", ())) or action.get("model") or action.get("source") or "nothing"
    freed = f" ({size_words(result['memoryFreedBytes'])} freed)" if result.get("memoryFreedBytes") else ""
    if "server" in added:
        return _server_text(added, result["models"], is_attached=kind == "load")
    match kind:
        case "load":
            took = f"in {result.get('loadSeconds', 0.0):.1f} s"
            held = f" ({took}, holds {size_words(result['memoryBytes'])})" if result.get("memoryBytes") else ""
            chosen = "".join(f"\n  {safe_text(reason)}" for reason in added.get("reasons", ()))
            text = f"model/{target} loaded{held}{chosen}"
        case "unload":
            text = f"model/{target} unloaded{freed}"
        case "pull":
            pulled = result["pulled"]
            text = f"{pulled['source']}: {size_words(pulled['sizeBytes'])}, {pulled['digest']}"
        case "remove":
            text = f"model/{target} removed{freed}; its files are kept: weft models ls"
        case _:
            tokens = f", {result['tokenCount']} tokens" if "tokenCount" in result else ""
            text = f"cache flushed: {result['entryCount']} prefixes{tokens}"
    return text


def _server_text(added: Document, models: Sequence[str], *, is_attached: bool) -> str:
    if not is_attached:
        return f"server/{added['name']} detached; it keeps running"
    names = ", ".join(models) or "no models yet; models that it lists later will be served"
    server = added["server"]
    served, listed, left = len(server.get("models", ())), server.get("listedCount", 0), server.get("leftOutCount", 0)
    limit = " (limit: max_listed_models of its runner)" if served + left < listed else ""
    of_all = f"{served} of {listed} models are served{limit}: " if served < listed else ""
    if left and not models:
        names = "none"
    items = "".join(
        f"\n  left out: {safe_text(each['name'])}: {safe_text(each['message'])}" for each in server.get("leftOut", ())
    )
    return f"server/{added['name']} attached: {of_all}{safe_text(names)}{items}"


def _bar(operation: Document) -> dict[str, Any]:
    share = 1.0 if operation["state"] == "succeeded" else operation.get("progress")
    return {
        "description": _words(operation),
        "total": None if share is None else DONE_SHARE,
        "completed": (share or 0.0) * DONE_SHARE,
    }


def _words(operation: Document) -> str:
    """Returns stage, detail and remaining time in one line that is safe for a terminal."""
    stage = operation.get("stage") or operation["state"]
    parts = [stage]
    if detail := operation.get("detail"):
        # The runner's text contains what it waits for.
        parts.append(detail.removeprefix(f"{stage}: ")[:MAX_DETAIL_CHARS])
    if "progress" in operation and not has_ended(operation):
        parts.append(f"{operation['progress']:.0%}")
    if "etaSeconds" in operation and not has_ended(operation):
        parts.append(f"about {operation['etaSeconds']:.0f} s left")
    # Rich would read square brackets as markup.
    return safe_text(": ".join(parts)).replace("[", "(").replace("]", ")")


def _columns() -> "Sequence[ProgressColumn]":
    from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn  # noqa: PLC0415 - see `output`

    return SpinnerColumn(), BarColumn(bar_width=30), TimeElapsedColumn(), TextColumn("{task.description}")


_PROGRESS = ProgressStyle(line=_words, columns=_columns, bar=_bar)


def _action_text(operation: Document) -> str:
    action = operation["action"]
    if action["type"] != "flush":
        return f"{action['type']} {action.get('model') or action.get('source', '')}"
    return f"flush {action['scope']} {action.get(action['scope'], '')}".rstrip()


_UNFINISHED = ("pending", "running")


_COLUMNS = custom_columns(
    "ID ACTION STATE:state STAGE? PROGRESS:progress:{:.0%} RUNNER:runner BY:requestedBy? AGE:createdAt:age~ "
    "DETAIL:detail",
    ID=lambda one: one["name"].partition("/")[2],
    ACTION=_action_text,
    STAGE=lambda one: one.get("stage") if one["state"] in _UNFINISHED else None,
)
_OPERATIONS = Listing(
    columns=_COLUMNS,
    name=lambda one: one["name"],
    plural="operations",
    empty="there are no such operations; weft load MODEL starts one",
)


@app.command("list")
def list_operations(
    unfinished: Annotated[bool, typer.Option("--unfinished", help="Only unfinished ones.")] = False,
    limit: Annotated[
        int, typer.Option(min=1, max=MAX_LIMIT, help="Maximum number of results, newest first.")
    ] = DEFAULT_LIMIT,
    home: HomeOption = DEFAULT_HOME,
    output: OutputOption = OutputFormat.TABLE,
    *,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Print changes until Ctrl-C.")] = False,
) -> None:
    """List operations, newest first; with --watch oldest first, then each that is new or changes.

    Example: weft mesh operation list --unfinished -w
    """
    if watch:
        with reporting(interrupted=EXIT_OK):
            _watch_operations(home, limit, output, unfinished=unfinished)
    with connect(home) as api:
        pages = api.pages(f"{ADMIN}/operations", pageSize=min(limit, MAX_PAGE), unfinished=unfinished)
        found = list(islice(pages, limit))
    _OPERATIONS.print(found, output, lambda: {"kind": "OperationList", "items": found, "nextPageToken": ""})


def _watch_operations(home: Path, limit: int, output: OutputFormat, *, unfinished: bool) -> None:
    """Prints operations, oldest first, then each that is new or changes; `unfinished`: until it has ended."""
    stream = replace(_OPERATIONS, yaml=lambda one: document_text(one, OutputFormat.YAML))
    changes, is_first = RecordChanges(stream, output), True
    for state, changed in follow_mesh(home, ("operation",)):
        there = [state["operation"][name] for _, name in changed]
        if is_first:
            there = sorted(there, key=lambda one: str(one.get("createdAt", "")))[-limit:]
            changes.all(one for one in there if not unfinished or one["state"] in _UNFINISHED)
            is_first = False
        for one in there:
            (changes.one if not unfinished or one["state"] in _UNFINISHED else changes.last)(one)


@app.command("get")
def get_operation(
    name: NameArgument, home: HomeOption = DEFAULT_HOME, output: OutputOption = OutputFormat.YAML
) -> None:
    """Show one operation in full.

    Example: weft mesh operation get op-3f2a -o json
    """
    with connect(home) as api:
        found = api.get(f"{ADMIN}/{_operation_named(api, name)}")
    _OPERATIONS.print([found], output, lambda: found)


@app.command("watch")
def watch_operation(name: NameArgument, home: HomeOption = DEFAULT_HOME) -> None:
    """Follow one operation until it has ended; exit code 0 when it succeeded.

    Example: weft mesh operation watch op-3f2a
    """
    with connect(home, WATCH_TIMEOUT_SECONDS) as api:
        say_outcome(api, api.get(f"{ADMIN}/{_operation_named(api, name)}"), shown=True)


@app.command("cancel")
def cancel_operation(name: NameArgument, home: HomeOption = DEFAULT_HOME) -> None:
    """Cancel an operation. What a load has loaded so far is unloaded.

    Example: weft mesh operation cancel op-3f2a
    """
    cancel_operations([name], OutputFormat.TABLE, home)


def cancel_operations(names: Sequence[str], output: OutputFormat, home: Path) -> None:
    """Cancels operations and prints the final state of each. A failure of one does not stop the others."""
    with connect(home, WATCH_TIMEOUT_SECONDS) as api:

        def cancel_one(name: str) -> None:
            last = cancelled(api, name)
            print_page(output, lambda: f"{last['name']} {last['state']}\n", lambda: last)

        act_on_each(names, cancel_one)


def cancelled(api: MeshApi, name: str) -> Document:
    """Cancels an operation and returns it once it has ended."""
    found: Document = api.delete(f"{ADMIN}/{_operation_named(api, name)}")
    return [found, *_news(api, found)][-1]


def instance_of(api: MeshApi, model: str) -> Document:
    """Returns a runner's description of a model's engine. Raises MODEL_NOT_FOUND, NO_RUNNER_AVAILABLE."""
    runner = api.get(f"/api/v1/models/{model}")["status"].get("runner")
    if not runner:
        raise WeftError(Reason.NO_RUNNER_AVAILABLE, f"no runner serves {model} now")
    found: list[Document] = api.get(f"{ADMIN}/runners/{runner}/instances")["instances"]
    return next((each for each in found if each["model"] == model), {})
