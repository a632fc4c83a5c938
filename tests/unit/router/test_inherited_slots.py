"""Slots that a runner reports in use and that this router has not granted: those of an earlier process of it."""

from index_harness import index, member, place, placed

from router_svc.policy.endpoints.pool import EngineSlots


def test_restarted_router_does_not_grant_slots_granted_by_its_predecessor() -> None:
    mesh = index(member("a", slots=2, slots_reported_used=2))
    assert placed(mesh, 1) == ["nobody"]
    mesh.table.put(member("a", slots=2, slots_reported_used=1))
    assert placed(mesh, 2) == ["a", "nobody"]


def test_all_slots_are_granted_without_a_usage_report() -> None:
    assert placed(index(member("a", slots=2)), 3) == ["a", "a", "nobody"]


def test_reports_of_a_routers_own_requests_block_no_slot() -> None:
    mesh = index(member("a", slots=2))
    running = place(mesh)
    assert running is not None
    mesh.table.put(member("a", slots=2, slots_reported_used=1))
    mesh.release(running)
    # The runner has not reported since: what it says is old.
    assert placed(mesh, 3) == ["a", "a", "nobody"]


def test_change_without_a_usage_report_keeps_inherited_requests() -> None:
    mesh = index(member("a", slots=4, slots_reported_used=2))
    assert placed(mesh, 3) == ["a", "a", "nobody"]
    mesh.table.put(member("a", slots=4, slots_reported_used=2, memory_bytes=1))
    assert place(mesh) is None


def test_adapter_and_its_model_inherit_the_same_requests() -> None:
    mesh = index(
        member("a", slots=2, slots_reported_used=1),
        member("x", slots=2, slots_reported_used=1, base_model="a", runner="on-a"),
    )
    assert placed(mesh, 2)[1:] == ["nobody"]


def test_inherited_requests_exceed_all_grants_and_never_increase() -> None:
    engine = EngineSlots(("m", "r", "1"))
    assert engine.note_used(3)
    assert engine.inherited == 3
    engine.granted = engine.requests = 1
    engine.note_used(4)
    assert engine.inherited == 3
    engine.note_used(2)
    assert engine.inherited == 1
    engine.granted, engine.requests = 5, 0
    engine.note_used(4)
    assert engine.inherited == 1, "four of five grants may still be counted there"
    engine.note_used(0)
    assert engine.inherited == 0
