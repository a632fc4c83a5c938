"""Which beginning of a prompt CTranslate2 keeps. Pure.

The library keeps the state after a *static prompt*, and uses it for exactly that beginning again. It never drops one
while the model is loaded, so that each costs memory until then: kept beginnings have a budget, and a beginning that may
not be used any more is only left alone until the model is loaded anew.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

MIN_SHARED_TOKENS = 16
"""Shorter beginnings are computed as quickly as found."""
RECENT_PROMPTS = 8
"""Number of earlier prompts with which a prompt is compared."""

Tokens = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Beginning:
    """The static prompt of one request."""

    tokens: int
    """Its length; 0: there is none."""
    cached: bool = False
    """Whether the library has its state."""
    wants_reload: bool = False
    """Whether there would be room for a longer one if the model were loaded again."""


NO_BEGINNING = Beginning(0)


class PrefixCache:
    """The static prompts that the library has, and which of them may be used."""

    def __init__(self, budget_tokens: int) -> None:
        """`budget_tokens`: most tokens of all static prompts together; 0: there are none."""
        self._budget = budget_tokens
        self._usable: set[Tokens] = set()
        self._held: set[Tokens] = set()
        """All that the library has, those that must not be used included."""
        self._recent: deque[Tokens] = deque(maxlen=RECENT_PROMPTS)

    @property
    def usable_tokens(self) -> int:
        """Tokens of the static prompts that may be used."""
        return sum(map(len, self._usable))

    def forget(self) -> int:
        """Use no earlier prompt any more; returns the number of their tokens."""
        count = self.usable_tokens
        self._usable.clear()
        self._recent.clear()
        return count

    def reloaded(self) -> None:
        """Record that the library has dropped everything."""
        self.forget()
        self._held.clear()

    def choose(self, prompt: Tokens) -> Beginning:
        """Returns the static prompt for a prompt, which is at least one token shorter."""
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
        # Half of the room is for beginnings that have been seen twice.
        room = self._budget if again else self._budget // 2
        if wanted and taken + wanted <= room:
            return Beginning(wanted)
        wants_reload = 0 < wanted <= room and (again or taken > self.usable_tokens)
        return Beginning(found, cached=bool(found), wants_reload=wants_reload)

    def note(self, prompt: Tokens, beginning: Beginning) -> None:
        """Record a computed prompt, and that the library has the state of its beginning."""
        self._recent.append(prompt)
        if beginning.tokens:
            held = prompt[: beginning.tokens]
            self._held.add(held)
            self._usable.add(held)

    def _unheld(self, prompt: Tokens, length: int) -> int:
        """Returns the longest length up to this one that the library would not recognise; 0: none that is worth it."""
        for shorter in range(length, 0, -1):
            if prompt[:shorter] not in self._held:
                return shorter
        return 0


def common_tokens(one: Sequence[str], other: Sequence[str]) -> int:
    """Returns the number of tokens with which both begin."""
    count = 0
    for mine, theirs in zip(one, other, strict=False):
        if mine != theirs:
            break
        count += 1
    return count


def _begins(prompt: Tokens, beginning: Tokens) -> bool:
    return len(beginning) < len(prompt) and prompt[: len(beginning)] == beginning
