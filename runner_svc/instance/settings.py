"""Settings of an instance: the served model, its hibernation, wake and keep-alive."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

from runner_svc.chat.settings import ChatSettings
from runner_svc.policy.backoff import RestartLimits
from runner_svc.policy.keep_alive import DEFAULT_CATEGORY, KeepAliveSettings
from runner_svc.runtimes.model_engine import ModelEngine
from weft.api.registry.v1 import tags_pb2, wake_pb2
from weft.api.runner.v1 import added_model_pb2
from weft.kernel.abilities import UNKNOWN, Abilities
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason
from weft.kernel.request import JournalMode, Operation, Skill
from weft.wake.recipes import DEFAULT_MAX_WAIT_SECONDS

NoteFetch = Callable[[str, float | None], None]
"""Called with what a pull does, in words, and its share that is done; None: not known."""
FetchModel = Callable[[NoteFetch], Awaitable["ServedModel"]]
"""Pulls the files of a model and returns it as it is served with them. Raises WeftError."""
RunRecipe = Callable[[wake_pb2.WakeRecipe, float], Awaitable[None]]
"""Runs a recipe within a number of seconds. Raises WAKE_FAILED."""


async def no_recipes(recipe: wake_pb2.WakeRecipe, timeout_seconds: float) -> None:
    """A RunRecipe that refuses every recipe."""
    del recipe, timeout_seconds
    raise WeftError(Reason.WAKE_FAILED, "this runner carries out no recipes")


@dataclass(frozen=True, slots=True, kw_only=True)
class SleepSettings:
    """When an idle model goes to sleep, and by which action."""

    after_seconds: float
    """Idle time after which it goes to sleep."""
    action: wake_pb2.WakeRecipe | None = field(default=None, repr=False)
    """A request or a program. None: the backend's process is ended."""
    max_wait_seconds: float = DEFAULT_MAX_WAIT_SECONDS
    """Timeout of the action."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HibernationSettings:
    """Whether and how a model hibernates and wakes."""

    attached: bool = False
    """Whether the backend is a server that weft neither started nor can end."""
    requests_fail_alone: bool = False
    """Whether a request that cannot reach the server is no sign that the server is gone."""
    start_asleep: bool = False
    """Whether it is loaded with the first request, not at start."""
    recipe: wake_pb2.WakeRecipe | None = field(default=None, repr=False)
    """Recipe that the runner runs before it starts the backend or attaches to it."""
    woken_by_mesh: bool = False
    """Whether routers can wake the host of an attached server."""
    max_wait_seconds: float = DEFAULT_MAX_WAIT_SECONDS
    """Maximum wait from the first step of a wake until requests are admitted. Where a wake is only the load of an own
    process, it bounds the callers alone: the load continues for as long as it makes progress."""
    sleep: SleepSettings | None = None
    """None: it goes to sleep by `unload` and keep-alive only."""
    drain_seconds: float = 10.0
    """Time that an unload gives running requests to end."""
    attach_retry_seconds: float = 5.0
    """Interval of the attempts to find a server that cannot be woken."""
    keep_alive_seconds: float | None = None
    """Idle time after which it goes to sleep; negative: never; None: from `sleep`, else from `category`."""
    category: str = DEFAULT_CATEGORY
    """Kind of model: a key of policy.keep_alive.CATEGORY_SECONDS."""
    pinned: bool = False
    """Whether it is never evicted for another model, and stays loaded."""
    memory_wait_seconds: float = 0.0
    """Maximum wait of a load for accelerator memory; 0 on hosts without a memory ledger."""

    @property
    def can_wake(self) -> bool:
        """Whether the runner can wake it. It can always start its own processes again."""
        return not self.attached or self.recipe is not None

    @property
    def can_unload(self) -> bool:
        """Whether the runner can put it to sleep."""
        return not self.attached or (self.sleep is not None and self.sleep.action is not None)

    @property
    def sleeps_by_itself(self) -> bool:
        """Whether it may go to sleep when idle: only where it can be woken again."""
        return self.can_unload and (self.can_wake or self.woken_by_mesh)

    def keep_alive_settings(
        self,
        *,
        request_seconds: float | None = None,
        load_seconds: float | None = None,
        holds_devices: bool = False,
        pinned: bool = False,
    ) -> KeepAliveSettings:
        """Returns the keep-alive settings of the configuration, with those of the moment."""
        after_seconds = None if self.sleep is None else self.sleep.after_seconds
        return KeepAliveSettings(
            request_seconds=request_seconds,
            load_seconds=load_seconds,
            model_seconds=after_seconds if self.keep_alive_seconds is None else self.keep_alive_seconds,
            category=self.category,
            holds_devices=holds_devices,
            pinned=pinned,
        )

    @property
    def longest_wake_seconds(self) -> float:
        """Maximum time that a caller waits for a wake, including a transition to sleep that is under way."""
        falling_asleep = 0.0 if self.sleep is None else self.sleep.max_wait_seconds
        return self.drain_seconds + falling_asleep + self.memory_wait_seconds + self.max_wait_seconds


ADAPTED_OPERATIONS = frozenset({Operation.CHAT, Operation.COMPLETION, Operation.TOKENIZE})
"""The operations that engines do with an adapter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedAdapter:
    """An adapter of a model, which the mesh knows as a separate model."""

    name: str
    """Unique in the mesh."""
    pool: str = ""
    """As of a model."""
    file: Path | None = None
    """The file with the digest for receipts; None: there is none."""
    skills: frozenset[Skill] = frozenset()
    """The skills that the configuration lists, all that it has then; empty: those of its model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel(ModelEngine):
    """One model as an instance serves it: its engine, and how it is published, kept and restarted."""

    name: str
    """Unique in the mesh."""
    slots: int = 4
    pool: str = ""
    """Models of one pool are interchangeable; empty: its own pool."""
    tags: tags_pb2.Tags = field(default_factory=tags_pb2.Tags)
    """Its tier, labels and owner; those of its adapters too."""
    upstream_name: str = ""
    """The name of its file or folder, or what its server has for it; empty: not known."""
    chat: ChatSettings = field(default_factory=ChatSettings)
    hibernation: HibernationSettings = field(default_factory=HibernationSettings)
    restart: RestartLimits = field(default_factory=RestartLimits)
    skills: frozenset[Skill] = frozenset()
    """The skills that the configuration lists, all that it has then; empty: it lists none."""
    declared_abilities: Abilities = UNKNOWN
    """What the model takes by its configuration, these skills included."""
    journal: JournalMode = JournalMode.UNSET
    """Whether its requests, and those of its adapters, are durable tasks of the mesh."""
    target_inflight: int | None = None
    """Concurrent requests that it admits; None: as many as its slots."""
    adapters: tuple[ServedAdapter, ...] = ()
    """Adapters of the model: separate models, which its instance serves as well."""
    fetch: FetchModel | None = field(default=None, repr=False)
    """Pulls its files before the first load; None: they are there."""
    lack: WeftError | None = None
    """What it needs and this machine does not have now, with which `fetch` fails; None: nothing."""
    added: added_model_pb2.AddedModel | None = field(default=None, repr=False)
    """How it was added, of a model that was asked for by its source; None: the configuration names it."""
    server: str = ""
    """The server whose list of models it is of; empty: it is served by its own settings."""
    wake_by_mesh: wake_pb2.WakeRecipe | None = field(default=None, repr=False)
    """Wake recipe that routers run to wake the host; it is published. The runner's own recipe is not."""

    @property
    def names(self) -> tuple[str, ...]:
        """The names under which it is served: its own, and those of its adapters."""
        return self.name, *(adapter.name for adapter in self.adapters)

    @property
    def adapter_operations(self) -> frozenset[Operation]:
        """The operations of each adapter."""
        return self.operations & ADAPTED_OPERATIONS

    def adapter(self, name: str) -> ServedAdapter | None:
        """Returns the adapter of this name; None: the name is that of the model itself."""
        return next((adapter for adapter in self.adapters if adapter.name == name), None)

    def takes_images(self, known: Abilities) -> bool:
        """Whether it takes images; its category counts where nothing is known of them."""
        is_for_images = self.hibernation.category == "vision" and Skill.IMAGE not in known.lacking
        return is_for_images or Skill.IMAGE in known.skills
