"""The probes of a gateway: what each answers, and who sees the components."""

import pytest
from gateway_script import serving
from kit.keys import KEY, Keys, bearer

from weft.kernel.access.principal import DEFAULT_SCOPES
from weft.kernel.services.health import EVENT_LOOP, Component, HealthReport, HealthState
from weft.kernel.services.health_monitor import HealthMonitor
from weft_testing.fake_clock import FakeClock

WELL = Component(name="router", state=HealthState.OK, since=1_000.0)
AWAY = Component(name="router", state=HealthState.DOWN, reason="no_router", message="none answers", since=1_000.0)
STUCK = Component(name=EVENT_LOOP, state=HealthState.DOWN, reason="event_loop_stuck", since=1_000.0)
OLD = Component(name="fleet_view", state=HealthState.DEGRADED, reason="old_fleet_view", since=1_000.0)


class Health(HealthMonitor):
    """Health that a test says."""

    def __init__(self, *components: Component, is_stopping: bool = False) -> None:
        super().__init__((), FakeClock())
        self._said = HealthReport(
            components=components, essential=frozenset({"router", EVENT_LOOP}), is_stopping=is_stopping
        )

    @property
    def report(self) -> HealthReport:
        return self._said


@pytest.mark.parametrize(
    ("health", "live", "ready", "word"),
    [
        (Health(WELL), 200, 200, "ok"),
        (Health(WELL, OLD), 200, 200, "degraded"),
        (Health(AWAY), 200, 503, "not_ready"),
        (Health(Component(name="router", since=1_000.0)), 200, 503, "starting"),
        (Health(WELL, is_stopping=True), 200, 503, "stopping"),
        (Health(WELL, STUCK), 503, 503, "not_ready"),
    ],
    ids=["well", "degraded", "down", "starting", "stopping", "stuck"],
)
@pytest.mark.parametrize("method", ["GET", "HEAD"])
async def test_livez_and_readyz_report_independently(
    health: Health, live: int, ready: int, word: str, method: str
) -> None:
    async with serving(health=health, keys=Keys()) as gateway:
        assert (await gateway.request(method, "/livez")).status == live
        answer = await gateway.request(method, "/readyz")
        assert answer.status == ready
        if method == "GET":
            assert answer.json["status"] == word


async def test_health_components_need_the_telemetry_scope() -> None:
    monitor = HealthMonitor((), FakeClock())
    await monitor.start()
    keys = Keys({KEY: DEFAULT_SCOPES, "abcdefghijk2": ["telemetry:view"]})
    async with serving(health=monitor, keys=keys) as gateway:
        for headers in ({}, bearer(), {"Authorization": "Bearer wrong"}):
            assert (await gateway.request("GET", "/health", headers=headers)).json == {"status": "ok"}
        body = (await gateway.request("GET", "/health", headers=bearer("abcdefghijk2"))).json
        assert [(each["name"], each["state"]) for each in body["components"]] == [(EVENT_LOOP, "ok")]
        assert (body["status"], body["live"], body["ready"]) == ("ok", True, True)
    async with serving(health=monitor) as gateway:
        assert "components" in (await gateway.request("GET", "/health")).json
    await monitor.stop()
