"""Lower priority classes behind higher ones: how many grants may pass them over, in their own queue and in others."""

from collections import Counter
from itertools import pairwise

from scheduler_harness import Mesh, arrival, candidate, placed, scheduler

from router_svc.policy.decisions import Decision
from router_svc.policy.endpoints.candidates import Candidate
from router_svc.policy.endpoints.cluster_view import MeshChange
from router_svc.policy.endpoints.routes import Route
from router_svc.policy.settings import Settings, TenantSettings
from weft.kernel.request import Priority

EVERY = 8
PATIENCE = 5.0


class Rush:
    """One slot; each served request ends after a tenth of a second, and others arrive for it."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.key = 0
        self.now = 0.0
        self.what: dict[int, str] = {}
        self.running: list[int] = []
        self.served: list[str] = []

    def asks(self, what: str, target: str, priority: Priority, count: int = 1) -> None:
        for _ in range(count):
            self.key += 1
            self.what[self.key] = what
            asked = arrival(self.key, target, tenant=what, priority=priority, arrived_at=self.now)
            self._hear(self.mesh.submit(asked, self.now))

    def goes_on(self) -> None:
        self.now += 0.1
        for key in self.running[:]:
            self.running.remove(key)
            self._hear(self.mesh.finish(key, self.now))

    def _hear(self, decisions: list[Decision]) -> None:
        for key in placed(decisions):
            self.running.append(key)
            self.served.append(self.what[key])


def roomy(settings: Settings | None = None, *others: Candidate) -> Mesh:
    limits = {"queue_depth_per_runner": 10_000, "queue_timeout_seconds": 1e6, "lower_band_every": EVERY}
    return scheduler(candidate("a", "m"), *others, settings=settings, **limits)


def longest_gap(served: list[str], what: str) -> int:
    """Grants in a row that went past it."""
    places = [-1, *(place for place, each in enumerate(served) if each == what), len(served)]
    return max(after - before for before, after in pairwise(places)) - 1


def test_low_priority_does_not_wait_behind_an_earlier_backlog_of_normal() -> None:
    """The one grant in eight used to go to the oldest request over all lower priority classes."""
    rush = Rush(roomy())
    rush.asks("high", "m", Priority.HIGH, 3)
    rush.asks("normal", "m", Priority.NORMAL, 2_000)
    rush.asks("low", "m", Priority.LOW, 2_000)
    for _ in range(500):
        rush.asks("high", "m", Priority.HIGH)
        rush.goes_on()
    after_patience = rush.served[int(PATIENCE / 0.1) + EVERY :]
    assert longest_gap(after_patience, "low") <= EVERY + 1
    assert longest_gap(after_patience, "normal") <= EVERY + 1
    assert Counter(after_patience)["high"] >= len(after_patience) * (EVERY - 2) // EVERY - EVERY


def test_low_priority_keeps_its_share_while_a_higher_class_waits_for_a_tenant_cap() -> None:
    """Normal counted as a lower priority class, and its grant reset the count of low."""
    settings = Settings(tenants={"capped": TenantSettings(max_in_flight=1)})
    rush = Rush(roomy(settings, candidate("b", "n")))
    rush.asks("capped", "n", Priority.HIGH)
    rush.running.clear()
    rush.asks("capped", "m", Priority.HIGH)
    rush.asks("normal", "m", Priority.NORMAL, 300)
    rush.asks("low", "m", Priority.LOW, 300)
    for _ in range(400):
        rush.goes_on()
    assert longest_gap(rush.served[int(PATIENCE / 0.1) + EVERY : 300], "low") <= EVERY


def test_high_class_route_does_not_starve_the_queue_of_a_pool_it_uses() -> None:
    """Passed over was counted per queue: a queue without any grant was never counted as passed over."""
    rush = Rush(roomy())
    rush.mesh.apply(MeshChange(routes={"r": Route(name="r", candidates=("m",))}), 0.0)
    rush.asks("route", "route/r", Priority.HIGH, 3)
    rush.asks("pool", "m", Priority.NORMAL, 300)
    for _ in range(400):
        rush.asks("route", "route/r", Priority.HIGH)
        rush.goes_on()
    after_patience = rush.served[int(PATIENCE / 0.1) + EVERY :]
    assert longest_gap(after_patience, "pool") <= EVERY
    assert Counter(after_patience)["route"] >= len(after_patience) * (EVERY - 1) // EVERY - EVERY


def test_many_queues_of_a_lower_class_share_the_quota_of_one_queue() -> None:
    rush = Rush(roomy())
    rush.mesh.apply(MeshChange(routes={f"r{n}": Route(name=f"r{n}", candidates=("m",)) for n in range(10)}), 0.0)
    rush.asks("high", "m", Priority.HIGH, 3)
    for number in range(10):
        rush.asks("low", f"route/r{number}", Priority.LOW, 100)
    for _ in range(500):
        rush.asks("high", "m", Priority.HIGH)
        rush.goes_on()
    counts = Counter(rush.served[100:])
    assert 0 < counts["low"] <= sum(counts.values()) // EVERY + 10
