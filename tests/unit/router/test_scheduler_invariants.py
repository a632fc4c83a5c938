"""Whatever happens in whatever order: nobody is lost, nobody is told twice, no slot is used twice, no model is woken
twice at once.
"""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st
from scheduler_harness import arrival, candidate, failed, scheduler

from router_svc.policy.decisions import Decision, Placed, Rejects, StopsWaking, Wakes
from router_svc.policy.endpoints.candidates import Candidate, Readiness
from weft.kernel.reasons import Reason
from weft.kernel.request import Priority

RUNNERS = "abc"
MODELS = tuple(f"{kind}-{runner}" for runner in RUNNERS for kind in "mn")
"""Two models of one pool on each runner."""
SLOTS = 2
RUNNER_MAX_REQUESTS = 3
SETTLE_SECONDS = 10.0
DOWN = (Readiness.DOWN,) * len(MODELS)
FAILURES = (Reason.SERVER_DIED, Reason.NO_SLOT_AVAILABLE, Reason.CANCELLED, Reason.BACKEND_NOT_READY)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.tuples(st.sampled_from(Priority), st.sampled_from(("p", "m-a")))),
        st.tuples(st.just("finish"), st.integers(0, 30)),
        st.tuples(st.just("fail"), st.sampled_from(FAILURES)),
        st.tuples(st.just("fleet"), st.tuples(*[st.sampled_from(Readiness)] * len(MODELS))),
        st.tuples(st.just("restart"), st.sampled_from(RUNNERS)),
        st.tuples(st.just("wake"), st.tuples(st.integers(0, 5), st.sampled_from((None, "no")), st.booleans())),
        st.tuples(st.just("wait"), st.floats(0.0, 20.0)),
    ),
    max_size=60,
)


class Observer:
    """What callers and the waker would have seen."""

    def __init__(self) -> None:
        self.readiness: tuple[Readiness, ...] = (Readiness.READY,) * len(MODELS)
        self.incarnations = dict.fromkeys(RUNNERS, 1)
        self.mesh = scheduler(*self.fleet(), queue_depth_per_runner=3, wake_settle_seconds=SETTLE_SECONDS)
        self.now = 0.0
        self.submitted = 0
        self.running: dict[int, Placed] = {}
        self.waiting: set[int] = set()
        self.over: set[int] = set()
        self.waking: set[str] = set()
        self.woken_at = float("-inf")
        self.believed: set[str] = set()
        """Models that are awake as their runners report."""

    def fleet(self) -> list[Candidate]:
        return [
            candidate(
                model[-1],
                model,
                pool="p",
                slots=SLOTS,
                readiness=state,
                runner_max_requests=RUNNER_MAX_REQUESTS,
                runner_wakes=True,
                incarnation=str(self.incarnations[model[-1]]),
            )
            for model, state in self.told()
        ]

    def told(self) -> list[tuple[str, Readiness]]:
        return list(zip(MODELS, self.readiness, strict=True))

    def hear(self, decisions: list[Decision]) -> None:
        for decision in decisions:
            if isinstance(decision, Wakes):
                assert decision.model not in self.waking, "a model is woken twice at once"
                self.waking.add(decision.model)
                continue
            if isinstance(decision, StopsWaking):
                assert decision.model in self.waking, "a wake is given up that is not under way"
                continue
            assert decision.key not in self.over, "a decision about a request that was over"
            if isinstance(decision, Placed):
                assert decision.key in self.waiting, "placed while it was running"
                assert decision.candidate.readiness is Readiness.READY, "placed where nothing takes requests"
                self.waiting.discard(decision.key)
                self.running[decision.key] = decision
            elif isinstance(decision, Rejects):
                self._end(decision.key)

    def _end(self, key: int) -> None:
        self.waiting.discard(key)
        self.running.pop(key, None)
        self.over.add(key)

    def step(self, kind: str, argument: object) -> None:
        match kind, argument:
            case "submit", (Priority() as priority, str(target)):
                self.submitted += 1
                self.waiting.add(self.submitted)
                request = arrival(self.submitted, target, priority=priority, arrived_at=self.now)
                self.hear(self.mesh.submit(request, self.now))
            case "finish", int(key) if key in self.running.keys() | self.waiting:
                self._end(key)
                self.hear(self.mesh.finish(key, self.now))
            case "fail", Reason() as reason if self.running:
                key, was = next(iter(self.running.items()))
                del self.running[key]
                self.waiting.add(key)
                self.hear(self.mesh.report_failed(key, was.attempt, reason, self.now))
            case _:
                self._step_of_mesh(kind, argument)

    def _step_of_mesh(self, kind: str, argument: object) -> None:
        match kind, argument:
            case "fleet", tuple(readiness):
                self.believed -= {model for (model, was), now in zip(self.told(), readiness, strict=True) if was != now}
                self.readiness = readiness
                self.hear(self.mesh.show(self.fleet(), self.now))
            case "restart", str(runner):
                self.incarnations[runner] += 1
                self.believed -= {model for model in MODELS if model[-1] == runner}
                self.hear(self.mesh.show(self.fleet(), self.now))
            case "wake", (int(index), None | str() as error, bool(self_reported)) if self.waking:
                model = sorted(self.waking)[index % len(self.waking)]
                self.waking.remove(model)
                self.woken_at = self.now if error is None else self.woken_at
                self.believed |= {model} if error is None and self_reported else set()
                self.hear(
                    self.mesh.wake_finished(
                        model, failed(error) if error else None, self.now, self_reported=self_reported
                    )
                )
            case "wait", float(seconds):
                self.now += seconds
                self.hear(self.mesh.tick(self.now))

    def fail_wakes(self) -> None:
        """End every wake that is under way; those that begin because of that go on."""
        for model in sorted(self.waking):
            self.waking.remove(model)
            self.hear(self.mesh.wake_finished(model, failed("no"), self.now))

    def check(self) -> None:
        slots = Counter(placed.candidate.key for placed in self.running.values())
        assert all(count <= SLOTS for count in slots.values()), "a slot was used twice"
        runners = Counter((p.candidate.runner, p.candidate.incarnation) for p in self.running.values())
        assert all(count <= RUNNER_MAX_REQUESTS for count in runners.values()), "a runner works on too many requests"
        assert self.mesh.running == len(self.running), "the scheduler counts other slots than the callers hold"
        assert self.mesh.waiting == len(self.waiting), "a request was lost or counted twice"
        hopeful = {Readiness.READY, Readiness.LOADING} & set(self.readiness)
        settling = self.now < self.woken_at + SETTLE_SECONDS
        believed = self.believed & {model for model, state in self.told() if state is Readiness.ASLEEP}
        assert not self.waiting or hopeful or self.waking or settling or believed, "somebody waits for nothing"


@given(STEPS)
def test_every_request_is_placed_waiting_or_over_and_never_two_of_them(steps: list[tuple[str, object]]) -> None:
    observer = Observer()
    for kind, argument in steps:
        observer.step(kind, argument)
        observer.check()
    observer.step("fleet", DOWN)
    observer.fail_wakes()
    observer.step("wait", SETTLE_SECONDS)
    assert not observer.waiting, "somebody waits for runners that are all down"


@given(STEPS)
def test_when_every_wake_ends_and_time_passes_every_waiting_request_ends(
    steps: list[tuple[str, object]],
) -> None:
    observer = Observer()
    for kind, argument in steps:
        observer.step(kind, argument)
    observer.step("fleet", (Readiness.ASLEEP,) * len(MODELS))
    for _ in range(2 * len(MODELS)):
        observer.fail_wakes()
        observer.step("wait", SETTLE_SECONDS)
        observer.check()
    assert not observer.waiting, "a request wakes models for ever"
