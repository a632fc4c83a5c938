"""Sessions of several turns over a few system prompts, and engines with prefix caches, for the routing benches."""

import hashlib
import itertools
import random
from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from weft.kernel.requests.request_values import CHARS_PER_TOKEN

ENGINES, SLOTS = 8, 8
CACHED_BLOCKS = 2_600
BLOCK_CHARS = 64
SYSTEM_PROMPTS, SYSTEM_CHARS = 6, 8_000
USER_CHARS = (120, 400, 1_200)
ANSWER_TOKENS = (12, 24, 48)
TOKEN_SECONDS = 8e-3
WORDS = ("river", "stone", "cloud", "engine", "table", "green", "quick", "seven", "lamp", "north", "paper", "glass")
POPULARITY = {"skewed": 0.7, "zipf": 1.1}
"""Rate of the exponential, and exponent of the Zipf distribution, by which sessions choose a system prompt."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What callers ask, of which engines."""

    prefill_ms: float = 0.1
    """Milliseconds per prompt token."""
    sessions: int = 64
    turns: int = 8
    seed: int = 1
    unequal: bool = False
    """Whether every second engine is half as fast."""
    zipf: bool = False
    named: bool = False
    """Whether requests name their session."""
    groups: Mapping[str, int] = field(default_factory=dict[str, int])
    """Sessions by group of callers; none: all are alike."""
    failover_after: int | None = None
    """Number of ended requests after which another router leads, which knows of none; None: never."""


class Turn(NamedTuple):
    """One turn of a session."""

    text: str
    """All that was said before, and the question."""
    prompt_tokens: int
    answer_tokens: int
    pause: float
    """Seconds from its end to the next turn."""


@dataclass(eq=False)
class Engine:
    """An engine with a prefix cache, one prefill at a time and SLOTS answers."""

    slowdown: float
    token_seconds: float
    """Prefill of one prompt token."""
    cache: OrderedDict[bytes, None] = field(default_factory=OrderedDict)
    prefilling: deque[int] = field(default_factory=deque)
    waiting: deque[int] = field(default_factory=deque)
    under_way: int = 0
    """Its requests, those that wait for a slot included."""
    is_prefilling: bool = False

    def cached(self, blocks: Iterable[bytes]) -> int:
        """Returns the tokens of the longest cached prefix."""
        count = sum(1 for _ in itertools.takewhile(self.cache.__contains__, blocks))
        return int(count * BLOCK_CHARS / CHARS_PER_TOKEN)

    def own_seconds(self, tokens: int, blocks: Iterable[bytes]) -> float:
        """Returns how long the prefill of a prompt takes."""
        return (tokens - self.cached(blocks)) * self.token_seconds

    def store(self, blocks: Iterable[bytes]) -> None:
        """Cache a prompt; the least recently used blocks are evicted."""
        for block in blocks:
            self.cache[block] = None
            self.cache.move_to_end(block)
        while len(self.cache) > CACHED_BLOCKS:
            self.cache.popitem(last=False)


def engines_of(workload: Workload) -> list[Engine]:
    """Returns the engines of a workload."""
    slowdowns = (2.0 if workload.unequal and number % 2 else 1.0 for number in range(ENGINES))
    return [Engine(slowdown, slowdown * workload.prefill_ms / 1_000) for slowdown in slowdowns]


def begins_at(session: int) -> float:
    """Returns when a session begins, in seconds."""
    return random.Random(session).random() * 3  # noqa: S311 - a workload


def system_prompt(workload: Workload, session: int) -> tuple[random.Random, str]:
    """Returns the source of a session's random choices, and the system prompt that it has drawn."""
    chance = random.Random(workload.seed * 1_000 + session)  # noqa: S311 - a workload
    zipf, skewed = POPULARITY["zipf"], POPULARITY["skewed"]
    drawn = chance.paretovariate(zipf) - 1 if workload.zipf else chance.expovariate(skewed)
    number = min(int(drawn), SYSTEM_PROMPTS - 1)
    return chance, words(SYSTEM_CHARS, random.Random(100 + number))  # noqa: S311 - a workload


def turns_of(workload: Workload, session: int) -> list[Turn]:
    """Returns the turns of a session."""
    chance, system = system_prompt(workload, session)
    text, found = f"<system>{system}\n", list[Turn]()
    for _ in range(workload.turns):
        text += f"<user>{words(chance.choice(USER_CHARS), chance)}\n"
        answer = chance.choice(ANSWER_TOKENS)
        found.append(Turn(text, int(len(text) / CHARS_PER_TOKEN), answer, 0.2 + chance.random()))
        text += f"<assistant>{'word ' * answer}\n"
    return found


def words(chars: int, chance: random.Random) -> str:
    """Returns random words of at least so many characters."""
    words, left = list[str](), chars
    while left > 0:
        words.append(chance.choice(WORDS))
        left -= len(words[-1]) + 1
    return " ".join(words)


def blocks_of(text: str) -> Sequence[bytes]:
    """Returns digests of ever longer prefixes of a text, one per block."""
    digest, found = b"", []
    for start in range(0, len(text) - BLOCK_CHARS + 1, BLOCK_CHARS):
        digest = hashlib.blake2b(digest + text[start : start + BLOCK_CHARS].encode(), digest_size=12).digest()
        found.append(digest)
    return found
