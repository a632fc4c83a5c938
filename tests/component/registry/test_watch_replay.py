"""Whatever happens, replaying a watch gives exactly what a fresh snapshot shows."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from math import ceil

from gated_store import GatedStore
from hypothesis import given, settings
from hypothesis import strategies as st

from registry_svc.config import RegistryConfig
from registry_svc.domain import (
    Capability,
    Heartbeat,
    Instance,
    Manifest,
    Opening,
    Phase,
    RunnerProfile,
    Snapshot,
)
from registry_svc.messages import change_message, snapshot_message
from registry_svc.roster import Roster
from registry_svc.watch import Watcher
from weft.dispatch.fleet import FleetView, apply_watch
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason
from weft.kernel.request import Operation
from weft.testing.fake_clock import FakeClock

# Few names, so that they are fought over.
RUNNERS = ("r1", "r2")
MODELS = ("m1", "m2", "m3")
SWEEP_SECONDS = 1_000.0
OUTCOMES = {Reason.ALREADY_EXISTS, Reason.SESSION_UNKNOWN, Reason.STALE_HEARTBEAT}


class Identity(Enum):
    """Whose session id a runner shows."""

    OWN = auto()
    NONE = auto()
    OTHERS = auto()
    """That of the other name: a runner that was renamed."""


@dataclass(frozen=True)
class Open:
    """A runner opens a session."""

    runner: str
    models: frozenset[str]
    identity: Identity


@dataclass(frozen=True)
class Beat:
    runner: str
    slots_used: int
    sequence_step: int


@dataclass(frozen=True)
class Close:
    runner: str


@dataclass(frozen=True)
class Wait:
    seconds: float


@dataclass(frozen=True)
class Restart:
    """The registry ends and another one starts on the same store."""


Step = Open | Beat | Close | Wait | Restart

runner_names = st.sampled_from(RUNNERS)
openings = st.builds(Open, runner_names, st.frozensets(st.sampled_from(MODELS)), st.sampled_from(list(Identity)))
steps = st.lists(
    st.one_of(
        openings,
        openings,
        st.builds(Beat, runner_names, st.integers(0, 2), st.integers(-1, 2)),
        st.builds(Close, runner_names),
        st.builds(Wait, st.sampled_from([5.0, 60.0, 90.0, 14_400.0])),
        st.builds(Restart),
    ),
    min_size=15,
    max_size=45,
)


@dataclass
class World:
    """A roster, everyone's session ids, and a watcher from the very beginning."""

    store: GatedStore = field(default_factory=GatedStore)
    clock: FakeClock = field(default_factory=FakeClock)
    session_ids: dict[str, str] = field(default_factory=dict)
    sequences: dict[str, int] = field(default_factory=dict)
    lives: int = 0

    async def start(self) -> None:
        config = RegistryConfig(database_url="sqlite+aiosqlite://", sweep_interval_seconds=SWEEP_SECONDS)
        self.roster = Roster(self.store, self.clock, config)
        await self.roster.start()
        snapshot, self.watcher = self.roster.watch()
        self.view = view_of(snapshot)

    async def end(self) -> None:
        await self.roster.stop(grace_seconds=1.0)
        await self.store.really_close()

    async def take(self, step: Step) -> None:
        """One step; refusals are part of the game."""
        try:
            await self._take(step)
        except WeftError as error:
            if error.reason not in OUTCOMES:
                raise

    async def _take(self, step: Step) -> None:
        match step:
            case Open():
                self.lives += 1
                session = await self.roster.open_session(self._opening(step))
                self.session_ids[step.runner] = session.id
                self.sequences[step.runner] = 0
            case Beat():
                self.sequences[step.runner] = max(0, self.sequences.get(step.runner, 0) + step.sequence_step)
                await self.roster.hear(self._beat(step))
            case Close(runner):
                await self.roster.close_session(self.session_ids.get(runner, ""), self._incarnation(runner))
            case Wait(seconds):
                for part in range(ceil(seconds / SWEEP_SECONDS)):
                    await self.clock.advance(min(SWEEP_SECONDS, seconds - part * SWEEP_SECONDS))
                    await self.roster.sweep()
            case Restart():
                await self.roster.stop(grace_seconds=1.0)
                await self.start()

    def _incarnation(self, runner: str) -> str:
        found = self.roster.runner(runner)
        return "none" if found is None else found.profile.incarnation

    def _opening(self, step: Open) -> Opening:
        other = RUNNERS[0] if step.runner == RUNNERS[1] else RUNNERS[1]
        owner = {Identity.OWN: step.runner, Identity.NONE: None, Identity.OTHERS: other}[step.identity]
        return Opening(
            request_id=f"open-{self.lives}",
            session_id="" if owner is None else self.session_ids.get(owner, ""),
            profile=RunnerProfile(
                name=step.runner, incarnation=f"life-{self.lives}", address="a", host="", runtime="", version=""
            ),
            capability=Capability(),
            models=tuple(manifest(name) for name in sorted(step.models)),
        )

    def _beat(self, step: Beat) -> Heartbeat:
        instance = Instance(
            model="m1",
            phase=Phase.READY,
            slots_total=4,
            slots_used=step.slots_used,
            load_progress=None,
            context_tokens=0,
            detail="",
        )
        return Heartbeat(
            session_id=self.session_ids.get(step.runner, "none"),
            incarnation=self._incarnation(step.runner),
            sequence=self.sequences[step.runner],
            capability=Capability(instances=(instance,)),
        )


def manifest(name: str) -> Manifest:
    return Manifest(name=name, pool_name="", operations=(Operation.CHAT,), context_tokens=0, digest="", remote=False)


def view_of(snapshot: Snapshot) -> FleetView:
    return apply_watch(FleetView(), snapshot_message(snapshot, with_keys=True))


async def replayed(view: FleetView, watcher: Watcher, up_to_revision: int) -> FleetView:
    """`view` after all that `watcher` was told; every revision exactly once."""
    while view.revision < up_to_revision:
        revised = await anext(watcher)
        assert revised.revision == view.revision + 1
        view = apply_watch(view, change_message(revised, with_keys=True))
    return view


async def play(script: Sequence[Step]) -> None:
    world = World()
    await world.start()
    try:
        for step in script:
            await world.take(step)
            await assert_told(world)
            await assert_stored(world)
    finally:
        await world.end()


async def assert_told(world: World) -> None:
    """What the watcher was told is what a newcomer sees, and it makes sense."""
    snapshot, _ = world.roster.watch()
    world.view = await replayed(world.view, world.watcher, snapshot.revision)
    assert world.view == view_of(snapshot)
    assert len(snapshot.models) == len(world.view.models)
    assert all(model.runner in world.view.runners for model in world.view.models.values())


async def assert_stored(world: World) -> None:
    """What is told is also on disk: the same runners, incarnations, keys and models."""
    stored = await world.store.load()
    assert {each.profile.name: each.profile.incarnation for each in stored} == {
        runner.name: runner.incarnation for runner in world.view.runners.values()
    }
    assert all(world.view.runners[each.profile.name].ticket_key == each.session.ticket_key for each in stored)
    assert {model.manifest.name: model.runner for each in stored for model in each.publications} == {
        model.name: model.runner for model in world.view.models.values()
    }


@settings(max_examples=60, deadline=None)
@given(steps)
def test_replaying_a_watch_equals_a_fresh_snapshot_and_the_store(script: list[Step]) -> None:
    asyncio.run(play(script))


def test_the_check_notices_a_change_that_was_not_told() -> None:
    async def scenario() -> bool:
        world = World()
        await world.start()
        await world.take(Open("r1", frozenset({"m1"}), Identity.NONE))
        world.roster._broadcaster.forget(world.watcher)
        before, _ = world.roster.watch()
        world.view = await replayed(world.view, world.watcher, before.revision)
        await world.take(Close("r1"))
        snapshot, _ = world.roster.watch()
        await world.end()
        return world.view == view_of(snapshot)

    assert asyncio.run(scenario()) is False
