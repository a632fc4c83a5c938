"""The VRAM ledger and the router name the same models when memory is wanted: each is asked, on the same hosts."""

from dataclasses import replace
from datetime import timedelta
from random import Random
from typing import Any

import pytest
from ledger_values import GIB, MARGIN, START, lease, program, runner, snapshot, wish

from registry_svc.ledger.host_view import host_memory
from registry_svc.ledger.lease_table import LeaseTable
from registry_svc.ledger.policy.leases import Lease
from registry_svc.ledger.policy.reclaim import Reclaim, plan_queue
from registry_svc.ledger.wait_queue import WaitQueue
from router_svc.memory_watch import host_memory_of
from router_svc.policy.endpoints.candidates import Candidate, Readiness
from router_svc.policy.estimates import Estimates
from router_svc.policy.limits import SchedulerLimits
from router_svc.policy.loading.cold_start_plan import Demand, Resident
from router_svc.policy.loading.cold_start_planner import LoadPlanner
from weft.kernel.requests.request_values import CALLER_CLASSES, Operation, Priority

HOSTS = 1_000
NOW = 1_000.0


def a_host(random: Random) -> tuple[list[int], list[Lease], int]:
    """The sizes of its devices, its leases (models and programs), and the bytes that are wanted."""
    rooms = [random.randint(4, 24) * GIB for _ in range(random.randint(1, 4))]
    left, leases = dict(enumerate(rooms)), list[Lease]()
    for number in range(1, random.randint(1, 12) + 1):
        among = random.sample(sorted(left), random.randint(1, min(2, len(left))))
        shares = [(index, random.randint(1, 6) * GIB // 2) for index in sorted(among)]
        if any(size > left[index] for index, size in shares):
            continue
        for index, size in shares:
            left[index] -= size
        known: dict[str, Any] = {
            "used": random.randint(0, 5),
            "priority": random.choice(CALLER_CLASSES),
            "pinned": random.random() < 0.15,
            "active_requests": random.choice([0, 0, 0, 1]),
            "holder": program() if random.random() < 0.1 else runner(),
        }
        known |= {"last_used_at": None} if random.random() < 0.1 else {}
        leases.append(lease(number, *shares, **known))
    return rooms, leases, random.randint(1, sum(rooms) // GIB) * GIB


def table_of(rooms: list[int], leases: list[Lease]) -> LeaseTable:
    table = LeaseTable(MARGIN, 60.0, lambda _: None)
    table.see(runner(), snapshot(*[room + MARGIN for room in rooms]), NOW, START)
    for each in leases:
        table.put(each)
    return table


def ledgers_victims(rooms: list[int], leases: list[Lease], size: int) -> set[str]:
    """What it evicts for a swap, one after the other, until the load is granted."""
    left, found = list(leases), set[str]()
    while True:
        account = table_of(rooms, left).open("host-a")
        assert account is not None
        reclaim = Reclaim(attempts={}, wait_seconds=2.0, look_seconds=5.0, seen=NOW, now=NOW)
        plan = plan_queue(account, left, [wish(size, priority=Priority.SYSTEM)], reclaim)
        if not plan.evictions:
            assert plan.grants or not found, "it evicted in vain"
            return found
        [(_, victim)] = plan.evictions
        found.add(victim.grant.purpose)
        left.remove(victim)


def candidate(model: str, size: int, readiness: Readiness, *, pinned: bool = False) -> Candidate:
    return Candidate(
        model=model,
        runner="r1",
        incarnation="life-1",
        readiness=readiness,
        slots=1,
        operations=frozenset({Operation.CHAT}),
        runner_wakes=True,
        max_wake_seconds=60.0,
        host="host-a",
        memory_bytes=size,
        pinned=pinned,
        pool=model,
    )


def routers_victims(rooms: list[int], leases: list[Lease], size: int) -> set[str]:
    """What it holds for a queue that waited as long as one may, with the ledger's page of the host."""
    page = host_memory(table_of(rooms, leases), WaitQueue(8), "host-a", NOW)
    assert page is not None
    for shown in page.leases:
        shown.unowned = False
    residents = [
        Resident(
            candidate=candidate(each.grant.purpose, sum(size for _, size in each.grant.shares), Readiness.READY),
            active=each.active_requests,
        )
        for each in leases
        if each.grant.holder == runner()
    ]
    demand = Demand(
        queue="wanted",
        asleep=(candidate("wanted", size, Readiness.ASLEEP),),
        waiting=1,
        priority=Priority.NORMAL,
        oldest_arrived_at=0.0,
        waited_seconds=NOW,
        queued_tokens=1.0,
    )
    planner = LoadPlanner(SchedulerLimits(), Estimates())
    plan = planner.review([demand], {"host-a": residents}, {"host-a": host_memory_of(page)}, {}, NOW)
    return {model for model, _, _ in plan.hold}


def drained(leases: list[Lease], held: set[str]) -> list[Lease]:
    """The leases once the runners have reported that the held models finished their requests."""
    now = START + timedelta(seconds=99)
    return [
        replace(each, active_requests=0, last_used_at=now)
        if each.grant.purpose in held and each.active_requests
        else each
        for each in leases
    ]


@pytest.mark.parametrize("seed", range(10))
def test_ledger_and_router_evict_the_same_models_on_1000_random_hosts(seed: int) -> None:
    random, swaps = Random(seed), 0
    for number in range(HOSTS // 10):
        rooms, leases, size = a_host(random)
        held = routers_victims(rooms, leases, size)
        assert ledgers_victims(rooms, leases, size) == held, f"host {number}"
        assert ledgers_victims(rooms, drained(leases, held), size) == held, f"host {number}, drained"
        swaps += len(held) > 0
    assert swaps >= 20, "too few of the hosts need an eviction"
