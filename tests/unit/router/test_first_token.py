"""The policy first_token: the endpoint with the lowest expected time to the first token."""

from dataclasses import replace
from typing import Any

import pytest
from index_harness import index, member, pick
from kit.scheduling import placement_request

from router_svc.policy.decisions import Decision, Placed, Served
from router_svc.policy.endpoints.candidate_index import CandidateIndex
from router_svc.policy.endpoints.candidates import Candidate, Needs, Readiness
from router_svc.policy.endpoints.choice import Choice, PickRequest
from router_svc.policy.endpoints.cluster_view import MeshChange
from router_svc.policy.endpoints.engine_load import EngineLoad
from router_svc.policy.endpoints.first_token import (
    PRIOR_PREFILL_SECONDS,
    SPEED_SECONDS,
    Busy,
    Speed,
    Speeds,
    first_token,
)
from router_svc.policy.endpoints.prefix_affinity import NO_HIT, Hit, PrefixCaches
from router_svc.policy.pool_settings import ChoicePolicy, PoolSettings
from router_svc.policy.router_request import Request
from router_svc.policy.scheduler import Scheduler
from weft.kernel.requests.placement_request import PrefixHolder
from weft.kernel.requests.request_values import Operation

CHUNK_TOKENS = 256
"""Tokens of one digest at the beginning of a prompt."""


def mesh_of(*names: str, **changes: Any) -> CandidateIndex:
    members = [member(name, slots=8, **changes) for name in names]
    return index(*members, policy=ChoicePolicy.FIRST_TOKEN)


def prompt(*digests: int, tokens: int | None = None, **changes: Any) -> PickRequest:
    return pick(prefix_digests=digests, prompt_tokens=tokens or CHUNK_TOKENS * len(digests) + 100, **changes)


def placed_on(mesh: CandidateIndex, asked: PickRequest, now: float = 0.0) -> Choice:
    """Place a request whose prompt is still processed."""
    choice = mesh.choose("p", asked, now)
    assert choice is not None
    assert choice.expected is not None
    mesh.take(choice.candidate)
    mesh.add_prompt(choice.candidate, choice.expected.uncached_tokens, choice.expected.own_seconds, now)
    return choice


def served_by(mesh: CandidateIndex, asked: PickRequest, now: float = 0.0) -> str:
    """Place a request and end it."""
    choice = placed_on(mesh, asked, now)
    assert choice.expected is not None
    mesh.end_prompt(choice.candidate, choice.expected.uncached_tokens, now)
    mesh.release(choice.candidate)
    return choice.candidate.model


def test_first_token_policy_is_the_default_and_prefix_affinity_is_its_alias() -> None:
    assert PoolSettings().policy is ChoicePolicy.FIRST_TOKEN
    assert ChoicePolicy("prefix_affinity") is ChoicePolicy.FIRST_TOKEN


def test_conversation_returns_to_the_cache_of_its_earlier_turns() -> None:
    mesh = mesh_of("a", "b", "c")
    home = served_by(mesh, prompt(1, 2))
    assert {served_by(mesh, prompt(1, 2, *range(3, 3 + turn))) for turn in range(1, 9)} == {home}


@pytest.mark.parametrize("keys", [(b"s", b"s/1", b"s/2", b"s/3", b"s/4", b"s/5"), (b"s",) * 6, (b"",) * 6])
def test_a_fan_out_of_sub_agents_does_not_move_the_main_agent_off_its_cache(keys: tuple[bytes, ...]) -> None:
    mesh = mesh_of("a", "b")
    main = prompt(*range(1, 21), affinity_key=keys[0])
    home = served_by(mesh, main)
    for _ in range(3):
        running = [
            placed_on(mesh, prompt(30, 31, 32, number, affinity_key=key)) for number, key in enumerate(keys[1:], 40)
        ]
        for choice in running:
            assert choice.expected is not None
            mesh.end_prompt(choice.candidate, choice.expected.uncached_tokens, 0.0)
            mesh.release(choice.candidate)
        assert served_by(mesh, main) == home
        main = prompt(*main.prefix_digests, len(main.prefix_digests) + 1, affinity_key=keys[0])


def test_a_router_that_took_over_learns_from_dispatchers_where_prompts_are_cached() -> None:
    home = PrefixHolder(*member("b").key, 20)
    asked = prompt(*range(1, 23), prefix_holder=home, affinity_key=b"s")
    mesh = mesh_of("a", "b", "c")
    choice = placed_on(mesh, asked)
    assert choice.candidate.model == "b"
    assert choice.expected is not None
    assert choice.expected.uncached_tokens <= 3 * CHUNK_TOKENS
    assert mesh.selector.sessions.find("p", b"s") == member("b").key


def test_a_router_that_has_placed_a_prompt_itself_does_not_ask_who_had_it_before() -> None:
    mesh = mesh_of("a", "b")
    home = served_by(mesh, prompt(1, 2, 3))
    elsewhere = PrefixHolder(*member("b" if home == "a" else "a").key, 3)
    assert served_by(mesh, prompt(1, 2, 3, prefix_holder=elsewhere)) == home
    gone = PrefixHolder("gone", "nowhere", "1", 3)
    assert served_by(mesh, prompt(7, 8, 9, prefix_holder=gone)) in ("a", "b")


def test_equal_prompts_stay_together_while_all_endpoints_process_prompts() -> None:
    mesh = mesh_of("a", "b", "c")
    for number in range(3):
        placed_on(mesh, prompt(number, tokens=2_000))
    assert len({placed_on(mesh, prompt(7, 8, 9, 10, tokens=1_030)).candidate.model for _ in range(3)}) == 1


def test_other_prompts_avoid_an_endpoint_with_pending_prompts() -> None:
    mesh = mesh_of("a", "b")
    busy = placed_on(mesh, prompt(1, tokens=8_000)).candidate.model
    assert {served_by(mesh, prompt(number)) for number in range(2, 6)}.isdisjoint({busy})


def test_long_prompt_queue_outweighs_a_short_cached_prefix() -> None:
    mesh = mesh_of("a", "b")
    home = served_by(mesh, prompt(1))
    placed_on(mesh, prompt(1, 2, 3, 4, 5, 6, 7, 8, tokens=9_000))
    assert served_by(mesh, prompt(1)) != home


def test_session_stays_unless_another_endpoint_is_faster_by_more_than_a_second() -> None:
    mesh = mesh_of("a", "b")
    session = prompt(1, affinity_key=b"s")
    home = served_by(mesh, session)
    elsewhere = frozenset({member("b" if home == "a" else "a").key})
    placed_on(mesh, prompt(2, tokens=2_000, excluded=elsewhere))
    assert served_by(mesh, session) == home
    placed_on(mesh, prompt(3, tokens=20_000, excluded=elsewhere))
    assert served_by(mesh, session) != home


def test_request_without_a_prompt_goes_to_the_least_loaded_endpoint() -> None:
    choice = mesh_of("a", "b").choose("p", pick(), 0.0)
    assert choice is not None
    assert (choice.policy, choice.expected) == ("least_loaded", None)


def test_faster_machine_gets_the_prompt_until_its_queue_is_longer() -> None:
    mesh = mesh_of("fast", "slow")
    for name, per_token in (("fast", 0.1e-3), ("slow", 10e-3)):
        for tokens in (100, 1_000) * 20:
            mesh.selector.speeds.note(member(name), tokens, 0.02 + tokens * per_token, 0.0)
    assert [placed_on(mesh, prompt(number, tokens=1_000)).candidate.model for number in range(4)] == ["fast"] * 4


def test_unloaded_model_has_no_cached_prefixes() -> None:
    scheduler = Scheduler()
    scheduler.apply(MeshChange(candidates=(member("a"), member("b"))), 0.0)
    caches = scheduler._index.selector.caches
    caches.enter("p", (1, 2), member("a"), 512)
    assert set(caches.hits("p", (1, 2))) == {member("a").key}
    scheduler.apply(MeshChange(candidates=(member("a", readiness=Readiness.ASLEEP),)), 1.0)
    scheduler.apply(MeshChange(candidates=(member("a"),)), 2.0)
    assert caches.hits("p", (1, 2)) == {}


def test_no_slot_is_free_while_requests_wait_in_the_engine() -> None:
    def wait_seconds(waiting: int) -> float:
        busy = Busy(requests=110, load=EngineLoad(waiting=waiting))
        return first_token(member("a", slots=256), busy, Speed(), 100, NO_HIT).wait_seconds

    assert wait_seconds(0) == 0.0
    assert 0.0 < wait_seconds(1) < wait_seconds(10)


def test_choice_explains_the_estimated_seconds_of_all_candidates() -> None:
    mesh = mesh_of("a", "b")
    served_by(mesh, prompt(1, 2))
    choice = mesh.choose("p", prompt(1, 2, 3), 0.0)
    assert choice is not None
    chosen, other = choice.considered
    assert "uncached of about 868 prompt tokens" in chosen.engine_load
    assert other.engine_load.startswith("first token in 237 ms: 217 ms for 868 uncached of about 868 prompt tokens")
    assert other.score < chosen.score


def test_prompts_in_progress_follow_a_model_to_another_pool() -> None:
    mesh = mesh_of("a", "b")
    choice = placed_on(mesh, prompt(1))
    moved = replace(choice.candidate, pool="q")
    mesh.table.put(moved)
    assert (mesh.table.pools["p"].prefilling, mesh.table.pools["q"].prefilling) == (0, 1)
    assert choice.expected is not None
    mesh.end_prompt(moved, choice.expected.uncached_tokens, 0.0)
    mesh.release(moved)
    assert mesh.table.pools["q"].prefilling == 0


# -- what endpoints keep


def holder(name: str = "a", **changes: Any) -> Candidate:
    return member(name, slots=1, context_tokens=10_000, **changes)


def test_prefixes_beyond_the_endpoint_capacity_are_not_expected() -> None:
    caches = PrefixCaches(100)
    caches.enter("p", (1,), holder(), 256)
    caches.enter("p", (2,), holder(), 9_000)
    assert caches.hits("p", (1,))
    caches.enter("p", (3,), holder(), 2_000)
    assert not caches.hits("p", (1,))


def test_capacity_estimate_shrinks_if_the_engine_evicts_earlier() -> None:
    caches = PrefixCaches(100)
    caches.enter("p", (1,), holder(), 1_000)
    for number in range(12):
        caches.correct(holder(), Hit(1_000, 6_000.0), 0 if number else 1_000)
    caches.enter("p", (2,), holder(), 8_000)
    assert not caches.hits("p", (1,))


def test_engine_that_never_reports_cached_tokens_changes_no_estimate() -> None:
    caches = PrefixCaches(100)
    caches.enter("p", (1,), holder(), 1_000)
    for _ in range(12):
        caches.correct(holder(), Hit(1_000, 6_000.0), 0)
    caches.enter("p", (2,), holder(), 8_000)
    assert caches.hits("p", (1,))


def test_prefixes_are_bounded_and_kept_per_pool() -> None:
    caches = PrefixCaches(2)
    for digest in (1, 2, 3):
        caches.enter("p", (digest,), holder(), 256)
    assert len(caches) == 2
    assert not caches.hits("p", (1,))
    assert caches.hits("p", (3,))
    assert not caches.hits("q", (3,))


# -- speeds


def test_overhead_and_prefill_speed_are_learned_separately() -> None:
    speed = Speed()
    for tokens in (50, 3_000, 400) * 20:
        speed.note(tokens, 0.3 + tokens * 2e-3, 0.0)
    overhead, per_token = speed.prefill()
    assert overhead == pytest.approx(0.3, rel=0.1)
    assert per_token == pytest.approx(2e-3, rel=0.05)


def test_one_slow_first_token_after_a_load_has_little_weight() -> None:
    speed = Speed()
    speed.note(100, 60.0, 0.0)
    assert sum(speed.prefill()) < 0.2


@pytest.mark.parametrize(("second_at", "is_believed"), [(30.0, True), (15.0, False)])
def test_second_slow_first_token_in_a_row_counts_in_full_unless_they_overlap(
    second_at: float, is_believed: bool
) -> None:
    """A laptop that processed 45 tokens per second was expected to process 4,000, even after 20 requests."""
    speed = Speed()
    for came_at in (14.0, second_at):
        speed.note(622, 14.0, came_at)
    overhead, per_token = speed.prefill()
    expected = overhead + 622 * per_token
    assert expected == pytest.approx(14.0) if is_believed else expected < 1.0


def test_slow_short_prompts_raise_the_overhead_and_leave_the_prefill_speed() -> None:
    """A provider that is far away was taken for one that processes a token in 8 ms."""
    speed = Speed()
    for came_at in (1.0, 2.0):
        speed.note(20, 0.8, came_at)
    overhead, per_token = speed.prefill()
    assert overhead + 20 * per_token == pytest.approx(0.8, rel=0.05)
    assert per_token < 2 * PRIOR_PREFILL_SECONDS


def test_cached_prompts_count_where_no_overhead_was_measured() -> None:
    speed = Speed(count=2.0, tokens=100.0, seconds=0.005, squares=10_000.0, products=1.0)
    assert speed.prefill()[0] == 0.0
    for came_at in (1.0, 2.0):
        speed.note(0, 0.5, came_at)
    assert speed.prefill()[0] > 0.2


def test_slow_first_token_after_a_usual_one_is_not_believed() -> None:
    speed = Speed()
    for first_seconds, came_at in ((60.0, 60.0), (0.2, 61.0), (60.0, 130.0)):
        speed.note(100, first_seconds, came_at)
    assert sum(speed.prefill()) < 0.5


def test_stale_speed_measurement_does_not_count() -> None:
    speeds = Speeds()
    for _ in range(20):
        speeds.note(member(), 1_000, 50.0, 0.0)
    assert speeds.of(member(), 1.0).prefill() != Speed().prefill()
    assert speeds.of(member(), SPEED_SECONDS + 1.0).prefill() == Speed().prefill()


# -- full pools


def scheduler_of(*names: str) -> Scheduler:
    made = Scheduler()
    made.apply(MeshChange(candidates=tuple(member(name, slots=1) for name in names)), 0.0)
    return made


def ask(scheduler: Scheduler, key: int, *digests: int, tenant: str = "t", now: float = 0.0) -> list[Decision]:
    spec = placement_request(
        "", tenant=tenant, model="p", prompt_tokens=CHUNK_TOKENS * len(digests) + 50, prefix_digests=digests
    )
    return scheduler.submit(Request(key, spec, Needs(Operation.CHAT), arrived_at=now), now)


def placements(decisions: list[Decision]) -> dict[int, str]:
    return {each.key: each.candidate.model for each in decisions if isinstance(each, Placed)}


def full_pool() -> tuple[Scheduler, dict[int, str]]:
    """Two endpoints with one slot each, which requests 1 and 2 hold with prefixes of their own."""
    scheduler = scheduler_of("a", "b")
    running = placements([*ask(scheduler, 1, 10, 11, 12), *ask(scheduler, 2, 20, 21, 22)])
    assert set(running.values()) == {"a", "b"}
    return scheduler, running


def end(scheduler: Scheduler, key: int) -> dict[int, str]:
    return placements(scheduler.finish(key, 1.0, Served(prompt_tokens=800, cached_tokens=0, output_tokens=1)))


def test_freed_endpoint_takes_the_waiting_request_with_a_cached_prompt() -> None:
    scheduler, running = full_pool()
    ask(scheduler, 3, 20, 21, 22, 23)
    ask(scheduler, 4, 10, 11, 12, 13)
    assert end(scheduler, 1) == {4: running[1]}
    assert end(scheduler, 2) == {3: running[2]}


def test_request_is_skipped_for_cached_prompts_only_a_few_times() -> None:
    scheduler, _ = full_pool()
    ask(scheduler, 3, 20, 21, 22, 23)
    last = 1
    for key in range(4, 40):
        ask(scheduler, key, 10, 11, 12, key)
        (last,) = end(scheduler, last)
        if last == 3:
            break
    assert last == 3


def test_tenant_is_not_skipped_for_cached_prompts_of_another() -> None:
    scheduler, running = full_pool()
    ask(scheduler, 3, 20, 21, 22, 23, tenant="first")
    ask(scheduler, 4, 10, 11, 12, 13, tenant="second")
    assert end(scheduler, 1) == {3: running[1]}
