"""How many finished tasks are released so that the rest stays in its bounds."""

from router_svc.policy.task_release import KeepBounds, KeptTasks, Release, ReleaseBound, releases

BOUNDS = KeepBounds(max_per_tenant=3, max_tenant_bytes=100, max_bytes=150)


def released(**kept: tuple[int, int]) -> list[Release]:
    tenants = {tenant: KeptTasks(count=count, size=size) for tenant, (count, size) in kept.items()}
    return list(releases(tenants, BOUNDS))


def test_within_the_bounds_nothing_is_released() -> None:
    assert released() == []
    assert released(ann=(3, 100), bob=(3, 50)) == []


def test_a_tenant_beyond_its_bounds_loses_its_own_oldest_and_nobody_elses() -> None:
    assert released(ann=(5, 20), bob=(1, 1)) == [Release(bound=ReleaseBound.COUNT, tenant="ann", count=2)]
    assert released(ann=(1, 130), bob=(1, 1)) == [Release(bound=ReleaseBound.TENANT_BYTES, tenant="ann", size=30)]
    both = [
        Release(bound=ReleaseBound.COUNT, tenant="ann", count=1),
        Release(bound=ReleaseBound.TENANT_BYTES, tenant="ann", size=1),
    ]
    assert released(ann=(4, 101)) == both


def test_only_what_is_left_of_all_tenants_counts_for_the_bound_of_all() -> None:
    assert released(ann=(1, 90), bob=(1, 90)) == [Release(bound=ReleaseBound.BYTES, tenant="", size=30)]
    assert released(ann=(1, 5_000), bob=(1, 40)) == [Release(bound=ReleaseBound.TENANT_BYTES, tenant="ann", size=4_900)]
