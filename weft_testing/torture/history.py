"""Everything that is known after a run: what processes wrote meanwhile, and what is kept at the end."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from weft_testing.torture.events import Event, Kind

COMPLETED, FAILED, CANCELLED = 3, 4, 5
"""Numbers of the states that nothing leaves, as in `router.v1.TaskState`: the checker shares no code with routers."""
TERMINAL = frozenset({COMPLETED, FAILED, CANCELLED})


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptRow:
    """One time that a task was begun, as it is kept."""

    attempt: int
    owner: str
    claimed_at: float
    ended_at: float | None
    reason: int
    """Number of the reason why it came to nothing; 0: it did not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptTask:
    """A task at the end of a run, as one reader found it."""

    id: str
    state: int
    attempt: int
    key: str = ""
    """Its idempotency key; empty where the reader is not told."""
    tokens: int | None = None
    """How long the answer must be, by what is kept of the request; None where the reader does not look."""
    text: str | None = None
    """The answer; None where the reader does not look."""
    answer_attempts: frozenset[int] = frozenset()
    """The attempts that its pieces are of."""
    finishes: int = 0
    """How many good ends the answer has."""
    is_told_whole: bool = True
    """Whether its watch came to an end; else it was refused in the middle, as that of a task that is gone."""
    attempts: Sequence[AttemptRow] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """The whole run."""

    events: Sequence[Event]
    """In the order of their files; those of one file are in the order in which they happened."""
    served: Mapping[str, KeptTask]
    """By id, as TaskService gives it."""
    stored: Mapping[str, KeptTask]
    """By id, as it stands in the database."""
    damage: Sequence[str] = field(default=())
    """What the database itself says is wrong with it."""

    def of_kind(self, *kinds: Kind) -> list[Event]:
        """The events of some kinds."""
        return [event for event in self.events if event.kind in kinds]


def expected_text(tokens: int) -> str:
    """What the fake backend answers when it may say so many tokens."""
    return " ".join(f"tok{number}" for number in range(tokens))
