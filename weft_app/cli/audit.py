"""`weft mesh audit`: the audit log of operations and its verification."""

from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Annotated

import typer
from google.protobuf.json_format import ParseDict

from registry_svc.operations.audit_chain import AuditCheck, Damage, Fault
from weft.api.operations.v1 import operation_service_pb2 as pb
from weft.kernel.errors.error_tree import WeftError, invalid_field
from weft.kernel.errors.reasons import Reason
from weft_app.cli.mesh_api import Document, MeshApi, connect
from weft_app.cli.options import DEFAULT_HOME, HomeOption, OutputFormat, OutputOption
from weft_app.cli.output import Listing, custom_columns
from weft_app.cli.terminal import note, say

AUDIT = "/v1/admin/audit"
PAGE_SIZE = 1000
MAX_SHOWN = 100_000
_HASH_CHARS = 64

app = typer.Typer()

_ENTRIES = Listing(
    empty="the audit log has no such entries; it records loads, unloads and flushes",
    columns=custom_columns(
        "SEQ:sequence TIME:time:local EVENT:event ACTOR:actor:actor? OPERATION DETAIL:detail",
        OPERATION=lambda entry: entry.get("operation", "").removeprefix("operations/"),
    ),
)


@app.command("list")
def list_entries(
    after: Annotated[int, typer.Option(min=0, help="Only entries after this sequence number.")] = 0,
    limit: Annotated[int, typer.Option(min=1, max=MAX_SHOWN, help="Maximum number of results.")] = 1000,
    home: HomeOption = DEFAULT_HOME,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Show the log, oldest entry first.

    Example: weft mesh audit list --after 100 -o json
    """
    with connect(home) as api:
        found = list(islice(_entries(api, after), limit + 1))
        page = api.get(AUDIT, pageSize=1)
    if len(found) > limit:
        del found[limit:]
        note(f"there are more: --after {found[-1]['sequence']}")
    _ENTRIES.print(found, output, lambda: page | {"items": found})


@app.command("head")
def show_head(home: HomeOption = DEFAULT_HOME) -> None:
    """Print the head of the log as SEQUENCE:HASH. Store it elsewhere: it reveals a truncated log.

    Example: weft mesh audit head > /mnt/elsewhere/weft-audit-head
    """
    with connect(home) as api:
        page = api.get(AUDIT, pageSize=1)
    say(f"{page.get('headSequence', 0)}:{page.get('headHash', '')}\n")


@app.command("verify")
def verify(
    head: Annotated[
        str | None, typer.Option(metavar="SEQUENCE:HASH", help="Expected hash of the last entry, stored elsewhere.")
    ] = None,
    head_file: Annotated[Path | None, typer.Option(help="File with the head.")] = None,
    home: HomeOption = DEFAULT_HOME,
) -> None:
    """Verify that no entry was changed, removed or moved and, with --head, none cut off. Exit code 1 otherwise.

    Example: weft mesh audit verify --head-file /mnt/elsewhere/weft-audit-head
    """
    known = _head(_kept(head, head_file))
    with connect(home) as api:
        count, fault = check_log(
            (ParseDict(each, pb.AuditEntry(), ignore_unknown_fields=True) for each in _entries(api)), known
        )
    if fault is not None:
        raise WeftError(Reason.INTERNAL, f"the audit log is not intact: {fault}")
    say(f"{count} entries, intact{'' if known is None else f', and reaching entry {known[0]}'}\n")


def _entries(api: MeshApi, after: int = 0) -> Iterator[Document]:
    """Yields the entries after a number, oldest first. Raises SERVICE_UNAVAILABLE if the registry repeats entries."""
    while found := api.get(AUDIT, after=after, pageSize=PAGE_SIZE)["items"]:
        if found[-1]["sequence"] <= after:
            message = f"the registry repeats audit entries: {found[-1]['sequence']} came after {after}"
            raise WeftError(Reason.SERVICE_UNAVAILABLE, message)
        yield from found
        after = found[-1]["sequence"]


def _kept(head: str | None, head_file: Path | None) -> str | None:
    if head_file is None:
        return head
    if head is not None:
        raise invalid_field("--head", "cannot be combined with --head-file")
    try:
        return head_file.expanduser().read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise invalid_field("--head-file", f"cannot be read: {error}") from error


def _head(text: str | None) -> tuple[int, str] | None:
    if text is None:
        return None
    number, _, found = text.partition(":")
    if not number.isascii() or not number.isdigit() or len(number) > 18 or len(found) not in (0, _HASH_CHARS):
        raise invalid_field("--head", "must be SEQUENCE:HASH, as `weft mesh audit head` prints it")
    return int(number), found


def check_log(entries: Iterable[pb.AuditEntry], kept: tuple[int, str] | None) -> tuple[int, str | None]:
    """Returns the number of entries and the first fault as text; None: no fault.

    `kept` is the sequence number and hash of a head stored elsewhere.
    """
    head = None if kept is None or kept[0] == 0 else pb.AuditHead(sequence=kept[0], hash=kept[1])
    check, count = AuditCheck(kept=head), 0
    for entry in entries:
        check.read([entry])
        count += 1
    fault = check.verdict()
    return count, None if fault is None else _words(fault)


def _words(fault: Fault) -> str:
    what = {
        Damage.CHANGED: "was changed after it was written",
        Damage.MISSING: "is missing, or in another place",
        Damage.CUT: "is the last one, but the stored head is later: the log was truncated",
        Damage.REWRITTEN: "was rewritten: its hash differs from the stored head",
    }[fault.damage]
    return f"entry {fault.sequence} {what}"
