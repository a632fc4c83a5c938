"""`weft cancel`: requests, tasks, batches and operations, by their ids."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from weft.kernel.errors.error_tree import invalid_field
from weft.kernel.errors.reasons import Reason
from weft.kernel.values.names import MAX_REQUEST_ID_CHARS, require_token
from weft_app.cli.completion import complete_cancelled_kind
from weft_app.cli.mesh_api import Document, connect
from weft_app.cli.options import DEFAULT_HOME, HomeOption, OutputFormat, PageOutputOption, act_on_each, words_of
from weft_app.cli.output import FORMATS, print_page
from weft_app.cli.short_ids import REQUESTS, full_id
from weft_app.cli.targets import record_ids, record_kind
from weft_app.cli.terminal import safe_text

CANCEL_TIMEOUT_SECONDS = 20.0
"""Timeout of a call, which waits until the cancelled request has ended."""


_ADVICE = "; `weft get requests` lists those that run, with `--state ended` those that ended"


def cancel(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="[KIND] ID...",
            help="Ids of requests, tasks, batches or operations, or their beginnings. If an id does not show the kind, "
            "write KIND ID.",
            autocompletion=complete_cancelled_kind,
        ),
    ],
    tenant: Annotated[str, typer.Option(help="Only requests of this tenant, if two tenants use the same id.")] = "",
    output: PageOutputOption = OutputFormat.TABLE,
    home: HomeOption = DEFAULT_HOME,
) -> None:
    """Cancel requests, tasks, batches or operations, whether they wait or run.

    It works for requests of every API, to models and agents. Their callers get the error `cancelled`. If a request has
    already ended, its outcome is printed.

    Example: weft cancel req-5f0c1a, or weft cancel op-3f2a, or weft cancel request my-own-id
    """
    kind, ids = _cancelled_kind(words)
    if kind != "request" and tenant:
        raise invalid_field("--tenant", "goes with requests")
    if kind == "request":
        cancel_requests(ids, tenant, output, home)
    elif kind == "task":
        from weft_app.cli.tasks import cancel_tasks  # noqa: PLC0415 - each kind imports its own

        cancel_tasks(["task", *ids], home, output)
    elif kind == "batch":
        from weft_app.cli.batch import cancel_batches  # noqa: PLC0415 - as above

        cancel_batches(ids, output, home)
    else:
        from weft_app.cli.operations import cancel_operations  # noqa: PLC0415 - as above

        cancel_operations(ids, output, home)


_KINDS = ("request", "task", "batch", "operation")
_KIND_OF_PREFIX = dict(zip(("req", "task", "batch", "op"), _KINDS, strict=True))


def _cancelled_kind(words: Sequence[str]) -> tuple[str, list[str]]:
    """Parses `KIND ID...`, `KIND/ID...` or `ID...`. Raises INVALID_ARGUMENT."""
    if (kind := record_kind(words[0])) in _KINDS:
        mixed = invalid_field("ID", f"write {kind}/ID for each, or {kind} once before the ids")
        ids = record_ids(words, kind, lambda _: mixed)
    else:
        found = {_KIND_OF_PREFIX.get(word.partition("-")[0], "") for word in words}
        kind, ids = "".join(found) if len(found) == 1 else "", list(words)
    if not kind:
        raise invalid_field(
            "KIND", "must be request, task, batch or operation, as in `weft cancel request ID`: the id does not show it"
        )
    if not ids or not all(ids):
        raise invalid_field("ID", f"name what to cancel, as {kind} ID or {kind}/ID; `weft get {kind}s` lists them")
    return kind, ids


def cancel_requests(ids: Sequence[str], tenant: str, output: OutputFormat, home: Path) -> None:
    """Cancels requests and prints how each ended. A failure of one does not stop the others."""
    with connect(home, CANCEL_TIMEOUT_SECONDS) as api:

        def cancel_one(request: str) -> None:
            request = require_token(request.removesuffix("…"), "ID", MAX_REQUEST_ID_CHARS)
            request = request if tenant else full_id(api, REQUESTS, request)
            path = f"/v1/requests/{request}/cancel"
            ended = api.post(path, headers={"X-Tenant-ID": tenant}) if tenant else api.post(path, allTenants=True)
            print_page(output, lambda: f"request/{request} {_ended_words(ended)}\n", lambda: ended)

        act_on_each(
            ids,
            cancel_one,
            lambda each, error: (
                f"request {safe_text(each)}: {words_of(error)}{_ADVICE if error.reason is Reason.NOT_FOUND else ''}"
            ),
        )


def _ended_words(request: Document) -> str:
    if request["state"] != "ended":
        return "is being cancelled; its caller has not read the end yet"
    if request.get("cancelledBy"):
        return f"cancelled by {FORMATS['actor'](request['cancelledBy'])}"
    return f"had already ended: {request['reason']}" if "reason" in request else "had already completed"
