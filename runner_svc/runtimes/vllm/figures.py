"""The figures of a running engine of vLLM, from the statistics that it records after each step."""

from collections.abc import Callable
from typing import Any

from runner_svc.engine_host.messages import EngineFigures


class StepStatistics:
    """Collects the statistics of the engine's steps; vLLM calls it as one of its loggers, in the event loop."""

    def __init__(self, on_change: Callable[[], None]) -> None:
        """`on_change` is called after each step."""
        self._on_change = on_change
        self._last: dict[int, Any] = {}
        """The last statistics of each scheduler."""
        self._preemption_count = 0
        self._prefix_query_tokens = 0
        self._prefix_hit_tokens = 0

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
    ) -> None:
        """Add the statistics of one step, by vLLM's names."""
        del mm_cache_stats
        if scheduler_stats is not None:
            self._last[engine_idx] = scheduler_stats
            self._prefix_query_tokens += scheduler_stats.prefix_cache_stats.queries
            self._prefix_hit_tokens += scheduler_stats.prefix_cache_stats.hits
        if iteration_stats is not None:
            self._preemption_count += iteration_stats.num_preempted_reqs
        self._on_change()

    def log_engine_initialized(self) -> None:
        """Nothing to do: vLLM calls it once the engine is loaded."""

    def log(self) -> None:
        """Nothing to do: the runner is sent figures while they change."""

    def record_sleep_state(self, is_awake: int = 0, level: int = 0) -> None:
        """Nothing to do: the runner knows whether the engine sleeps."""

    def figures(self, *, has_requests: bool, kv_cache_tokens: int | None, kv_cache_bytes: int | None) -> EngineFigures:
        """Returns the present figures; without requests nothing runs, whatever the last step had."""
        last = self._last.values() if has_requests else ()
        return EngineFigures(
            running_count=sum(stats.num_running_reqs for stats in last),
            waiting_count=sum(stats.num_waiting_reqs + stats.num_skipped_waiting_reqs for stats in last),
            kv_cache_share=max((stats.kv_cache_usage for stats in last), default=0.0),
            kv_cache_tokens=kv_cache_tokens,
            kv_cache_bytes=kv_cache_bytes,
            preemption_count=self._preemption_count,
            prefix_query_tokens=self._prefix_query_tokens,
            prefix_hit_tokens=self._prefix_hit_tokens,
        )
