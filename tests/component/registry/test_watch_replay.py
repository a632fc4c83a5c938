"""Whatever happens, replaying a watch gives exactly what a fresh snapshot shows."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import Any

import pytest
from gated_store import GatedStore
from hypothesis import given
from kit.resources import records
from roster_harness import BareRegistry
from told_state import Told
from watch_steps import (
    RUNNERS,
    Allow,
    Beat,
    Close,
    Declare,
    DeclareRoute,
    Delete,
    Identity,
    Open,
    OperatorStep,
    Restart,
    Step,
    Wait,
    steps,
)

from registry_svc.mesh.requests import Batch
from registry_svc.mesh.states import Status
from registry_svc.mesh.watch import Snapshot, change_message
from registry_svc.registry_config import RegistryConfig
from weft.api.registry.v1 import registry_service_pb2
from weft.api.registry.v1.agent_pb2 import AgentManifest
from weft.api.registry.v1.model_pb2 import MODEL_OPERATION_CHAT, ModelDeclaration, ModelManifest
from weft.api.registry.v1.route_pb2 import RouteManifest
from weft.api.registry.v1.runner_pb2 import Capability, InstanceState, Runner
from weft.api.registry.v1.runner_session_service_pb2 import HeartbeatRequest, OpenSessionRequest
from weft.api.registry.v1.wake_pb2 import Wake, WakeOnLanAction, WakeRecipe
from weft.dispatch.fleet import FleetView, ModelView, apply_watch
from weft.documents.kinds import DECLARED_KINDS, key_of
from weft.documents.resource_kinds import ResourceKind
from weft.documents.resources import new_document
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft_testing.fake_clock import FakeClock

SWEEP_SECONDS = 1_000.0
OUTCOMES = {
    Reason.ALREADY_EXISTS,
    Reason.SESSION_UNKNOWN,
    Reason.STALE_HEARTBEAT,
    Reason.MODEL_NOT_FOUND,
    Reason.NOT_FOUND,
    Reason.RESOURCE_IN_USE,
}


@dataclass
class World:
    """A roster, everyone's session ids, and a watcher from the very beginning."""

    store: GatedStore = field(default_factory=GatedStore)
    clock: FakeClock = field(default_factory=FakeClock)
    session_ids: dict[str, str] = field(default_factory=dict)
    sequences: dict[str, int] = field(default_factory=dict)
    lives: int = 0

    async def start(self) -> None:
        config = RegistryConfig(database_url="sqlite://", sweep_interval_seconds=SWEEP_SECONDS)
        self.registry = BareRegistry(self.store, self.clock, config)
        await self.registry.start()
        snapshot, self.watcher = self.registry.core.watch()
        self.view = await view_of(snapshot)
        self.told = Told.of(await snapshot.message(with_keys=True))

    async def end(self) -> None:
        await self.registry.stop()
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
                session = await self.registry.roster.open_session(self._opening(step))
                self.session_ids[step.runner] = session.id
                self.sequences[step.runner] = 0
            case Beat():
                self.sequences[step.runner] = max(0, self.sequences.get(step.runner, 0) + step.sequence_step)
                await self.registry.roster.heartbeat(self._beat(step))
            case Close(runner):
                await self.registry.roster.close_session(self.session_ids.get(runner, ""), self._incarnation(runner))
            case Wait(seconds):
                for part in range(ceil(seconds / SWEEP_SECONDS)):
                    await self.clock.advance(min(SWEEP_SECONDS, seconds - part * SWEEP_SECONDS))
                    await self.registry.expiry.sweep()
            case Restart():
                await self.registry.stop()
                await self.start()
            case _:
                await self._operate(step)

    async def _operate(self, step: OperatorStep) -> None:
        match step:
            case Declare():
                await self.registry.declarations.apply(batch_of(step))
            case DeclareRoute():
                await self.registry.declarations.apply(route_batch_of(step))
            case Allow(cloud_fallback):
                await self.registry.settings.update(cloud_fallback)
            case Delete(kind, name):
                await self.registry.declarations.delete(kind, name)

    def _incarnation(self, runner: str) -> str:
        found = self.registry.catalogue.find(ResourceKind.RUNNER, runner)
        return "none" if found is None else found.incarnation

    def _opening(self, step: Open) -> OpenSessionRequest:
        other = RUNNERS[0] if step.runner == RUNNERS[1] else RUNNERS[1]
        owner = {Identity.OWN: step.runner, Identity.NONE: None, Identity.OTHERS: other}[step.identity]
        return OpenSessionRequest(
            request_id=f"open-{self.lives}",
            session_id="" if owner is None else self.session_ids.get(owner, ""),
            runner=Runner(name=step.runner, incarnation=f"life-{self.lives}", address="a"),
            models=[manifest(name, step.pool, wakeable=step.wakeable) for name in sorted(step.models)],
            # What clashes with itself does not get past the requests.
            agents=[agent(name, step.target) for name in sorted(step.agents - step.models - {step.pool, step.runner})],
        )

    def _beat(self, step: Beat) -> HeartbeatRequest:
        phase = InstanceState.PHASE_HIBERNATING if step.asleep else InstanceState.PHASE_READY
        instance = InstanceState(model="m1", phase=phase, slots_total=4, slots_used=step.slots_used)
        return HeartbeatRequest(
            session_id=self.session_ids.get(step.runner, "none"),
            incarnation=self._incarnation(step.runner),
            sequence=self.sequences[step.runner],
            capability=Capability(instances=[instance]),
        )


def manifest(name: str, pool: str = "", *, wakeable: bool = False) -> ModelManifest:
    recipe = WakeRecipe(wake_on_lan=WakeOnLanAction(mac_address="02:00:00:00:00:01"))
    return ModelManifest(
        name=name,
        pool_name=pool,
        operations=[MODEL_OPERATION_CHAT],
        wake=Wake(by_mesh=recipe) if wakeable else None,
    )


def agent(name: str, target: str) -> AgentManifest:
    if target.startswith("p"):
        return AgentManifest(name=name, pool=target)
    return AgentManifest(name=name, model=target)


def batch_of(step: Declare) -> Batch:
    points = new_document(ResourceKind.AGENT, AgentManifest(name=step.agent, pool=step.pool or step.model))
    declaration = ModelDeclaration(manifest=manifest(step.model, step.pool), runner=step.runner)
    model = new_document(ResourceKind.MODEL, declaration)
    clashes = step.agent in {step.model, step.pool}
    return Batch(documents=[model] if clashes else [points, model], adopt=step.adopt)


def route_batch_of(step: DeclareRoute) -> Batch:
    route = RouteManifest(name=step.name, candidates=sorted(step.candidates), pin_primary=step.pinned)
    return Batch(documents=[new_document(ResourceKind.ROUTE, route)])


async def view_of(snapshot: Snapshot) -> FleetView:
    return apply_watch(FleetView(), await snapshot.message(with_keys=True))


async def replay(world: "World", up_to_revision: int) -> None:
    """Take in all that the watcher was told; every revision exactly once."""
    while world.view.revision < up_to_revision:
        revised = await anext(world.watcher)
        assert revised.revision == world.view.revision + 1
        message = change_message(revised, with_keys=True)
        world.view = apply_watch(world.view, message)
        world.told.heartbeat(message.change)


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
    snapshot, watcher = world.registry.core.watch()
    with watcher:
        await replay(world, snapshot.revision)
        assert world.view == await view_of(snapshot)
        response = await snapshot.message(with_keys=True)
        assert world.told == Told.of(response)
    shown = response.snapshot
    assert len(records(shown.resources, "model")) == len(world.view.models)
    assert all(model.runner in {"", *world.view.runners} for model in world.view.models.values())
    assert all(agent.runner in {"", *world.view.runners} for agent in records(shown.resources, "agent"))
    assert_statuses_of_routes(world.view, shown)
    assert_one_namespace(world.view, shown)


def assert_statuses_of_routes(view: FleetView, shown: registry_service_pb2.Snapshot) -> None:
    """A route is as well as the best that its names stand for: pools first, then models."""
    for route in records(shown.resources, "route"):
        found: list[ModelView] = []
        for name in route.manifest.candidates:
            pool = [model for model in view.models.values() if model.pool == name]
            found += pool or [model for model in view.models.values() if model.name == name]
        best = Status.INACTIVE
        if any(model.hibernating for model in found):
            best = Status.HIBERNATING
        if any(model.active for model in found):
            best = Status.ACTIVE
        assert Status(route.status) is best, route


def assert_one_namespace(view: FleetView, shown: registry_service_pb2.Snapshot) -> None:
    """No name belongs to two kinds, but for pools that are called like models."""
    pools = {model.pool for model in view.models.values()} - view.models.keys()
    names = [*view.runners, *view.models, *view.agents, *view.routes, *pools]
    assert len(names) == len(set(names)), names
    explicit = {model.manifest.pool_name for model in records(shown.resources, "model")}
    assert not explicit & (view.runners.keys() | view.agents.keys() | view.routes.keys())


async def assert_stored(world: World) -> None:
    """What is told is also on disk: the same runners, incarnations, keys, models, agents and declarations."""
    stored = await world.store.load()
    assert {each.profile.name: each.profile.incarnation for each in stored.sessions} == {
        runner.name: runner.incarnation for runner in world.view.runners.values()
    }
    assert all(world.view.runners[each.profile.name].ticket_key == each.session.ticket_key for each in stored.sessions)
    published = {model.manifest.name: each.profile.name for each in stored.sessions for model in each.publications}
    documents: dict[ResourceKind, dict[str, Any]] = {kind: {} for kind in DECLARED_KINDS}
    for record in stored.documents:
        kind, name = key_of(record)
        documents[kind][name] = record
    declared = {name: model.declared_runner for name, model in documents[ResourceKind.MODEL].items()}
    assert published.keys() | declared.keys() == world.view.models.keys()
    for name, model in world.view.models.items():
        barred = declared.get(name, "") not in {"", published.get(name)}
        assert model.runner == ("" if barred else published.get(name, "")), name
    agents = {each.manifest.name for session in stored.sessions for each in session.agents}
    assert agents | documents[ResourceKind.AGENT].keys() == world.view.agents.keys()
    assert documents[ResourceKind.ROUTE].keys() == world.view.routes.keys()
    assert stored.settings is not None
    assert stored.settings.allow_cloud_fallback == world.view.settings.allow_cloud_fallback


@pytest.mark.slow("steps hours of a registry's life")
@given(steps)
def test_replayed_watch_equals_a_fresh_snapshot_and_the_store(script: list[Step]) -> None:
    asyncio.run(play(script))


def test_check_detects_an_unpublished_change() -> None:
    async def scenario() -> bool:
        world = World()
        await world.start()
        await world.take(Open("r1", frozenset({"m1"}), Identity.NONE))
        world.watcher.__exit__(None, None, None)
        before, _ = world.registry.core.watch()
        await replay(world, before.revision)
        await world.take(Close("r1"))
        snapshot, _ = world.registry.core.watch()
        await world.end()
        return bool(world.view == await view_of(snapshot))

    assert asyncio.run(scenario()) is False
