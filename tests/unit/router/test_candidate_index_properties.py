"""After any sequence of events the index agrees with a model that examines every candidate."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from index_harness import CHAT, index, member, pick

from router_svc.policy.endpoints.candidates import Candidate, Needs, Readiness
from router_svc.policy.endpoints.choice import PickRequest
from router_svc.policy.endpoints.circuit_breaker import HealthState
from router_svc.policy.endpoints.pool import Endpoint
from router_svc.policy.endpoints.required_capabilities import fits
from router_svc.policy.pool_settings import ChoicePolicy
from weft.kernel.errors.failover import FailureKind
from weft.kernel.requests.request_values import Operation

NAMES = "abcdef"
POOLS = "pq"
MAX_IN_FLIGHT = 5
EMBED = Needs(Operation.EMBEDDING)
SOME_NAMES = st.sets(st.sampled_from(NAMES), max_size=3)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("ask"), st.tuples(st.sampled_from(POOLS), st.sampled_from((CHAT, EMBED)), SOME_NAMES)),
        st.tuples(st.just("release"), st.integers(0, 10)),
        st.tuples(
            st.just("put"),
            st.tuples(
                st.sampled_from(NAMES),
                st.sampled_from(POOLS),
                st.sampled_from((Readiness.READY, Readiness.READY, Readiness.ASLEEP, Readiness.DOWN)),
                st.integers(1, 3),
                st.integers(0, 4),
                st.booleans(),
            ),
        ),
        st.tuples(st.just("restart"), st.sampled_from(NAMES)),
        st.tuples(st.just("drop"), st.sampled_from(NAMES)),
        st.tuples(st.just("hold"), SOME_NAMES),
        st.tuples(st.just("fail"), st.tuples(st.sampled_from(NAMES), st.sampled_from(FailureKind), st.integers(1, 6))),
        st.tuples(st.just("succeed"), st.sampled_from(NAMES)),
        st.tuples(st.just("wait"), st.sampled_from((0.1, 0.3, 1.0, 5.0, 12.0))),
    ),
    min_size=5,
    max_size=60,
)


class Looker:
    """Knows every input of the index, and computes each answer from scratch."""

    def __init__(self, policy: ChoicePolicy) -> None:
        self.policy = policy
        self.incarnations = dict.fromkeys(NAMES, 1)
        self.known: dict[str, Candidate] = {}
        self.running: list[Candidate] = []
        self.held: set[tuple[str, str, str]] = set()
        self.now = 0.0
        self.mesh = index(policy=policy, max_in_flight=MAX_IN_FLIGHT)
        for name in NAMES:
            self.put(name, "p" if name < "d" else "q", Readiness.READY, slots=2, limit=0, embeds=False)

    def put(self, name: str, pool: str, readiness: Readiness, *, slots: int, limit: int, embeds: bool) -> None:
        """Two candidates share a runner."""
        self.known[name] = member(
            name,
            pool,
            runner=f"on-{'abcabc'[NAMES.index(name)]}",
            incarnation=str(self.incarnations[name]),
            readiness=readiness,
            slots=slots,
            runner_max_requests=limit,
            operations=frozenset(Operation) if embeds else frozenset({Operation.CHAT}),
        )
        self.mesh.table.put(self.known[name])

    def in_flight(self, candidate: Candidate) -> int:
        return sum(running.key == candidate.key for running in self.running)

    def on_runner(self, candidate: Candidate) -> int:
        return sum(running.key[1:] == candidate.key[1:] for running in self.running)

    def has_room(self, candidate: Candidate) -> bool:
        limit = candidate.runner_max_requests
        return self.in_flight(candidate) < candidate.slots and (not limit or self.on_runner(candidate) < limit)

    def seat(self, candidate: Candidate) -> Endpoint:
        return self.mesh.table.by_key[candidate.key]

    def takes(self, candidate: Candidate, asked: PickRequest) -> bool:
        """Whether it would take such a request, were it not for how it did."""
        return (
            candidate.readiness is Readiness.READY
            and candidate.key not in self.held | asked.excluded
            and not fits(candidate, asked.needs)
        )

    def works(self, candidate: Candidate) -> bool:
        return self.seat(candidate).health.state is HealthState.WORKS

    def free(self, queue: str, asked: PickRequest) -> list[Candidate]:
        members = [candidate for candidate in self.known.values() if candidate.pool == queue]
        able = [candidate for candidate in members if self.takes(candidate, asked)]
        free = [each for each in able if self.has_room(each) and not self.seat(each).health.paused]
        on_trial = [each for each in free if self.seat(each).health.state is HealthState.ON_TRIAL]
        on_trial = [each for each in on_trial if not self.seat(each).trying]
        best = [each for each in free if self.works(each)] + on_trial
        if best or any(self.works(each) for each in able):
            return best
        return free

    def ask(self, queue: str, needs: Needs, excluded: set[str]) -> None:
        gone = frozenset(self.known[name].key for name in excluded if name in self.known)
        asked = pick(needs, excluded=gone, seed=len(self.running))
        self.mesh.health.advance(self.now)
        free = self.free(queue, asked)
        capped = self.in_line[queue] >= MAX_IN_FLIGHT
        choice = self.mesh.choose(queue, asked, self.now)
        if capped or not free:
            assert choice is None, "somebody was chosen who is not free"
            return
        assert choice is not None, f"{[each.model for each in free]} were overlooked"
        assert choice.candidate in free
        assert self.mesh.has_free(queue), "it was said that nobody is free"
        if self.policy is ChoicePolicy.LEAST_LOADED:
            least = min(self.in_flight(each) / each.slots for each in free)
            assert self.in_flight(choice.candidate) / choice.candidate.slots == least
        self.mesh.take(choice.candidate)
        self.running.append(choice.candidate)

    @property
    def in_line(self) -> Counter[str]:
        """Requests by pool: by the one that their candidate is in now, or was in when it went."""
        return Counter({queue: self.mesh.in_flight_of_queue(queue) for queue in POOLS})

    def step(self, kind: str, argument: object) -> None:
        match kind, argument:
            case "ask", (str(queue), Needs() as needs, set(excluded)):
                self.ask(queue, needs, excluded)
            case "release", int(number) if number < len(self.running):
                self.mesh.release(self.running.pop(number))
            case "put", (str(name), str(pool), Readiness() as readiness, int(slots), int(limit), bool(embeds)):
                self.put(name, pool, readiness, slots=slots, limit=limit, embeds=embeds)
            case "restart", str(name) if name in self.known:
                self.incarnations[name] += 1
                was = self.known[name]
                self.put(name, was.pool, was.readiness, slots=was.slots, limit=0, embeds=False)
            case "drop", str(name):
                self.mesh.table.drop(name)
                self.known.pop(name, None)
            case "hold", set(names):
                self.held = {self.known[name].key for name in names if name in self.known}
                self.mesh.table.hold(frozenset(self.held))
            case _:
                self._step_of_health(kind, argument)

    def _step_of_health(self, kind: str, argument: object) -> None:
        match kind, argument:
            case "fail", (str(name), FailureKind() as failure, int(times)) if name in self.known:
                for _ in range(times):
                    self.mesh.health.note_failure(self.known[name], failure, self.now)
            case "succeed", str(name) if name in self.known:
                self.mesh.health.note_content(self.known[name], self.now)
            case "wait", float(seconds):
                self.now += seconds

    def check(self) -> None:
        assert self.mesh.total_in_flight == len(self.running)
        self.mesh.health.advance(self.now)
        for candidate in self.known.values():
            assert self.mesh.table.candidate(candidate.model) == candidate
            assert self.mesh.in_flight(candidate) == self.in_flight(candidate)
            assert self.mesh.on_runner(candidate) == self.on_runner(candidate)
        for queue in POOLS:
            members = [candidate for candidate in self.known.values() if candidate.pool == queue]
            assert sorted(each.model for each in self.mesh.table.members(queue)) == sorted(
                each.model for each in members
            )
            permitted = {each.model for each in self.mesh.permitted(queue, CHAT, frozenset())}
            assert permitted == {each.model for each in members if each.readiness is not Readiness.DOWN}
        assert len(self.mesh.table.by_key) <= len(self.known) + len(self.running)


@given(policy=st.sampled_from(ChoicePolicy), steps=STEPS)
def test_index_equals_a_full_scan_of_the_candidates(policy: ChoicePolicy, steps: list[tuple[str, object]]) -> None:
    looker = Looker(policy)
    for kind, argument in steps:
        looker.step(kind, argument)
        looker.check()


def test_scan_detects_an_index_that_ignores_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    looker = Looker(ChoicePolicy.ROUND_ROBIN)
    monkeypatch.setattr(looker.mesh.table, "hold", lambda _keys: None)
    looker.step("hold", {"a", "b", "c"})
    with pytest.raises(AssertionError, match="who is not free"):
        looker.step("ask", ("p", CHAT, set()))


def test_scan_detects_an_index_that_misses_free_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    looker = Looker(ChoicePolicy.LEAST_LOADED)
    monkeypatch.setattr(looker.mesh, "choose", lambda _line, _wish, _now: None)
    with pytest.raises(AssertionError, match="overlooked"):
        looker.step("ask", ("p", CHAT, set()))
