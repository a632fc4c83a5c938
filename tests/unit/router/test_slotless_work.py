"""Work that engines do beside their slots: it takes no slot and no turn, and costs no tenant any tokens."""

from scheduler_harness import arrival, asleep, candidate, placed, rejected, scheduler, woken

from router_svc.policy.decisions import Served
from router_svc.policy.endpoints.candidates import Readiness
from weft.kernel.errors.reasons import Reason
from weft.kernel.requests.request_values import TEXT_OPERATIONS, Operation

TOKENS = Operation.TOKENIZE


def test_token_count_is_placed_immediately_while_every_slot_is_busy() -> None:
    mesh = scheduler(candidate())
    mesh.submit(arrival(1), 0.0)
    mesh.submit(arrival(2), 0.0)
    assert placed(mesh.submit(arrival(3, operation=TOKENS), 0.0)) == {3: "a"}
    assert (mesh.running, mesh.waiting) == (1, 1)


def test_end_of_a_token_count_frees_no_slot() -> None:
    mesh = scheduler(candidate())
    mesh.submit(arrival(1), 0.0)
    mesh.submit(arrival(2), 0.0)
    mesh.submit(arrival(3, operation=TOKENS), 0.0)
    assert placed(mesh.finish(3, 1.0, Served(prompt_tokens=0, cached_tokens=0, output_tokens=0))) == {}
    assert (mesh.running, mesh.waiting) == (1, 1)
    assert placed(mesh.finish(1, 2.0)) == {2: "a"}


def test_token_count_without_a_loaded_model_wakes_one_and_waits() -> None:
    mesh = scheduler(asleep())
    assert woken(mesh.submit(arrival(1, operation=TOKENS), 0.0)) == ["m"]
    assert mesh.waiting == 1
    assert placed(mesh.show([candidate()], 1.0)) == {1: "a"}
    mesh.finish(1, 2.0)
    assert mesh.running == 0


def test_loaded_member_is_chosen_before_a_hibernating_one() -> None:
    mesh = scheduler(asleep("b", "m-b", pool="p"), candidate("a", "m-a", pool="p"))
    decisions = mesh.submit(arrival(1, "p", operation=TOKENS), 0.0)
    assert (placed(decisions), woken(decisions)) == ({1: "a"}, [])


def test_token_counts_are_spread_over_the_loaded_members_of_a_pool() -> None:
    mesh = scheduler(candidate("a", "m-a", pool="p"), candidate("b", "m-b", pool="p"))
    runners = [placed(mesh.submit(arrival(key, "p", operation=TOKENS), 0.0))[key] for key in range(1, 5)]
    assert sorted(runners) == ["a", "a", "b", "b"]


def test_failed_token_count_is_retried_elsewhere_and_takes_a_slot() -> None:
    mesh = scheduler(candidate("a", "m-a", pool="p"), candidate("b", "m-b", pool="p"))
    first = placed(mesh.submit(arrival(1, "p", operation=TOKENS), 0.0))[1]
    second = placed(mesh.report_failed(1, 1, Reason.SERVER_DIED, 1.0))[1]
    assert {first, second} == {"a", "b"}
    assert mesh.running == 1
    mesh.finish(1, 2.0)
    assert mesh.running == 0


def test_error_for_a_model_without_token_counting_lists_its_operations() -> None:
    mesh = scheduler(candidate(operations=TEXT_OPERATIONS))
    (refused,) = mesh.submit(arrival(1, operation=TOKENS), 0.0)
    assert rejected([refused]) == {1: Reason.UNSUPPORTED_OPERATION}
    assert "m does not offer tokenize; it supports chat, completion, embedding" in str(refused)


def test_token_count_waits_for_a_loading_model() -> None:
    mesh = scheduler(candidate(readiness=Readiness.LOADING))
    assert placed(mesh.submit(arrival(1, operation=TOKENS), 0.0)) == {}
    assert placed(mesh.show([candidate()], 1.0)) == {1: "a"}
