"""Health checks of a service's dependencies: its view of the fleet, and the router."""

from weft.dispatch.fleet import FleetWatcher
from weft.dispatch.remote_router import RouterSource
from weft.kernel.health import WELL, HealthCheck, Observation, degraded, down

MAX_VIEW_AGE_SECONDS = 30.0
"""Age from which routers and gateways that have lost the registry are degraded; they go on with what they know."""


def look_at_fleet(fleet: FleetWatcher | None) -> Observation:
    """Returns the state of a service's view of the fleet; None: it has not connected to the registry yet.

    An outdated view is still used: calls fail for runners that are gone.
    """
    if fleet is None or fleet.view.revision == 0:
        return down("no_fleet_view", "the registry has not answered yet, so that no model or runner is known")
    lost = fleet.lost_seconds
    if lost <= MAX_VIEW_AGE_SECONDS:
        return WELL
    return degraded("old_fleet_view", f"the registry has not answered for {lost:.0f} s; the last view is used")


def fleet_check(fleet: FleetWatcher) -> HealthCheck:
    """Returns the health check of a service's view of the fleet."""

    async def look() -> Observation:
        return look_at_fleet(fleet)

    return HealthCheck(name="fleet_view", look=look)


def router_check(router: RouterSource) -> HealthCheck:
    """Returns the health check that a router answers."""

    async def look() -> Observation:
        return WELL if router.is_there else down("no_router", "no router answers")

    return HealthCheck(name="router", look=look)
