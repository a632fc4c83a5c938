"""How many finished tasks are released so that the rest stays in its bounds."""

from router_svc.policy.task_release import KeepBounds, KeptTasks, Release, ReleaseBound, releases

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
