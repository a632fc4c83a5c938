"""Requests that only some runners may serve, because their gateway reaches no others."""

from scheduler_harness import arrival, candidate, placed, rejected, scheduler

from router_svc.policy.decisions import Waits
from weft.kernel.reasons import Reason

TWO = (candidate("a", slots=2, pool="p", model="m-a"), candidate("b", slots=1, pool="p", model="m-b"))
ONLY_B = frozenset({"b"})


def test_a_request_waits_for_a_runner_that_it_may_use_while_another_one_is_free() -> None:
    mesh = scheduler(*TWO)
    assert placed(mesh.submit(arrival(1, "p", only_runners=ONLY_B), 0.0)) == {1: "b"}
    (waits,) = mesh.submit(arrival(2, "p", only_runners=ONLY_B), 1.0)
    assert isinstance(waits, Waits)
    assert placed(mesh.submit(arrival(3, "p"), 2.0)) == {3: "a"}, "others are not held up"
    assert placed(mesh.finish(1, 3.0)) == {2: "b"}


def test_a_request_without_a_runner_that_it_may_use_is_refused_at_once() -> None:
    mesh = scheduler(*TWO)
    assert rejected(mesh.submit(arrival(1, "p", only_runners=frozenset({"c"})), 0.0)) == {1: Reason.NO_RUNNER_AVAILABLE}


def test_a_retry_stays_among_the_runners_that_it_may_use() -> None:
    mesh = scheduler(*TWO, candidate("c", pool="p", model="m-c"))
    only = frozenset({"b", "c"})
    first = placed(mesh.submit(arrival(1, "p", only_runners=only), 0.0))[1]
    assert {first, placed(mesh.report_failed(1, 1, Reason.CONNECT_FAILED, 1.0))[1]} == only
