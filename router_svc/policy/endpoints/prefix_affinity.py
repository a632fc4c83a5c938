"""Prefix affinity: what endpoints' prefix caches probably hold, from the prompts placed there.

A prompt is entered when it is placed, so that a burst of equal prompts stays together. An endpoint is assumed to keep
the most recently entered tokens, as many as its KV cache has room for; cached tokens that engines report correct that.
What engines report about single prefixes replaces these estimates. Prompts that runners have on disk count beside them,
with the time of their restore.
"""

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from router_svc.policy.endpoints.candidates import Candidate, CandidateKey
from weft.kernel.requests.request_values import CHARS_PER_TOKEN, PREFIX_ENDS
from weft.kernel.values.fast_dataclass import fast_dataclass

MAX_HOLDERS = 16
"""Maximum remembered endpoints per prefix; the one that got it longest ago is dropped first."""
DEFAULT_CAPACITY_TOKENS = 65_536.0
"""Assumed room of an engine that reports no context size."""
MIN_CAPACITY_TOKENS = 4_096.0
MISS_SHARE, HIT_SHARE = 0.5, 1.5
"""An engine that reports less than the first share of the expected tokens as cached has evicted the prefix; one that
reports more than the second has more room than assumed."""
MIN_LEARNED_TOKENS = 512
"""Smaller prefixes do not show what an engine evicts: templates and rounding weigh too much."""
LEARNED_STEP = 0.25


class StoredPrompt(NamedTuple):
    """A prompt that a runner has on disk."""

    digests: tuple[int, ...]
    seconds: float
    """Estimated time of its restore."""
    byte_count: int = 0
    kind: str = ""
    """Engines with the same `Candidate.state_kind` can restore it."""
    token_seconds: float = 0.0
    """Time in which its engine processed each of its tokens; 0: unknown."""


class StoredHit(NamedTuple):
    """The beginning of a prompt that an endpoint can restore."""

    tokens: int
    seconds: float
    """Time of the restore."""
    byte_count: int = 0
    kind: str = ""
    digest: int = 0
    """That of the prefix."""
    token_seconds: float = 0.0
    """As in StoredPrompt."""


class Move(NamedTuple):
    """The transfer of a stored prompt from another endpoint."""

    source: CandidateKey
    hit: StoredHit


class Hit(NamedTuple):
    """The beginning of a prompt that an endpoint has probably cached."""

    tokens: int
    age_tokens: float
    """Tokens entered there since it was last used."""
    is_reported: bool = False
    """Whether the engine reports it as cached; otherwise it is estimated."""
    stored: StoredHit | None = None
    """What its runner can restore instead; None: nothing."""


@fast_dataclass(kw_only=True)
class PrefixReport:
    """What an engine reports about the prefixes in its cache."""

    key: CandidateKey
    """The endpoint."""
    restart: bool = False
    """Whether its earlier reports no longer count."""
    cleared: bool = False
    """Whether its cache was emptied."""
    held: Sequence[int] = ()
    lost: Sequence[int] = ()
    stored: Sequence[StoredPrompt] | None = None
    """All prompts that its runner has on disk; None: unchanged."""


NO_HIT = Hit(0, 0.0)


def moves_of(hits: Mapping[CandidateKey, Hit]) -> dict[str, Move]:
    """Return the endpoint with the longest stored prefix for each kind of engine; of equal ones the fastest."""
    found: dict[str, Move] = {}
    for key, hit in hits.items():
        stored = hit.stored
        if stored is None or not stored.kind:
            continue
        known = found.get(stored.kind)
        if known is None or (stored.tokens, -stored.seconds) > (known.hit.tokens, -known.hit.seconds):
            found[stored.kind] = Move(key, stored)
    return found


def tokens_of(digests: Sequence[int]) -> int:
    """Return the tokens of a prompt's beginning that has these digests."""
    return int(PREFIX_ENDS[len(digests) - 1] / CHARS_PER_TOKEN) if digests else 0


class PrefixCaches:
    """Prefixes by pool and the endpoints that hold them; the least recently used prefix is dropped first."""

    def __init__(self, max_prefixes: int) -> None:
        self._max_prefixes = max_prefixes
        self._holders: OrderedDict[tuple[str, int], dict[CandidateKey, float]] = OrderedDict()
        """For each holder the tokens that had been entered there when the prefix was last used."""
        self._entered: dict[CandidateKey, float] = {}
        """Total tokens entered, by endpoint."""
        self._capacities: dict[CandidateKey, float] = {}
        """Room in tokens, by endpoint: first that of its context, then as learned."""
        self._reported: dict[int, set[CandidateKey]] = {}
        """Endpoints by the digest of a prefix that their engines report as cached; at most `max_prefixes` digests."""
        self._reported_by: dict[CandidateKey, set[int]] = {}
        self._stored: dict[int, dict[CandidateKey, StoredPrompt]] = {}
        """Stored prompts by endpoint, by the digest of a prefix; at most `max_prefixes` digests."""
        self._stored_by: dict[CandidateKey, list[int]] = {}
        self._reporting: set[CandidateKey] = set()
        """Endpoints whose engines have reported cached tokens; a 0 from any other says nothing."""

    def __len__(self) -> int:
        return len(self._holders)

    def hits(self, pool: str, digests: Sequence[int]) -> dict[CandidateKey, Hit]:
        """Return a prompt's longest known prefix on each endpoint that probably holds one."""
        found: dict[CandidateKey, Hit] = {}
        restorable: dict[CandidateKey, StoredHit] = {}
        for end, digest in zip(PREFIX_ENDS, digests, strict=False):
            holders, reporting = self._holders.get((pool, digest)), self._reported.get(digest, ())
            stored = self._stored.get(digest)
            if holders is None and not reporting and stored is None:
                break
            tokens = int(end / CHARS_PER_TOKEN)
            for key, used_at in (holders or {}).items():
                age = self._entered.get(key, 0.0) - used_at
                if 0.0 <= age <= self._capacities.get(key, 0.0):
                    found[key] = Hit(tokens, age)
            for key in reporting:
                found[key] = Hit(tokens, 0.0, is_reported=True)
            for key, prompt in (stored or {}).items():
                _, seconds, byte_count, kind, token_seconds = prompt
                restorable[key] = StoredHit(tokens, seconds, byte_count, kind, digest, token_seconds)
        for key, hit in restorable.items():
            found[key] = found.get(key, NO_HIT)._replace(stored=hit)
        return found

    def knows(self, pool: str, digest: int) -> bool:
        """Return whether prompts with this prefix were entered."""
        return (pool, digest) in self._holders

    def enter(self, pool: str, digests: Sequence[int], candidate: Candidate, uncached_tokens: float) -> None:
        """Record that an endpoint processes a prompt."""
        key = candidate.key
        room = float(candidate.slots * candidate.context_tokens) or DEFAULT_CAPACITY_TOKENS
        self._capacities.setdefault(key, room)
        now = self._entered[key] = self._entered.get(key, 0.0) + uncached_tokens
        for digest in digests[: len(PREFIX_ENDS)]:
            entry = (pool, digest)
            holders = self._holders.setdefault(entry, {})
            self._holders.move_to_end(entry)
            holders.pop(key, None)
            holders[key] = now
            if len(holders) > MAX_HOLDERS:
                del holders[next(iter(holders))]
        while len(self._holders) > self._max_prefixes:
            self._holders.popitem(last=False)

    def correct(self, candidate: Candidate, expected: Hit, cached_tokens: int) -> None:
        """Compare the cached tokens that an engine reports with the expected ones."""
        key = candidate.key
        known = self._capacities.get(key)
        if known is None or expected.is_reported or expected.stored is not None:
            return
        if cached_tokens:
            self._reporting.add(key)
        if key not in self._reporting or max(expected.tokens, cached_tokens) < MIN_LEARNED_TOKENS:
            return
        if cached_tokens < MISS_SHARE * expected.tokens:
            target = max(MIN_CAPACITY_TOKENS, min(known, expected.age_tokens))
        elif cached_tokens > HIT_SHARE * expected.tokens:
            target = known * (1.0 + LEARNED_STEP)
        else:
            return
        self._capacities[key] = known + LEARNED_STEP * (target - known)

    def report(self, report: PrefixReport, queues: Iterable[str]) -> None:
        """Record what the engine of an endpoint of these queues reports."""
        key, queues = report.key, tuple(queues)
        if report.restart or report.cleared:
            self._forget_reports(key)
        if report.cleared:
            self._age(key)
        if report.restart or report.stored is not None:
            self._store(key, report.stored or ())
        for digest in report.lost:
            self._reported_by.get(key, set()).discard(digest)
            self._lose(key, digest)
            for queue in queues:
                self._holders.get((queue, digest), {}).pop(key, None)
        for digest in report.held:
            if digest in self._reported or len(self._reported) < self._max_prefixes:
                self._reported.setdefault(digest, set()).add(key)
                self._reported_by.setdefault(key, set()).add(digest)

    def drop(self, candidate: Candidate) -> None:
        """Remove an endpoint that left the mesh."""
        self._forget_reports(candidate.key)
        self._store(candidate.key, ())
        self._entered.pop(candidate.key, None)
        self._capacities.pop(candidate.key, None)
        self._reporting.discard(candidate.key)

    def empty(self, candidate: Candidate) -> None:
        """Clear an endpoint's cache, because its engine ended or sleeps. Stored prompts remain."""
        self._forget_reports(candidate.key)
        self._age(candidate.key)

    def _age(self, key: CandidateKey) -> None:
        """Move all entries of an endpoint out of its room, but not those that follow."""
        if key in self._entered:
            self._entered[key] += 2.0 * self._capacities[key]

    def _forget_reports(self, key: CandidateKey) -> None:
        for digest in self._reported_by.pop(key, ()):
            self._lose(key, digest)

    def _store(self, key: CandidateKey, prompts: Iterable[StoredPrompt]) -> None:
        """Replace the prompts that an endpoint can restore."""
        for digest in self._stored_by.pop(key, ()):
            holders = self._stored[digest]
            holders.pop(key, None)
            if not holders:
                del self._stored[digest]
        fastest: dict[int, StoredPrompt] = {}
        for prompt in sorted(prompts, key=lambda prompt: -prompt.seconds):
            fastest |= dict.fromkeys(prompt.digests, prompt)
        for digest, prompt in fastest.items():
            if digest in self._stored or len(self._stored) < self._max_prefixes:
                self._stored.setdefault(digest, {})[key] = prompt
                self._stored_by.setdefault(key, []).append(digest)

    def _lose(self, key: CandidateKey, digest: int) -> None:
        reporting = self._reported.get(digest, set())
        reporting.discard(key)
        if not reporting:
            self._reported.pop(digest, None)
