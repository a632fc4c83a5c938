"""Prefixes that engines report as cached, next to estimated ones."""

from typing import Any

import pytest
from index_harness import member

from router_svc.policy.endpoints.candidates import Readiness
from router_svc.policy.endpoints.cluster_view import ClusterView, MeshChange
from router_svc.policy.endpoints.engine_load import EngineLoad
from router_svc.policy.endpoints.first_token import TRANSFER_BYTES_PER_SECOND, Busy, Speed, first_token
from router_svc.policy.endpoints.prefix_affinity import (
    NO_HIT,
    Hit,
    Move,
    PrefixCaches,
    PrefixReport,
    StoredHit,
    StoredPrompt,
    moves_of,
)
from router_svc.policy.limits import SchedulerLimits
from router_svc.policy.pool_settings import Settings

A, B = member("a"), member("b")
POOL = "p"


def _report(caches: PrefixCaches, candidate: Any = A, **report: Any) -> None:
    caches.report(PrefixReport(key=candidate.key, **report), [POOL])


def _tokens(caches: PrefixCaches, *digests: int) -> dict[str, int]:
    return {key[0]: hit.tokens for key, hit in caches.hits(POOL, digests).items()}


def test_reported_prefix_is_a_hit_that_does_not_age() -> None:
    caches = PrefixCaches(100)
    _report(caches, restart=True, held=(1, 2))
    caches.enter(POOL, (9,), A, 1e9)
    assert caches.hits(POOL, (1, 2, 3)) == {A.key: Hit(512, 0.0, is_reported=True)}
    assert _tokens(caches, 1, 7) == {"a": 256}
    assert caches.hits("another pool", (1,))[A.key].tokens == 256


def test_lost_prefix_is_no_hit_even_if_it_was_placed_there() -> None:
    caches = PrefixCaches(100)
    for candidate in (A, B):
        caches.enter(POOL, (1, 2), candidate, 512)
    _report(caches, held=(1, 2))
    _report(caches, lost=(2,))
    assert _tokens(caches, 1, 2) == {"a": 256, "b": 512}
    _report(caches, lost=(1,))
    assert _tokens(caches, 1, 2) == {"b": 512}


def test_prompt_that_is_not_reported_yet_is_estimated() -> None:
    caches = PrefixCaches(100)
    _report(caches, held=(1,))
    caches.enter(POOL, (1, 2, 3), A, 512)
    assert caches.hits(POOL, (1, 2, 3))[A.key] == Hit(768, 0.0)


def test_emptied_cache_has_no_hits() -> None:
    caches = PrefixCaches(100)
    caches.enter(POOL, (1, 2), A, 512)
    _report(caches, held=(1, 2))
    _report(caches, cleared=True, held=(5,))
    assert _tokens(caches, 1, 2) == {}
    assert _tokens(caches, 5) == {"a": 256}


def test_restart_returns_to_the_estimates() -> None:
    caches = PrefixCaches(100)
    caches.enter(POOL, (1,), A, 256)
    _report(caches, held=(1, 2))
    _report(caches, restart=True)
    assert caches.hits(POOL, (1, 2)) == {A.key: Hit(256, 0.0)}


@pytest.mark.parametrize("end", ["drop", "empty"])
def test_engine_that_ended_holds_nothing(end: str) -> None:
    caches = PrefixCaches(100)
    _report(caches, held=(1, 2))
    _report(caches, B, held=(2,))
    getattr(caches, end)(A)
    assert _tokens(caches, 1) == {}
    assert caches.hits(POOL, (2,)) == {B.key: Hit(256, 0.0, is_reported=True)}


def test_flood_of_reports_is_bounded() -> None:
    caches = PrefixCaches(4)
    _report(caches, held=range(100))
    _report(caches, B, held=range(100))
    assert len(caches._reported) == 4
    _report(caches, lost=range(100))
    _report(caches, B, restart=True)
    assert (caches._reported, caches._reported_by.get(B.key)) == ({}, None)


def test_reported_hit_says_nothing_about_the_room_of_an_engine() -> None:
    caches = PrefixCaches(100)
    caches.enter(POOL, (1,), A, 256)
    before = dict(caches._capacities)
    caches.correct(A, Hit(4_096, 0.0, is_reported=True), 1)
    assert caches._capacities == before


@pytest.mark.parametrize(
    ("hit", "words"),
    [(Hit(512, 0.0, is_reported=True), "88 uncached (reported) of about 600"), (NO_HIT, "600 uncached of about 600")],
)
def test_explanation_says_whether_a_hit_is_reported(hit: Hit, words: str) -> None:
    busy = Busy(requests=0, load=EngineLoad())
    assert words in first_token(A, busy, Speed(), 600, hit).explanation()


def test_stored_prompt_is_a_hit_that_takes_its_restore() -> None:
    caches = PrefixCaches(100)
    caches.enter(POOL, (1,), A, 256)
    _report(caches, stored=(StoredPrompt((1, 2, 3), 0.5), StoredPrompt((1, 7), 0.1)))
    assert caches.hits(POOL, (1, 2, 9)) == {A.key: Hit(256, 0.0, stored=StoredHit(512, 0.5, digest=2))}
    assert caches.hits(POOL, (1,))[A.key].stored == StoredHit(256, 0.1, digest=1), "the fastest restore of equal ones"
    caches.empty(A)
    assert caches.hits(POOL, (1, 2)) == {A.key: NO_HIT._replace(stored=StoredHit(512, 0.5, digest=2))}


@pytest.mark.parametrize("end", [{"stored": ()}, {"restart": True}, None])
def test_deleted_stored_prompt_is_no_hit(end: dict[str, Any] | None) -> None:
    caches = PrefixCaches(100)
    _report(caches, stored=(StoredPrompt((1,), 0.5),))
    _report(caches, B, stored=(StoredPrompt((1,), 0.7),))
    if end is None:
        caches.drop(A)
    else:
        _report(caches, **end)
    assert list(caches.hits(POOL, (1,))) == [B.key]


def test_flood_of_stored_prompts_is_bounded() -> None:
    caches = PrefixCaches(4)
    _report(caches, stored=(StoredPrompt(tuple(range(100)), 0.5),))
    assert len(caches._stored) == 4


def test_restored_prompt_says_nothing_about_the_room_of_an_engine() -> None:
    caches = PrefixCaches(100)
    caches.enter(POOL, (1,), A, 256)
    before = dict(caches._capacities)
    caches.correct(A, Hit(0, 0.0, stored=StoredHit(4_096, 0.5)), 4_096)
    assert caches._capacities == before


@pytest.mark.parametrize(
    ("resident", "restore_seconds", "uncached", "restored"),
    [
        pytest.param(0, 0.05, 200, 0.05, id="restoring is sooner than processing"),
        pytest.param(0, 100.0, 1_000, 0.0, id="processing is sooner"),
        pytest.param(900, 0.0, 100, 0.0, id="more is cached"),
    ],
)
def test_restore_counts_as_its_time_if_it_is_sooner(
    resident: int, restore_seconds: float, uncached: int, restored: float
) -> None:
    busy, hit = Busy(requests=0, load=EngineLoad()), Hit(resident, 0.0)
    time = first_token(A, busy, Speed(), 1_000, hit._replace(stored=StoredHit(800, restore_seconds)))
    per_token = Speed().prefill()[1]
    assert (time.uncached_tokens, time.restore_seconds) == (uncached, restored)
    assert time.own_seconds == pytest.approx(uncached * per_token + restored)
    assert time.seconds == pytest.approx(first_token(A, busy, Speed(), uncached, NO_HIT).seconds + restored)
    assert ("restoring a stored prompt" in time.explanation()) == (restored > 0)


def test_reports_of_another_incarnation_do_not_count() -> None:
    view = ClusterView(Settings(), SchedulerLimits(), lambda _: False)
    view.apply(MeshChange(candidates=(member("a", readiness=Readiness.READY),)), 0.0)
    caches = view.index.selector.caches
    for key in (("a", A.runner, "another"), ("gone", A.runner, A.incarnation)):
        view.apply(MeshChange(prefixes=(PrefixReport(key=key, held=(1,)),)), 0.0)
    assert caches.hits(POOL, (1,)) == {}
    view.apply(MeshChange(prefixes=(PrefixReport(key=A.key, held=(1,)),)), 0.0)
    assert caches.hits(POOL, (1,)) == {A.key: Hit(256, 0.0, is_reported=True)}


@pytest.mark.parametrize(
    ("kind", "byte_count", "moves"),
    [
        pytest.param("k", 1_000, True, id="the transfer is sooner"),
        pytest.param("k", 10**12, False, id="processing is sooner"),
        pytest.param("other", 1_000, False, id="another engine or file"),
        pytest.param("", 1_000, False, id="unknown engine"),
    ],
)
def test_stored_prompt_of_another_runner_is_moved_if_that_is_sooner(kind: str, byte_count: int, *, moves: bool) -> None:
    caches = PrefixCaches(100)
    _report(caches, B, stored=(StoredPrompt((1,), 0.0, 10, "k"), StoredPrompt((1, 2, 3, 4), 0.02, byte_count, kind)))
    found = moves_of(caches.hits(POOL, (1, 2, 3, 4)))
    move = found.get("k")
    busy = Busy(requests=0, load=EngineLoad())
    time = first_token(A, busy, Speed(), 1_200, NO_HIT, move)
    if moves:
        assert move == Move(B.key, StoredHit(1_024, 0.02, byte_count, kind, 4))
        assert (time.move, time.uncached_tokens) == (move, 176)
        assert time.restore_seconds == pytest.approx(0.02 + byte_count / TRANSFER_BYTES_PER_SECOND)
        assert f"restoring a stored prompt of {B.runner}" in time.explanation()
    else:
        assert (time.move, time.uncached_tokens, time.restore_seconds) == (None, 1_200, 0.0)


def test_longest_stored_prompt_is_moved_and_of_equal_ones_the_fastest() -> None:
    caches = PrefixCaches(100)
    C = member("c")  # noqa: N806 - as A and B
    _report(caches, stored=(StoredPrompt((1, 2), 0.3, 10, "k"),))
    _report(caches, B, stored=(StoredPrompt((1, 2), 0.2, 10, "k"),))
    _report(caches, C, stored=(StoredPrompt((1,), 0.1, 10, "k"),))
    assert moves_of(caches.hits(POOL, (1, 2)))["k"].source == B.key


@pytest.mark.parametrize("speeds", [(), (20.0,)], ids=["nothing measured", "one slow prompt, which is not believed"])
def test_time_that_a_stored_prompt_took_counts_if_the_speed_is_unknown(speeds: tuple[float, ...]) -> None:
    """The second of two equal slow engines was assumed to be fast, and processed prompts for 20 s."""
    move = Move(B.key, StoredHit(1_024, 0.2, 80_000_000, "k", token_seconds=0.02))
    busy, speed = Busy(requests=0, load=EngineLoad()), Speed()
    for seconds in speeds:
        speed.note(1_000, seconds, seconds)
    assert (
        first_token(A, busy, speed, 1_200, NO_HIT, move._replace(hit=move.hit._replace(token_seconds=0))).move is None
    )
    assert first_token(A, busy, speed, 1_200, NO_HIT, move).move == move
    own = first_token(A, busy, speed, 1_200, Hit(0, 0.0, stored=move.hit))
    assert (own.uncached_tokens, own.restore_seconds) == (176, 0.2)
    assert own.prefill_seconds == pytest.approx(176 * 0.02)
    for came_at in (100.0, 101.0):
        speed.note(1_000, 0.1, came_at)
    assert first_token(A, busy, speed, 1_200, NO_HIT, move).prefill_seconds < 1_200 * 0.02 / 4
