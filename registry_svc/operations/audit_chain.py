"""The audit log as a hash chain of messages, and the detection of tampering.

Entries are drafted without sequence and hashes; `chained` returns complete copies. Entries are never modified.
"""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC
from enum import Enum

from weft.api.operations.v1.operation_service_pb2 import AuditEntry, AuditHead

NO_HASH = "0" * 64
"""Previous hash of the first entry."""


def empty_head() -> AuditHead:
    """Returns the head of an empty log."""
    return AuditHead(hash=NO_HASH)


def head_of(entry: AuditEntry) -> AuditHead:
    """Returns the head of a log that ends with this entry."""
    return AuditHead(sequence=entry.sequence, hash=entry.hash)


class Damage(Enum):
    """Kind of damage to a log."""

    CHANGED = "changed"
    MISSING = "missing"
    """An entry was deleted or moved."""
    CUT = "cut"
    """The log ends before a head that was stored elsewhere."""
    REWRITTEN = "rewritten"
    """An entry does not match the previous hash of the next one, or a head that was stored elsewhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """The first fault in a log."""

    damage: Damage
    sequence: int
    """The entry that was changed, is missing, or is the first one cut off."""


def detail_json(detail: dict[str, object]) -> str:
    """Returns a detail in its canonical form."""
    return _canonical(detail)


def canonical_entry(entry: AuditEntry) -> bytes:
    """Returns the bytes of an entry that are hashed: JSON in UTF-8, keys sorted, no spaces, minimal escapes.

    `detail` is hashed as the stored string, so that verification needs no parsing. The time is UTC in microseconds,
    such as 2026-01-01T12:00:00.000000Z.
    """
    return _canonical(
        {
            "actor": entry.actor,
            "detail": entry.detail,
            "event": entry.event,
            "operation": entry.operation,
            "sequence": entry.sequence,
            "time": entry.time.ToDatetime(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
        }
    ).encode()


def entry_hash(entry: AuditEntry) -> str:
    """Returns the SHA-256 of the previous hash's 64 hex digits and the canonical form, as 64 hex digits."""
    return hashlib.sha256(entry.previous_hash.encode("ascii") + canonical_entry(entry)).hexdigest()


def chained(head: AuditHead, drafts: Iterable[AuditEntry]) -> list[AuditEntry]:
    """Returns drafts as the entries that follow `head`."""
    entries: list[AuditEntry] = []
    for draft in drafts:
        entry = AuditEntry()
        entry.CopyFrom(draft)
        entry.sequence, entry.previous_hash = head.sequence + 1, head.hash
        entry.hash = entry_hash(entry)
        entries.append(entry)
        head = head_of(entry)
    return entries


class AuditCheck:
    """Verifies a log in pages, oldest entry first: `read` every page, then call `verdict`."""

    def __init__(self, *, after: AuditHead | None = None, kept: AuditHead | None = None) -> None:
        """`after` is the head before the first entry, if any; `kept` is a head that was stored elsewhere."""
        self._at = after or empty_head()
        self._kept = kept or empty_head()
        self._fault: Fault | None = None

    def read(self, entries: Iterable[AuditEntry]) -> None:
        """Checks the next entries, up to the first fault."""
        for entry in entries:
            if self._fault is not None:
                return
            self._fault = self._fault_of(entry)
            self._at = head_of(entry)

    def verdict(self) -> Fault | None:
        """Returns the first fault; None if the log is intact."""
        if self._fault is None and self._at.sequence < self._kept.sequence:
            return Fault(damage=Damage.CUT, sequence=self._at.sequence + 1)
        return self._fault

    def _fault_of(self, entry: AuditEntry) -> Fault | None:
        expected = self._at.sequence + 1
        if entry.sequence != expected:
            return Fault(damage=Damage.MISSING, sequence=expected)
        if entry.hash != entry_hash(entry):
            return Fault(damage=Damage.CHANGED, sequence=entry.sequence)
        if entry.previous_hash != self._at.hash:
            # The entry matches its hash, so entries before it were rewritten.
            return Fault(damage=Damage.REWRITTEN, sequence=max(self._at.sequence, 1))
        if entry.sequence == self._kept.sequence and entry.hash != self._kept.hash:
            return Fault(damage=Damage.REWRITTEN, sequence=entry.sequence)
        return None


def _canonical(value: dict[str, object]) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"), sort_keys=True)
