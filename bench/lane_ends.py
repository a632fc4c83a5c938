"""The ends of requests by three views: the client's, the log of the engines, and the receipts of routers. Pure.

A request that was under way when the picker was killed may have no receipt, or one that says it was lost with its
router: those are counted apart. Every other one must have ended alike for all who saw it.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

REPORT_SECONDS = 2.0
"""How long after the end that its client saw a request may be open to its router: so long a runner's report is waited
for (`picker.report_wait_seconds`)."""
COMPLETED, ROUTER_LOST, FINISHED = "completed", "router_lost", "finished"


class ClientEnd(StrEnum):
    """What a client saw."""

    COMPLETE = "complete"
    """A whole answer that says so."""
    REFUSED = "refused"
    """Another status than 200."""
    BROKEN = "broken"
    """An answer that began and is not whole, or says that it failed, or no answer at all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenEnd:
    """One request as its client saw it. Times are UTC seconds since the epoch."""

    request_id: str
    tenant: str
    sent_at: float
    ended_at: float
    end: ClientEnd
    tokens: int = 0
    """Completion tokens of a complete answer, as it states them."""
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    """What a router has written of a request's end."""

    request_id: str
    outcome: str
    """`completed`, or another word."""
    reason: str = ""
    tokens: int | None = None
    """Completion tokens; None: it states none."""
    written_at: float = 0.0
    """Of one that was lost with its router: when that router last wrote its records."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Views:
    """All that is known of the requests of a run."""

    seen: Sequence[SeenEnd]
    engines: Mapping[str, Sequence[str]]
    """What engines logged of each request's ends: `finished`, `cancelled` or `failed`."""
    receipts: Mapping[str, Sequence[Receipt]]
    """One or more of a request: the log of a router and its database both have it."""
    outages: Sequence[tuple[float, float]] = ()
    """When the picker was killed, and when it served again."""

    @property
    def kills(self) -> list[float]:
        """When the picker was killed."""
        return [began for began, _ in self.outages]


@dataclass(frozen=True, slots=True)
class WrongEnd:
    """A request whose views contradict each other."""

    rule: str
    request_id: str
    detail: str

    def __str__(self) -> str:
        return f"{self.rule}: {self.request_id}: {self.detail}"


@dataclass(slots=True)
class Findings:
    """The result of a check."""

    wrong: list[WrongEnd] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    """How many requests ended how, and how many of them have no receipt of their end, and why."""


def check(views: Views) -> Findings:
    """Returns every wrong end, and what was counted."""
    found = Findings()
    for seen in views.seen:
        found.counts[seen.end.value] += 1
        receipts, engine = views.receipts.get(seen.request_id, ()), views.engines.get(seen.request_id, ())
        told = [receipt for receipt in receipts if not _was_lost(seen, receipt, views.kills)]
        is_near = near_a_kill(seen, views.kills)
        found.wrong += _contradictions(seen, told, engine, is_receipt_due=not (is_near or receipts))
        if not told and receipts:
            found.counts[f"{seen.end.value}, lost with its router"] += 1
        elif not told and is_near:
            found.counts[f"{seen.end.value}, without a receipt, under way at a kill"] += 1
        elif not told and seen.end is not ClientEnd.COMPLETE:
            # Envoy refuses by itself while no picker is there.
            is_away = any(began <= seen.sent_at <= ended for began, ended in views.outages)
            found.counts[f"{seen.end.value}, {'while no picker was there' if is_away else 'without a receipt'}"] += 1
    return found


def near_a_kill(seen: SeenEnd, kills: Iterable[float]) -> bool:
    """Whether the picker was killed while a request was under way, or while its runner's report may have been."""
    return any(seen.sent_at <= kill <= seen.ended_at + REPORT_SECONDS for kill in kills)


def _was_lost(seen: SeenEnd, receipt: Receipt, kills: Iterable[float]) -> bool:
    """Whether a receipt says rightly that the request was lost with its router.

    The router had written nothing after the request's end, and was killed then.
    """
    if receipt.reason != ROUTER_LOST or seen.ended_at + REPORT_SECONDS < receipt.written_at:
        return False
    return any(kill >= max(seen.sent_at, receipt.written_at) for kill in kills)


def jain(values: Sequence[float]) -> float:
    """Jain's index of fairness: 1 where all have the same, 1/n where one has all; 0 where none has anything."""
    squares = sum(value * value for value in values)
    return sum(values) ** 2 / (len(values) * squares) if squares else 0.0


def served_tokens(seen: Iterable[SeenEnd], tenants: Sequence[str]) -> Mapping[str, int]:
    """Returns the completion tokens of complete answers by tenant, those with none included."""
    found: dict[str, int] = dict.fromkeys(tenants, 0)
    for each in seen:
        if each.end is ClientEnd.COMPLETE:
            found[each.tenant] += each.tokens
    return found


def by_request(receipts: Iterable[Receipt]) -> Mapping[str, Sequence[Receipt]]:
    """Returns the receipts by the id of their request."""
    found: dict[str, list[Receipt]] = defaultdict(list)
    for receipt in receipts:
        found[receipt.request_id].append(receipt)
    return found


def _contradictions(
    seen: SeenEnd, told: Sequence[Receipt], engine: Sequence[str], *, is_receipt_due: bool
) -> Iterator[WrongEnd]:
    finished = engine.count(FINISHED)
    if finished > 1:
        yield WrongEnd("served twice", seen.request_id, f"{finished} engines have finished it")
    if seen.end is ClientEnd.COMPLETE:
        yield from _about_complete(seen, told, finished, is_receipt_due=is_receipt_due)
        return
    if any(receipt.outcome == COMPLETED for receipt in told):
        yield WrongEnd("recorded as complete", seen.request_id, f"its client saw it {seen.end}: {seen.note}")
    if seen.end is ClientEnd.REFUSED and finished:
        yield WrongEnd("refused, and served", seen.request_id, f"an engine has finished it: {seen.note}")


def _about_complete(
    seen: SeenEnd, told: Sequence[Receipt], finished: int, *, is_receipt_due: bool
) -> Iterator[WrongEnd]:
    if not finished:
        yield WrongEnd("complete of nothing", seen.request_id, "no engine has finished it")
    if is_receipt_due:
        yield WrongEnd("no receipt", seen.request_id, "its client saw it complete, and no router was killed meanwhile")
    for receipt in told:
        if receipt.outcome != COMPLETED:
            words = f"its client saw it complete, and a receipt says {receipt.outcome} {receipt.reason}".rstrip()
            yield WrongEnd("not recorded as complete", seen.request_id, words)
        elif receipt.tokens is not None and receipt.tokens != seen.tokens:
            words = f"its client counted {seen.tokens} tokens, its receipt {receipt.tokens}"
            yield WrongEnd("other tokens", seen.request_id, words)
