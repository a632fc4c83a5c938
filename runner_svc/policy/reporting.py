"""When the registry hears from a runner."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportTimes:
    """When the last heartbeat and the last look at the capability were. Seconds on any monotonic clock."""

    heartbeat_at: float
    looked_at: float
    heartbeat_interval_seconds: float
    report_interval_seconds: float

    def heartbeat_due(self, now: float) -> bool:
        """Whether a sign of life is due, whatever there is to tell."""
        return now - self.heartbeat_at >= self.heartbeat_interval_seconds

    def pause_seconds(self, now: float) -> float:
        """Time until the capability is looked at again or a heartbeat is due."""
        due = min(self.heartbeat_at + self.heartbeat_interval_seconds, self.looked_at + self.report_interval_seconds)
        return max(0.0, due - now)
