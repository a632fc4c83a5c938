"""The ends of requests by three views: the client's, the log of the engines, and the receipts of routers. Pure.

A request that was under way when the picker was killed may have no receipt, or one that says it was lost with its
router: those are counted apart. Every other one must have ended alike for all who saw it.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

UNWRITTEN_SECONDS = 4.0
"""How long before a kill a request may have ended whose receipt was not written yet: a runner's report is waited for
(`picker.report_wait_seconds`, 2 s), and records are written now and then (`router.records.flush_interval_seconds`,
2 s)."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Views:
    """All that is known of the requests of a run."""

    seen: Sequence[SeenEnd]
    engines: Mapping[str, Sequence[str]]
    """What engines logged of each request's ends: `finished`, `cancelled` or `failed`."""
    receipts: Mapping[str, Sequence[Receipt]]
    """One or more of a request: the log of a router and its database both have it."""
    kills: Sequence[float] = ()


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
    """How many requests ended how, and how many of them near a kill have no receipt of their end."""


def check(views: Views) -> Findings:
    """Returns every wrong end, and what was counted."""
    found = Findings()
    for seen in views.seen:
        found.counts[seen.end.value] += 1
        receipts, engine = views.receipts.get(seen.request_id, ()), views.engines.get(seen.request_id, ())
        is_near = near_a_kill(seen, views.kills)
        found.wrong += _contradictions(seen, receipts, engine, is_near=is_near)
        if is_near and not _is_recorded(receipts):
            kind = "lost with its router" if receipts else "without a receipt"
            found.counts[f"{seen.end.value}, {kind}, near a kill"] += 1
        elif not receipts and seen.end is not ClientEnd.COMPLETE:
            # Envoy refuses by itself while no picker is there.
            found.counts[f"{seen.end.value}, without a receipt"] += 1
    return found


def near_a_kill(seen: SeenEnd, kills: Iterable[float]) -> bool:
    """Whether the picker was killed while a request was under way, or before its receipt was surely written."""
    return any(seen.sent_at <= kill <= seen.ended_at + UNWRITTEN_SECONDS for kill in kills)


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


def _is_recorded(receipts: Sequence[Receipt]) -> bool:
    return any(receipt.reason != ROUTER_LOST for receipt in receipts)


def _contradictions(
    seen: SeenEnd, receipts: Sequence[Receipt], engine: Sequence[str], *, is_near: bool
) -> Iterator[WrongEnd]:
    finished = engine.count(FINISHED)
    if finished > 1:
        yield WrongEnd("served twice", seen.request_id, f"{finished} engines have finished it")
    told = [receipt for receipt in receipts if not (is_near and receipt.reason == ROUTER_LOST)]
    if seen.end is ClientEnd.COMPLETE:
        yield from _about_complete(seen, told, finished, is_near=is_near)
        return
    if any(receipt.outcome == COMPLETED for receipt in told):
        yield WrongEnd("recorded as complete", seen.request_id, f"its client saw it {seen.end}: {seen.note}")
    if seen.end is ClientEnd.REFUSED and finished:
        yield WrongEnd("refused, and served", seen.request_id, f"an engine has finished it: {seen.note}")


def _about_complete(seen: SeenEnd, told: Sequence[Receipt], finished: int, *, is_near: bool) -> Iterator[WrongEnd]:
    if not finished:
        yield WrongEnd("complete of nothing", seen.request_id, "no engine has finished it")
    if not told and not is_near:
        yield WrongEnd("no receipt", seen.request_id, "its client saw it complete, and no router was killed meanwhile")
    for receipt in told:
        if receipt.outcome != COMPLETED:
            words = f"its client saw it complete, and a receipt says {receipt.outcome} {receipt.reason}".rstrip()
            yield WrongEnd("not recorded as complete", seen.request_id, words)
        elif receipt.tokens is not None and receipt.tokens != seen.tokens:
            words = f"its client counted {seen.tokens} tokens, its receipt {receipt.tokens}"
            yield WrongEnd("other tokens", seen.request_id, words)
