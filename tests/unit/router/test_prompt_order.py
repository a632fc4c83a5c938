"""Requests that wait for the endpoint with their first token soonest, although another one is free."""

from dataclasses import replace
from typing import Any

import pytest
from scheduler_harness import Mesh, arrival, candidate, placed, scheduler

from router_svc.policy.decisions import Served, WaitKind, Waits
from router_svc.policy.endpoints.further_turns import MAX_TURNS, RETURN_SECONDS, FurtherTurns
from router_svc.policy.endpoints.prompt_line import OPEN_LINE_SECONDS, PromptLine
from router_svc.policy.endpoints.routes import Route
from router_svc.policy.pool_settings import PoolSettings, RemotePermission, Settings, TenantSettings
from router_svc.policy.prompt_order import MAX_PASSED_OVER
from weft.kernel.errors.reasons import Reason
from weft.kernel.requests.request_values import CHARS_PER_TOKEN, PREFIX_ENDS, Priority

TOKENS = 20_000
"""Of a prompt that takes 5 s at the assumed speed."""
DIGESTS = sum(end / CHARS_PER_TOKEN <= TOKENS for end in PREFIX_ENDS)
LONG: dict[str, Any] = {"prompt_tokens": TOKENS, "prefix_digests": tuple(range(1, 1 + DIGESTS))}
OTHER: dict[str, Any] = {"prompt_tokens": TOKENS, "prefix_digests": tuple(range(1_001, 1_001 + DIGESTS))}
SHORT: dict[str, Any] = {"prompt_tokens": 40}
DONE = Served(prompt_tokens=TOKENS, cached_tokens=0, output_tokens=10)


def pair(settings: Settings | None = None, *, slots: int = 2, line_tokens: int = 4_000) -> tuple[Mesh, str, str]:
    """Two endpoints, of which the first one holds LONG and processes a prompt, for 1 s by default."""
    names = [candidate(runner, model, pool="p", slots=slots) for runner, model in (("a", "m"), ("b", "n"))]
    mesh = scheduler(*names, settings=settings)
    (home,) = placed(mesh.submit(arrival(1, "p", **LONG), 0.0)).values()
    mesh.report_first_content(1, 5.0)
    mesh.finish(1, 5.0, DONE)
    away = "b" if home == "a" else "a"
    assert placed(mesh.submit(arrival(2, "p", arrived_at=5.0, **OTHER), 5.0)) == {2: away}
    mesh.report_first_content(2, 10.0)
    mesh.finish(2, 10.0, DONE)
    busy: dict[str, Any] = {"prompt_tokens": TOKENS + line_tokens, "prefix_digests": LONG["prefix_digests"]}
    assert placed(mesh.submit(arrival(3, "p", arrived_at=40.0, **busy), 40.0)) == {3: home}
    return mesh, home, away


def waits(mesh: Mesh, key: int, now: float, **asked: Any) -> Waits:
    (found,) = mesh.submit(arrival(key, "p", arrived_at=now, **asked), now)
    assert isinstance(found, Waits)
    return found


def test_request_waits_for_the_endpoint_that_holds_its_prompt_although_another_is_free() -> None:
    mesh, home, _ = pair()
    status = waits(mesh, 4, 40.0, **LONG)
    assert status.kind is WaitKind.PROMPT
    assert status.reason.startswith(f"waits for {home}, which holds ")
    assert "prompt tokens: first token in about" in status.reason
    assert "; elsewhere 5" in status.reason
    assert placed(mesh.report_first_content(3, 41.0)) == {4: home}


def test_request_goes_elsewhere_if_the_line_is_longer_than_its_prompt() -> None:
    mesh, _, away = pair()
    assert placed(mesh.submit(arrival(4, "p", arrived_at=40.0, prompt_tokens=1_000), 40.0)) == {4: away}


def test_prompt_that_is_too_short_to_be_cached_takes_a_free_slot_at_once() -> None:
    mesh = scheduler(candidate("a", "m", pool="p", slots=2))
    assert placed(mesh.submit(arrival(1, "p", **LONG), 0.0)) == {1: "a"}
    assert placed(mesh.submit(arrival(2, "p", **SHORT), 0.0)) == {2: "a"}


def test_waiting_request_leaves_free_endpoints_to_other_tenants_and_lower_classes() -> None:
    mesh, _, away = pair()
    waits(mesh, 4, 40.0, **LONG)
    assert placed(mesh.submit(arrival(5, "p", arrived_at=40.0, tenant="other", **SHORT), 40.0)) == {5: away}
    mesh.report_first_content(5, 40.1)
    assert placed(mesh.submit(arrival(6, "p", arrived_at=40.1, priority=Priority.LOW, **SHORT), 40.1)) == {6: away}


def test_request_of_another_tenant_is_not_delayed_by_what_waits_before_it_there() -> None:
    mesh, home, _ = pair()
    for key in range(4, 8):
        waits(mesh, key, 40.0, **LONG)
    waits(mesh, 8, 40.0, tenant="other", **LONG)
    first, second = placed(mesh.report_first_content(3, 41.0)), placed(mesh.finish(3, 41.5, DONE))
    assert {**first, **second}.get(8) == home


def test_request_takes_any_free_endpoint_after_a_quarter_of_its_time() -> None:
    mesh, _, away = pair(slots=1)
    waits(mesh, 4, 40.0, deadline_at=52.0, **LONG)
    assert not placed(mesh.report_first_content(3, 41.0))
    assert not placed(mesh.tick(42.9))
    assert placed(mesh.tick(43.1)) == {4: away}


def test_request_that_has_no_time_to_wait_takes_a_free_slot_at_once() -> None:
    mesh, home, _ = pair(line_tokens=16_000)
    assert placed(mesh.submit(arrival(4, "p", arrived_at=40.0, deadline_at=48.0, **LONG), 40.0)) == {4: home}
    waits(mesh, 5, 40.0, deadline_at=60.0, **LONG)


def test_request_takes_any_free_endpoint_after_half_of_the_queue_timeout() -> None:
    mesh, _, away = pair(slots=1)
    waits(mesh, 4, 40.0, **LONG)
    mesh.report_first_content(3, 41.0)
    assert not placed(mesh.tick(54.9))
    assert placed(mesh.tick(55.1)) == {4: away}


def test_requests_move_at_once_if_the_endpoint_that_they_wait_for_is_lost() -> None:
    mesh, _home, away = pair()
    waits(mesh, 4, 40.0, **LONG)
    left = [each for each in mesh.shown.values() if each.runner == away]
    assert placed(mesh.show(left, 40.1)) == {4: away}


def test_requests_move_if_the_endpoint_that_they_wait_for_fails() -> None:
    mesh, _, away = pair()
    waits(mesh, 4, 40.0, **LONG)
    assert placed(mesh.report_failed(3, 1, Reason.BACKEND_NOT_READY, 40.1)) == {4: away}


def test_cancelled_request_no_longer_counts_for_the_line() -> None:
    mesh, home, _ = pair()
    waits(mesh, 4, 40.0, prompt_tokens=TOKENS + 40_000, prefix_digests=LONG["prefix_digests"])
    mesh.finish(4, 40.0)
    waits(mesh, 5, 40.0, **LONG)
    assert placed(mesh.report_first_content(3, 41.0)) == {5: home}


def test_pool_at_its_cap_places_no_waiting_prompt() -> None:
    mesh, _, _ = pair(Settings(default_pool=PoolSettings(max_in_flight=1)))
    assert waits(mesh, 4, 40.0, **LONG).kind is WaitKind.POOL
    assert not placed(mesh.report_first_content(3, 41.0))
    assert placed(mesh.finish(3, 41.5, DONE))


def test_tenant_at_its_cap_waits_whatever_is_free() -> None:
    mesh, _, _ = pair(Settings(tenants={"default": TenantSettings(max_in_flight=1)}))
    assert waits(mesh, 4, 40.0, **LONG).kind is WaitKind.TENANT
    assert not placed(mesh.report_first_content(3, 41.0))


def test_engine_gets_its_next_prompt_before_the_one_before_has_ended() -> None:
    """The router learnt of a first token a round trip later, while the engine idled."""
    mesh, home, _ = pair()
    waits(mesh, 4, 40.0, **LONG)
    at = mesh.opens_at(40.0)
    assert at is not None
    assert 40.0 < at < 41.0
    assert not placed(mesh.proceed(at - 0.01))
    assert placed(mesh.proceed(at + 0.001)) == {4: home}
    assert mesh.opens_at(at + 0.001) is None


def test_engine_is_given_a_prompt_that_arrived_while_none_took_prompts() -> None:
    """The router looked again at the next tick only, and the engine idled until then."""
    mesh = scheduler(candidate("a", "m", pool="p", slots=3))
    assert placed(mesh.submit(arrival(1, "p", **LONG), 0.0)) == {1: "a"}
    assert not placed(mesh.submit(arrival(2, "p", **OTHER), 0.0))
    at = mesh.opens_at(0.0)
    assert at is not None
    assert at == pytest.approx(5.0 - OPEN_LINE_SECONDS, abs=0.05)
    assert placed(mesh.proceed(at)) == {2: "a"}


def test_prompts_for_a_remote_model_do_not_wait_for_each_other() -> None:
    settings = Settings(tenants={"default": TenantSettings(allow_remote=RemotePermission.ALWAYS)})
    mesh = scheduler(candidate("a", "m", pool="p", slots=3, remote=True), settings=settings)
    for key in (1, 2, 3):
        assert placed(mesh.submit(arrival(key, "p", allow_remote=True, **LONG), 0.0)) == {key: "a"}
    mesh.report_first_content(1, 6.0)
    mesh.finish(1, 6.0, DONE)
    assert placed(mesh.submit(arrival(4, "p", arrived_at=6.0, allow_remote=True, **LONG), 6.0)) == {4: "a"}


def test_requests_of_a_route_take_the_first_free_slot() -> None:
    mesh, _, away = pair(line_tokens=16_000, slots=1)
    mesh.show(mesh.shown.values(), 40.0, routes={"r": Route(name="r", candidates=("p",))})
    assert placed(mesh.submit(arrival(4, "route/r", arrived_at=40.0, **LONG), 40.0)) == {4: away}


def test_no_request_is_passed_over_more_often_than_the_bound() -> None:
    mesh = scheduler(candidate("a", "m", pool="p"))
    mesh.submit(arrival(1, "p"), 0.0)
    mesh.submit(arrival(2, "p", **LONG), 0.0)
    running, now, order = 1, 0.0, list[int]()
    for key in range(3, 5 + MAX_PASSED_OVER):
        mesh.submit(arrival(key, "p", arrived_at=now, **SHORT), now)
        now += 0.01
        (running,) = placed(mesh.finish(running, now, DONE))
        order.append(running)
    assert order.index(2) == MAX_PASSED_OVER


def test_burst_is_not_refused_for_a_full_queue_while_slots_are_free() -> None:
    mesh = scheduler(candidate("a", "m", pool="p", slots=8), queue_depth_per_runner=2)
    decisions = [each for key in range(1, 11) for each in mesh.submit(arrival(key, "p", **LONG), 0.0)]
    assert all(isinstance(each, Waits) or placed([each]) for each in decisions)
    assert mesh.waiting == 9


def test_speed_of_an_engine_is_learned_without_the_prompts_before() -> None:
    mesh = scheduler(candidate("a", "m", pool="p", slots=8))
    for key in range(1, 6):
        mesh.submit(arrival(key, "p", prompt_tokens=1_000), 0.0)
    now, ended = 0.0, 0
    while ended < 5:
        now += 0.1
        ended += 1
        mesh.report_first_content(ended, now)
    for key in range(1, 6):
        mesh.finish(key, now, replace(DONE, prompt_tokens=1_000))
    speed = mesh._index.selector.speeds.of(candidate("a", "m", pool="p", slots=8), now)
    overhead, per_token = speed.prefill()
    assert overhead + 1_000 * per_token == pytest.approx(0.1, rel=0.5)


def test_further_turns_follow_the_share_of_continued_prompts() -> None:
    turns = FurtherTurns()
    for number in range(300):
        turns.note("often", (1, *range(2, 3 + number)), float(number))
        turns.note("never", (-number,), float(number))
    turns.note("never", (-1_000,), 300.0 + RETURN_SECONDS)
    assert turns.expected("often") > 0.8 * MAX_TURNS
    assert turns.expected("never") < 1.0
    assert turns.expected("new") == pytest.approx(3.0)


def test_usual_line_is_the_average_of_the_last_seconds() -> None:
    line = PromptLine()
    line.add(100.0, 0.0, is_first=True)
    assert line.usual_seconds(30.0) == pytest.approx(85.0, rel=0.05)
    line.advance(0.0, 30.0)
    assert line.seconds(30.0) == 0.0
    assert line.usual_seconds(60.0) < 0.01 * OPEN_LINE_SECONDS * 100
    line.wait(2.0, 60.0)
    assert line.usual_seconds(90.0) == pytest.approx(2.0, rel=0.01)
