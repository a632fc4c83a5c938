from router_svc.policy.token_refusals import RefusalLimits, TokenRefusals

LIMITS = RefusalLimits(burst=3, seconds_each=2.0, burst_overall=6, seconds_each_overall=0.5, max_peers=2)


def _refuse(refusals: TokenRefusals, peer: str, now: float, count: int) -> None:
    for _ in range(count):
        refusals.refused(peer, now)


def test_peer_is_delayed_after_its_burst_and_another_is_not() -> None:
    refusals = TokenRefusals(LIMITS)
    _refuse(refusals, "a", 10.0, 2)
    assert refusals.wait_seconds("a", 10.0) == 0
    refusals.refused("a", 10.0)
    assert refusals.wait_seconds("a", 10.0) == 2.0
    assert refusals.wait_seconds("b", 10.0) == 0
    assert refusals.wait_seconds("a", 12.0) == 0


def test_refusal_credit_is_capped_at_a_full_reset() -> None:
    refusals = TokenRefusals(LIMITS)
    _refuse(refusals, "a", 0.0, 3)
    _refuse(refusals, "a", 1000.0, 3)
    assert refusals.wait_seconds("a", 1000.0) == 2.0


def test_peers_have_a_combined_bound_too() -> None:
    refusals = TokenRefusals(LIMITS)
    for number in range(6):
        refusals.refused(f"peer-{number}", 5.0)
    assert refusals.wait_seconds("somebody else", 5.0) == 0.5
    assert refusals.wait_seconds("somebody else", 5.5) == 0


def test_number_of_remembered_peers_is_bounded() -> None:
    refusals = TokenRefusals(LIMITS)
    _refuse(refusals, "a", 0.0, 3)
    for peer in ("b", "c"):
        refusals.refused(peer, 100.0)
    assert refusals.wait_seconds("a", 0.0) == 0
    assert len(refusals._peers) == 2
