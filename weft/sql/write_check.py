"""The health check of a database: a write that changes nothing."""

from collections.abc import Awaitable, Callable

from weft.kernel.clock import Clock
from weft.kernel.health import WELL, HealthCheck, Observation, down
from weft.kernel.health_monitor import paced

INTERVAL_SECONDS = 60.0
"""Time between two writes that check a database while they succeed: each is synchronised to disk."""


def write_check(
    name: str, failure: Callable[[], Awaitable[str]], clock: Clock, *, services: tuple[str, ...]
) -> HealthCheck:
    """Returns the check of a database that gRPC `services` depend on.

    `failure` writes, and returns the database's error code or "". While it succeeds, it is called every
    INTERVAL_SECONDS.
    """

    async def look() -> Observation:
        code = await failure()
        return WELL if not code else down("store_not_writable", f"the database cannot be written ({code})")

    return HealthCheck(name=name, look=paced(look, clock, INTERVAL_SECONDS), services=services)
