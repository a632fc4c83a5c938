"""The rules of the book together, against a model of a host that knows the truth."""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from ledger_values import GIB, MARGIN, lease, runner, wish

from registry_svc.ledger.policy import leases as lease_policy
from registry_svc.ledger.policy.device_memory import choose, host_account, largest_lease
from registry_svc.ledger.policy.leases import Lease, LeaseState, orphaned, processes_after, released, renewed, with_gone
from registry_svc.ledger.policy.reclaim import Reclaim, plan_queue
from weft.gpu.snapshot import DeviceSnapshot, HostSnapshot, ProcessId, ProcessSnapshot, Source
from weft.kernel.requests.request_values import Priority

if TYPE_CHECKING:
    from registry_svc.ledger.policy.leases import MemoryRequest

GPUS = 4
ROOM = 10 * GIB
LARGE = st.sampled_from([1, 2, 5, 9, 15, 40])


class BookOfOneHost(RuleBasedStateMachine):
    """Wishes come, leases are granted, given up and lost; processes end when they like. Time is a counter."""

    source = Source.NVML

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.numbers = 0
        self.leases: dict[str, Lease] = {}
        self.line: list[MemoryRequest] = []
        self.processes: dict[ProcessId, dict[int, int]] = {}
        """The truth."""

    @rule(size=LARGE, priority=st.sampled_from(Priority), indexes=st.frozensets(st.integers(0, 3), max_size=2))
    def somebody_wants_memory(self, size: int, priority: Priority, indexes: frozenset[int]) -> None:
        self.numbers += 1
        wanted = wish(size * GIB, self.numbers, priority=priority, device_indexes=indexes)
        account = host_account(self.look(), list(self.leases.values()), MARGIN)
        if wanted.size <= largest_lease([account.devices[i] for i in wanted.devices_among(account.devices)], 0):
            self.line.append(wanted)
        self.serve()

    def serve(self) -> None:
        there = list(self.leases.values())
        account = host_account(self.look(), there, MARGIN)
        reclaim = Reclaim(attempts={}, wait_seconds=2.0, look_seconds=5.0, seen=self.now, now=self.now)
        for granted, shares in plan_queue(account, there, self.line, reclaim).grants:
            self.line.remove(granted)
            self.numbers += 1
            new = lease(self.numbers, *shares, holder=runner(f"r{self.numbers}"), filled=False, renewed=self.now)
            self.leases[new.grant.id] = new

    @precondition(lambda self: self.leases)
    @rule()
    def holders_start_processes_and_say_so(self) -> None:
        starting = [each for each in self.leases.values() if each.state is LeaseState.HELD]
        for held in [each for each in starting if not each.grant.processes]:
            self.numbers += 1
            process = ProcessId(self.numbers, 1)
            self.processes[process] = dict(held.grant.shares)
            grant = replace(held.grant, processes=processes_after(held, frozenset({process})))
            self.leases[held.grant.id] = replace(held, grant=grant, named=frozenset({process}), filled=True)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def a_lease_is_given_up(self, data: st.DataObject) -> None:
        if (held := self.some(data, LeaseState.HELD)) is not None:
            self.leases[held.grant.id] = released(held, self.now)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def a_holder_falls_silent(self, data: st.DataObject) -> None:
        if (held := self.some(data, LeaseState.HELD)) is not None:
            self.leases[held.grant.id] = orphaned(held, self.now)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def a_silent_holder_comes_back(self, data: st.DataObject) -> None:
        if (silent := self.some(data, LeaseState.ORPHANED)) is not None:
            self.leases[silent.grant.id] = renewed(silent, self.now)

    @precondition(lambda self: self.processes)
    @rule(data=st.data())
    def a_process_ends(self, data: st.DataObject) -> None:
        del self.processes[data.draw(st.sampled_from(sorted(self.processes)))]

    @rule(later=st.sampled_from([0.25, 5.0]))
    def somebody_looks(self, later: float) -> None:
        self.now += later
        asked = lease_policy.watched(list(self.leases.values()))
        seen = self.look(asked)
        for lease_id, known in list(self.leases.items()):
            updated = self.leases[lease_id] = with_gone(known, seen.processes)
            if lease_policy.is_over(updated, seen, self.now, 5.0):
                assert not (set(known.grant.processes) & self.processes.keys()), "a lease ended before its processes"
                del self.leases[lease_id]
        self.serve()

    @invariant()
    def nothing_is_booked_or_filled_twice(self) -> None:
        for index in range(GPUS):
            booked = sum(dict(each.grant.shares).get(index, 0) for each in self.leases.values())
            assert booked <= ROOM, "booked twice"
            assert sum(memory.get(index, 0) for memory in self.processes.values()) <= ROOM, "filled twice"

    @invariant()
    def the_book_counts_as_the_model_does(self) -> None:
        account = host_account(self.look(), list(self.leases.values()), MARGIN)
        for index, device in account.devices.items():
            assert device.booked == sum(dict(each.grant.shares).get(index, 0) for each in self.leases.values())
            assert device.free <= ROOM - device.booked
            assert choose([device], device.free + 1, 0) is None

    def some(self, data: st.DataObject, state: LeaseState) -> Lease | None:
        found = [each for each in self.leases.values() if each.state is state]
        return data.draw(st.sampled_from(found)) if found else None

    def look(self, asked: list[ProcessId] | None = None) -> HostSnapshot:
        known = self.source is Source.NVML
        devices = tuple(
            DeviceSnapshot(
                index=index,
                id=f"GPU-{index}",
                name="model",
                total_bytes=ROOM + MARGIN,
                used_bytes=sum(memory.get(index, 0) for memory in self.processes.values()) if known else None,
            )
            for index in range(GPUS)
        )
        named = sorted({*(self.processes if known else ()), *(asked or ())})
        return HostSnapshot(host="host-a", source=self.source, devices=devices, processes=tuple(map(self.seen, named)))

    def seen(self, process: ProcessId) -> ProcessSnapshot:
        memory = self.processes.get(process)
        if memory is None:
            return ProcessSnapshot(process=process, alive=False)
        if self.source is not Source.NVML:
            return ProcessSnapshot(process=process, alive=True, memory_unknown=True)
        return ProcessSnapshot(process=process, alive=True, bytes_by_device=tuple(sorted(memory.items())))


class BookOfDeclaredDevices(BookOfOneHost):
    source = Source.DECLARED


RUNS = settings(stateful_step_count=40, max_examples=settings().max_examples // 5)
"""A history takes a tenth of a second."""


@pytest.mark.parametrize("machine", [BookOfOneHost, BookOfDeclaredDevices])
def test_no_history_overbooks_or_overfills_a_device(machine: type[BookOfOneHost]) -> None:
    run_state_machine_as_test(machine, settings=RUNS)


def _over_at_once(given: Lease, *_: Any) -> bool:
    return given.since is not None


def test_model_detects_leases_that_end_before_their_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease_policy, "is_over", _over_at_once)
    with pytest.raises(AssertionError, match="ended before its processes"):
        # Found is enough; a short example would take long.
        run_state_machine_as_test(BookOfOneHost, settings=settings(RUNS, max_examples=500, phases=[Phase.generate]))
