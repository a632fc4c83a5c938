"""Refused at once or not at all: full queues, overload, deadlines that cannot be met."""

import pytest
from scheduler_harness import Mesh, arrival, asleep, candidate, placed, refusals, rejected, scheduler

from router_svc.policy.decisions import Placed, Served, Waits
from router_svc.policy.endpoints.routes import Route
from router_svc.policy.queue.queue import MAX_REMEMBERED_KINDS
from weft.kernel.errors.reasons import Reason
from weft.kernel.requests.request_values import Priority

TOOK = Served(prompt_tokens=100, cached_tokens=0, output_tokens=100)


def measured(mesh: Mesh, seconds: float, times: int = 4, target: str = "m") -> None:
    """The model has answered a few requests, each in so many seconds."""
    for index in range(times):
        key, now = 9000 + index, index * seconds
        mesh.submit(arrival(key, target, arrived_at=now, prompt_tokens=100, max_output_tokens=100), now)
        mesh.report_first_content(key, now + seconds / 10)
        mesh.finish(key, now + seconds, TOOK)


def test_full_queue_refusal_has_length_and_retry_after() -> None:
    mesh = scheduler(candidate(), queue_depth_per_runner=2)
    decisions = [mesh.submit(arrival(key), 0.0) for key in range(1, 5)]
    refused = refusals(decisions[3])[4]
    assert refused.metadata == {"queueDepth": "2", "maxDepth": "2", "avgWaitMs": "0"}
    assert refused.retry_after_seconds == 5.0


def test_retry_after_follows_the_queue_throughput() -> None:
    mesh = scheduler(candidate(), queue_depth_per_runner=3, overload_after_seconds=1e9)
    for key in (1, 2, 3, 4):
        mesh.submit(arrival(key), 0.0)
    for key in (1, 2, 3):
        mesh.finish(key, 8.0 * key)
        mesh.submit(arrival(10 + key, arrived_at=8.0 * key), 8.0 * key)
    refused = refusals(mesh.submit(arrival(20, arrived_at=24.0), 24.0))[20]
    assert refused.retry_after_seconds == pytest.approx(8.0, abs=2.0)
    assert int(refused.metadata["avgWaitMs"]) > 0


def test_queue_timeout_error_has_length_and_retry_after() -> None:
    mesh = scheduler(candidate(), queue_timeout_seconds=30.0)
    mesh.submit(arrival(1), 0.0)
    mesh.submit(arrival(2), 0.0)
    refused = refusals(mesh.tick(30.0))[2]
    assert (refused.reason, refused.metadata["queueDepth"], refused.metadata["maxDepth"]) == (
        Reason.QUEUE_TIMEOUT,
        "1",
        "16",
    )


def test_higher_class_displaces_the_last_request_of_the_lowest_class_in_a_full_queue() -> None:
    mesh = scheduler(candidate(), queue_depth_per_runner=3)
    for key, band in ((1, Priority.NORMAL), (2, Priority.LOW), (3, Priority.NORMAL), (4, Priority.LOW)):
        mesh.submit(arrival(key, priority=band, arrived_at=float(key)), float(key))
    decisions = mesh.submit(arrival(5, priority=Priority.HIGH, arrived_at=5.0), 5.0)
    assert rejected(decisions) == {4: Reason.QUEUE_FULL}
    assert mesh.waiting == 3
    assert placed(mesh.finish(1, 6.0)) == {5: "a"}


def test_tenant_below_its_share_displaces_the_tenant_with_most_requests_in_a_full_queue() -> None:
    mesh = scheduler(candidate(), queue_depth_per_runner=4)
    for key in range(1, 6):
        mesh.submit(arrival(key, tenant="loud", arrived_at=float(key)), float(key))
    assert rejected(mesh.submit(arrival(6, tenant="loud", arrived_at=6.0), 6.0)) == {6: Reason.QUEUE_FULL}
    assert rejected(mesh.submit(arrival(7, tenant="quiet", arrived_at=7.0), 7.0)) == {5: Reason.QUEUE_FULL}
    assert rejected(mesh.submit(arrival(8, tenant="quiet", arrived_at=8.0), 8.0)) == {4: Reason.QUEUE_FULL}
    assert rejected(mesh.submit(arrival(9, tenant="quiet", arrived_at=9.0), 9.0)) == {9: Reason.QUEUE_FULL}


def test_class_displaces_no_request_of_a_tenant_with_fewer_in_a_full_queue() -> None:
    mesh = scheduler(candidate(), queue_depth_per_runner=4)
    for key in (1, 2, 3, 4):
        mesh.submit(arrival(key, tenant="loud", priority=Priority.HIGH), 0.0)
    mesh.submit(arrival(5, tenant="quiet", priority=Priority.LOW), 0.0)
    assert rejected(mesh.submit(arrival(6, tenant="loud", priority=Priority.HIGH), 0.0)) == {6: Reason.QUEUE_FULL}
    assert rejected(mesh.submit(arrival(7, tenant="new", priority=Priority.LOW), 0.0)) == {4: Reason.QUEUE_FULL}


def test_low_class_keeps_a_place_among_few_of_its_tenant_in_a_full_queue() -> None:
    mesh = scheduler(candidate(), queue_depth_per_runner=8)
    for key in range(1, 6):
        mesh.submit(arrival(key, tenant="other"), 0.0)
    for key, band in ((11, Priority.HIGH), (12, Priority.HIGH), (13, Priority.HIGH), (14, Priority.HIGH)):
        mesh.submit(arrival(key, priority=band), 0.0)
    assert rejected(mesh.submit(arrival(15, priority=Priority.LOW), 0.0)) == {14: Reason.QUEUE_FULL}
    assert rejected(mesh.submit(arrival(16, priority=Priority.LOW), 0.0)) == {16: Reason.QUEUE_FULL}
    assert rejected(mesh.submit(arrival(17, priority=Priority.HIGH), 0.0)) == {17: Reason.QUEUE_FULL}


def test_system_requests_are_never_displaced() -> None:
    mesh = scheduler(candidate(), queue_depth_per_runner=2)
    for key in (1, 2, 3):
        mesh.submit(arrival(key, priority=Priority.SYSTEM), 0.0)
    assert rejected(mesh.submit(arrival(4, priority=Priority.HIGH), 0.0)) == {4: Reason.QUEUE_FULL}
    assert rejected(mesh.submit(arrival(5, priority=Priority.SYSTEM, tenant="other"), 0.0)) == {5: Reason.QUEUE_FULL}


def test_request_that_would_wait_until_the_queue_timeout_is_refused_immediately_in_overload() -> None:
    mesh = scheduler(candidate(), queue_depth_per_runner=1000, queue_timeout_seconds=30.0)
    refused: dict[int, Reason] = {}
    served, key, running = 0, 1, 1
    mesh.submit(arrival(1), 0.0)
    for second in range(200):
        for _ in range(5):
            key += 1
            refused |= rejected(mesh.submit(arrival(key, arrived_at=float(second)), float(second)))
        late = rejected(mesh.tick(second + 0.5))
        assert not late or second < 45, "one that was taken in waited in vain"
        (running,) = placed(mesh.finish(running, second + 0.9))
        served += 1
    assert served == 200
    assert set(refused.values()) == {Reason.QUEUE_FULL}
    assert 10 <= mesh.waiting <= 30


def test_tenant_with_few_requests_is_still_admitted_in_overload() -> None:
    mesh = scheduler(candidate(), queue_depth_per_runner=1000)
    running, key = 1, 1
    mesh.submit(arrival(1, tenant="loud"), 0.0)
    for second in range(60):
        for _ in range(5):
            key += 1
            mesh.submit(arrival(key, tenant="loud", arrived_at=float(second)), float(second))
        mesh.tick(second + 0.5)
        (running,) = placed(mesh.finish(running, second + 0.9))
    more = [rejected(mesh.submit(arrival(key, tenant="loud", arrived_at=60.0), 60.0)) for key in range(9001, 9004)]
    assert more[-1] == {9003: Reason.QUEUE_FULL}
    assert rejected(mesh.submit(arrival(10000, tenant="quiet", arrived_at=60.0), 60.0)) == {}


def test_deadline_too_short_for_the_answer_is_refused_immediately_with_the_estimate() -> None:
    mesh = scheduler(candidate())
    measured(mesh, seconds=20.0)
    decisions = mesh.submit(arrival(1, deadline_at=110.0, max_output_tokens=100, arrived_at=100.0), 100.0)
    refused = refusals(decisions)[1]
    assert refused.reason is Reason.DEADLINE_UNREACHABLE
    assert float(refused.metadata["estimate_seconds"]) == pytest.approx(20.0, abs=0.5)
    assert refused.message.startswith("it would take about 20.0 s (20.0 s to answer)")
    assert placed(mesh.submit(arrival(2, deadline_at=130.0, max_output_tokens=100, arrived_at=100.0), 100.0))


def test_deadline_unreachable_because_of_a_load_is_refused_before_the_load() -> None:
    mesh = scheduler(asleep(usual_load_seconds=47.0))
    decisions = mesh.submit(arrival(1, deadline_at=30.0), 0.0)
    refused = refusals(decisions)[1]
    assert refused.reason is Reason.DEADLINE_UNREACHABLE
    assert "47.0 s until a model is loaded" in refused.message
    assert len(decisions) == 1, "nothing is woken for it"
    assert rejected(mesh.submit(arrival(2, deadline_at=60.0), 0.0)) == {}


def test_deadline_unreachable_because_of_the_queue_is_refused_immediately() -> None:
    mesh = scheduler(candidate())
    measured(mesh, seconds=10.0)
    for key in (1, 2, 3):
        mesh.submit(arrival(key, arrived_at=50.0, priority=Priority.HIGH), 50.0)
    decisions = mesh.submit(arrival(4, deadline_at=75.0, arrived_at=50.0, max_output_tokens=100), 50.0)
    assert rejected(decisions) == {4: Reason.DEADLINE_UNREACHABLE}


def test_no_request_is_refused_without_an_estimate() -> None:
    mesh = scheduler(asleep())
    assert rejected(mesh.submit(arrival(1, deadline_at=0.5), 0.0)) == {}


def test_waiting_request_is_refused_once_its_deadline_is_unreachable() -> None:
    mesh = scheduler(candidate())
    measured(mesh, seconds=10.0)
    mesh.submit(arrival(1, arrived_at=50.0), 50.0)
    assert rejected(mesh.submit(arrival(2, deadline_at=80.0, arrived_at=50.0, max_output_tokens=100), 50.0)) == {}
    ended = next(second for second in range(51, 90) if rejected(mesh.tick(float(second))))
    assert 60 <= ended < 80, "neither at once nor only when the deadline came"


def test_past_deadline_is_refused_as_exceeded() -> None:
    mesh = scheduler(candidate())
    mesh.submit(arrival(1), 0.0)
    assert rejected(mesh.submit(arrival(2, deadline_at=4.0), 5.0)) == {2: Reason.DEADLINE_EXCEEDED}


def test_route_budget_counts_like_a_deadline_from_arrival() -> None:
    mesh = scheduler(candidate())
    mesh.show([candidate()], 0.0, routes={"quick": Route(name="quick", candidates=("m",), budget_seconds=8.0)})
    measured(mesh, seconds=5.0)
    assert placed(mesh.submit(arrival(1, "route/quick", arrived_at=50.0, max_output_tokens=100), 50.0)) == {1: "a"}
    waits = mesh.submit(arrival(2, "route/quick", arrived_at=50.0, max_output_tokens=100), 50.0)
    assert isinstance(waits[0], Waits)
    late = mesh.submit(arrival(3, "route/quick", arrived_at=50.0, max_output_tokens=100), 50.0)
    assert rejected(late) == {3: Reason.DEADLINE_UNREACHABLE}


def test_request_that_used_up_its_route_budget_elsewhere_is_refused() -> None:
    mesh = scheduler(candidate())
    mesh.show([candidate()], 0.0, routes={"quick": Route(name="quick", candidates=("m",), budget_seconds=8.0)})
    mesh.submit(arrival(1), 0.0)
    assert rejected(mesh.submit(arrival(2, "route/quick", arrived_at=1.0), 20.0)) == {2: Reason.DEADLINE_EXCEEDED}


def charged(mesh: Mesh, tenant: str, target: str, tokens: int) -> None:
    """The tenant was served so much, elsewhere, and asks on there."""
    first = 8000 + tokens
    for key in (first, first + 1):
        mesh.submit(arrival(key, target, tenant=tenant), 0.0)
    mesh.finish(first, 0.0, Served(prompt_tokens=tokens, cached_tokens=0, output_tokens=0))


def test_less_served_tenant_takes_precedence_in_a_full_queue_despite_more_positions() -> None:
    """Only positions in the queue counted, so that tenants far below their share were refused everywhere."""
    mesh = scheduler(candidate(), candidate("b", "n", slots=2), queue_depth_per_runner=4)
    for tenant, tokens in (("greedy", 50_000), ("modest", 10)):
        charged(mesh, tenant, "n", tokens)
    mesh.submit(arrival(1, tenant="third", prompt_tokens=100), 0.0)
    for key, tenant in ((2, "modest"), (3, "modest"), (4, "modest"), (5, "greedy")):
        mesh.submit(arrival(key, tenant=tenant, prompt_tokens=100), 0.0)
    assert rejected(mesh.submit(arrival(6, tenant="modest", prompt_tokens=100), 1.0)) == {5: Reason.QUEUE_FULL}
    assert rejected(mesh.submit(arrival(7, tenant="greedy", prompt_tokens=100), 1.0)) == {7: Reason.QUEUE_FULL}


def test_less_served_tenant_is_admitted_in_overload_despite_its_slow_turns() -> None:
    """One grant in twenty seconds, in a queue that was cold, does not predict the next grants."""
    mesh = scheduler(candidate(), queue_depth_per_runner=1000)
    mesh.submit(arrival(1, tenant="loud"), 0.0)
    for key in range(2, 30):
        mesh.submit(arrival(key, tenant="loud"), 0.0)
    for key in range(50, 56):
        mesh.submit(arrival(key, tenant="quiet", arrived_at=0.5), 0.5)
    mesh.finish(1, 6.0, TOOK)
    assert placed(mesh.finish(2, 12.0, TOOK)) == {50: "a"}
    asked = mesh.submit(arrival(58, tenant="quiet", arrived_at=13.0), 13.0)
    assert rejected(asked) == {29: Reason.QUEUE_FULL}, "the last one of the tenant that has more"
    assert rejected(mesh.submit(arrival(60, tenant="loud", arrived_at=13.0), 13.0)) == {60: Reason.QUEUE_FULL}


def after_an_outage(mesh: Mesh) -> None:
    """The only slot of a pool of quick answers was held for twenty seconds by one whose gateway was killed."""
    measured(mesh, seconds=0.5)
    for key in range(1, 8):
        mesh.submit(arrival(key, arrived_at=60.0), 60.0)
    assert placed(mesh.finish(1, 80.0)) == {2: "a"}
    assert mesh.waiting == 5


def test_few_grants_after_an_outage_do_not_predict_a_queue_timeout() -> None:
    """One grant in twenty seconds for five that wait: its turn "would come in about 41 s", where it came in three."""
    mesh = scheduler(candidate(), queue_timeout_seconds=30.0)
    after_an_outage(mesh)
    assert rejected(mesh.submit(arrival(10, arrived_at=80.5), 80.5)) == {}


def test_few_grants_after_an_outage_do_not_predict_a_missed_deadline() -> None:
    mesh = scheduler(candidate(), queue_timeout_seconds=30.0)
    after_an_outage(mesh)
    assert rejected(mesh.submit(arrival(10, arrived_at=80.5, deadline_at=90.0), 80.5)) == {}
    assert rejected(mesh.submit(arrival(11, arrived_at=80.5, deadline_at=81.0), 80.5)) == {
        11: Reason.DEADLINE_UNREACHABLE
    }


def test_queue_of_slow_answers_is_overloaded_before_eight_were_measured() -> None:
    mesh = scheduler(candidate(), queue_timeout_seconds=30.0)
    measured(mesh, seconds=15.0)
    for key in range(1, 4):
        mesh.submit(arrival(key, arrived_at=60.0), 60.0)
    assert rejected(mesh.submit(arrival(10, arrived_at=71.0), 71.0)) == {10: Reason.QUEUE_FULL}


def test_flood_of_a_higher_class_leaves_a_lower_class_its_part_of_the_queue() -> None:
    """Every eighth grant belonged to the lower priority class, but none of its requests was admitted to the queue."""
    mesh = scheduler(candidate(), queue_depth_per_runner=16)
    for key in range(1, 18):
        mesh.submit(arrival(key, priority=Priority.NORMAL), 0.0)
    low = [mesh.submit(arrival(key, priority=Priority.LOW), 0.0) for key in (21, 22, 23)]
    assert [rejected(each) for each in low] == [
        {17: Reason.QUEUE_FULL},
        {16: Reason.QUEUE_FULL},
        {23: Reason.QUEUE_FULL},
    ]
    assert rejected(mesh.submit(arrival(31, priority=Priority.NORMAL), 0.0)) == {31: Reason.QUEUE_FULL}
    assert rejected(mesh.submit(arrival(32, priority=Priority.HIGH), 0.0)) == {15: Reason.QUEUE_FULL}
    assert mesh.waiting == 16


def test_request_evicted_for_a_lower_class_is_not_told_of_a_higher_one() -> None:
    mesh = scheduler(candidate(), queue_depth_per_runner=16)
    for key in range(1, 18):
        mesh.submit(arrival(key), 0.0)
    refused = refusals(mesh.submit(arrival(21, priority=Priority.LOW), 0.0))[17]
    assert "evicted for one of another priority class" in refused.message


def test_lower_class_gets_its_part_of_the_throughput_in_overload() -> None:
    mesh = scheduler(candidate())
    priorities: dict[int, Priority] = {}
    served: list[Priority] = []
    key = running = 1
    mesh.submit(arrival(1), 0.0)
    for step in range(1, 800):
        now = step / 2
        for band in (Priority.NORMAL, Priority.NORMAL, Priority.NORMAL, Priority.LOW):
            key += 1
            priorities[key] = band
            mesh.submit(arrival(key, priority=band, arrived_at=now), now)
        mesh.tick(now)
        (running,) = placed(mesh.finish(running, now))
        served.append(priorities[running])
    assert served[100:].count(Priority.LOW) == pytest.approx(len(served[100:]) / 8, rel=0.1)


def test_requests_with_ever_different_tools_do_not_grow_router_memory() -> None:
    """Who could serve each kind of request was kept until the mesh changed, which it may not for days."""
    mesh = scheduler(candidate(tools=frozenset({"search"})))
    mesh.submit(arrival(1), 0.0)
    for key in range(2, 2 * MAX_REMEMBERED_KINDS):
        mesh.submit(arrival(key, tools=frozenset({f"tool-{key}"})), 0.0)
        mesh.submit(arrival(-key, context_tokens=key), 0.0)
        mesh.finish(-key, 0.0)
    line = mesh._queues.open("m")
    assert max(len(line.capacities), len(line.considered)) <= MAX_REMEMBERED_KINDS


def test_runner_whose_pause_has_ended_is_free_for_the_next_request() -> None:
    mesh = scheduler(candidate())
    measured(mesh, 10.0)
    mesh.submit(arrival(1, arrived_at=50.0), 50.0)
    mesh.report_failed(1, 1, Reason.NO_SLOT_AVAILABLE, 50.0)
    mesh.finish(1, 50.1)
    # Nothing has happened since. Behind a busy slot it would end too late.
    asked = arrival(2, arrived_at=60.0, deadline_at=72.0, prompt_tokens=100, max_output_tokens=100)
    assert [type(decision) for decision in mesh.submit(asked, 60.0)] == [Placed]
