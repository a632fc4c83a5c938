"""A host with devices and processes that are only simulated, and a ledger on a fake clock beside it."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from itertools import count
from types import SimpleNamespace
from typing import Any, NamedTuple, Self

from registry_svc.ledger.lease_store import LeaseStore, StoredLedger
from registry_svc.ledger.ledger import Ledger
from registry_svc.ledger.policy.leases import Grant, Holder, HolderKind, Lease
from registry_svc.ledger.requests import check_acquire, check_renewal
from registry_svc.mesh.runner_calls import EvictionAnswer, EvictionRequest, RunnerCalls
from registry_svc.registry_config import LedgerConfig
from weft.api.registry.v1 import lease_pb2
from weft.api.registry.v1.lease_service_pb2 import (
    AcquireLeaseRequest,
    AcquireLeaseResponse,
    LeaseUse,
    RenewLeasesRequest,
    WaitingForMemory,
)
from weft.api.registry.v1.runner_pb2 import Runner
from weft.gpu.snapshot import (
    DeviceSnapshot,
    HostSnapshot,
    ProcessId,
    ProcessSnapshot,
    Source,
    process_id_from,
    process_id_message,
    snapshot_message,
)
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.requests.request_values import Priority
from weft.kernel.time.timestamps import duration_of, seconds_of
from weft_testing.fake_clock import FakeClock, let_all_run

GIB = 1024**3
MARGIN = GIB // 2
SESSION = "session-of-"


@dataclass
class MemoryLeaseStore(LeaseStore):
    """Leases in memory. Outlives the ledgers on it; can fail before a commit."""

    grants: dict[str, Grant] = field(default_factory=dict)
    last_fencing_number: int = 0
    failing: bool = False
    """Nothing is committed."""
    gate: asyncio.Event | None = None
    """Commits are told only once it is set."""
    committed: asyncio.Event = field(default_factory=asyncio.Event)
    is_in_doubt: bool = False

    async def load(self) -> StoredLedger:
        in_order = sorted(self.grants.values(), key=lambda grant: grant.fencing_number)
        return StoredLedger(grants=tuple(in_order), last_fencing_number=self.last_fencing_number)

    async def grant(self, grant: Grant) -> None:
        self._require_working()
        assert grant.fencing_number > self.last_fencing_number, "a fencing number came again"
        self.grants[grant.id] = grant
        self.last_fencing_number = grant.fencing_number
        await self._tell()

    async def save_releasing(self, lease_ids: Sequence[str]) -> None:
        self._require_working()
        for lease_id in self._known(lease_ids):
            self.grants[lease_id] = replace(self.grants[lease_id], releasing=True)
        await self._tell()

    async def save_processes(self, lease_id: str, processes: Sequence[ProcessId]) -> None:
        self._require_working()
        for known in self._known([lease_id]):
            self.grants[known] = replace(self.grants[known], processes=tuple(processes))
        await self._tell()

    async def remove(self, lease_ids: Sequence[str]) -> None:
        self._require_working()
        for lease_id in self._known(lease_ids):
            del self.grants[lease_id]
        await self._tell()

    def _known(self, lease_ids: Iterable[str]) -> list[str]:
        return [lease_id for lease_id in lease_ids if lease_id in self.grants]

    def _require_working(self) -> None:
        if self.failing:
            raise WeftError(Reason.SERVICE_UNAVAILABLE, "the registry's database failed")

    async def _tell(self) -> None:
        self.committed.set()
        await asyncio.sleep(0)
        if self.gate is not None:
            await self.gate.wait()


@dataclass
class SimulatedHost:
    """Devices and processes of one host, with the truth about who holds what."""

    totals: tuple[int, ...] = (24 * GIB,)
    name: str = "host-a"
    source: Source = Source.NVML
    held: dict[ProcessId, dict[int, int]] = field(default_factory=dict)
    """By every process that is there."""
    _pids: Any = field(default_factory=lambda: count(100))

    def spawn(self, *shares: tuple[int, int]) -> ProcessId:
        pid = next(self._pids)
        process = ProcessId(pid, pid * 7)
        self.held[process] = dict(shares)
        return process

    def end(self, process: ProcessId) -> None:
        self.held.pop(process, None)

    def used(self, index: int) -> int:
        return sum(memory.get(index, 0) for memory in self.held.values())

    def look(self, asked: Iterable[ProcessId] = ()) -> HostSnapshot:
        """What somebody there sees, as precisely as the source allows."""
        can_look = self.source is Source.NVML
        devices = tuple(
            DeviceSnapshot(
                index=index,
                id=f"GPU-{index}",
                name="simulated",
                total_bytes=total,
                used_bytes=self.used(index) if can_look else None,
            )
            for index, total in enumerate(self.totals)
        )
        named = {*(self.held if can_look else ()), *asked}
        return HostSnapshot(
            host=self.name, source=self.source, devices=devices, processes=tuple(map(self._seen, sorted(named)))
        )

    def _seen(self, process: ProcessId) -> ProcessSnapshot:
        if process not in self.held:
            return ProcessSnapshot(process=process, alive=False)
        if self.source is not Source.NVML:
            return ProcessSnapshot(process=process, alive=True, memory_unknown=True)
        memory = tuple(sorted((index, size) for index, size in self.held[process].items() if size))
        return ProcessSnapshot(process=process, alive=True, bytes_by_device=memory)


@dataclass
class ScriptedCalls(RunnerCalls):
    """The runners' side of YieldMemory: who is asked, and what they say."""

    answer: Callable[[EvictionRequest], Awaitable[EvictionAnswer]] | None = None
    asked: list[EvictionRequest] = field(default_factory=list)

    async def evict(self, request: EvictionRequest) -> EvictionAnswer:
        self.asked.append(request)
        return EvictionAnswer.REFUSED if self.answer is None else await self.answer(request)


@dataclass(frozen=True, kw_only=True)
class Renewed:
    """What a holder reads in the answer to a renewal."""

    lost_lease_ids: tuple[str, ...]
    watched: tuple[ProcessId, ...]
    next_within_seconds: float


@dataclass(eq=False)
class Acquisition:
    """One AcquireLease call in the background."""

    ledger: Ledger
    words: list[WaitingForMemory] = field(default_factory=list)
    granted: Lease | None = None
    error: WeftError | None = None
    task: "asyncio.Task[None] | None" = None

    async def run(self, words: AsyncGenerator[AcquireLeaseResponse]) -> None:
        try:
            async with aclosing(words):
                async for word in words:
                    if word.HasField("granted"):
                        self.granted = granted_lease(self.ledger, word)
                    else:
                        self.words.append(word.waiting)
        except WeftError as error:
            self.error = error

    @property
    def lease(self) -> Lease:
        assert self.granted is not None, self.error or self.words
        return self.granted

    @property
    def reason(self) -> Reason | None:
        """Why it failed; None: it has not."""
        return None if self.error is None else self.error.reason

    async def cancel(self) -> None:
        assert self.task is not None
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


class FreezingClock(FakeClock):
    """See FakeClock. Time that passes in `freeze` passes at once: nobody who should have woken meanwhile did."""

    def __init__(self) -> None:
        super().__init__()
        self._frozen_seconds = 0.0

    def freeze(self, seconds: float) -> None:
        self._frozen_seconds += seconds

    def monotonic(self) -> float:
        return super().monotonic() + self._frozen_seconds


class Stage:
    """A ledger, its store, its clock, one host, and the sessions of its runners."""

    def __init__(self, host: SimulatedHost | None = None, store: LeaseStore | None = None, **settings: Any) -> None:
        self.host = host or SimulatedHost()
        self.clock = FreezingClock()
        self.memory_store = MemoryLeaseStore()
        self.store: LeaseStore = store or self.memory_store
        self.config = LedgerConfig(device_margin_mb=MARGIN // 1024**2, **settings)
        self.calls = ScriptedCalls()
        self.sessions: dict[str, str] = {}
        """The present incarnation of each runner."""
        self.withdrawn: set[tuple[str, str]] = set()
        """Runners, and models that they do not publish any more."""
        self.guests: set[str] = set()
        """Runners that joined over a link."""
        self.ledger = self._new_ledger()
        self._requests = count(1)
        self.acquisitions: list[Acquisition] = []

    async def __aenter__(self) -> Self:
        await self.ledger.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.ledger.stop(1.0)
        await asyncio.gather(*(each.task for each in self.acquisitions if each.task), return_exceptions=True)

    async def restart(self, *, politely: bool = True) -> None:
        """Another registry on the same store; without good manners the first one is gone in the middle of whatever."""
        if politely:
            await self.ledger.stop(1.0)
        else:
            for task in [*self.ledger._tasks, *self.ledger._evictor._tasks.values(), *self.ledger._writer._running]:
                task.cancel()
            # Whoever waited sees the connection break.
            for each in self.acquisitions:
                if each.task is not None and not each.task.done():
                    each.task.cancel()
        await self.settle()
        self.ledger = self._new_ledger()
        await self.ledger.start()

    def runner(self, name: str = "r1", life: str = "life-1") -> Holder:
        """A runner in its present life."""
        self.sessions[name] = life
        return Holder(kind=HolderKind.RUNNER, name=name, incarnation=life)

    def acquire(self, holder: Holder, size: int, **asked: Any) -> Acquisition:
        """Begin to wait."""
        acquisition = Acquisition(self.ledger)
        words = self.ledger.acquire(self.request(holder, size, **asked))
        acquisition.task = asyncio.create_task(acquisition.run(words))
        self.acquisitions.append(acquisition)
        return acquisition

    def request(self, holder: Holder, size: int, **asked: Any) -> AcquireLeaseRequest:
        facts = {"request_id": f"request-{next(self._requests)}", "session_id": session_id(holder), "purpose": "m1"}
        snapshot = asked.pop("snapshot", None) or self.host.look()
        request = wanted(holder, size, snapshot, **{**facts, **asked})
        check_acquire(request)
        return request

    async def lease(self, holder: Holder, size: int, **asked: Any) -> Lease:
        """Memory that is there."""
        acquisition = self.acquire(holder, size, **asked)
        await self.settle()
        return acquisition.lease

    async def loaded(self, holder: Holder, size: int, **asked: Any) -> tuple[Lease, ProcessId]:
        """A lease whose process holds all of it, idle."""
        used = {key: asked.pop(key) for key in ("active_requests", "pinned_by_use", "use_priority") if key in asked}
        lease = await self.lease(holder, size, **asked)
        process = self.host.spawn(*lease.grant.shares)
        await self.renew(holder, use(lease, process, **used))
        return lease, process

    async def renew(self, holder: Holder, *uses: LeaseUse, asked: Iterable[ProcessId] = ()) -> Renewed:
        """What a holder does every few seconds."""
        answer = await renew(self.ledger, renewal(holder, uses, self.host.look(asked)))
        await self.settle()
        return answer

    async def look(self) -> Renewed:
        """Somebody there who holds nothing says what is to be seen; the second time about what it was asked."""
        observer = self.runner("observer")
        answer = await self.renew(observer)
        await self.clock.advance(0.25)
        return await self.renew(observer, asked=answer.watched)

    async def release(self, lease: Lease) -> None:
        holder = lease.grant.holder
        await self.ledger.release(holder, session_id(holder), lease.grant.id, lease.grant.fencing_number)
        await self.settle()

    async def pass_time(self, seconds: float) -> None:
        """Let time pass in small steps, and everything that follows happen."""
        end = self.clock.monotonic() + seconds
        while (left := end - self.clock.monotonic()) > 1e-9:
            await self.clock.advance(min(0.25, left))
            await self.settle()

    async def settle(self) -> None:
        await let_all_run()

    def leases(self) -> list[Lease]:
        return list(self.ledger._table)

    def states(self) -> list[str]:
        """The purposes and states of all leases, in order of their fencing numbers."""
        in_order = sorted(self.leases(), key=lambda each: each.grant.fencing_number)
        return [f"{each.grant.purpose} {each.state.name.lower()}" for each in in_order]

    def _new_ledger(self) -> Ledger:
        return Ledger(
            self.store,
            self.clock,
            self.config,
            self.calls,
            self._runner_of,
        )

    def _runner_of(self, runner: str) -> Any:
        life = self.sessions.get(runner)
        if life is None:
            return None
        return SimpleNamespace(
            session=SimpleNamespace(id=SESSION + runner, incarnation=life),
            publications=_AllBut(self.withdrawn, runner),
            profile=Runner(dial_out=runner in self.guests),
        )


class _AllBut(NamedTuple):
    """The models of a runner: all but withdrawn ones."""

    withdrawn: set[tuple[str, str]]
    runner: str

    def __contains__(self, model: object) -> bool:
        return (self.runner, model) not in self.withdrawn


def session_id(holder: Holder) -> str:
    return SESSION + holder.name if holder.kind is HolderKind.RUNNER else ""


def program(name: str = "train") -> Holder:
    return Holder(kind=HolderKind.PROGRAM, name=name, incarnation="life-1")


def holder_message(holder: Holder) -> lease_pb2.LeaseHolder:
    kind = lease_pb2.LeaseHolder.Kind.ValueType(holder.kind)
    return lease_pb2.LeaseHolder(kind=kind, name=holder.name, incarnation=holder.incarnation)


def wanted(holder: Holder, size: int, snapshot: HostSnapshot, **asked: Any) -> AcquireLeaseRequest:
    """A request for memory."""
    asked["priority"] = asked.get("priority", Priority.NORMAL).wire
    if "max_wait_seconds" in asked:
        asked["max_wait"] = duration_of(asked.pop("max_wait_seconds"))
    return AcquireLeaseRequest(holder=holder_message(holder), bytes=size, sighting=snapshot_message(snapshot), **asked)


def granted_lease(ledger: Ledger, response: AcquireLeaseResponse) -> Lease:
    """The lease that a response grants, as the ledger has it at this moment."""
    lease = ledger._table.lease(response.granted.lease.lease_id)
    assert lease is not None
    return lease


def renewal(holder: Holder, uses: Iterable[LeaseUse], snapshot: HostSnapshot) -> RenewLeasesRequest:
    """A holder is there, uses its leases so, and sees this."""
    return RenewLeasesRequest(
        holder=holder_message(holder),
        session_id=session_id(holder),
        leases=uses,
        sighting=snapshot_message(snapshot),
    )


async def renew(ledger: Ledger, request: RenewLeasesRequest) -> Renewed:
    """The answer of a ledger to a renewal."""
    check_renewal(request)
    response = await ledger.renew(request)
    return Renewed(
        lost_lease_ids=tuple(response.lost_lease_ids),
        watched=tuple(map(process_id_from, response.watched_processes)),
        next_within_seconds=seconds_of(response.next_within),
    )


def use(lease: Lease, *processes: ProcessId, **how: Any) -> LeaseUse:
    """An idle, loaded model, unless said otherwise."""
    facts = {
        "filled": True,
        "priority": how.pop("use_priority", Priority.NORMAL).wire,
        "pinned": how.pop("pinned_by_use", False),
    }
    return LeaseUse(
        lease_id=lease.grant.id,
        fencing_number=lease.grant.fencing_number,
        processes=map(process_id_message, processes),
        **{**facts, **how},
    )
