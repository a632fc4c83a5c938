"""Derives the health of a runner's engines from their phases. A runner without a usable engine is degraded."""

from collections.abc import Mapping

from runner_svc.policy.lifecycle import Phase
from weft.kernel.services.health import WELL, Observation, degraded

_USABLE = frozenset({Phase.READY, Phase.IDLE, Phase.HIBERNATING})
"""Phases in which it serves, or the next request loads it."""
_FAILED = frozenset({Phase.CRASH_LOOP, Phase.FAILED})
MAX_NAMES = 5


def engine_health(phases: Mapping[str, Phase]) -> Observation:
    """Returns the health of a runner's engines from their phases by model."""
    failed = sorted(name for name, phase in phases.items() if phase in _FAILED)
    if phases and not _USABLE.intersection(phases.values()):
        if len(failed) == len(phases):
            return degraded("no_engine_ready", f"no engine runs: {_listed(failed)} failed")
        return degraded("no_engine_ready", "no engine is ready; requests wait for one that starts")
    return degraded("engine_failed", f"{_listed(failed)} failed") if failed else WELL


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return f"{', '.join(names[:MAX_NAMES])}{more}"
