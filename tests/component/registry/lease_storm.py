"""Runners, programs and strangers on one simulated host who load, die, freeze and come back as chance has it.

After every quarter of a second the truth is compared with the capacity of the devices: what is booked, and what the
processes really hold.
"""

import asyncio
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random

from lease_stage import GIB, MARGIN, Acquisition, SimulatedHost, Stage, program, renew, renewal, session_id, use

from registry_svc.ledger.policy.leases import Holder, HolderKind, Lease, LeaseState
from registry_svc.mesh.runner_calls import EvictionAnswer, EvictionRequest
from weft.api.registry.v1.lease_service_pb2 import LeaseUse
from weft.gpu.snapshot import ProcessId, Source
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.requests.request_values import CALLER_CLASSES, Priority

BANDS = CALLER_CLASSES
STEP_SECONDS = 0.25
GPUS = 4
TOTAL = 24 * GIB
TIME_TO_LIVE_SECONDS = 30.0
MAX_LINGER_SECONDS = 3.0
"""Longest time from killing a process until its memory is back."""


@dataclass(eq=False)
class Held:
    """One lease as its holder sees it."""

    lease: Lease
    confirmed: float
    """When the book last said that it is held."""
    start_at: float
    process: ProcessId | None = None
    filled_at: float = 0.0
    active: int = 0
    pinned: bool = False
    priority: Priority = Priority.NORMAL
    leaving: bool = False


@dataclass(eq=False)
class Actor:
    """A runner or a program."""

    storm: "Storm"
    name: str
    kind: HolderKind
    life: int = 1
    alive: bool = True
    frozen_until: float = 0.0
    swept: bool = True
    """Whether the leases of its earlier lives were given up."""
    held: dict[str, Held] = field(default_factory=dict)
    loads: list[Acquisition] = field(default_factory=list)
    leftovers: set[ProcessId] = field(default_factory=set)
    due: float = 0.0
    asked: tuple[ProcessId, ...] = ()

    @property
    def holder(self) -> Holder:
        return Holder(kind=self.kind, name=self.name, incarnation=f"life-{self.life}")

    @property
    def awake(self) -> bool:
        return self.alive and self.storm.now >= self.frozen_until

    def load(self, size: int, priority: Priority, max_wait: float) -> None:
        acquisition = self.storm.stage.acquire(
            self.holder,
            size,
            priority=priority,
            purpose=f"{self.name}-model",
            max_wait_seconds=max_wait,
            pinned=self.storm.random.random() < 0.1,
        )
        self.loads.append(acquisition)

    async def tick(self) -> None:
        if not self.awake:
            return
        self._take_granted()
        if not self.swept:
            await self._sweep()
        if self.storm.now >= self.due:
            await self.renew()
        for held in list(self.held.values()):
            await self._move_on(held)

    async def renew(self) -> None:
        uses = [self._use(held) for held in self.held.values() if not held.leaving or held.process]
        try:
            answer = await renew(self.storm.stage.ledger, renewal(self.holder, uses, self.storm.host.look(self.asked)))
        except WeftError:
            self.due = self.storm.now + 1.0
            return
        self.asked, self.due = answer.watched, self.storm.now + answer.next_within_seconds
        for lease_id in answer.lost_lease_ids:
            held = self.held.pop(lease_id)
            self.storm.count["lost"] += 1
            if held.process is not None:
                self.storm.end_later(held.process)
        for lease_id in {each.lease_id for each in uses}.intersection(self.held):
            self.held[lease_id].confirmed = self.storm.now

    def unload(self, held: Held) -> None:
        held.leaving = True
        if held.process is not None:
            self.storm.end_later(held.process)

    def kill(self, *, processes_survive: bool, is_noticed: bool) -> None:
        """kill -9. Its processes die with it, or one by one later; its calls break, or seem to go on."""
        self.alive = False
        for held in self.held.values():
            if held.process is not None and processes_survive:
                self.leftovers.add(held.process)
            elif held.process is not None:
                self.storm.end_later(held.process)
        self.held.clear()
        if is_noticed:
            for load in self.loads:
                if load.task is not None:
                    load.task.cancel()
        self.loads.clear()

    def restart(self) -> None:
        self.alive, self.swept, self.frozen_until = True, False, 0.0
        self.life += 1
        self.due, self.asked = self.storm.now, ()
        if self.kind is HolderKind.RUNNER:
            self.storm.stage.runner(self.name, f"life-{self.life}")
        for process in self.leftovers:
            self.storm.end_later(process)
        self.leftovers.clear()

    async def _sweep(self) -> None:
        with suppress(WeftError):
            await self.storm.stage.ledger.release_earlier_lives(self.holder, session_id(self.holder))
            self.swept = True

    def _take_granted(self) -> None:
        for load in [load for load in self.loads if load.task is not None and load.task.done()]:
            self.loads.remove(load)
            if load.granted is None:
                self.storm.count["refused"] += 1
                continue
            lease = load.granted
            self.storm.count["granted"] += 1
            start_at = self.storm.now + self.storm.random.choice([0.0, 0.0, 1.0, 30.0])
            granted_at = (lease.grant.created_at - self.storm.began_at).total_seconds()
            self.held[lease.grant.id] = Held(
                lease=lease, confirmed=granted_at, start_at=start_at, pinned=lease.pinned, priority=lease.priority
            )

    async def _move_on(self, held: Held) -> None:
        now = self.storm.now
        if held.leaving:
            if held.process is None or held.process not in self.storm.host.held:
                await self._give_up(held)
        elif held.process is None and now >= held.start_at:
            if now - held.confirmed >= TIME_TO_LIVE_SECONDS:
                held.leaving = True
                return
            held.process = self.storm.host.spawn(*held.lease.grant.shares)
            held.filled_at = now + self.storm.random.choice([0.0, 2.0, 6.0])
            # Whose memory it is must be known before anything else happens.
            await self.renew()

    async def _give_up(self, held: Held) -> None:
        grant = held.lease.grant
        with suppress(WeftError):
            await self.storm.stage.ledger.release(self.holder, session_id(self.holder), grant.id, grant.fencing_number)
            self.held.pop(grant.id, None)
            self.storm.count["released"] += 1

    def _use(self, held: Held) -> LeaseUse:
        return use(
            held.lease,
            *([] if held.process is None else [held.process]),
            filled=held.process is not None and self.storm.now >= held.filled_at,
            active_requests=held.active,
            use_priority=held.priority,
            pinned_by_use=held.pinned,
        )


class Storm:
    """A number of cycles, each one event and a little time."""

    def __init__(self, seed: int, source: Source) -> None:
        self.random = Random(seed)
        self.host = SimulatedHost(totals=(TOTAL,) * GPUS, source=source)
        self.stage = Stage(self.host, lease_time_to_live_seconds=TIME_TO_LIVE_SECONDS, restart_grace_seconds=10.0)
        self.stage.calls.answer = self._answer
        self.began_at = self.stage.clock.utc_now()
        self.actors = [Actor(self, f"r{number}", HolderKind.RUNNER) for number in range(4)]
        self.actors += [Actor(self, f"p{number}", HolderKind.PROGRAM) for number in range(2)]
        for actor in self.actors[:4]:
            self.stage.runner(actor.name)
        self.dying: dict[ProcessId, float] = {}
        self.strangers: set[ProcessId] = set()
        self.count: Counter[str] = Counter()
        self.orphans: set[str] = set()
        """Every lease that was one at some time."""
        self.checks = 0

    @property
    def now(self) -> float:
        """Seconds since the beginning."""
        return (self.stage.clock.utc_now() - self.began_at).total_seconds()

    async def run(self, cycles: int) -> None:
        """Let it rage, and end in silence. An AssertionError says which rule was broken."""
        events = self._events()
        names, weights = zip(*((name, weight) for name, (weight, _) in events.items()), strict=True)
        async with self.stage:
            for _ in range(cycles):
                (name,) = self.random.choices(names, weights)
                self.count[name] += 1
                if self.random.random() < 0.4:
                    self._disk_works()
                events[name][1]()
                if name in {"registry restarts", "registry dies"}:
                    await self.stage.restart(politely=name == "registry restarts")
                await self.pass_time(self.random.choice([0.25, 0.5, 1.0, 2.0, 4.0]))
            await self._calm_down()

    async def pass_time(self, seconds: float) -> None:
        for _ in range(round(seconds / STEP_SECONDS)):
            await self.stage.clock.advance(STEP_SECONDS)
            await self.stage.settle()
            for process in [process for process, at in self.dying.items() if self.now >= at]:
                self.host.end(process)
                del self.dying[process]
            for actor in self.actors:
                await actor.tick()
            await self.stage.settle()
            self.check()

    def check(self) -> None:
        """What nobody may ever find broken."""
        self.checks += 1
        self.orphans |= {each.grant.id for each in self.stage.leases() if each.state is LeaseState.ORPHANED}
        for index in range(GPUS):
            booked = sum(dict(lease.grant.shares).get(index, 0) for lease in self.stage.leases())
            assert booked <= TOTAL - MARGIN, f"device {index} is booked twice"
            assert self.host.used(index) <= TOTAL - MARGIN, f"device {index} is filled twice"

    def end_later(self, process: ProcessId) -> None:
        self.dying.setdefault(process, self.now + self.random.uniform(0.0, MAX_LINGER_SECONDS))

    def _events(self) -> dict[str, tuple[int, Callable[[], None]]]:
        return {
            "load": (36, self._load),
            "work": (12, self._work),
            "unload": (8, self._unload),
            "cancel": (5, self._cancel),
            "kill": (9, self._kill),
            "freeze": (6, self._freeze),
            "stranger": (6, self._stranger),
            "disk fails": (4, self._disk_fails),
            "registry restarts": (1, lambda: None),
            "registry dies": (2, lambda: None),
            "revive": (10, self._revive),
        }

    def _load(self) -> None:
        awake = [actor for actor in self.actors if actor.awake]
        if awake:
            size = self.random.choice([1, 3, 7, 12, 20, 23, 40, 60]) * GIB
            actor = self.random.choice(awake)
            actor.load(size, self.random.choice(BANDS), self.random.choice([0.0, 5.0, 20.0, 60.0]))

    def _some_held(self) -> tuple[Actor, Held] | None:
        every = [(actor, held) for actor in self.actors if actor.awake for held in actor.held.values()]
        return self.random.choice(every) if every else None

    def _work(self) -> None:
        if (found := self._some_held()) is not None:
            found[1].active = self.random.choice([0, 0, 1])
            found[1].priority = self.random.choice(BANDS)

    def _unload(self) -> None:
        if (found := self._some_held()) is not None:
            found[0].unload(found[1])

    def _cancel(self) -> None:
        waiting = [load for actor in self.actors if actor.awake for load in actor.loads]
        if waiting:
            load = self.random.choice(waiting)
            if load.task is not None:
                load.task.cancel()

    def _kill(self) -> None:
        alive = [actor for actor in self.actors if actor.alive]
        if len(alive) > 1:
            chance = self.random.random
            self.random.choice(alive).kill(processes_survive=chance() < 0.4, is_noticed=chance() < 0.7)

    def _revive(self) -> None:
        dead = [actor for actor in self.actors if not actor.alive]
        if dead:
            self.random.choice(dead).restart()

    def _freeze(self) -> None:
        awake = [actor for actor in self.actors if actor.awake]
        if len(awake) > 1:
            self.random.choice(awake).frozen_until = self.now + self.random.choice([3.0, 20.0, 60.0, 90.0])

    def _stranger(self) -> None:
        if self.strangers:
            self.end_later(self.strangers.pop())
        elif self.host.source is Source.NVML and (account := self.stage.ledger._table.open(self.host.name)) is not None:
            index = self.random.randrange(GPUS)
            self.strangers.add(self.host.spawn((index, account.devices[index].free // 2)))
            # Nobody can be told of memory that is taken before anybody could look.
            clock = self.stage.clock
            self.stage.ledger._table.see(program(), self.host.look(), clock.monotonic(), clock.utc_now())

    def _disk_fails(self) -> None:
        self.stage.memory_store.failing = True

    def _disk_works(self) -> None:
        self.stage.memory_store.failing = False

    async def _answer(self, request: EvictionRequest) -> EvictionAnswer:
        self.count["asked"] += 1
        actor = next(actor for actor in self.actors if actor.name == request.runner)
        if not actor.awake:
            await self.stage.clock.sleep(self.random.choice([0.5, 5.0]))
            return EvictionAnswer.UNREACHABLE
        held = actor.held.get(request.lease_id)
        if held is None or held.active or held.pinned or held.process is None:
            return EvictionAnswer.REFUSED
        actor.unload(held)
        while held.process in self.host.held and actor.awake:
            await self.stage.clock.sleep(STEP_SECONDS)
        self.count["gave way"] += 1
        return self.random.choice([EvictionAnswer.GIVEN_UP] * 8 + [EvictionAnswer.UNREACHABLE])

    async def _calm_down(self) -> None:
        """Everybody comes back, ends what is running, and goes idle."""
        self._disk_works()
        for actor in self.actors:
            actor.frozen_until = 0.0
            if not actor.alive:
                actor.restart()
            for load in actor.loads:
                if load.task is not None:
                    load.task.cancel()
        for stranger in self.strangers:
            self.end_later(stranger)
        for _ in range(4):
            await self.pass_time(15.0)
            for actor in self.actors:
                for held in actor.held.values():
                    actor.unload(held)
        await asyncio.gather(*(each.task for each in self.stage.acquisitions if each.task), return_exceptions=True)
        assert self.host.held == {}, "a process was left"
        assert self.stage.states() == [], "a lease was left"
        assert self.stage.memory_store.grants == {}, "a lease was left on disk"
