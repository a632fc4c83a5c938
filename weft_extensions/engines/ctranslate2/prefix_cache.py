"""Selection of the prompt prefixes that CTranslate2 caches. Pure.

The library caches the state after a *static prompt* and reuses it for exactly that prefix. It never frees a state while
the model is loaded, so cached prefixes have a budget, and a prefix that must not be used any more stays in memory until
the model is reloaded.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

MIN_SHARED_TOKENS = 16
"""Shorter prefixes are computed as quickly as found."""
RECENT_PROMPTS = 8
"""Number of earlier prompts with which a prompt is compared."""

Tokens = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Beginning:
    """The static prompt of a request."""

    tokens: int
    """Its length; 0: there is none."""
    cached: bool = False
    """Whether the library has its state."""
    wants_reload: bool = False
    """Whether a reload of the model would make room for a longer one."""


NO_BEGINNING = Beginning(0)


class PrefixCache:
    """The static prompts in the library, and which of them may be used."""

    def __init__(self, budget_tokens: int) -> None:
        """`budget_tokens`: maximum sum of all static prompts; 0: no caching."""
        self._budget = budget_tokens
        self._usable: set[Tokens] = set()
        self._held: set[Tokens] = set()
        """Static prompts in the library, including those that must not be used."""
        self._recent: deque[Tokens] = deque(maxlen=RECENT_PROMPTS)

    @property
    def usable_tokens(self) -> int:
        """Number of tokens in usable static prompts."""
        return sum(map(len, self._usable))

    def forget(self) -> int:
        """Makes all earlier prompts unusable; returns their number of tokens."""
        count = self.usable_tokens
        self._usable.clear()
        self._recent.clear()
        return count

    def reloaded(self) -> None:
        """Records that the library has dropped all states."""
        self.forget()
        self._held.clear()

    def choose(self, prompt: Tokens) -> Beginning:
        """Returns the static prompt for a prompt; it is at least one token shorter."""
        if not self._budget or len(prompt) < 2:
            return NO_BEGINNING
        found = max((len(held) for held in self._usable if _begins(prompt, held)), default=0)
        shared = max((common_tokens(prompt, earlier) for earlier in self._recent), default=0)
        shared = min(shared, len(prompt) - 1)
        if found and 2 * found >= shared:
            return Beginning(found, cached=True)
        again = shared >= MIN_SHARED_TOKENS
        wanted = self._unheld(prompt, shared if again else len(prompt) - 1)
        taken = sum(map(len, self._held))
        # Half of the budget is for prefixes seen twice.
        room = self._budget if again else self._budget // 2
        if wanted and taken + wanted <= room:
            return Beginning(wanted)
        wants_reload = 0 < wanted <= room and (again or taken > self.usable_tokens)
        return Beginning(found, cached=bool(found), wants_reload=wants_reload)

    def note(self, prompt: Tokens, beginning: Beginning) -> None:
        """Records a computed prompt, and that the library has the state of its prefix."""
        self._recent.append(prompt)
        if beginning.tokens:
            held = prompt[: beginning.tokens]
            self._held.add(held)
            self._usable.add(held)

    def _unheld(self, prompt: Tokens, length: int) -> int:
        """Returns the largest length up to `length` with an uncached prefix; 0: there is none."""
        for shorter in range(length, 0, -1):
            if prompt[:shorter] not in self._held:
                return shorter
        return 0


def common_tokens(one: Sequence[str], other: Sequence[str]) -> int:
    """Returns the length of the common prefix."""
    count = 0
    for mine, theirs in zip(one, other, strict=False):
        if mine != theirs:
            break
        count += 1
    return count


def _begins(prompt: Tokens, beginning: Tokens) -> bool:
    return len(beginning) < len(prompt) and prompt[: len(beginning)] == beginning
