"""A small mesh with everything in it, and an observer that checks whatever its scheduler decides.

One pool over three runners, a model off the premises, a host whose memory holds one of three models, two routes;
tenants with caps, weights and permissions.
"""

from collections import Counter
from typing import TYPE_CHECKING

from scheduler_harness import Mesh, arrival, asleep, candidate

from router_svc.policy.decisions import Decision, Placed, Rejects, Served, StopsWaking, WakeFailure, Wakes
from router_svc.policy.endpoints.candidates import Candidate, HostMemory, MemoryHolder, Readiness
from router_svc.policy.endpoints.cluster_view import MeshChange
from router_svc.policy.endpoints.routes import Route
from router_svc.policy.limits import SchedulerLimits
from router_svc.policy.settings import PoolSettings, Settings, TenantSettings
from weft.kernel.reasons import Reason
from weft.kernel.request import Priority

if TYPE_CHECKING:
    from router_svc.policy.request import Request


RUNNERS = "abc"
POOL = tuple(f"{kind}-{runner}" for runner in RUNNERS for kind in "mn")
SWAPPED = ("g1", "g2", "g3")
REMOTE = "cloud"
EVERYTHING = (*POOL, *SWAPPED, REMOTE)
TARGETS = ("p", "m-a", *SWAPPED, REMOTE, "route/chain", "route/pinned")
SLOTS = 2
RUNNER_MAX_REQUESTS = 3
POOL_CAP = 8
TENANT_CAP = 2
MODEL_BYTES = 10 << 30
SETTLE_SECONDS = 10.0
SETTINGS = Settings(
    pools={"p": PoolSettings(max_in_flight=POOL_CAP)},
    tenants={"capped": TenantSettings(max_in_flight=TENANT_CAP), "heavy": TenantSettings(weight=2.0)},
)
TENANTS = ("capped", "heavy", "light")
ROUTES = {
    "chain": Route(name="chain", candidates=("g1", "p", REMOTE), keep_alive_seconds=60.0),
    "pinned": Route(name="pinned", candidates=("g2", REMOTE), pin_primary=True, budget_seconds=300.0),
}


class World:
    """Does what the mesh would do, and checks every decision."""

    def __init__(self, **limits: float) -> None:
        self.mesh = Mesh(SchedulerLimits(**{"queue_depth_per_runner": 4, **limits}), SETTINGS)  # type: ignore[arg-type]  # numbers by name
        self.now = 0.0
        self.readiness = dict.fromkeys(POOL, Readiness.READY) | dict.fromkeys(SWAPPED, Readiness.ASLEEP)
        self.readiness[REMOTE] = Readiness.READY
        self.incarnations = dict.fromkeys((*RUNNERS, "g", REMOTE), 1)
        self.cloud_fallback = True
        self.submitted: dict[int, Request] = {}
        self.waiting: set[int] = set()
        self.running: dict[int, Placed] = {}
        self.over: set[int] = set()
        self.waking: dict[str, Wakes] = {}
        self.swaps = 0
        self.given_up: set[tuple[int, str]] = set()
        """The requests that failed on a model, or waited for a wake of it that failed."""
        self.show(routes=ROUTES, cloud_fallback=True)

    # -- the mesh

    def show(self, **changes: object) -> None:
        self.hear(self.mesh.show(self.candidates(), self.now, hosts=self.memory(), **changes))

    def candidates(self) -> list[Candidate]:
        pool = [
            candidate(
                model[-1],
                model,
                pool="p",
                slots=SLOTS,
                readiness=self.readiness[model],
                runner_max_requests=RUNNER_MAX_REQUESTS,
                runner_wakes=True,
                incarnation=str(self.incarnations[model[-1]]),
            )
            for model in POOL
        ]
        swapped = [
            asleep(
                f"run-{model}",
                model,
                readiness=self.readiness[model],
                host="g",
                memory_bytes=MODEL_BYTES,
                usual_load_seconds=2.0,
                incarnation=str(self.incarnations["g"]),
            )
            for model in SWAPPED
        ]
        remote = candidate(REMOTE, REMOTE, remote=True, slots=4, readiness=self.readiness[REMOTE])
        return [*pool, *swapped, remote]

    def memory(self) -> dict[str, HostMemory]:
        loaded = [model for model in SWAPPED if self.readiness[model] in (Readiness.READY, Readiness.LOADING)]
        holders = tuple(MemoryHolder(name=model, is_model=True, held_bytes=MODEL_BYTES) for model in loaded)
        free = MODEL_BYTES + (1 << 30) - MODEL_BYTES * len(loaded)
        return {"g": HostMemory(host="g", total_bytes=MODEL_BYTES + (1 << 30), free_bytes=free, holders=holders)}

    def busy(self, model: str) -> bool:
        return any(placed.candidate.model == model for placed in self.running.values())

    # -- what happens

    def submit(
        self,
        target: str,
        priority: Priority,
        tenant: str,
        *,
        allow_remote: bool = False,
        seconds: float | None = None,
    ) -> None:
        key = len(self.submitted) + 1
        self.submitted[key] = arrival(
            key,
            target,
            priority=priority,
            tenant=tenant,
            allow_remote=allow_remote,
            arrived_at=self.now,
            deadline_at=None if seconds is None else self.now + seconds,
            prompt_tokens=100,
            max_output_tokens=100,
        )
        self.waiting.add(key)
        self.hear(self.mesh.submit(self.submitted[key], self.now))

    def finish(self, key: int, *, served: bool = True) -> None:
        self.waiting.discard(key)
        was_placed = self.running.pop(key, None) is not None
        self.over.add(key)
        took = Served(prompt_tokens=100, cached_tokens=20, output_tokens=50) if served and was_placed else None
        self.hear(self.mesh.finish(key, self.now, took))

    def fail(self, key: int, reason: Reason) -> None:
        was = self.running.pop(key)
        self.waiting.add(key)
        self.given_up.add((key, was.candidate.model))
        self.hear(self.mesh.report_failed(key, was.attempt, reason, self.now))

    def end_wake(self, model: str, reason: Reason | None = None) -> None:
        """The wake ends: as the ledger of a real mesh would have it, where `reason` does not say how it fails."""
        del self.waking[model]
        others = [other for other in SWAPPED if other != model and self.readiness[other] is Readiness.READY]
        if model in SWAPPED and reason is None:
            if any(self.busy(other) for other in others):
                reason = Reason.INSUFFICIENT_MEMORY
            for other in others if reason is None else ():
                self.readiness[other] = Readiness.ASLEEP
                self.swaps += 1
            self.show()
        failure = None if reason is None else WakeFailure(reason=reason, message="no")
        if reason is Reason.WAKE_FAILED:
            self.given_up |= {(key, model) for key in self.waiting}
        self.hear(self.mesh.wake_finished(model, failure, self.now))
        if failure is None:
            self.readiness[model] = Readiness.READY
        self.show()

    def set_guard(self, *, cloud_fallback: bool) -> None:
        self.cloud_fallback = cloud_fallback
        self.hear(self.mesh.apply(MeshChange(cloud_fallback=cloud_fallback), self.now))

    def restart(self, runner: str) -> None:
        self.incarnations[runner] += 1
        self.show()

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.hear(self.mesh.tick(self.now))

    # -- what is checked

    def hear(self, decisions: list[Decision]) -> None:
        for decision in decisions:
            if isinstance(decision, Wakes):
                assert decision.model not in self.waking, "a model is woken twice at once"
                self.waking[decision.model] = decision
                continue
            if isinstance(decision, StopsWaking):
                assert decision.model in self.waking, "a wake is given up that is not under way"
                continue
            assert decision.key not in self.over, "a decision about a request that was over"
            assert decision.key in self.waiting, "a decision about a request that does not wait"
            if isinstance(decision, Placed):
                self.check_place(decision)
                self.waiting.discard(decision.key)
                self.running[decision.key] = decision
            elif isinstance(decision, Rejects):
                self.waiting.discard(decision.key)
                self.over.add(decision.key)
        self.check()

    def check_place(self, placed: Placed) -> None:
        request, chosen = self.submitted[placed.key], placed.candidate
        assert self.readiness[chosen.model] is Readiness.READY, "placed where nothing takes requests"
        assert request.needs.allow_remote or not chosen.remote, "left the premises without a permit"
        is_fallback = request.spec.model.startswith("route/") and chosen.model == REMOTE
        assert not is_fallback or self.cloud_fallback, "fell back off the premises though the mesh does not"
        if request.spec.model == "route/pinned" and chosen.model == REMOTE:
            waits = self.readiness["g2"] is not Readiness.DOWN and (placed.key, "g2") not in self.given_up
            assert not waits, "did not wait for the primary that it is pinned to"

    def check(self) -> None:
        running = self.running.values()
        slots = Counter(placed.candidate.key for placed in running)
        most = {REMOTE: 4, **dict.fromkeys(POOL, SLOTS), **dict.fromkeys(SWAPPED, 1)}
        assert all(count <= most[key[0]] for key, count in slots.items()), "a slot was used twice"
        runners = Counter((p.candidate.runner, p.candidate.incarnation) for p in running if p.candidate.pool == "p")
        assert all(count <= RUNNER_MAX_REQUESTS for count in runners.values()), "a runner works on too many requests"
        in_pool = sum(placed.candidate.pool == "p" for placed in running)
        assert in_pool <= POOL_CAP, "a pool has more running than it may"
        capped = sum(self.submitted[key].spec.tenant == "capped" for key in self.running)
        assert capped <= TENANT_CAP, "a tenant has more running than it may"
        assert self.mesh.running == len(self.running), "the scheduler counts other slots than the callers hold"
        assert self.mesh.waiting == len(self.waiting), "a request was lost or counted twice"
        hopeful = {Readiness.READY, Readiness.LOADING} & {self.readiness[model] for model in POOL}
        # A tenant at its cap waits for its own running requests.
        held_up = {"capped"} if capped == TENANT_CAP else set()
        waiting = [self.submitted[key] for key in self.waiting]
        in_vain = any(each.spec.model in ("p", "m-a") and each.spec.tenant not in held_up for each in waiting)
        assert not in_vain or hopeful or self.waking.keys() & set(POOL), "somebody waits for nothing"

    def become(self, readiness: Readiness) -> None:
        """Every model is in this state, and each wake under way fails."""
        self.readiness = dict.fromkeys(self.readiness, readiness)
        self.show()
        for model in sorted(self.waking):
            self.end_wake(model, Reason.WAKE_FAILED)
        self.wait(SETTLE_SECONDS)

    def recover(self) -> None:
        """Everything that broke works again, and what is being woken wakes."""
        for model in (*POOL, REMOTE):
            self.readiness[model] = Readiness.READY
        for model in SWAPPED:
            if self.readiness[model] in (Readiness.DOWN, Readiness.LOADING):
                self.readiness[model] = Readiness.ASLEEP
        self.show()

    def serve_all(self, seconds: float) -> None:
        """Let everything run for so long: each quarter of a second ends what runs and what wakes."""
        for _ in range(int(seconds * 4)):
            self.wait(0.25)
            for model in sorted(self.waking):
                self.end_wake(model)
            for key in sorted(self.running):
                self.finish(key)
            if not self.waiting and not self.running:
                return
