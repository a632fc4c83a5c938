"""The audit log as a hash chain: what is hashed, how tampering shows, and how floods of refusals are counted."""

import hashlib
import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from enum import Enum

NO_HASH = "0" * 64
"""The previous hash of the first entry."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditDraft:
    """An audit entry before it has a sequence number."""

    at: datetime
    """UTC."""
    event: str
    """Such as "operation.accepted"."""
    actor: str
    """The actor, as named by the caller."""
    operation: str
    """ "operations/<id>", or empty."""
    detail: str
    """A JSON object; see `detail_json`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditHead:
    """The end of a log."""

    sequence: int = 0
    """The number of the newest entry; 0: there is none."""
    hash: str = NO_HASH


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditEntry:
    """One entry of the log."""

    sequence: int
    """Counted from 1, without gaps."""
    draft: AuditDraft
    previous_hash: str
    hash: str

    @property
    def head(self) -> AuditHead:
        """The end of a log that ends with this entry."""
        return AuditHead(sequence=self.sequence, hash=self.hash)


class Damage(Enum):
    """Kind of damage to a log."""

    CHANGED = "changed"
    """An entry was changed after it was written."""
    MISSING = "missing"
    """The next entry is missing: deleted, or moved."""
    CUT = "cut"
    """The log ends before the head that was kept elsewhere."""
    REWRITTEN = "rewritten"
    """The entry of the head that was kept elsewhere has another hash: the log was rewritten from some entry on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """The first thing that is wrong with a log."""

    damage: Damage
    sequence: int
    """Where: the entry that is changed, missing, or the first one cut off."""


def detail_json(detail: dict[str, object]) -> str:
    """A detail in its canonical form."""
    return _canonical(detail)


def canonical_entry(sequence: int, draft: AuditDraft) -> bytes:
    """Return the bytes of an entry that are hashed: JSON in UTF-8, keys sorted, no spaces, minimal escapes.

    `detail` is hashed as the stored string, so that verifying a log needs no parsing.
    """
    return _canonical(
        {
            "actor": draft.actor,
            "detail": draft.detail,
            "event": draft.event,
            "operation": draft.operation,
            "sequence": sequence,
            "time": canonical_time(draft.at),
        }
    ).encode()


def canonical_time(at: datetime) -> str:
    """A moment as it is hashed: UTC to the microsecond, such as 2026-01-01T12:00:00.000000Z."""
    return at.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def entry_hash(previous_hash: str, sequence: int, draft: AuditDraft) -> str:
    """SHA-256 over the 64 hex digits of the hash before and the canonical form; 64 hex digits."""
    return hashlib.sha256(previous_hash.encode("ascii") + canonical_entry(sequence, draft)).hexdigest()


def chained(head: AuditHead, drafts: Iterable[AuditDraft]) -> list[AuditEntry]:
    """Drafts as the entries that follow `head`."""
    entries: list[AuditEntry] = []
    for draft in drafts:
        sequence = head.sequence + 1
        own_hash = entry_hash(head.hash, sequence, draft)
        entries.append(AuditEntry(sequence=sequence, draft=draft, previous_hash=head.hash, hash=own_hash))
        head = entries[-1].head
    return entries


class AuditCheck:
    """Verifies a log that is read in pages, oldest entry first: `read` every page, then call `verdict`."""

    def __init__(self, *, after: AuditHead | None = None, kept: AuditHead | None = None) -> None:
        """`after`: the head before the first entry read; default: none. `kept`: a head that was kept elsewhere."""
        self._at = after or AuditHead()
        self._kept = kept or AuditHead()
        self._fault: Fault | None = None

    def read(self, entries: Iterable[AuditEntry]) -> None:
        """Check the next entries; after a fault no more are checked."""
        for entry in entries:
            if self._fault is not None:
                return
            self._fault = self._fault_of(entry)
            self._at = entry.head

    def verdict(self) -> Fault | None:
        """Return the first fault; None: the log is intact."""
        if self._fault is None and self._at.sequence < self._kept.sequence:
            return Fault(damage=Damage.CUT, sequence=self._at.sequence + 1)
        return self._fault

    def _fault_of(self, entry: AuditEntry) -> Fault | None:
        expected = self._at.sequence + 1
        if entry.sequence != expected:
            return Fault(damage=Damage.MISSING, sequence=expected)
        if entry.hash != entry_hash(entry.previous_hash, entry.sequence, entry.draft):
            return Fault(damage=Damage.CHANGED, sequence=entry.sequence)
        if entry.previous_hash != self._at.hash:
            # The entry fits its own hash, so what comes before it was rewritten.
            return Fault(damage=Damage.REWRITTEN, sequence=max(self._at.sequence, 1))
        if entry.sequence == self._kept.sequence and entry.hash != self._kept.hash:
            return Fault(damage=Damage.REWRITTEN, sequence=entry.sequence)
        return None


def _canonical(value: dict[str, object]) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"), sort_keys=True)


WINDOW_SECONDS = 600.0
MAX_ENTRIES_PER_WINDOW = 20
MAX_COUNTED_REASONS = 16
OTHER_REASONS = "other"
# Share of the log that refusals may fill: the rest is for accepted operations.
SHARE_FOR_REFUSALS = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class CountedRefusals:
    """Refusals that were not written down one by one."""

    since: datetime
    until: datetime
    count: int
    reasons: dict[str, int] = field(hash=False)
    """How many by why; at most MAX_COUNTED_REASONS of them, the rest as OTHER_REASONS."""


class RefusalWindow:
    """Counts refusals in windows of WINDOW_SECONDS.

    The first MAX_ENTRIES_PER_WINDOW of a window each get an entry of their own; the others share one, written at the
    end of the window. A flood so writes at most 21 entries in 10 minutes, 3,024 a day.
    """

    def __init__(self) -> None:
        self._since: datetime | None = None
        self._written = 0
        self._counted: Counter[str] = Counter()

    def takes(self, now: datetime) -> bool:
        """Whether a refusal at `now` gets an entry of its own. Call `closed` first."""
        if self._since is None:
            self._since = now
        if self._written < MAX_ENTRIES_PER_WINDOW:
            self._written += 1
            return True
        return False

    def count(self, why: str) -> None:
        """A refusal that got none."""
        known = why in self._counted or len(self._counted) < MAX_COUNTED_REASONS
        self._counted[why if known else OTHER_REASONS] += 1

    def closed(self, now: datetime, *, at_once: bool = False) -> CountedRefusals | None:
        """Return the counts of a window that has ended, or `at_once`, and begin a new one. None: none, or not yet."""
        # A clock that was set back ends the window too, or it might never end.
        over = self._since is not None and not timedelta(0) <= now - self._since < timedelta(seconds=WINDOW_SECONDS)
        if self._since is None or not (over or at_once):
            return None
        counted, since = self._counted, self._since
        self._since, self._written, self._counted = None, 0, Counter()
        if not counted:
            return None
        return CountedRefusals(since=since, until=now, count=counted.total(), reasons=dict(sorted(counted.items())))
