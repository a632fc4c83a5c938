"""Slots that are given back before the end of their request is reported: proxies see the end first."""

import pytest
from scheduler_harness import Mesh, arrival, candidate, placed, scheduler

from router_svc.policy.decisions import Placed, Served
from router_svc.policy.settings import Settings, TenantSettings
from weft.kernel.reasons import Reason

TOOK = Served(prompt_tokens=100, cached_tokens=0, output_tokens=100)


def running(mesh: Mesh) -> int:
    return sum(queue.running for queue in mesh.queues())


def test_a_freed_slot_goes_to_the_next_request_and_once() -> None:
    mesh = scheduler(candidate())
    for key in (1, 2, 3):
        mesh.submit(arrival(key), 0.0)
    assert placed(mesh.free_slot(1, 1.0)) == {2: "a"}
    assert mesh.free_slot(1, 1.1) == []
    assert placed(mesh.finish(1, 1.2, TOOK)) == {}
    assert running(mesh) == 1
    assert placed(mesh.finish(2, 2.0, TOOK)) == {3: "a"}


def test_a_request_that_freed_its_slot_is_charged_at_its_end() -> None:
    freed, held = scheduler(candidate()), scheduler(candidate())
    for mesh in (freed, held):
        mesh.submit(arrival(1, tenant="ann"), 0.0)
    freed.free_slot(1, 1.0)
    for mesh in (freed, held):
        mesh.finish(1, 1.0, TOOK)
        # An account is compared as long as its tenant is active.
        mesh.submit(arrival(2, tenant="ann"), 2.0)
    assert freed.fair_share("ann") == held.fair_share("ann") != 0.0


def test_a_tenant_at_its_cap_may_go_on_with_a_freed_slot() -> None:
    mesh = Mesh(settings=Settings(tenants={"ann": TenantSettings(max_in_flight=1)}))
    mesh.show([candidate(slots=4)], 0.0)
    for key in (1, 2):
        mesh.submit(arrival(key, tenant="ann"), 0.0)
    assert placed(mesh.free_slot(1, 1.0)) == {2: "a"}


@pytest.mark.parametrize("failure", [None, Reason.WORKER_LOST])
def test_the_slot_of_the_endpoint_that_a_proxy_went_on_to_is_held_until_the_end(failure: Reason | None) -> None:
    """The freed slot is that of the first endpoint, however the request ends."""
    mesh = scheduler(candidate("a"), candidate("b", "n", pool="m"))
    decisions = mesh.submit(arrival(1, fallbacks=1), 0.0)
    assert [isinstance(each, Placed) and len(each.fallbacks) for each in decisions] == [1]
    mesh.free_slot(1, 1.0)
    mesh.fall_back(1, Reason.CONNECT_FAILED, 1.5)
    assert running(mesh) == 1
    mesh.finish(1, 2.0, TOOK, failure)
    assert running(mesh) == 0


def test_what_waits_or_is_not_known_has_no_slot_to_free() -> None:
    mesh = scheduler(candidate())
    for key in (1, 2):
        mesh.submit(arrival(key), 0.0)
    assert mesh.free_slot(2, 1.0) == []
    assert mesh.free_slot(3, 1.0) == []
    assert running(mesh) == 1
