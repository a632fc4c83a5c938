"""How a model falls asleep and wakes: settings as values."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from runner_svc.policy.keep_alive import DEFAULT_CATEGORY, KeepAliveSettings
from runner_svc.policy.restart import RestartLimits
from runner_svc.policy.timeouts import TimeoutProfile
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
    requests_fail_alone: bool = False
    """A request that cannot reach the server says nothing about the others, nor whether the server is there."""
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
    keep_alive_seconds: float | None = None
    """Idle time after which it goes to sleep; negative: never; None: as `sleep` says, else by `category`."""
    category: str = DEFAULT_CATEGORY
    """What it is for: a key of policy.keep_alive.CATEGORY_SECONDS."""
    pinned: bool = False
    """It is never evicted for another model, and stays loaded."""
    memory_wait_seconds: float = 0.0
    """Longest wait of a load for accelerator memory; 0 where nobody keeps a book of it."""

    @property
    def can_wake(self) -> bool:
        """Whether the runner can wake it: what it starts itself it can always start again."""
        return not self.attached or self.recipe is not None

    @property
    def can_unload(self) -> bool:
        """Whether the runner can put it to sleep."""
        return not self.attached or (self.sleep is not None and self.sleep.action is not None)

    @property
    def sleeps_by_itself(self) -> bool:
        """Whether it may go to sleep when nobody wants it: not where nobody could wake it again."""
        return self.can_unload and (self.can_wake or self.woken_by_mesh)

    @property
    def keep_alive_settings(self) -> KeepAliveSettings:
        """What the configuration says."""
        after_seconds = None if self.sleep is None else self.sleep.after_seconds
        return KeepAliveSettings(
            model_seconds=after_seconds if self.keep_alive_seconds is None else self.keep_alive_seconds,
            category=self.category,
            pinned=self.pinned,
        )

    @property
    def longest_wake_seconds(self) -> float:
        """Longest time a caller may have to wait: a model on its way to sleep gets there first."""
        falling_asleep = 0.0 if self.sleep is None else self.sleep.max_wait_seconds
        return self.drain_seconds + falling_asleep + self.memory_wait_seconds + self.max_wait_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceConfig:
    """What an instance is, apart from its backend."""

    model: str
    """The model's name in the mesh."""
    slots: int
    """Of its engine, as configured."""
    target_inflight: int | None = None
    """Requests that it works on at once; None: as many as its engine has slots."""
    vision_input: bool = False
    """Whether it takes images."""
    model_path: Path | None = None
    quantizations: Mapping[str, Path] = field(default_factory=dict)
    """Further files of the model by quantization."""
    restart: RestartLimits = field(default_factory=RestartLimits)
    timeouts: TimeoutProfile = field(default_factory=TimeoutProfile)
    hibernation: HibernationSettings = field(default_factory=HibernationSettings)
