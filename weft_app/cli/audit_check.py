"""Verification of an audit log on the reader's side, with the registry's own rule."""

from collections.abc import Iterable

from registry_svc.operations.policy.audit import AuditCheck, AuditDraft, AuditEntry, AuditHead, Damage, Fault
from weft.documents.operation_documents import AuditEntryDocument


def check_log(entries: Iterable[AuditEntryDocument], kept: tuple[int, str] | None) -> tuple[int, str | None]:
    """Returns the number of entries and the first fault as text; None: no fault.

    `kept` is the sequence and hash of a head that was stored elsewhere.
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
        Damage.CHANGED: "was changed after it was written",
        Damage.MISSING: "is missing, or in another place",
        Damage.CUT: "and what follows was cut off: the stored head lies behind it",
        Damage.REWRITTEN: "was rewritten: it does not lead to the stored head",
    }[fault.damage]
    return f"entry {fault.sequence} {what}"
