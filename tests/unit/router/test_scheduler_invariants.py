"""Whatever happens in whatever order: nobody is lost, nobody is told twice, no slot is used twice."""

from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_harness import arrival, candidate, scheduler

from router_svc.policy.candidates import Candidate, Fleet, Readiness
from router_svc.policy.decisions import Decision, Placed, Rejects
from weft.kernel.reasons import Reason
from weft.kernel.request import Priority

RUNNERS = "abc"
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.sampled_from(Priority)),
        st.tuples(st.just("finish"), st.integers(0, 30)),
        st.tuples(st.just("fail"), st.sampled_from([Reason.SERVER_DIED, Reason.NO_SLOT_AVAILABLE, Reason.CANCELLED])),
        st.tuples(st.just("fleet"), st.tuples(*[st.sampled_from(Readiness)] * len(RUNNERS))),
        st.tuples(st.just("wait"), st.floats(0.0, 20.0)),
    ),
    max_size=60,
)


class Observer:
    """What a caller would have seen of each request."""

    def __init__(self) -> None:
        self.mesh = scheduler(*self._fleet([Readiness.READY] * len(RUNNERS)), queue_depth_per_runner=3)
        self.now = 0.0
        self.submitted = 0
        self.running: dict[int, Placed] = {}
        self.waiting: set[int] = set()
        self.over: set[int] = set()

    @staticmethod
    def _fleet(readiness: list[Readiness]) -> list[Candidate]:
        return [
            candidate(name, pool="p", model=f"m-{name}", slots=2, readiness=state)
            for name, state in zip(RUNNERS, readiness, strict=True)
        ]

    def hear(self, decisions: list[Decision]) -> None:
        for decision in decisions:
            assert decision.key not in self.over, "a decision about a request that was over"
            if isinstance(decision, Placed):
                assert decision.key in self.waiting, "placed while it was running"
                self.waiting.discard(decision.key)
                self.running[decision.key] = decision
            elif isinstance(decision, Rejects):
                self._end(decision.key)

    def _end(self, key: int) -> None:
        self.waiting.discard(key)
        self.running.pop(key, None)
        self.over.add(key)

    def step(self, kind: str, argument: object) -> None:
        if kind == "submit":
            self.submitted += 1
            self.waiting.add(self.submitted)
            request = arrival(self.submitted, "p", priority=argument, arrived_at=self.now)
            self.hear(self.mesh.submit(request, self.now))
        elif kind == "finish" and isinstance(argument, int) and argument in self.running.keys() | self.waiting:
            self._end(argument)
            self.hear(self.mesh.finish(argument, self.now))
        elif kind == "fail" and self.running and isinstance(argument, Reason):
            key, was = next(iter(self.running.items()))
            del self.running[key]
            self.waiting.add(key)
            self.hear(self.mesh.report_failed(key, was.attempt, argument, self.now))
        elif kind == "fleet" and isinstance(argument, tuple):
            self.hear(self.mesh.update_fleet(Fleet.of(self._fleet(list(argument))), self.now))
        elif kind == "wait" and isinstance(argument, float):
            self.now += argument
            self.hear(self.mesh.tick(self.now))

    def check(self) -> None:
        used: dict[str, int] = {}
        for placed in self.running.values():
            used[placed.candidate.runner] = used.get(placed.candidate.runner, 0) + 1
        assert all(count <= 2 for count in used.values()), "a slot was used twice"
        assert self.mesh.running == len(self.running), "the scheduler counts other slots than the callers hold"
        assert self.mesh.waiting == len(self.waiting), "a request was lost or counted twice"


@settings(max_examples=300, deadline=None)
@given(STEPS)
def test_every_request_is_placed_waiting_or_over_and_never_two_of_them(steps: list[tuple[str, object]]) -> None:
    observer = Observer()
    for kind, argument in steps:
        observer.step(kind, argument)
        observer.check()
    observer.step("fleet", (Readiness.DOWN,) * len(RUNNERS))
    assert not observer.waiting, "somebody waits for runners that are all down"
