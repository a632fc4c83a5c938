"""`weft load`, `weft unload`, `weft flush` and `weft logs`."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from runner_svc.runtimes.table import find_runtime
from weft.api.operations.v1 import operation_pb2
from weft.client.operations import Operations, connect_operations
from weft.client.resources import connect_registry
from weft.client.runners import connect_runner_of
from weft.documents.operation_documents import OperationDocument
from weft.documents.operation_messages import flush_action, load_action, unload_action
from weft.kernel.errors import invalid_field
from weft.kernel.names import require_name, require_request_id
from weft_app.cli.completion import complete_model
from weft_app.cli.load_settings import (
    BudgetOption,
    ContextOption,
    EvictOption,
    KeepAliveOption,
    PinOption,
    QuantizationOption,
    ReplicasOption,
    SetOption,
    flush_scope,
    load_settings,
    naming_options,
)
from weft_app.cli.operations import follow, outcome_words
from weft_app.cli.options import DEFAULT_HOME, HomeOption, note, reporting
from weft_app.cli.output import safe_text, say
from weft_app.cli.tasks import is_about_tasks, print_answer

DEFAULT_LINES = 100
MAX_LINES = 1000
MAX_TOKEN_BYTES = 16 * 1024

ModelArgument = Annotated[str, typer.Argument(metavar="MODEL", help="A model.", autocompletion=complete_model)]
MembersArgument = Annotated[
    str, typer.Argument(metavar="MODEL", help="A model or a pool.", autocompletion=complete_model)
]
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


def load(
    model: MembersArgument,
    *,
    context_tokens: ContextOption = None,
    quantization: QuantizationOption = None,
    budget: BudgetOption = None,
    evict: EvictOption = "",
    replicas: ReplicasOption = 0,
    pin: PinOption = False,
    keep_alive: KeepAliveOption = None,
    parameters: SetOption = None,
    token: TokenOption = None,
    watch: WatchOption = False,
    no_wait: NoWaitOption = False,
    request_id: RequestIdOption = "",
    home: HomeOption = DEFAULT_HOME,
) -> None:
    """Load a model, and keep it loaded until it is unloaded. Other settings than the current ones reload it.

    Example: weft load qwen --ctx 8192 --watch
    """
    with reporting(), naming_options():
        settings = load_settings(
            context_tokens=context_tokens,
            quantization=quantization,
            budget=budget,
            pin=pin,
            keep_alive=keep_alive,
            parameters=parameters or (),
        )
        action = load_action(require_name(model, "MODEL"), settings, evict_model=evict, replicas=replicas)
        _carry_out(action, token, request_id, home, watch=watch, wait=not no_wait)


def unload(
    model: MembersArgument,
    *,
    token: TokenOption = None,
    watch: WatchOption = False,
    no_wait: NoWaitOption = False,
    request_id: RequestIdOption = "",
    home: HomeOption = DEFAULT_HOME,
) -> None:
    """Drain the requests of a model, then unload it; the next request loads it again.

    Example: weft unload qwen
    """
    with reporting(), naming_options():
        action = unload_action(require_name(model, "MODEL"))
        _carry_out(action, token, request_id, home, watch=watch, wait=not no_wait)


def flush(
    *,
    everything: Annotated[bool, typer.Option("--all", help="All cached prefixes.")] = False,
    model: Annotated[str, typer.Option("--model", help="Of this model.", autocompletion=complete_model)] = "",
    tenant: Annotated[str, typer.Option("--tenant", help="Of this tenant.")] = "",
    tag: Annotated[str, typer.Option("--tag", help="Only prefixes with this cache tag.")] = "",
    runner: Annotated[str, typer.Option("--runner", help="Only on this runner.")] = "",
    token: TokenOption = None,
    watch: WatchOption = False,
    no_wait: NoWaitOption = False,
    request_id: RequestIdOption = "",
    home: HomeOption = DEFAULT_HOME,
) -> None:
    """Drop cached prefixes. Running requests keep theirs until they end.

    Example: weft flush --tenant acme
    """
    with reporting(), naming_options():
        scope = flush_scope(everything, model, tenant, tag)
        action = flush_action(scope, model=model, tenant=tenant, tag=tag, runner=runner)
        _carry_out(action, token, request_id, home, watch=watch, wait=not no_wait)


def logs(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL", help="A model; or task/ID for the answer of a task.", autocompletion=complete_model
        ),
    ],
    follow_on: Annotated[bool, typer.Option("--follow", "-f", help="Follow new lines until Ctrl-C.")] = False,
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, max=MAX_LINES, help="Last lines.")] = DEFAULT_LINES,
    home: HomeOption = DEFAULT_HOME,
) -> None:
    """Show the output of a model's backend, or the answer of a task so far.

    Example: weft logs qwen -f
    """
    with reporting(interrupted=0):
        if is_about_tasks(words):
            print_answer(words, home, follow=follow_on)
            return
        if len(words) != 1:
            raise invalid_field("MODEL", "name one model, or one task as task/ID")
        model = require_name(words[0], "MODEL")
        with connect_registry(home=home) as registry, connect_runner_of(registry, model) as runner:
            runtime = find_runtime(runner.runtime)
            if runtime is not None and runtime.no_output:
                note(f"{model}: {runtime.no_output}")
                return
            for response in runner.log_lines(lines, follow=follow_on):
                if response.lost_line_count:
                    note(f"{response.lost_line_count} lines were lost: this reader is too slow")
                sys.stdout.write("".join(f"{safe_text(line)}\n" for line in response.lines))
                sys.stdout.flush()


def _carry_out(
    action: operation_pb2.OperationAction, token: str | None, request_id: str, home: Path, *, watch: bool, wait: bool
) -> None:
    if request_id:
        require_request_id(request_id, "--request-id")
    authorization = "" if token is None else read_token(token)
    with connect_operations(home=home) as operations:
        operation = operations.create(action, request_id=request_id, authorization=authorization)
        if not wait:
            say(f"{operation.name}\n")
            return
        say(f"{outcome_words(_ended(operations, operation, watch=watch))}\n")


def _ended(operations: Operations, operation: OperationDocument, *, watch: bool) -> OperationDocument:
    return follow(operations, operation, shown=watch or sys.stderr.isatty())


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
