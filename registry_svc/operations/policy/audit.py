"""The audit log as a chain: what is hashed, and how a log that was changed shows."""

import hashlib
import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from enum import Enum

NO_HASH = "0" * 64
"""What stands for the hash of the entry before the first one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditDraft:
    """What happened, before it has a place in the log."""

    at: datetime
    """UTC."""
    event: str
    """Such as "operation.accepted"."""
    actor: str
    """Who did it, in the caller's own words."""
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
    """One line of the log."""

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
    """What is wrong with a log."""

    CHANGED = "changed"
    """An entry was changed after it was written."""
    MISSING = "missing"
    """An entry that must come next is not there: deleted, or in another place."""
    CUT = "cut"
    """The log ends before the head that was kept elsewhere."""
    REWRITTEN = "rewritten"
    """The entry of the head that was kept elsewhere has another hash: the log was made anew from some entry on."""


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
    """The bytes of an entry that are hashed: JSON in UTF-8, keys sorted, no spaces, nothing escaped that need not be.

    `detail` is hashed as the string that is kept, so nobody has to parse it to verify a log.
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
    """Verifies a log that is read in pages, oldest entry first: `read` every page, then ask for the `verdict`."""

    def __init__(self, *, after: AuditHead | None = None, kept: AuditHead | None = None) -> None:
        """`after`: what comes before the first entry read; default: nothing. `kept`: a head that was kept elsewhere."""
        self._at = after or AuditHead()
        self._kept = kept or AuditHead()
        self._fault: Fault | None = None

    def read(self, entries: Iterable[AuditEntry]) -> None:
        """Check the next entries; nothing more is looked at once a fault is found."""
        for entry in entries:
            if self._fault is not None:
                return
            self._fault = self._fault_of(entry)
            self._at = entry.head

    def verdict(self) -> Fault | None:
        """What is wrong first; None: nothing."""
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
            # It fits its own hash, so what comes before it was made anew.
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
# What a flood may take of the log: the rest is for operations that were accepted.
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

    The first MAX_ENTRIES_PER_WINDOW of a window each get an entry of their own; the others share one, written when the
    window is over. A flood so writes at most 21 entries in 10 minutes, 3,024 a day.
    """

    def __init__(self) -> None:
        self._since: datetime | None = None
        self._written = 0
        self._counted: Counter[str] = Counter()

    def takes(self, now: datetime) -> bool:
        """Whether a refusal now gets an entry of its own. Ask `closed` first."""
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
        """What was counted in a window that is over, or `at_once`; a new window begins. None: nothing, or not yet."""
        # A clock that was set back ends the window too, or it might never end.
        over = self._since is not None and not timedelta(0) <= now - self._since < timedelta(seconds=WINDOW_SECONDS)
        if self._since is None or not (over or at_once):
            return None
        counted, since = self._counted, self._since
        self._since, self._written, self._counted = None, 0, Counter()
        if not counted:
            return None
        return CountedRefusals(since=since, until=now, count=counted.total(), reasons=dict(sorted(counted.items())))
