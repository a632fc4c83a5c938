"""Whether an audit log, as it was told, is whole: the registry's own rule, carried out by whoever reads it."""

from collections.abc import Iterable

from registry_svc.operations.policy.audit import AuditCheck, AuditDraft, AuditEntry, AuditHead, Damage, Fault
from weft.documents.operation_documents import AuditEntryDocument


def check_log(entries: Iterable[AuditEntryDocument], kept: tuple[int, str] | None) -> tuple[int, str | None]:
    """How many entries there are, and what is wrong first, in words; None: nothing.

    `kept` is the sequence and hash of an end of the log that was kept elsewhere.
    """
    head = None if kept is None or kept[0] == 0 else AuditHead(sequence=kept[0], hash=kept[1])
    check, count = AuditCheck(kept=head), 0
    for entry in entries:
        check.read([_entry(entry)])
        count += 1
    fault = check.verdict()
    return count, None if fault is None else _words(fault)


def _entry(document: AuditEntryDocument) -> AuditEntry:
    draft = AuditDraft(
        at=document.time,
        event=document.event,
        actor=document.actor,
        operation=document.operation or "",
        detail=document.detail,
    )
    return AuditEntry(sequence=document.sequence, draft=draft, previous_hash=document.previous_hash, hash=document.hash)


def _words(fault: Fault) -> str:
    what = {
        Damage.CHANGED: "is not what it was when it was written",
        Damage.MISSING: "is missing, or in another place",
        Damage.CUT: "and what follows was cut off: the end that was kept elsewhere lies behind it",
        Damage.REWRITTEN: "was written anew: it does not lead to what was kept",
    }[fault.damage]
    return f"entry {fault.sequence} {what}"
