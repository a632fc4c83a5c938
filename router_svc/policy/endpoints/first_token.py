"""The expected time to the first token of a request on an endpoint, by which the policy `first_token` compares.

    first token = line + overhead + uncached * prefill + restore + running * token + wait

- line: time for the prompts before it, on the engine and in the router's queue;
- overhead: measured time to the first token of a cached prompt, round trip included;
- uncached: prompt tokens of this request that the endpoint has not cached and does not restore;
- restore: time in which its runner restores a stored prompt, if that is shorter than processing its tokens; if another
  runner has a longer one, with the time of its transfer;
- prefill: measured seconds per prompt token; if unknown, those of the engine that processed a stored prompt;
- token: measured seconds between two tokens of an answer, by which each running request delays a prefill, as long as
  the speed is assumed: a measured one contains it;
- wait: for a slot, if all are taken, requests wait inside the engine, or its KV cache is full.

All terms are seconds, so machines of different speed compare.
"""

import math
from collections import OrderedDict
from dataclasses import dataclass
from typing import NamedTuple

from router_svc.policy.endpoints.candidates import Candidate
from router_svc.policy.endpoints.engine_load import EngineLoad
from router_svc.policy.endpoints.prefix_affinity import Hit, Move
from weft.kernel.values.fast_dataclass import fast_dataclass
from weft.kernel.values.units import time_words

PRIOR_OVERHEAD_SECONDS = 0.02
"""Assumed time to the first token of a cached prompt."""
PRIOR_PREFILL_SECONDS = 0.25e-3
"""Assumed time per prompt token: that of an 8B model on a small GPU."""
PRIOR_PREFILL_TOKENS = 1_000.0
PRIOR_BETWEEN_SECONDS = 1.0 / 30.0
"""Assumed time between two tokens."""
PRIOR_SERVICE_SECONDS = 2.0
"""Assumed time of a whole answer."""
MAX_COUNTED_PROMPTS = 32
"""Prompts that count for the speed of a model on a host; older ones are discounted."""
NEWEST_SHARE = 0.3
"""Weight of the newest answer in the other averages."""
MAX_SURPRISE = 4.0
"""A first token counts at most this multiple of the expected time: the first one after a load says little. If the next
prompt takes as long, the host is that slow, such as a laptop without a GPU, and its time counts in full."""
SPEED_SECONDS = 3_600.0
"""How long a speed counts after its last measurement. This also limits how long a slow endpoint of an idle pool is
avoided: afterwards one request per hour measures it again."""
MAX_SPEEDS = 16_384
"""Maximum models on hosts with a known speed; the least recently measured is dropped first."""
SHOWN_SECONDS = 0.005
TRANSFER_BYTES_PER_SECOND = 100e6
"""Assumed speed of the transfer of a stored prompt; the fetching runner measures its own and decides."""


@dataclass(slots=True)
class Speed:
    """Speed of a model on a host: least squares of the time that its engine takes for a prompt over the new tokens.

    It starts with two assumed prompts, which are discounted like all others.
    """

    count: float = 2.0
    tokens: float = PRIOR_PREFILL_TOKENS
    seconds: float = 2 * PRIOR_OVERHEAD_SECONDS + PRIOR_PREFILL_TOKENS * PRIOR_PREFILL_SECONDS
    squares: float = PRIOR_PREFILL_TOKENS**2
    products: float = PRIOR_PREFILL_TOKENS * (PRIOR_OVERHEAD_SECONDS + PRIOR_PREFILL_TOKENS * PRIOR_PREFILL_SECONDS)
    between_seconds: float = PRIOR_BETWEEN_SECONDS
    """Time between two tokens of an answer."""
    service_seconds: float = PRIOR_SERVICE_SECONDS
    noted_at: float = -math.inf
    surprised_at: float = math.inf
    """When the last first token came that took longer than MAX_SURPRISE allows; inf: none did since one that did not.
    """

    def note(self, tokens: float, first_seconds: float, now: float) -> None:
        """Add the time to the first token of one prompt, which came at `now`."""
        overhead, per_token = self.prefill()
        expected = overhead + per_token * tokens
        seconds = min(first_seconds, MAX_SURPRISE * expected)
        # Prompts that overlap may have been delayed by one disturbance.
        if seconds < first_seconds and self.surprised_at <= now - first_seconds:
            seconds = first_seconds
            self._believe(first_seconds - expected, tokens, is_overhead=overhead >= per_token * tokens)
        self.surprised_at = now if seconds < first_seconds else math.inf
        kept = 1.0 - 1.0 / MAX_COUNTED_PROMPTS
        self.count = self.count * kept + 1.0
        self.tokens = self.tokens * kept + tokens
        self.seconds = self.seconds * kept + seconds
        self.squares = self.squares * kept + tokens * tokens
        self.products = self.products * kept + tokens * seconds
        self.noted_at = now

    def _believe(self, more_seconds: float, tokens: float, *, is_overhead: bool) -> None:
        """Expect this much more for such a prompt, by the term that most of its time was expected for.

        A short prompt to a distant runner says nothing about the speed of long ones.
        """
        if is_overhead:
            self.seconds += more_seconds * self.count
            self.products += more_seconds * self.tokens
        else:
            self.seconds += more_seconds / tokens * self.tokens
            self.products += more_seconds / tokens * self.squares

    def note_answer(self, seconds: float, between_seconds: float | None) -> None:
        """Add the duration of an answer and the time between its tokens."""
        self.service_seconds += NEWEST_SHARE * (seconds - self.service_seconds)
        if between_seconds is not None:
            self.between_seconds += NEWEST_SHARE * (between_seconds - self.between_seconds)

    @property
    def is_known(self) -> bool:
        """Whether it was measured, and the last measurement is believed."""
        return self.noted_at > -math.inf and self.surprised_at == math.inf

    def prefill(self) -> tuple[float, float]:
        """Return the overhead and the seconds per prompt token."""
        variance = self.count * self.squares - self.tokens**2
        slope = (self.count * self.products - self.tokens * self.seconds) / variance if variance > 0 else 0.0
        overhead = (self.seconds - slope * self.tokens) / self.count
        if slope <= 0.0 or overhead < 0.0:
            return 0.0, self.products / self.squares
        return overhead, slope


_UNKNOWN = Speed()


class Speeds:
    """Measured speeds of models on hosts."""

    def __init__(self) -> None:
        self._speeds: OrderedDict[tuple[str, str], Speed] = OrderedDict()

    def of(self, candidate: Candidate, now: float) -> Speed:
        """Return the speed of a candidate; the assumed one without a recent measurement."""
        known = self._speeds.get(candidate.model_host)
        return _UNKNOWN if known is None or now > known.noted_at + SPEED_SECONDS else known

    def note(self, candidate: Candidate, prompt_tokens: float, first_seconds: float, now: float) -> Speed:
        """Record how long an engine took for a prompt, and how many of its tokens it processed."""
        location = candidate.model_host
        speed = self._speeds.setdefault(location, Speed())
        speed.note(prompt_tokens, first_seconds, now)
        self._speeds.move_to_end(location)
        if len(self._speeds) > MAX_SPEEDS:
            self._speeds.popitem(last=False)
        return speed


@fast_dataclass(kw_only=True)
class FirstToken:
    """The expected time to the first token on an endpoint, by its terms."""

    overhead_seconds: float
    line_seconds: float
    prefill_seconds: float
    decode_seconds: float
    wait_seconds: float
    prompt_tokens: int
    uncached_tokens: int
    """Prompt tokens of this request that the endpoint has to process."""
    hit: Hit
    restore_seconds: float = 0.0
    """Time in which a stored prompt is restored; 0: none is."""
    move: Move | None = None
    """The transfer before that; None: the prompt is its runner's own."""
    move_saves_seconds: float = 0.0
    """How much longer it would take without the transfer."""

    @property
    def own_seconds(self) -> float:
        """Return this request's own part of the prefill, restore included."""
        return self.prefill_seconds + self.restore_seconds

    @property
    def seconds(self) -> float:
        """Return the sum of the terms."""
        engine_seconds = self.line_seconds + self.prefill_seconds + self.decode_seconds + self.wait_seconds
        return self.overhead_seconds + self.restore_seconds + engine_seconds

    def explanation(self) -> str:
        """Return the terms as text."""
        source = " (reported)" if self.hit.is_reported else ""
        tokens = f"{self.uncached_tokens} uncached{source} of about {self.prompt_tokens} prompt tokens"
        terms = [
            f"{time_words(self.prefill_seconds)} for {tokens}",
            f"{time_words(self.overhead_seconds)} overhead",
        ]
        if self.line_seconds >= SHOWN_SECONDS:
            terms.append(f"{time_words(self.line_seconds)} for the prompts before it")
        if self.restore_seconds:
            origin = f" of {self.move.source[1]}" if self.move is not None else ""
            terms.append(f"{time_words(self.restore_seconds)} for restoring a stored prompt{origin}")
        if self.decode_seconds >= SHOWN_SECONDS:
            terms.append(f"{time_words(self.decode_seconds)} for running answers")
        if self.wait_seconds >= SHOWN_SECONDS:
            terms.append(f"{time_words(self.wait_seconds)} for a slot")
        return f"first token in {time_words(self.seconds)}: {', '.join(terms)}"


class Line(NamedTuple):
    """The prompts that an endpoint processes before a request's own, as seconds of prefill."""

    engine_seconds: float
    """Of requests on its engine."""
    tenant_seconds: float = 0.0
    """Of the tenant's requests in the router's queue that wait for it."""
    others_seconds: float = 0.0
    """Of those of other tenants."""
    other_tenants: int = 0
    """Tenants take turns of equal length, so that each of the others goes first at most as long as the own tenant."""

    def seconds(self, own_seconds: float) -> float:
        """Return the whole line before a request with this prefill."""
        turns = self.other_tenants * (self.tenant_seconds + own_seconds)
        return self.engine_seconds + self.tenant_seconds + min(self.others_seconds, turns)


NO_LINE = Line(0.0)


@fast_dataclass(kw_only=True)
class Busy:
    """Current work of an endpoint."""

    requests: int
    """Requests that this router has granted its engine."""
    load: EngineLoad
    """What the engine's figures add."""
    line: Line = NO_LINE


def first_token(
    candidate: Candidate, busy: Busy, speed: Speed, prompt_tokens: int, hit: Hit, move: Move | None = None
) -> FirstToken:
    """Return the expected time to the first token of a prompt on an endpoint.

    `move`: the stored prompt of another endpoint that its runner can fetch.
    """
    overhead, per_token = speed.prefill()
    # An engine of the same kind processed the stored prompt, which says more than an assumption.
    stored = hit.stored or (None if move is None else move.hit)
    if stored is not None and not speed.is_known:
        per_token = stored.token_seconds or per_token
    running = busy.requests + busy.load.others
    # While requests wait in the engine no slot is free, whatever the reason.
    ahead = max(running - busy.load.slots(candidate.slots), busy.load.waiting - 1)
    uncached, restore_seconds, move_saves_seconds = max(0, prompt_tokens - hit.tokens), 0.0, 0.0
    if (stored := hit.stored) is not None:
        left = max(0, prompt_tokens - stored.tokens)
        if stored.seconds + per_token * left < per_token * uncached:
            uncached, restore_seconds = left, stored.seconds
    if move is not None:
        left = max(0, prompt_tokens - move.hit.tokens)
        seconds = move.hit.byte_count / TRANSFER_BYTES_PER_SECOND + move.hit.seconds
        move_saves_seconds = restore_seconds + per_token * (uncached - left) - seconds
        if move_saves_seconds > 0.0:
            uncached, restore_seconds = left, seconds
        else:
            move, move_saves_seconds = None, 0.0
    return FirstToken(
        overhead_seconds=overhead,
        line_seconds=busy.line.seconds(per_token * uncached + restore_seconds),
        prefill_seconds=per_token * uncached,
        decode_seconds=0.0 if speed.is_known else running * speed.between_seconds,
        wait_seconds=0.0 if ahead < 0 else (ahead + 0.5) * speed.service_seconds / (candidate.slots or 1),
        prompt_tokens=prompt_tokens,
        uncached_tokens=uncached,
        hit=hit,
        restore_seconds=restore_seconds,
        move=move,
        move_saves_seconds=move_saves_seconds,
    )
