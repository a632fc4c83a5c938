"""Settings of an instance: the served model, its hibernation, wake and keep-alive."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

from runner_svc.chat.chat_settings import ChatSettings
from runner_svc.policy.backoff import RestartLimits
from runner_svc.policy.keep_alive import DEFAULT_CATEGORY
from runner_svc.runtimes.model_engine import ModelEngine
from weft.api.registry.v1 import tags_pb2, wake_pb2
from weft.api.runner.v1 import added_model_pb2
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.requests.capabilities import UNKNOWN, Capabilities
from weft.kernel.requests.request_values import JournalMode, Operation, Skill
from weft.wake.recipes import DEFAULT_MAX_WAIT_SECONDS

NoteFetch = Callable[[str, float | None], None]
"""Called with the stage of a pull as text, and its completed share; None: unknown."""
FetchModel = Callable[[NoteFetch], Awaitable["ServedModel"]]
"""Pulls a model's files and returns the model with them. Raises WeftError."""
RunRecipe = Callable[[wake_pb2.WakeRecipe, float], Awaitable[None]]
"""Runs a recipe with a timeout in seconds. Raises WAKE_FAILED."""


async def no_recipes(recipe: wake_pb2.WakeRecipe, timeout_seconds: float) -> None:
    """A RunRecipe that rejects every recipe."""
    del recipe, timeout_seconds
    raise WeftError(Reason.WAKE_FAILED, "this runner does not run wake recipes")


@dataclass(frozen=True, slots=True, kw_only=True)
class SleepSettings:
    """When an idle model goes to sleep, and how."""

    after_seconds: float
    action: wake_pb2.WakeRecipe | None = field(default=None, repr=False)
    """A request or a program. None: the backend's process is ended."""
    max_wait_seconds: float = DEFAULT_MAX_WAIT_SECONDS
    """Timeout of the action."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HibernationSettings:
    """Whether and how a model hibernates and wakes."""

    attached: bool = False
    """Whether the backend is a server that weft neither started nor can end."""
    start_asleep: bool = False
    """Whether it is loaded by the first request instead of at start."""
    recipe: wake_pb2.WakeRecipe | None = field(default=None, repr=False)
    """Recipe that the runner runs before it starts the backend or attaches to it."""
    woken_by_mesh: bool = False
    """Whether routers can wake the host of an attached server."""
    max_wait_seconds: float = DEFAULT_MAX_WAIT_SECONDS
    """Maximum time from the first step of a wake until requests are admitted. If a wake only loads weft's own process,
    it limits the callers alone: the load continues as long as it makes progress."""
    sleep: SleepSettings | None = None
    """None: it only goes to sleep by `unload` and keep-alive."""
    drain_seconds: float = 10.0
    """How long an unload waits for running requests."""
    attach_retry_seconds: float = 5.0
    """Polling interval for a server that cannot be woken."""
    keep_alive_seconds: float | None = None
    """Idle time after which it goes to sleep; negative: never; None: from `sleep`, else from `category`."""
    category: str = DEFAULT_CATEGORY
    """A key of policy.keep_alive.CATEGORY_SECONDS."""
    pinned: bool = False
    """Whether it is never evicted for another model, and stays loaded."""
    memory_wait_seconds: float = 0.0
    """Maximum wait of a load for accelerator memory; 0 on hosts without a memory ledger."""

    @property
    def can_wake(self) -> bool:
        """Whether the runner can wake it. It can always restart its own processes."""
        return not self.attached or self.recipe is not None

    @property
    def can_unload(self) -> bool:
        """Whether the runner can put it to sleep."""
        return not self.attached or (self.sleep is not None and self.sleep.action is not None)

    @property
    def sleeps_by_itself(self) -> bool:
        """Whether it may go to sleep when idle, which requires that it can be woken again."""
        return self.can_unload and (self.can_wake or self.woken_by_mesh)

    @property
    def idle_seconds(self) -> float | None:
        """Configured idle time after which it goes to sleep; negative: never; None: from `category`."""
        after_seconds = None if self.sleep is None else self.sleep.after_seconds
        return after_seconds if self.keep_alive_seconds is None else self.keep_alive_seconds

    @property
    def longest_wake_seconds(self) -> float:
        """Maximum time that a caller waits for a wake, including a running transition to sleep."""
        falling_asleep = 0.0 if self.sleep is None else self.sleep.max_wait_seconds
        return self.drain_seconds + falling_asleep + self.memory_wait_seconds + self.max_wait_seconds


ADAPTED_OPERATIONS = frozenset({Operation.CHAT, Operation.COMPLETION, Operation.TOKENIZE})
"""Operations that engines support with an adapter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedAdapter:
    """An adapter of a model, which the mesh lists as a separate model."""

    name: str
    """Unique in the mesh."""
    pool: str = ""
    """Like a model's pool."""
    file: Path | None = None
    """The file with the digest for receipts; None: there is none."""
    skills: frozenset[Skill] = frozenset()
    """The configured skills, which are then all it has; empty: those of its model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel(ModelEngine):
    """A model as an instance serves it: its engine, and how it is published, kept loaded and restarted."""

    name: str
    """Unique in the mesh."""
    slots: int = 4
    pool: str = ""
    """Models of a pool are interchangeable; empty: a pool of its own name."""
    tags: tags_pb2.Tags = field(default_factory=tags_pb2.Tags)
    """Tier, labels and owner, also of its adapters."""
    upstream_name: str = ""
    """The name of its file or folder, or its server's name for it; empty: unknown."""
    chat: ChatSettings = field(default_factory=ChatSettings)
    hibernation: HibernationSettings = field(default_factory=HibernationSettings)
    restart: RestartLimits = field(default_factory=RestartLimits)
    skills: frozenset[Skill] = frozenset()
    """The configured skills, which are then all it has; empty: not configured."""
    declared_capabilities: Capabilities = UNKNOWN
    """The model's configured capabilities, including these skills."""
    journal: JournalMode = JournalMode.UNSET
    """Whether its and its adapters' requests are durable tasks of the mesh."""
    target_inflight: int | None = None
    """Maximum concurrent requests; None: as many as its slots."""
    adapters: tuple[ServedAdapter, ...] = ()
    """Adapters of the model: separate models that its instance also serves."""
    fetch: FetchModel | None = field(default=None, repr=False)
    """Pulls its files before a load unless `is_here`; None: they are present, and cannot be pulled."""
    is_here: Callable[[], bool] | None = field(default=None, repr=False)
    """Whether its files are present now, since others may delete them; None: they are not. May block."""
    lack: WeftError | None = None
    """What the model needs but this machine lacks, the error of `fetch`; None: nothing."""
    added: added_model_pb2.AddedModel | None = field(default=None, repr=False)
    """The record of a model that was added by its source; None: it is configured."""
    server: str = ""
    """The followed server that lists the model; empty: the model has its own settings."""
    wake_by_mesh: wake_pb2.WakeRecipe | None = field(default=None, repr=False)
    """Published wake recipe, which routers run to wake the host. The runner's own recipe is not published."""

    @property
    def names(self) -> tuple[str, ...]:
        """The names it serves: its own and those of its adapters."""
        return self.name, *(adapter.name for adapter in self.adapters)

    @property
    def adapter_operations(self) -> frozenset[Operation]:
        """The operations of each adapter."""
        return self.operations & ADAPTED_OPERATIONS

    def adapter(self, name: str) -> ServedAdapter | None:
        """Returns the adapter with this name; None: it is the model's own name."""
        for adapter in self.adapters:
            if adapter.name == name:
                return adapter
        return None

    def takes_images(self, known: Capabilities) -> bool:
        """Whether it accepts images; its category decides if its capabilities are unknown."""
        is_for_images = self.hibernation.category == "vision" and Skill.IMAGE not in known.lacking
        return is_for_images or Skill.IMAGE in known.skills
