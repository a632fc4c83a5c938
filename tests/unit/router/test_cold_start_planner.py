"""Single decisions of the load planner, and the status messages of the requests that wait."""

import math
from typing import Any

import pytest
from load_harness import GIB, candidate

from router_svc.policy.decisions import Served
from router_svc.policy.endpoints.candidates import Candidate, HostMemory, MemoryHolder, Readiness
from router_svc.policy.estimates import Estimates
from router_svc.policy.limits import SchedulerLimits
from router_svc.policy.loading.cold_start_plan import Demand, LoadPlan, Resident
from router_svc.policy.loading.cold_start_planner import LoadPlanner
from weft.kernel.requests.request_values import Priority

LIMITS = SchedulerLimits()


def demand(queue: str, *asleep: Candidate, **other: object) -> Demand:
    fields: dict[str, object] = {
        "waiting": 1,
        "priority": Priority.NORMAL,
        "oldest_arrived_at": 100.0,
        "waited_seconds": 0.0,
        "queued_tokens": 50.0,
    }
    return Demand(queue=queue, asleep=asleep, **{**fields, **other})  # type: ignore[arg-type]


def resident(model: str, *, gib: float = 4.0, pool: str = "", host: str = "host-a", **other: object) -> Resident:
    ready = candidate(model, gib=gib, host=host, readiness=Readiness.READY, pool=pool or model)
    return Resident(candidate=ready, **{"active": 0, "since": 0.0, **other})  # type: ignore[arg-type]


def busy(model: str, **other: object) -> Resident:
    wanted: dict[str, object] = {"active": 1, "queued_tokens": 500.0, "account": 0.0, "priority": Priority.NORMAL}
    return resident(model, **{**wanted, **other})  # type: ignore[arg-type]


def book(*models: tuple[str, float], total: float = 6.0, programs: tuple[tuple[str, float], ...] = ()) -> HostMemory:
    holders = [MemoryHolder(name=name, is_model=True, held_bytes=int(gib * GIB)) for name, gib in models]
    holders += [MemoryHolder(name=name, is_model=False, held_bytes=int(gib * GIB)) for name, gib in programs]
    held = sum(holder.held_bytes for holder in holders)
    return HostMemory(
        host="host-a", total_bytes=int(total * GIB), free_bytes=int(total * GIB) - held, holders=tuple(holders)
    )


class Desk:
    """A planner with one host, reviewed at one time."""

    def __init__(self) -> None:
        self.estimates = Estimates()
        self.planner = LoadPlanner(LIMITS, self.estimates)
        self._shown: dict[str, Candidate] = {}

    def review(
        self,
        demands: list[Demand],
        residents: list[Resident] | None = None,
        memory: HostMemory | None = None,
        *,
        waking: tuple[str, ...] = (),
        now: float = 100.0,
    ) -> LoadPlan:
        hosts = {} if memory is None else {"host-a": memory}
        self._shown |= {each.model: each for asked in demands for each in asked.asleep}
        under_way = {name: self._shown[name] for name in waking}
        return self.planner.review(demands, {"host-a": residents or []}, hosts, under_way, now)


def begun(plan: LoadPlan) -> list[str]:
    return [start.candidate.model for start in plan.begin]


def held(plan: LoadPlan) -> set[str]:
    return {model for model, _, _ in plan.hold}


def test_load_starts_immediately_if_memory_is_unknown_and_the_ledger_decides() -> None:
    no_book = Desk().review([demand("b", candidate("b"))], [busy("a")])
    assert (begun(no_book), held(no_book)) == (["b"], set())
    no_size = Desk().review([demand("b", candidate("b", gib=0))], [busy("a")], book(("a", 4.0)))
    assert (begun(no_size), held(no_size)) == (["b"], set())
    assert not no_size.begin[0].evicts


def test_load_is_started_once_until_its_wake_ended() -> None:
    desk = Desk()
    asked = [demand("b", candidate("b"))]
    assert begun(desk.review(asked, memory=book())) == ["b"]
    assert begun(desk.review(asked, memory=book(), waking=("b",), now=100.1)) == []
    assert begun(desk.review(asked, memory=book(), now=105.0)) == ["b"]


def test_of_several_hibernating_models_the_one_that_fits_is_loaded() -> None:
    large, small = candidate("large", gib=6.0, pool="p"), candidate("small", gib=2.0, pool="p")
    plan = Desk().review([demand("p", large, small)], [busy("a")], book(("a", 4.0)))
    assert begun(plan) == ["small"]


def test_pool_loads_the_fastest_model_that_fits_and_a_route_its_first() -> None:
    slow, quick = candidate("slow", gib=1, usual_load_seconds=60.0), candidate("quick", gib=1, usual_load_seconds=2.0)
    assert begun(Desk().review([demand("p", slow, quick)], memory=book())) == ["quick"]
    assert begun(Desk().review([demand("route/r", slow, quick)], memory=book())) == ["slow"]


def test_model_named_by_two_queues_is_loaded_once() -> None:
    same = candidate("b")
    plan = Desk().review([demand("b", same), demand("route/r", same)], memory=book())
    assert begun(plan) == ["b"]


def test_requests_in_several_queues_for_one_model_count_together() -> None:
    """Requests with other needs wait apart, and would each be worth too little."""
    desk = Desk()
    for model in ("a", "b"):
        desk.estimates.note_load(candidate(model), 3.0)
    lines = [demand(f"b#{number}", candidate("b"), waited_seconds=2.0) for number in range(10)]
    assert held(desk.review(lines[:1], [busy("a", queued_tokens=1.0)], book(("a", 4.0)))) == set()
    assert held(desk.review(lines, [busy("a", queued_tokens=1.0)], book(("a", 4.0)))) == {"a"}


def test_evicted_model_finishes_first_and_then_the_highest_priority_load_starts() -> None:
    desk = Desk()
    asked = [demand("b", candidate("b"), waited_seconds=1000.0)]
    waits = desk.review(asked, [busy("a", active=2)], book(("a", 4.0)))
    assert (begun(waits), held(waits)) == ([], {"a"})
    assert waits.gates["b"].reason == "VRAM: needs 4 GiB on host-a, held by a until idle"
    ends = desk.review(asked, [busy("a", active=0)], book(("a", 4.0)), now=101.0)
    assert (begun(ends), held(ends)) == (["b"], {"a"})
    assert ends.begin[0].evicts
    assert "it evicts a" in ends.begin[0].why


def test_evicted_model_is_held_until_the_wake_ends_even_without_waiting_requests() -> None:
    desk = Desk()
    desk.review([demand("b", candidate("b"))], [resident("a")], book(("a", 4.0)))
    gone = desk.planner.review([], {}, {}, {"b": candidate("b")}, 100.1)
    assert held(gone) == {"a"}, "nobody said that it takes no requests any more"
    assert held(desk.planner.review([], {}, {}, {}, 103.0)) == set()


def test_reloaded_model_is_not_held_for_the_load_that_evicted_it() -> None:
    desk = Desk()
    desk.review([demand("b", candidate("b"))], [resident("a")], book(("a", 4.0)))
    asked = [demand("c", candidate("c", gib=50.0))]
    assert held(desk.review(asked, [], book(("b", 4.0)), waking=("b",), now=101.0)) == set()
    assert held(desk.review(asked, [resident("a")], book(("b", 4.0)), waking=("b",), now=102.0)) == set()


def test_two_loads_do_not_use_the_same_memory() -> None:
    desk = Desk()
    plan = desk.review([demand("a", candidate("a")), demand("b", candidate("b"))], memory=book())
    assert begun(plan) == ["a"]
    assert plan.gates["b"].reason == "VRAM: needs 4 GiB on host-a, held by a (loaded before it)"
    later = desk.review([demand("b", candidate("b"))], memory=book(), waking=("a",), now=100.2)
    assert begun(later) == [], "its lease is not in the book yet"


def test_ready_model_missing_from_the_ledger_counts_as_holding_memory() -> None:
    plan = Desk().review([demand("b", candidate("b"))], [busy("a")], book())
    assert begun(plan) == []
    assert "held by a" in plan.gates["b"].reason


def test_memory_being_released_is_waited_for_in_the_queue() -> None:
    leaving = HostMemory(
        host="host-a",
        total_bytes=6 * GIB,
        free_bytes=2 * GIB,
        holders=(MemoryHolder(name="a", is_model=True, held_bytes=4 * GIB, is_leaving=True),),
    )
    desk = Desk()
    waits = desk.review([demand("b", candidate("b"))], memory=leaving)
    assert begun(waits) == []
    assert waits.gates["b"].reason == "VRAM: needs 4 GiB on host-a, held by a (unloading)"
    assert begun(desk.review([demand("b", candidate("b"))], memory=book(), now=100.5)) == ["b"]


def test_processes_without_a_lease_are_listed_with_their_memory() -> None:
    memory = HostMemory(host="host-a", total_bytes=6 * GIB, free_bytes=1 * GIB)
    plan = Desk().review([demand("b", candidate("b"))], memory=memory)
    assert plan.gates["b"].reason == "VRAM: needs 4 GiB on host-a, held by processes without a lease (5 GiB)"


def test_holders_are_listed_up_to_a_limit_and_long_names_are_truncated() -> None:
    programs = tuple((f"train-{number}{'x' * 200}", 1.0) for number in range(6))
    plan = Desk().review([demand("b", candidate("b"))], memory=book(programs=programs))
    assert plan.gates["b"].reason.endswith("and 2 more")
    assert len(plan.gates["b"].reason) < 500


def test_load_of_a_model_larger_than_its_host_is_left_to_the_ledger_without_evictions() -> None:
    plan = Desk().review([demand("b", candidate("b", gib=50.0))], [resident("a")], book(("a", 4.0)))
    assert (begun(plan), held(plan)) == (["b"], set())
    assert "larger than its host" in plan.begin[0].why


def test_only_as_many_models_as_needed_are_evicted_with_idle_ones_first() -> None:
    here = [busy("a", gib=2.0), resident("b", gib=2.0), resident("c", gib=1.0)]
    memory = book(("a", 2.0), ("b", 2.0), ("c", 1.0), total=5.0)
    assert held(Desk().review([demand("d", candidate("d", gib=2.0))], here, memory)) == {"b"}
    assert held(Desk().review([demand("d", candidate("d", gib=3.0))], here, memory)) == {"b", "c"}


def test_second_member_is_loaded_if_the_queue_is_worth_its_load() -> None:
    desk = Desk()
    desk.estimates.note_load(candidate("p2"), 10.0)
    ready = busy("p1", pool="p")
    second = candidate("p2", pool="p")
    for waited, expected in ((9.0, []), (10.0, ["p2"])):
        asked = demand("p", second, waiting=6, waited_seconds=waited, ready_slots=1)
        plan = desk.review([asked], [ready], book(("p1", 4.0), total=8.0))
        assert begun(plan) == expected
        assert not plan.gates, "it waits for a slot"


def test_second_member_does_not_evict_the_first() -> None:
    asked = demand("p", candidate("p2", pool="p"), waiting=99, waited_seconds=9_999.0, ready_slots=1)
    plan = Desk().review([asked], [busy("p1", pool="p")], book(("p1", 4.0)))
    assert (begun(plan), held(plan)) == ([], set())


def test_further_member_is_loaded_only_for_requests_not_served_by_the_first_load() -> None:
    one, two = candidate("p1", pool="p", gib=1.0, slots=4), candidate("p2", pool="p", gib=1.0, slots=4)
    for waiting, expected in ((4, []), (40, ["p2"])):
        desk = Desk()
        asked = demand("p", one, two, waiting=waiting, waited_seconds=1000.0)
        assert begun(desk.review([asked], memory=book())) == ["p1"]
        assert begun(desk.review([asked], memory=book(), waking=("p1",), now=100.1)) == expected


def test_model_already_loading_is_waited_for() -> None:
    asked = demand("p", candidate("p2", pool="p"), waiting=1, loading_slots=1, waited_seconds=1000.0)
    assert begun(Desk().review([asked], memory=book())) == []


def test_load_without_memory_is_retried_after_a_backoff() -> None:
    desk = Desk()
    asked = [demand("b", candidate("b"))]
    assert begun(desk.review(asked)) == ["b"]
    desk.planner.note_no_memory("b", 101.0)
    paused = desk.review(asked, now=102.0)
    assert begun(paused) == []
    assert paused.gates["b"].reason == (
        "VRAM: needs 4 GiB on host-a; not available a moment ago, requested again in 4 s"
    )
    assert begun(desk.review(asked, now=101.0 + LIMITS.memory_retry_seconds)) == ["b"]


def test_eta_adds_running_work_and_the_load() -> None:
    desk = Desk()
    desk.estimates.note_load(candidate("b"), 8.0)
    asked = [demand("b", candidate("b"), waited_seconds=1000.0)]
    assert desk.review(asked, [busy("a")], book(("a", 4.0))).gates["b"].eta_seconds is None, "a was never measured"
    taken = Served(prompt_tokens=1, cached_tokens=0, output_tokens=100)
    desk.estimates.note_served(candidate("a"), "t", taken, 3.0)
    assert desk.review(asked, [busy("a")], book(("a", 4.0)), now=100.5).gates["b"].eta_seconds == 11.0


def test_request_waiting_for_the_bound_has_it_as_its_eta() -> None:
    desk = Desk()
    for model in ("a", "b"):
        desk.estimates.note_load(candidate(model), 8.0)
        taken = Served(prompt_tokens=1, cached_tokens=0, output_tokens=100)
        desk.estimates.note_served(candidate(model), "t", taken, 1.0)
    asked = demand("b", candidate("b"), priority=Priority.LOW)
    incumbent = busy("a", queued_tokens=1e6, priority=Priority.HIGH)
    plan = desk.review([asked], [incumbent], book(("a", 4.0)), now=105.0)
    assert plan.gates["b"].eta_seconds == LIMITS.max_cold_wait_seconds - 5.0 + 1.0 + 8.0
    assert held(plan) == set()


@pytest.mark.parametrize(("tenant", "gains"), [("own", True), ("other", False)])
def test_class_brings_a_load_forward_only_in_place_of_its_own_tenants_requests(tenant: str, *, gains: bool) -> None:
    """The class of a tenant's requests neither ends the turn of another tenant's model nor outweighs its waiting."""
    begun: dict[Priority, bool] = {}
    for priority in (Priority.HIGH, Priority.NORMAL):
        desk = Desk()
        for model in ("a", "b"):
            desk.estimates.note_load(candidate(model), 8.0)
        asked = demand("b", candidate("b"), priority=priority, tenant="own", waited_seconds=20.0)
        incumbent = busy("a", active=0, tenant=tenant, since=97.0)
        begun[priority] = bool(desk.review([asked], [incumbent], book(("a", 4.0))).begin)
    assert begun == {Priority.HIGH: gains, Priority.NORMAL: False}


def test_class_of_its_requests_does_not_keep_a_model_from_another_tenant() -> None:
    held_for: dict[Priority, set[str]] = {}
    for priority in (Priority.HIGH, Priority.NORMAL, Priority.LOW):
        desk = Desk()
        asked = demand("b", candidate("b"), tenant="own", waited_seconds=1000.0)
        incumbent = busy("a", tenant="other", priority=priority)
        held_for[priority] = held(desk.review([asked], [incumbent], book(("a", 4.0))))
    assert held_for == {priority: {"a"} for priority in held_for}


def test_waiting_load_is_planned_again_if_its_memory_is_gone() -> None:
    desk = Desk()
    asked = [demand("b", candidate("b"), waited_seconds=1000.0)]
    assert held(desk.review(asked, [busy("a")], book(("a", 4.0)))) == {"a"}
    taken = book(("a", 3.0), programs=(("train.py", 3.0),))
    plan = desk.review(asked, [busy("a", gib=3.0)], taken, now=100.5)
    assert held(plan) == set()
    assert plan.gates["b"].reason == "VRAM: needs 4 GiB on host-a, held by train.py (a program)"


def test_earlier_due_load_is_not_overtaken_by_a_later_one() -> None:
    """The large one needs all of the host: the small one must not take what the first of the two leaves."""
    desk = Desk()
    for model in ("a1", "a2", "large", "small"):
        desk.estimates.note_load(candidate(model), 5.0)
    now = 200.0
    here = [
        busy("a1", gib=3.0, since=now - 1.0),
        busy("a2", gib=3.0, since=now - 100.0),
    ]
    asked = [
        demand("small", candidate("small", gib=3.0), oldest_arrived_at=now - 30.0, waited_seconds=9_999.0),
        demand("large", candidate("large", gib=6.0), oldest_arrived_at=now - 40.0),
    ]
    plan = desk.review(asked, here, book(("a1", 3.0), ("a2", 3.0)), now=now)
    assert held(plan) == set(), "large waits for the turn of a1, and a2 is promised to it"
    assert "promised" in plan.gates["small"].reason
    here = [busy("a1", gib=3.0, since=now - 1.0), busy("a2", gib=3.0, since=now - 100.0)]
    later = desk.review(asked, here, book(("a1", 3.0), ("a2", 3.0)), now=now + 9.5)
    assert held(later) == {"a1", "a2"}


def test_infinite_accounts_and_empty_demands_are_harmless() -> None:
    nobody = demand("b", waiting=0)
    plan = Desk().review([nobody], [busy("a", account=math.inf)], book(("a", 4.0)))
    assert plan == LoadPlan()


def test_load_without_room_does_not_wait_behind_a_never_idle_model() -> None:
    """It was begun before the book of its host was known."""
    desk = Desk()
    asked = [demand("b", candidate("b"))]
    assert begun(desk.review(asked, [busy("a")])) == ["b"]
    memory = book(("a", 4.0))
    assert held(desk.review(asked, [busy("a")], memory, waking=("b",), now=101.0)) == set(), "it may fit any moment"
    stuck = desk.review(asked, [busy("a")], memory, waking=("b",), now=100.0 + LIMITS.min_turn_seconds)
    assert (begun(stuck), held(stuck)) == ([], {"a"})
    loaded = book(("b", 4.0))
    assert held(desk.review(asked, [], loaded, waking=("b",), now=110.0)) == set()


def test_load_without_room_holds_no_model_if_its_eviction_would_not_help() -> None:
    desk = Desk()
    asked = [demand("b", candidate("b"))]
    desk.review(asked, [busy("a", gib=1.0)])
    taken = book(("a", 1.0), programs=(("train.py", 4.0),))
    assert held(desk.review(asked, [busy("a", gib=1.0)], taken, waking=("b",), now=150.0)) == set()


@pytest.mark.parametrize(
    ("holder", "loading", "doing"),
    [
        ({}, (), "idle"),
        ({"active_requests": 2}, (), "busy"),
        ({}, ("a",), "loading"),
        ({"is_lost": True}, (), "no heartbeat"),
        ({"is_leaving": True}, (), "unloading"),
    ],
)
def test_memory_holder_without_requests_is_described_by_its_state(
    holder: dict[str, Any], loading: tuple[str, ...], doing: str
) -> None:
    """Found by trying: an idle model that the mesh did not list any more was said to be loading."""
    memory = HostMemory(
        host="host-a",
        total_bytes=6 * GIB,
        free_bytes=2 * GIB,
        holders=(MemoryHolder(name="a", is_model=True, held_bytes=4 * GIB, **holder),),
    )
    planner = LoadPlanner(LIMITS, Estimates())
    asked = [demand("b", candidate("b"))]
    plan = planner.review(asked, {"host-a": []}, {"host-a": memory}, {}, 100.0, loading=frozenset(loading))
    assert plan.gates["b"].reason == f"VRAM: needs 4 GiB on host-a, held by a ({doing})"
