"""Candidates that break: ejected for growing times, tried with one request, and never the last one."""

from collections import Counter

import pytest
from index_harness import index, member, pick, place

from router_svc.policy.endpoints.candidate_index import CandidateIndex
from router_svc.policy.endpoints.candidates import Candidate, Readiness
from router_svc.policy.endpoints.routes import Route
from weft.kernel.errors.failover import FailureKind, classify
from weft.kernel.errors.reasons import Reason

A, B, C = member("a"), member("b"), member("c")
TO_A = pick(excluded=frozenset({B.key, C.key}))


def break_down(mesh: CandidateIndex, candidate: Candidate, times: int, now: float) -> None:
    for _ in range(times):
        mesh.health.note_failure(candidate, FailureKind.BROKE, now)


def takes(mesh: CandidateIndex, candidate: Candidate, now: float) -> bool:
    """Whether it is among those whom a request may go to, when it need not be the only one."""
    found = mesh.choose("p", pick(excluded=frozenset({A.key, B.key, C.key} - {candidate.key})), now)
    return found is not None


def gate_of(mesh: CandidateIndex, candidate: Candidate, now: float) -> str:
    return next(each.gate for each in mesh.considered("p", pick(), now) if each.model == candidate.model)


def goes_to(mesh: CandidateIndex, now: float, requests: int = 12) -> set[str]:
    """Where so many requests go at once."""
    running = [candidate for _ in range(requests) if (candidate := place(mesh, now=now)) is not None]
    for candidate in running:
        mesh.release(candidate)
    return {candidate.model for candidate in running}


def test_endpoint_with_enough_consecutive_failures_is_ejected() -> None:
    mesh = index(A, B)
    break_down(mesh, A, 4, 0.0)
    assert goes_to(mesh, 1.0) == {"a", "b"}
    break_down(mesh, A, 1, 1.0)
    assert goes_to(mesh, 10.9) == {"b"}
    assert gate_of(mesh, A, 2.0) == "failed 5 times in a row; retried in 9 s"
    assert goes_to(mesh, 11.0) == {"a", "b"}


def test_success_resets_the_failure_count() -> None:
    mesh = index(A, B)
    for moment in range(4):
        break_down(mesh, A, 4, moment * 10.0)
        mesh.health.note_content(A, moment * 10.0)
    assert goes_to(mesh, 40.0) == {"a", "b"}


def test_endpoint_with_a_high_failure_rate_is_ejected_without_consecutive_failures() -> None:
    mesh = index(A, B)
    for _ in range(10):
        break_down(mesh, A, 2, 0.0)
        mesh.health.note_content(A, 0.0)
    assert goes_to(mesh, 5.0) == {"b"}
    assert gate_of(mesh, A, 5.0) == "failed 14 of its last 20 requests; retried in 5 s"


def test_non_streamed_answers_count_too() -> None:
    mesh = index(A, B)
    for _ in range(20):
        mesh.health.note_content(A, 0.0)
        break_down(mesh, A, 1, 0.0)
    assert goes_to(mesh, 5.0) == {"a", "b"}


def test_half_failed_or_few_requests_eject_no_endpoint() -> None:
    mesh = index(A, B, C)
    for _ in range(50):
        mesh.health.note_content(A, 0.0)
        break_down(mesh, A, 1, 0.0)
    for _ in range(4):
        break_down(mesh, B, 4, 0.0)
        mesh.health.note_content(B, 0.0)
    assert goes_to(mesh, 1.0) == {"a", "b", "c"}


def test_old_failures_do_not_count() -> None:
    mesh = index(A, B)
    for moment in range(40):
        break_down(mesh, A, 2, moment * 31.0)
        mesh.health.note_content(A, moment * 31.0)
    assert goes_to(mesh, 40 * 31.0) == {"a", "b"}


def test_ejected_endpoint_is_probed_with_one_request_at_a_time_after_its_pause() -> None:
    mesh = index(A, B)
    break_down(mesh, A, 5, 0.0)
    probe = place(mesh, asked=TO_A, now=10.0)
    assert probe == A
    assert goes_to(mesh, 10.0) == {"b"}
    assert gate_of(mesh, A, 10.0) == "a trial request is running there"
    mesh.release(A)
    assert place(mesh, asked=TO_A, now=10.0) == A, "a probe that ended without a word is repeated"
    mesh.health.note_content(A, 10.0)
    assert goes_to(mesh, 10.0) == {"a", "b"}


def test_endpoint_failing_its_probe_is_ejected_for_longer_each_time() -> None:
    mesh = index(A, B)
    break_down(mesh, A, 5, 0.0)
    now = 0.0
    for seconds in (10.0, 20.0, 30.0, 40.0):
        assert goes_to(mesh, now + seconds - 0.1) == {"b"}
        now += seconds
        assert place(mesh, asked=TO_A, now=now) == A
        mesh.release(A)
        break_down(mesh, A, 1, now)
    assert gate_of(mesh, A, now) == "failed its trial request; retried in 50 s"


def test_ejection_has_a_maximum_duration() -> None:
    mesh = index(A, B, limits={"max_ejection_seconds": 25.0})
    now = 0.0
    break_down(mesh, A, 5, now)
    for seconds in (10.0, 20.0, 25.0, 25.0):
        mesh.health.advance(now + 1.0)
        assert mesh.table.by_key[A.key].health.next_end == now + seconds
        now += seconds
        mesh.health.advance(now)
        break_down(mesh, A, 1, now)


def test_ejection_time_resets_after_working_as_long_as_it_was_ejected() -> None:
    mesh = index(A, B)
    break_down(mesh, A, 5, 0.0)
    mesh.health.advance(10.0)
    break_down(mesh, A, 1, 10.0)
    mesh.health.advance(30.0)
    mesh.health.note_content(A, 30.0)
    break_down(mesh, A, 5, 49.0)
    mesh.health.advance(51.0)
    assert mesh.table.by_key[A.key].health.next_end == 49.0 + 30.0, (
        "it had not worked for the 20 s of its last ejection"
    )
    mesh.health.advance(79.0)
    mesh.health.note_content(A, 79.0)
    break_down(mesh, A, 5, 109.0)
    mesh.health.advance(111.0)
    assert mesh.table.by_key[A.key].health.next_end == 109.0 + 10.0


def test_requests_in_flight_do_not_affect_an_ejection() -> None:
    mesh = index(A, B)
    break_down(mesh, A, 5, 0.0)
    break_down(mesh, A, 7, 2.0)
    mesh.health.note_content(A, 3.0)
    assert goes_to(mesh, 9.9) == {"b"}
    assert mesh.table.by_key[A.key].health.next_end == 10.0


def test_last_working_endpoint_is_never_ejected() -> None:
    mesh = index(A, B, C)
    for candidate in (A, B, C):
        break_down(mesh, candidate, 50, 0.0)
    assert goes_to(mesh, 1.0) == {"c"}


@pytest.mark.parametrize("other", [member("b", readiness=Readiness.DOWN), member("b", readiness=Readiness.ASLEEP)])
def test_endpoints_that_take_no_requests_do_not_count_as_alternatives(other: Candidate) -> None:
    mesh = index(A, other)
    break_down(mesh, A, 50, 0.0)
    assert goes_to(mesh, 1.0) == {"a"}


def test_last_endpoint_of_any_of_its_queues_is_never_ejected() -> None:
    routes = [Route(name="only-a", candidates=("a",))]
    mesh = index(A, B, routes=routes)
    break_down(mesh, A, 50, 0.0)
    assert goes_to(mesh, 1.0) == {"a", "b"}
    break_down(mesh, B, 50, 2.0)
    assert goes_to(mesh, 3.0) == {"a"}


def test_ejected_endpoint_is_used_again_when_the_others_are_gone() -> None:
    mesh = index(A, B)
    break_down(mesh, A, 5, 0.0)
    mesh.health.advance(2.0)
    mesh.table.take_freed()
    mesh.table.put(member("b", readiness=Readiness.DOWN))
    assert list(mesh.table.take_freed()) == ["p"]
    assert mesh.has_free("p")
    assert goes_to(mesh, 5.0) == {"a"}
    mesh.table.put(B)
    assert goes_to(mesh, 5.0) == {"b"}


def test_ejected_endpoint_is_used_by_a_request_that_tried_all_others() -> None:
    mesh = index(A, B)
    break_down(mesh, A, 5, 0.0)
    assert not takes(index(A, B, C), member("d"), 5.0)
    assert place(mesh, asked=TO_A, now=5.0) == A
    mesh.release(A)
    assert place(mesh, asked=pick(excluded=frozenset({A.key, B.key})), now=5.0) is None


def test_no_request_uses_an_ejected_endpoint_while_others_are_only_busy() -> None:
    busy = member("b", slots=1)
    mesh = index(A, busy)
    break_down(mesh, A, 5, 0.0)
    assert place(mesh, now=5.0) == busy
    assert place(mesh, now=5.0) is None


def test_new_incarnation_has_a_clean_record() -> None:
    mesh = index(A, B)
    break_down(mesh, A, 5, 0.0)
    mesh.health.note_content(B, 0.0)
    mesh.table.put(member("a", incarnation="2"))
    assert goes_to(mesh, 0.5) == {"a", "b"}
    assert mesh.health.is_clean(member("a", incarnation="2"), 0.5)


def test_recently_failed_endpoint_is_unclean_until_success_or_timeout() -> None:
    mesh = index(A, B)
    assert mesh.health.is_clean(A, 0.0)
    mesh.health.note_failure(A, FailureKind.BUSY, 0.0)
    assert mesh.health.is_clean(A, 0.0), "being full is no failure"
    break_down(mesh, A, 1, 0.0)
    assert not mesh.health.is_clean(A, 9.9)
    assert mesh.health.is_clean(A, 10.0)
    break_down(mesh, A, 1, 20.0)
    mesh.health.note_content(A, 21.0)
    assert mesh.health.is_clean(A, 21.0)
    break_down(mesh, A, 5, 30.0)
    mesh.health.advance(45.0)
    assert not mesh.health.is_clean(A, 45.0), "it has yet to be tried"


def test_only_proven_endpoints_are_clean_during_an_outage() -> None:
    mesh = index(A, B, C)
    mesh.health.note_content(B, 0.0)
    break_down(mesh, A, 4, 0.0)
    assert mesh.health.is_clean(B, 0.0)
    assert mesh.health.is_clean(C, 0.0), "nobody knows anything bad of it"
    break_down(mesh, A, 1, 0.0)
    assert mesh.health.is_clean(B, 0.0)
    assert not mesh.health.is_clean(C, 0.0), "everything breaks, and nobody knows anything good of it"
    mesh.health.note_content(B, 1.0)
    assert mesh.health.is_clean(C, 1.0)
    assert not mesh.health.is_clean(member("nobody"), 1.0)


def test_fault_f49_engine_with_protocol_errors_counts_as_broken_and_is_ejected() -> None:
    assert classify(Reason.BACKEND_PROTOCOL_ERROR) is FailureKind.BROKE
    mesh = index(A, B)
    now = 0.0
    gone_to: Counter[str] = Counter()
    for _ in range(100):
        now += 1.0
        candidate = place(mesh, now=now)
        assert candidate is not None
        gone_to[candidate.model] += 1
        mesh.release(candidate)
        if candidate.model == "a":
            mesh.health.note_failure(candidate, classify(Reason.BACKEND_PROTOCOL_ERROR), now)
        else:
            mesh.health.note_content(candidate, now)
    assert gone_to["a"] < 12


def test_insufficient_memory_counts_as_a_bounced_request() -> None:
    assert classify(Reason.INSUFFICIENT_MEMORY) is FailureKind.BOUNCED
