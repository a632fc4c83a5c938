"""Tasks after refused offers and failed attempts, and the round-robin of their lanes."""

import pytest

from router_svc.durable.tasks.task_dispatcher import next_turns
from router_svc.durable.tasks.task_records import Lane
from router_svc.policy.task_release import KeepBounds, KeptTasks, Release, ReleaseBound, releases
from router_svc.policy.task_retry import (
    MAX_FRUITLESS_ATTEMPTS,
    MAX_OFFER_PAUSE_SECONDS,
    GivesUp,
    OfferAgain,
    TryAgain,
    after_failed_attempt,
    after_refused_offer,
    doubled,
)
from weft.kernel.errors.error_tree import LASTING, WeftError
from weft.kernel.errors.reasons import Reason, traits
from weft.kernel.requests.request_values import Priority

FINAL = {
    Reason.INVALID_ARGUMENT,
    Reason.MALFORMED_REQUEST,
    Reason.REQUEST_TOO_LARGE,
    Reason.CONTEXT_LENGTH_EXCEEDED,
    Reason.METHOD_NOT_ALLOWED,
    Reason.ALREADY_EXISTS,
    Reason.UNAUTHENTICATED,
    Reason.PERMISSION_DENIED,
    Reason.IDEMPOTENCY_CONFLICT,
    Reason.OPERATION_REFUSED,
    Reason.BACKEND_REJECTED,
    Reason.NOT_FOUND,
    Reason.UNSUPPORTED_OPERATION,
    Reason.MODALITY_UNSUPPORTED,
    Reason.RESOURCE_IN_USE,
    Reason.OUT_OF_MEMORY,
    Reason.REPEATED_LINE_LOOP,
    Reason.CONSTRAINT_NOT_MET,
    Reason.TOOL_CALL_INVALID,
    Reason.TEMPLATE_FAILED,
}

WAITS = {Reason.MODEL_NOT_FOUND, Reason.NO_RUNNER_AVAILABLE, Reason.UNSUPPORTED_OPERATION, Reason.QUEUE_FULL}


def failed(reason: Reason, failures: int = 1, max_attempts: int = 5) -> TryAgain | GivesUp:
    return after_failed_attempt(
        WeftError(reason, "why"),
        failures,
        failures - 1,
        max_attempts,
        was_taken=True,
        first_pause_seconds=1.0,
        max_seconds=60.0,
    )


def not_taken(reason: Reason, attempt: int, failures: int = 0) -> TryAgain | GivesUp:
    return after_failed_attempt(
        WeftError(reason, "why"), attempt, failures, 2, was_taken=False, first_pause_seconds=1.0, max_seconds=60.0
    )


@pytest.mark.parametrize("reason", list(Reason), ids=lambda reason: reason.name)
def test_attempt_is_retried_unless_the_failure_is_final(reason: Reason) -> None:
    assert isinstance(failed(reason), GivesUp) is (reason in FINAL)


@pytest.mark.parametrize("reason", list(Reason), ids=lambda reason: reason.name)
def test_possibly_temporary_failures_are_retried(reason: Reason) -> None:
    # A model's malformed tool call may be sampled well the next time; it is the caller who decides that.
    if traits(reason).retryable and reason is not Reason.TOOL_CALL_INVALID:
        assert isinstance(failed(reason), TryAgain)


@pytest.mark.parametrize("reason", [Reason.BACKEND_PROTOCOL_ERROR, Reason.BACKEND_ERROR])
def test_bug_html_page_or_refused_key_was_tried_five_times(reason: Reason) -> None:
    error = WeftError(reason, "the engine answered with 'text/html'", metadata={LASTING: "true"})
    verdict = after_failed_attempt(error, 1, 0, 5, was_taken=True, first_pause_seconds=1.0, max_seconds=60.0)
    assert verdict == GivesUp(reason, "the engine answered with 'text/html'")


def test_task_waits_as_long_as_a_provider_asks_for_and_loses_no_attempt() -> None:
    error = WeftError(Reason.RATE_LIMIT_EXCEEDED, "30 requests per minute", retry_after_seconds=120.0)
    verdict = after_failed_attempt(error, 1, 0, 1, was_taken=True, first_pause_seconds=1.0, max_seconds=60.0)
    assert verdict == TryAgain(120.0, counts=False)


@pytest.mark.parametrize(("reason", "longest"), [(Reason.BACKEND_NOT_READY, 3600.0), (Reason.SHUTTING_DOWN, 60.0)])
def test_only_a_busy_provider_makes_a_task_wait_longer_than_the_longest_backoff(reason: Reason, longest: float) -> None:
    error = WeftError(reason, "later", retry_after_seconds=86_400.0)
    verdict = after_failed_attempt(error, 1, 0, 5, was_taken=True, first_pause_seconds=1.0, max_seconds=60.0)
    assert verdict == TryAgain(longest, counts=False)


def test_backoff_doubles_up_to_its_bound() -> None:
    pauses = [failed(Reason.WORKER_LOST, failures, 200) for failures in (1, 2, 3, 6, 7, 8, 199)]
    assert pauses == [TryAgain(seconds) for seconds in (1.0, 2.0, 4.0, 32.0, 60.0, 60.0, 60.0)]
    assert doubled(1.0, 100_000, 60.0) == 60.0


def test_exhausted_attempts_report_the_last_reason_and_the_count() -> None:
    assert failed(Reason.WORKER_LOST, 4, 5) == TryAgain(8.0)
    assert failed(Reason.WORKER_LOST, 5, 5) == GivesUp(Reason.WORKER_LOST, "after 5 attempts: why")
    assert failed(Reason.WORKER_LOST, 1, 1) == GivesUp(Reason.WORKER_LOST, "after 1 attempt: why")


@pytest.mark.parametrize(
    "reason", [Reason.WORKER_LOST, Reason.CONNECT_FAILED, Reason.NO_SLOT_AVAILABLE, Reason.WORKER_RESTARTED]
)
def test_unclaimed_or_deliberately_stopped_attempt_is_not_counted_and_backs_off_longer(reason: Reason) -> None:
    found = [not_taken(reason, attempt) for attempt in (1, 2, 5, 50)]
    assert found == [TryAgain(seconds, counts=False) for seconds in (1.0, 2.0, 16.0, 60.0)]
    assert not_taken(reason, 3, failures=1) == TryAgain(2.0, counts=False)


def test_task_accepted_by_no_runner_ends_after_a_bounded_number_of_attempts() -> None:
    assert not_taken(Reason.WORKER_LOST, MAX_FRUITLESS_ATTEMPTS + 1) == TryAgain(1.0)
    last = not_taken(Reason.WORKER_LOST, MAX_FRUITLESS_ATTEMPTS + 2, failures=1)
    assert last == GivesUp(Reason.WORKER_LOST, "after 2 attempts: why")


def test_stall_counts_as_an_attempt_even_without_runner_output() -> None:
    assert not_taken(Reason.STALL_TIMEOUT, 1) == TryAgain(1.0)


@pytest.mark.parametrize("reason", list(Reason), ids=lambda reason: reason.name)
def test_refusal_before_the_claim_means_waiting_unless_it_is_final(reason: Reason) -> None:
    verdict = after_refused_offer(WeftError(reason, "why"), 1)
    if reason in WAITS:
        assert isinstance(verdict, OfferAgain)
    if isinstance(verdict, GivesUp):
        assert reason in FINAL
        assert not traits(reason).retryable


def test_offers_are_repeated_after_a_doubling_or_requested_backoff() -> None:
    def pause(refusals: int, asked: float | None = None) -> float:
        verdict = after_refused_offer(WeftError(Reason.QUEUE_FULL, "full", retry_after_seconds=asked), refusals)
        assert isinstance(verdict, OfferAgain)
        return verdict.pause_seconds

    assert [pause(refusals) for refusals in (1, 2, 5, 6, 50)] == [1.0, 2.0, 16.0, 30.0, 30.0]
    assert pause(1, 12.0) == 12.0
    assert pause(5, 12.0) == 16.0
    assert pause(1, 10_000.0) == MAX_OFFER_PAUSE_SECONDS


def test_missing_capability_of_one_task_does_not_block_its_lane() -> None:
    skills = after_refused_offer(WeftError(Reason.MODALITY_UNSUPPORTED, "no images"), 1)
    nobody = after_refused_offer(WeftError(Reason.MODEL_NOT_FOUND, "no model"), 1)
    assert isinstance(skills, OfferAgain)
    assert isinstance(nobody, OfferAgain)
    assert (skills.whole_lane, nobody.whole_lane) == (False, True)


def lane(model: str) -> Lane:
    return Lane(model, "ann", Priority.NORMAL)


def turns(counts: dict[str, tuple[int, int]], *, after: str | None = None, per_lane: int = 4, free: int = 100) -> str:
    left = {lane(name): min(ready, per_lane - offered) for name, (ready, offered) in counts.items()}
    last = None if after is None else lane(after)
    return "".join(each.model for each in next_turns(left, after=last, free=free))


def test_lanes_take_turns_with_one_task_each() -> None:
    assert turns({"a": (9, 0), "b": (1, 0), "c": (2, 0)}) == "abcacaa"


def test_lane_never_exceeds_its_limit_of_offered_tasks() -> None:
    assert turns({"a": (9, 3), "b": (9, 4), "c": (9, 9)}) == "a"


def test_scarce_places_go_to_the_lanes_after_the_last_served_one() -> None:
    counts = {"a": (9, 0), "b": (9, 0), "c": (9, 0)}
    assert turns(counts, after="a", free=2) == "bc"
    assert turns(counts, after="c", free=2) == "ab"
    assert turns(counts, after="gone", free=2) == "ab"
    assert turns(counts, free=0) == ""


def test_lanes_without_a_ready_task_are_skipped() -> None:
    assert turns({"a": (0, 0), "b": (1, 0)}) == "b"
    assert turns({}) == ""


BOUNDS = KeepBounds(max_per_tenant=3, max_tenant_bytes=100, max_bytes=150)


def released(**kept: tuple[int, int]) -> list[Release]:
    tenants = {tenant: KeptTasks(count=count, size=size) for tenant, (count, size) in kept.items()}
    return list(releases(tenants, BOUNDS))


def test_no_record_is_released_within_the_bounds() -> None:
    assert released() == []
    assert released(ann=(3, 100), bob=(3, 50)) == []


def test_tenant_beyond_its_bounds_loses_only_its_own_oldest_records() -> None:
    assert released(ann=(5, 20), bob=(1, 1)) == [Release(bound=ReleaseBound.COUNT, tenant="ann", count=2)]
    assert released(ann=(1, 130), bob=(1, 1)) == [Release(bound=ReleaseBound.TENANT_BYTES, tenant="ann", size=30)]
    both = [
        Release(bound=ReleaseBound.COUNT, tenant="ann", count=1),
        Release(bound=ReleaseBound.TENANT_BYTES, tenant="ann", size=1),
    ]
    assert released(ann=(4, 101)) == both


def test_total_bound_applies_to_what_remains_after_tenant_bounds() -> None:
    assert released(ann=(1, 90), bob=(1, 90)) == [Release(bound=ReleaseBound.BYTES, tenant="", size=30)]
    assert released(ann=(1, 5_000), bob=(1, 40)) == [Release(bound=ReleaseBound.TENANT_BYTES, tenant="ann", size=4_900)]
