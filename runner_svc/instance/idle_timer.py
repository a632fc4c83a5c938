"""The idle timer of an instance: how long it has been idle, and when it is unloaded."""

from dataclasses import replace
from datetime import datetime, timedelta

from runner_svc.instance.settings import HibernationSettings
from runner_svc.memory.model_memory import ModelMemory
from runner_svc.policy.keep_alive import IdleState, SleepDecision, decide_sleep, keep_alive
from runner_svc.request_records import RequestRecords
from weft.kernel.clock import Clock

FIRST_REQUEST_SECONDS = 10.0
"""Time that a model with a keep-alive of 0 waits for its first request."""


class IdleTimer:
    """The unload timer of one instance. Keep-alives of loads and requests hold until the backend sleeps."""

    def __init__(
        self, settings: HibernationSettings, memory: ModelMemory, records: RequestRecords, clock: Clock
    ) -> None:
        self._settings = settings
        self._memory = memory
        self._records = records
        self._clock = clock
        self._request_seconds: float | None = None
        self._has_served = False
        self._since, self._since_at = clock.monotonic(), clock.utc_now()
        self.load_seconds: float | None = None
        """Keep-alive of the explicit load; see policy.keep_alive."""

    @property
    def limit_seconds(self) -> float | None:
        """Idle time after which it goes to sleep; None: never by itself."""
        if not self._settings.sleeps_by_itself:
            return None
        wishes = replace(
            self._settings.keep_alive_settings,
            request_seconds=self._request_seconds,
            load_seconds=self.load_seconds,
            holds_devices=self._memory.holds_devices,
            pinned=self._memory.pinned,
        )
        limit = keep_alive(wishes)
        return FIRST_REQUEST_SECONDS if limit == 0 and not self._has_served else limit

    @property
    def ends_at(self) -> datetime | None:
        """Time at which it goes to sleep unless a request comes, UTC; None: never, or it works on a request."""
        limit = self.limit_seconds
        if limit is None or self._records.running:
            return None
        return self._since_at + timedelta(seconds=limit)

    def begin(self) -> None:
        """Start the idle time: requests are admitted from now on, or a request has ended."""
        self._since, self._since_at = self._clock.monotonic(), self._clock.utc_now()

    def begin_life(self) -> None:
        """Reset after a new start of the backend."""
        self._has_served = False

    def note_request_end(self, keep_alive_seconds: float | None) -> bool:
        """Record the end of a request and its keep-alive. Returns whether `decide` should be called again at once."""
        before = self.limit_seconds
        self.begin()
        self._has_served, self._request_seconds = True, keep_alive_seconds
        after = self.limit_seconds
        return after != before or after == 0

    def forget(self) -> None:
        """Forget the keep-alives of loads and requests: the model sleeps."""
        self.load_seconds = self._request_seconds = None

    def decide(self, *, stays_awake: bool) -> SleepDecision:
        """Whether to go to sleep now."""
        signs = IdleState(
            now=self._clock.monotonic(),
            idle_since=self._since,
            busy=bool(self._records.running),
            stays_awake=stays_awake,
        )
        return decide_sleep(signs, self.limit_seconds)
