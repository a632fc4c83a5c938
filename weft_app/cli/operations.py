"""`weft operation`: look at operations, follow them, end them."""

from typing import Annotated, Any

import typer

from weft.client.operations import connect_operations
from weft.documents.operation_documents import OperationDocument, OperationList
from weft_app.cli.columns import age
from weft_app.cli.operation_progress import follow, outcome_words
from weft_app.cli.options import DEFAULT_HOME, HomeOption, OutputFormat, OutputOption, reporting
from weft_app.cli.output import Column, print_document, print_table, say

DEFAULT_LIMIT = 50
MAX_LIMIT = 10_000

app = typer.Typer(
    help="Look at loads, unloads and flushes, follow them, end them.",
    epilog="Example: weft operation list --unfinished",
    no_args_is_help=True,
)

NameArgument = Annotated[str, typer.Argument(metavar="ID", help='An operation: its id, or "operations/<id>".')]


def action_words(operation: OperationDocument) -> str:
    """What an operation does, in few words."""
    action = operation.action
    if action.type != "flush":
        return f"{action.type} {action.model}"
    what = {"model": action.model, "tenant": action.tenant, "tag": action.tag}.get(action.scope or "", "")
    return f"flush {action.scope} {what}".rstrip()


_COLUMNS = (
    Column("ID", lambda one: one.name.partition("/")[2]),
    Column("ACTION", action_words),
    Column("STATE", lambda one: one.state),
    Column("STAGE", lambda one: one.stage or "-" if not one.is_over else "-"),
    Column("PROGRESS", lambda one: "-" if one.progress is None else f"{one.progress:.0%}"),
    Column("RUNNER", lambda one: one.runner or "-"),
    Column("BY", lambda one: one.requested_by or "-"),
    Column("AGE", lambda one: age(one.created_at), ticks=True),
    Column("DETAIL", lambda one: one.detail or "-"),
)


@app.command("list")
def list_operations(
    unfinished: Annotated[bool, typer.Option("--unfinished", help="Only those that have not ended.")] = False,
    limit: Annotated[
        int, typer.Option("--limit", min=1, max=MAX_LIMIT, help="How many, newest first.")
    ] = DEFAULT_LIMIT,
    home: HomeOption = DEFAULT_HOME,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Show operations, newest first.

    Example: weft operation list --unfinished
    """
    with reporting():
        with connect_operations(home=home) as operations:
            found = tuple(operations.newest(limit, unfinished_only=unfinished))
        if output is OutputFormat.TABLE:
            print_table(found, _COLUMNS)
        else:
            print_document(_plain(OperationList(kind="OperationList", items=found)), output)


@app.command("get")
def get_operation(
    name: NameArgument, home: HomeOption = DEFAULT_HOME, output: OutputOption = OutputFormat.YAML
) -> None:
    """Show one operation whole.

    Example: weft operation get op-3f2a -o json
    """
    with reporting():
        with connect_operations(home=home) as operations:
            found = operations.get(name)
        if output is OutputFormat.TABLE:
            print_table([found], _COLUMNS)
        else:
            print_document(_plain(found), output)


@app.command("watch")
def watch_operation(name: NameArgument, home: HomeOption = DEFAULT_HOME) -> None:
    """Follow one operation until it has ended; exit code 0 when it succeeded.

    Example: weft operation watch op-3f2a
    """
    with reporting(), connect_operations(home=home) as operations:
        say(f"{outcome_words(follow(operations, operations.get(name), shown=True))}\n")


@app.command("cancel")
def cancel_operation(name: NameArgument, home: HomeOption = DEFAULT_HOME) -> None:
    """End an operation. What a load has loaded so far is unloaded again.

    Example: weft operation cancel op-3f2a
    """
    with reporting(), connect_operations(home=home) as operations:
        last = operations.cancel(name)
        if not last.is_over:
            for last in operations.watch(name):
                if last.is_over:
                    break
        say(f"{last.name} {last.state}\n")


def _plain(document: OperationDocument | OperationList) -> dict[str, Any]:
    return document.model_dump(mode="json", by_alias=True, exclude_none=True)
