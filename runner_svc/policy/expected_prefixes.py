"""The beginnings of prompts that will come again on a model, and which of them to process after a load. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf

from runner_svc.policy.cache_directory import Partition

MAX_PREFIXES = 4
"""Maximum number of expected prefixes per model; the least recently used one is dropped."""
MAX_PREFIX_BYTES = 128 * 1024
"""Maximum size of a prompt that is processed in advance, with its tools. An agent's own has up to 65,536 characters."""
MAX_TRIES = 3
"""After how many loads in a row without success a prefix is given up: the engine may crash because of it."""
FIRST_STEP_TOKENS, MAX_STEP_TOKENS = 64, 2_048
STEP_SECONDS = 0.25
"""Target duration of one engine call. A request that arrives meanwhile waits for at most one of them."""


@dataclass(frozen=True, slots=True)
class ExpectedPrefix:
    """The system prompt and the tools of an agent."""

    agent: str
    partition: Partition
    """Who uses it: it is processed for this partition only."""


class ExpectedPrefixes:
    """The prefixes that are expected on one model. Times are monotonic seconds."""

    def __init__(self) -> None:
        self._used_at: dict[ExpectedPrefix, float] = {}
        """When each was last used or processed."""
        self._tries: dict[ExpectedPrefix, tuple[int, float]] = {}
        """How often it was taken since then, and the load at which it was taken last."""

    def note(self, prefix: ExpectedPrefix, now: float) -> None:
        """Records that a request uses a prefix, or that it was processed."""
        self._used_at[prefix] = now
        self._tries.pop(prefix, None)
        if len(self._used_at) > MAX_PREFIXES:
            oldest = min(self._used_at, key=self._used_at.__getitem__)
            del self._used_at[oldest]
            self._tries.pop(oldest, None)

    def add_unused(self, prefixes: Iterable[ExpectedPrefix]) -> None:
        """Adds prefixes that no request has used yet, as long as there is room."""
        for prefix in prefixes:
            if len(self._used_at) < MAX_PREFIXES:
                self._used_at.setdefault(prefix, -inf)

    def take_due(self, loaded_at: float) -> ExpectedPrefix | None:
        """Returns the last used prefix that was not processed or taken since the engine was loaded; None: none is due.

        A prefix with which the engine may have ended several times is not due until a request uses it.
        """
        due = [prefix for prefix, at in self._used_at.items() if at < loaded_at and self._may_try(prefix, loaded_at)]
        found = max(due, key=self._used_at.__getitem__, default=None)
        if found is not None:
            self._tries[found] = (self._tries.get(found, (0, 0.0))[0] + 1, loaded_at)
        return found

    def _may_try(self, prefix: ExpectedPrefix, loaded_at: float) -> bool:
        tries, last = self._tries.get(prefix, (0, -inf))
        return tries < MAX_TRIES and last < loaded_at


def next_step_tokens(tokens: int, seconds: float) -> int:
    """Returns the size of the next step, after one of `tokens` took `seconds`."""
    return max(1, min(MAX_STEP_TOKENS, int(tokens * STEP_SECONDS / max(seconds, 1e-3))))
