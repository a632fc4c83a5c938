"""The beginnings of prompts that are expected again on a model, and which of them to process after a load. Pure."""

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any

from runner_svc.policy.cache_directory import Partition

MAX_PREFIXES = 4
"""Maximum number of expected prefixes per model; the least recently used one is dropped."""
MAX_PREFIX_BYTES = 128 * 1024
"""Maximum size of a prompt that is processed in advance, with its tools. An agent's prompt has up to 65,536
characters."""
MAX_TRIES = 3
"""Number of consecutive loads without success after which a prefix is given up: it may crash the engine."""
FIRST_STEP_TOKENS, MAX_STEP_TOKENS = 64, 2_048
STEP_SECONDS = 0.25
"""Target duration of one engine call. A request that arrives meanwhile waits for at most one of them."""


@dataclass(frozen=True, slots=True)
class ExpectedPrefix:
    """Tools and system messages with which prompts begin."""

    agent: str
    """The agent of the prompt; empty: a request announced it."""
    partition: Partition
    """The partition that uses it; it is processed only for this partition."""
    marks: tuple[bytes, ...] = ()
    """Digests of an announced prefix, see `prompt_marks`."""
    content: Any = field(default=None, compare=False)
    """An announced prefix."""


@dataclass(slots=True)
class _State:
    used_at: float
    """Time of its last use; negative infinity: never used."""
    until: float
    """Time after which it is no longer expected."""
    load: int
    """The load during which it was last used or taken."""
    tries: int = 0
    """Number of times it was taken since it was used or processed."""


class ExpectedPrefixes:
    """The prefixes that are expected on one model. Times are monotonic seconds; loads are numbered from 1."""

    def __init__(self) -> None:
        self._states: dict[ExpectedPrefix, _State] = {}

    def note(self, prefix: ExpectedPrefix, load: int, now: float, until: float = inf) -> None:
        """Records that a request uses a prefix that is expected again."""
        self._states[prefix] = _State(now, until, load)
        if len(self._states) > MAX_PREFIXES:
            del self._states[min(self._states, key=self._used_at)]

    def add_unused(self, prefixes: Iterable[ExpectedPrefix]) -> None:
        """Adds prefixes that no request has used yet, up to the limit."""
        for prefix in prefixes:
            if len(self._states) < MAX_PREFIXES:
                self._states.setdefault(prefix, _State(-inf, inf, load=0))

    def keep_agents(self, agents: Container[str]) -> None:
        """Removes the prefixes of other agents."""
        for prefix in [each for each in self._states if each.agent and each.agent not in agents]:
            del self._states[prefix]

    def take_due(self, load: int, now: float) -> ExpectedPrefix | None:
        """Returns the last used prefix that was not used or taken since the engine was loaded; None: none is due.

        A prefix with which the engine may have ended several times is not due until a request uses it.
        """
        due = [
            prefix
            for prefix, state in self._states.items()
            if state.load < load and state.tries < MAX_TRIES and now < state.until
        ]
        found = max(due, key=self._used_at, default=None)
        if found is not None:
            self._states[found].tries += 1
            self._states[found].load = load
        return found

    def is_taken(self, prefix: ExpectedPrefix, now: float) -> bool:
        """Whether a taken prefix is still to be processed: it was not forgotten, and no request has used it."""
        state = self._states.get(prefix)
        return state is not None and state.tries > 0 and now < state.until

    def note_processed(self, prefix: ExpectedPrefix) -> None:
        """Records that the engine has processed a prefix."""
        if (state := self._states.get(prefix)) is not None:
            state.tries = 0

    def forget(self, tenant: str | None, tag: str | None) -> None:
        """Removes the prefixes of a tenant and a tag; None: any."""
        for prefix in [each for each in self._states if each.partition.is_meant(tenant, tag)]:
            del self._states[prefix]

    def announces(self, partition: Partition, marks: Sequence[bytes], now: float) -> bool:
        """Whether a prompt of a partition begins with a prefix that a request announced."""
        return any(
            prefix.marks and prefix.partition == partition and tuple(marks[: len(prefix.marks)]) == prefix.marks
            for prefix, state in self._states.items()
            if now < state.until
        )

    def _used_at(self, prefix: ExpectedPrefix) -> float:
        return self._states[prefix].used_at


def next_step_tokens(tokens: int, seconds: float) -> int:
    """Returns the size of the next step, after one of `tokens` took `seconds`."""
    return max(1, min(MAX_STEP_TOKENS, int(tokens * STEP_SECONDS / max(seconds, 1e-3))))
