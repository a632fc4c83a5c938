"""Saved prompts that no slot of an engine holds any more, within a size budget. Pure.

What is dropped first is chosen by GreedyDual-Size (Cao and Irani, 1997): the prompt that saves the fewest seconds per
byte, where prompts that were not used for long lose against newer ones.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from runner_svc.policy.cache_directory import Partition, common_marks


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptPrompt:
    """A saved prompt."""

    name: str
    """File name."""
    partition: Partition
    marks: tuple[bytes, ...]
    byte_count: int
    token_count: int = 0
    """0: unknown."""
    seconds: float = 0.0
    """Time that processing its tokens takes; 0: unknown."""
    digests: tuple[int, ...] = ()
    """The prefixes of its text by which routers know it; empty: unknown."""
    kind: str = ""
    """Engines of other runners with the same `ModelCache.kind` can restore it; empty: unknown."""
    identity: str = ""
    """`MODEL:DIGEST` of the engine, files and settings that can use it; empty: only the process that saved it can."""

    @property
    def model(self) -> str:
        """The model in its identity."""
        return self.identity.rpartition(":")[0]


class KeptPrompts:
    """Saved prompts of one engine incarnation, or those on disk of many."""

    def __init__(self, budget_bytes: int, is_expected: Callable[[KeptPrompt], bool] = lambda _: False) -> None:
        """`is_expected`: whether a prompt is expected again, so that others are dropped before it."""
        self._is_expected = is_expected
        self.budget_bytes = budget_bytes
        self.byte_count = 0
        self.flush_count = 0
        """Number of flushes so far: a prompt whose saving overlaps a flush is dropped."""
        self._prompts: dict[str, KeptPrompt] = {}
        """By name, the least recently used first."""
        self._values: dict[str, float] = {}
        """By name: seconds per byte, plus the value of the last dropped prompt when it was used."""
        self._last_dropped = 0.0

    def __len__(self) -> int:
        return len(self._prompts)

    def __iter__(self) -> Iterator[KeptPrompt]:
        return iter(list(self._prompts.values()))

    def best(
        self, partition: Partition | None, marks: Sequence[bytes], identity: str = ""
    ) -> tuple[KeptPrompt | None, int]:
        """Returns the partition's prompt with the most common leading marks, and their number."""
        found: KeptPrompt | None = None
        most = 0
        for kept in self._prompts.values():
            if kept.partition != partition or kept.identity != identity:
                continue
            if (count := common_marks(kept.marks, marks)) > most:
                found, most = kept, count
        return found, most

    def has(self, partition: Partition, marks: Sequence[bytes], identity: str = "") -> bool:
        """Whether a saved prompt begins with all of these marks."""
        return self.best(partition, marks, identity)[1] == len(marks)

    def use(self, kept: KeptPrompt) -> None:
        """Records that a prompt was restored."""
        if (known := self._prompts.pop(kept.name, None)) is not None:
            self._note_used(known)

    def make_room(self, byte_count: int) -> list[KeptPrompt] | None:
        """Removes and returns prompts of least value until these bytes fit, expected ones last. None: never fits."""
        if byte_count > self.budget_bytes:
            return None
        dropped: list[KeptPrompt] = []
        while self.byte_count + byte_count > self.budget_bytes:
            least = min(self._prompts.values(), key=lambda kept: (self._is_expected(kept), self._values[kept.name]))
            self._last_dropped = self._values[least.name]
            self._remove(least)
            dropped.append(least)
        return dropped

    def add(self, kept: KeptPrompt) -> list[KeptPrompt]:
        """Adds a prompt. Returns the prompts to delete: its earlier turns, and those of least value beyond the budget.

        A prompt larger than the budget is not added but returned for deletion.
        """
        if kept.byte_count > self.budget_bytes:
            return [kept]
        dropped = [
            known
            for known in self._prompts.values()
            if (known.partition, known.identity) == (kept.partition, kept.identity)
            and common_marks(known.marks, kept.marks) == len(known.marks)
        ]
        self._note_used(kept)
        self.byte_count += kept.byte_count
        for known in dropped:
            self._remove(known)
        return dropped + (self.make_room(0) or [])

    def drop(self, kept: KeptPrompt) -> None:
        """Removes a prompt that could not be restored."""
        if kept.name in self._prompts:
            self._remove(kept)

    def forget(self, tenant: str | None, tag: str | None, model: str | None = None) -> list[KeptPrompt]:
        """Removes and returns the prompts of a tenant, a tag and a model; None: any."""
        self.flush_count += 1
        meant = [
            kept
            for kept in self._prompts.values()
            if kept.partition.is_meant(tenant, tag) and model in (None, kept.model)
        ]
        for kept in meant:
            self._remove(kept)
        return meant

    def of_model(self, model: str) -> list[KeptPrompt]:
        """Returns a model's prompts, the least recently used first."""
        return [kept for kept in self._prompts.values() if kept.model == model]

    def _note_used(self, kept: KeptPrompt) -> None:
        self._prompts[kept.name] = kept
        self._values[kept.name] = self._last_dropped + kept.seconds / max(1, kept.byte_count)

    def _remove(self, kept: KeptPrompt) -> None:
        del self._prompts[kept.name], self._values[kept.name]
        self.byte_count -= kept.byte_count
