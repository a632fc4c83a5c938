"""How a model falls asleep and wakes: settings as values."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason
from weft.wake.recipes import DEFAULT_MAX_WAIT_SECONDS, CommandRecipe, HttpRecipe, Recipe

RunRecipe = Callable[[Recipe, float], Awaitable[None]]
"""Carries out a recipe within that many seconds. Raises WAKE_FAILED."""


async def no_recipes(recipe: Recipe, timeout_seconds: float) -> None:
    """A RunRecipe for a runner that has none to run."""
    del recipe, timeout_seconds
    raise WeftError(Reason.WAKE_FAILED, "this runner carries out no recipes")


@dataclass(frozen=True, slots=True, kw_only=True)
class SleepSettings:
    """What puts a model to sleep, and when."""

    after_seconds: float
    """Time without a request after which it goes to sleep."""
    action: HttpRecipe | CommandRecipe | None = None
    """None: ending the backend's process is all there is to do."""
    max_wait_seconds: float = DEFAULT_MAX_WAIT_SECONDS
    """Longest time the action may take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HibernationSettings:
    """Whether and how a model sleeps."""

    attached: bool = False
    """The backend is a server that weft did not start and cannot end."""
    start_asleep: bool = False
    """It is loaded with the first request."""
    recipe: Recipe | None = None
    """What the runner does before it starts the backend or attaches to it."""
    woken_by_mesh: bool = False
    """Somebody else can wake the host of an attached server."""
    max_wait_seconds: float = DEFAULT_MAX_WAIT_SECONDS
    """Longest wait from the first step of waking until it takes requests. Where waking is no more than loading a
    process of ours, only how long callers wait: the load goes on for as long as it moves."""
    sleep: SleepSettings | None = None
    """None: it never sleeps by itself."""
    drain_seconds: float = 10.0
    """How long an unload waits for running requests."""
    attach_retry_seconds: float = 5.0
    """Pause between two attempts to find a server that nobody can wake."""

    @property
    def can_wake(self) -> bool:
        """Whether the runner can wake it: what it starts itself it can always start again."""
        return not self.attached or self.recipe is not None

    @property
    def can_unload(self) -> bool:
        """Whether the runner can put it to sleep."""
        return not self.attached or (self.sleep is not None and self.sleep.action is not None)

    @property
    def sleep_after_seconds(self) -> float | None:
        """Idle time after which it goes to sleep; None: never by itself, also where nobody could wake it again."""
        wakes_again = self.can_wake or self.woken_by_mesh
        return self.sleep.after_seconds if self.sleep is not None and self.can_unload and wakes_again else None

    @property
    def longest_wake_seconds(self) -> float:
        """Longest time a caller may have to wait: a model on its way to sleep gets there first."""
        falling_asleep = 0.0 if self.sleep is None else self.sleep.max_wait_seconds
        return self.drain_seconds + falling_asleep + self.max_wait_seconds
