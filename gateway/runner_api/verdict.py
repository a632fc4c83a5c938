"""Whether a runner is well: pure."""

from dataclasses import dataclass

from gateway.runner_api.facts import ModelStage, RunnerFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """How the runner does. `reason` and `message` are empty unless it is unhealthy."""

    status: str
    """healthy, degraded or unhealthy."""
    reason: str = ""
    message: str = ""

    @property
    def is_unhealthy(self) -> bool:
        """Whether a health check fails."""
        return self.status == "unhealthy"


def verdict_of(facts: RunnerFacts, waiting: int, max_queue_depth: int) -> Verdict:
    """Unhealthy when accelerator memory ran out, every model failed to load, or the queue is full."""
    starved = [model.name for model in facts.models if model.out_of_memory]
    failed = [model.name for model in facts.models if model.stage is ModelStage.FAILED]
    if starved:
        return Verdict(
            status="unhealthy",
            reason="gpu_out_of_memory",
            message=f"accelerator memory ran out for {', '.join(starved)}",
        )
    if failed and len(failed) == len(facts.models):
        return Verdict(status="unhealthy", reason="all_models_failed", message="every model failed to load")
    if 0 < max_queue_depth <= waiting:
        return Verdict(
            status="unhealthy", reason="queue_saturated", message=f"the queue is full: {waiting}/{max_queue_depth}"
        )
    return Verdict(status="degraded" if failed else "healthy")
