"""Deleting what a live runner has loaded: refused, or unloaded first; and memory that lost its owner all the same."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from kit.messages import changed
from operated_registry import GovernedGate, OperatedRegistry, opening, operated_registry
from roster_harness import BareRegistry

from registry_svc.mesh.declarations import Declarations
from registry_svc.mesh.unowned import UNLOAD_GRACE_SECONDS, UNLOAD_RETRY_SECONDS, UnownedModel, UnownedModels
from registry_svc.operations.governance import Gatekeeper
from registry_svc.registry_config import RegistryConfig
from weft.api.registry.v1.runner_pb2 import InstanceState
from weft.api.registry.v1.runner_session_service_pb2 import OpenSessionRequest
from weft.documents.resource_kinds import ResourceKind
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason

if TYPE_CHECKING:
    from registry_svc.mesh.states import Session

LIMIT_SECONDS = 20.0


def instance(model: str, phase: "InstanceState.Phase.ValueType" = InstanceState.PHASE_READY) -> InstanceState:
    return InstanceState(model=model, phase=phase, slots_total=1)


@dataclass(kw_only=True)
class Mesh(OperatedRegistry):
    """The registry, and its watch on models that nothing owns."""

    unowned: UnownedModels
    leased: list[UnownedModel]

    async def delete(self, kind: ResourceKind, name: str, *, force: bool = False) -> None:
        async with asyncio.timeout(LIMIT_SECONDS):
            await self.declarations.delete(kind, name, force=force, requested_by="test")

    async def refused(self, kind: ResourceKind, name: str, *, force: bool = False) -> WeftError:
        with pytest.raises(WeftError) as caught:
            await self.delete(kind, name, force=force)
        return caught.value

    async def after(self, seconds: float) -> list[str]:
        """What runners are asked for once so much time has passed."""
        await self.registry.core.clock.advance(seconds)  # type: ignore[attr-defined]  # a fake clock
        await self.unowned.sweep()
        for _ in range(10):
            await asyncio.sleep(0)
        heard, self.calls.heard[:] = list(self.calls.heard), []
        return heard


@asynccontextmanager
async def mesh_of(
    tmp_path: Path, *instances: InstanceState, gate: Callable[[], Gatekeeper] = Gatekeeper
) -> AsyncIterator[Mesh]:
    config = RegistryConfig(database_url=f"sqlite:///{tmp_path / 'registry.db'}")
    async with operated_registry(config, opening(*instances), gate=gate) as operated:
        leased: list[UnownedModel] = []
        unowned = UnownedModels(operated.registry.core, operated.calls, lambda: leased)
        try:
            yield Mesh(**vars(operated), unowned=unowned, leased=leased)
        finally:
            await unowned.stop()


async def test_model_loaded_on_a_live_runner_cannot_be_deleted_and_error_names_the_runner(tmp_path: Path) -> None:
    async with mesh_of(tmp_path, instance("m1"), instance("m2", InstanceState.PHASE_HIBERNATING)) as mesh:
        error = await mesh.refused(ResourceKind.MODEL, "m1")
        assert error.reason is Reason.RESOURCE_IN_USE
        assert error.metadata == {"model": "m1", "runner": "r1", "loaded": "m1"}
        for word in ("'r1'", "weft unload m1", "weft.yaml", "--force"):
            assert word in error.message
        assert mesh.registry.core.mesh.model("m1") is not None
        await mesh.beat(
            instance("m1", InstanceState.PHASE_HIBERNATING), instance("m2", InstanceState.PHASE_HIBERNATING)
        )
        await mesh.delete(ResourceKind.MODEL, "m1")
        assert mesh.registry.core.mesh.model("m1") is None
        assert mesh.calls.heard == [], "nothing was loaded, so nothing was unloaded"


@pytest.mark.parametrize(
    "phase", [InstanceState.PHASE_LOADING, InstanceState.PHASE_READY, InstanceState.PHASE_DRAINING]
)
async def test_live_runner_with_loaded_models_cannot_be_deleted(
    tmp_path: Path, phase: "InstanceState.Phase.ValueType"
) -> None:
    async with mesh_of(tmp_path, instance("m1", phase)) as mesh:
        error = await mesh.refused(ResourceKind.RUNNER, "r1")
        assert (error.reason, error.metadata["loaded"]) == (Reason.RESOURCE_IN_USE, "m1")
        await mesh.registry.roster.close_session(mesh.session.id, "life-1")
        await mesh.delete(ResourceKind.RUNNER, "r1")


async def test_forced_delete_unloads_first_and_hides_the_model_until_the_next_runner_session(tmp_path: Path) -> None:
    async with mesh_of(tmp_path, instance("m1"), instance("m2", InstanceState.PHASE_HIBERNATING)) as mesh:
        await mesh.delete(ResourceKind.MODEL, "m1", force=True)
        assert await mesh.after(0.0) == ["unload m1 on r1"]
        await mesh.beat(
            instance("m1", InstanceState.PHASE_HIBERNATING), instance("m2", InstanceState.PHASE_HIBERNATING)
        )
        assert mesh.registry.core.mesh.model("m1") is None
        assert await mesh.after(10 * UNLOAD_GRACE_SECONDS) == []
        audit, _ = await mesh.desk.operations.audit_page(0, 10)
        assert len(audit) > 0, "the unload is in the audit log"
        reopened = changed(
            opening(instance("m1", InstanceState.PHASE_HIBERNATING), incarnation="life-2"), session_id=mesh.session.id
        )
        await mesh.registry.roster.open_session(reopened)
        assert mesh.registry.core.mesh.model("m1") is not None


async def test_forced_delete_of_a_runner_unloads_all_its_models(tmp_path: Path) -> None:
    async with mesh_of(tmp_path, instance("m1"), instance("m2")) as mesh:
        await mesh.delete(ResourceKind.RUNNER, "r1", force=True)
        assert mesh.calls.heard == ["unload m1 on r1", "unload m2 on r1"]
        assert mesh.registry.core.mesh.of_runner("r1") is None


async def test_failed_unload_of_a_forced_delete_deletes_nothing(tmp_path: Path) -> None:
    async with mesh_of(tmp_path, instance("m1")) as mesh:
        mesh.calls.failures["m1"] = [WeftError(Reason.INTERNAL, "it hangs")]
        error = await mesh.refused(ResourceKind.MODEL, "m1", force=True)
        assert "nothing was deleted" in error.message
        assert mesh.registry.core.mesh.model("m1") is not None


async def test_forced_delete_of_an_attached_engine_succeeds(tmp_path: Path) -> None:
    async with mesh_of(tmp_path, instance("m1")) as mesh:
        mesh.calls.failures["m1"] = [WeftError(Reason.UNSUPPORTED_OPERATION, "it is attached")]
        await mesh.delete(ResourceKind.MODEL, "m1", force=True)
        assert mesh.registry.core.mesh.model("m1") is None


class EndingRunner:
    """Ends an added model as its runner does: the session without the model is being opened when the end is said."""

    def __init__(self, registry: BareRegistry, without: OpenSessionRequest) -> None:
        self._registry = registry
        self._without = without
        self.opening: asyncio.Task[Session] | None = None

    async def unload(self, model: str, requested_by: str) -> None:
        """Frees its memory."""

    async def remove(self, model: str, requested_by: str) -> None:
        """The write of the next session is under way when this returns."""
        self.opening = asyncio.create_task(self._registry.roster.open_session(self._without))
        await asyncio.sleep(0)


async def test_forced_delete_of_an_added_model_succeeds_if_a_concurrent_session_drops_it(tmp_path: Path) -> None:
    added = InstanceState(model="m1", phase=InstanceState.PHASE_READY, slots_total=1, added_source="hf:acme/m1")
    async with mesh_of(tmp_path, added, instance("m2")) as mesh:
        without = changed(opening(instance("m2"), models=("m2",), incarnation="life-2"), session_id=mesh.session.id)
        runner = EndingRunner(mesh.registry, without)
        async with asyncio.timeout(LIMIT_SECONDS):
            await Declarations(mesh.registry.core, runner).delete(
                ResourceKind.MODEL, "m1", force=True, requested_by="test"
            )
            assert runner.opening is not None
            await runner.opening
        assert mesh.registry.core.mesh.model("m1") is None
        assert mesh.registry.core.mesh.model("m2") is not None


async def test_forced_delete_does_not_bypass_governance(tmp_path: Path) -> None:
    async with mesh_of(tmp_path, instance("m1"), gate=GovernedGate) as mesh:
        error = await mesh.refused(ResourceKind.MODEL, "m1", force=True)
        assert error.reason is Reason.OPERATION_REFUSED
        assert "weft unload m1 --token" in error.message
        assert mesh.calls.heard == []


async def test_loaded_but_unpublished_model_emits_an_event_and_is_unloaded_after_a_grace_period(tmp_path: Path) -> None:
    """The delete had found it asleep, and it was loaded at that very moment."""
    async with mesh_of(tmp_path, instance("m1", InstanceState.PHASE_HIBERNATING)) as mesh:
        await mesh.delete(ResourceKind.MODEL, "m1")
        await mesh.beat(instance("m1"))
        assert await mesh.after(0.0) == []
        assert "r1 unowned" not in mesh.events(), "a forced delete may unload it at this moment"
        assert await mesh.after(UNLOAD_GRACE_SECONDS) == ["unload m1 on r1"]
        assert "r1 unowned" in mesh.events()
        assert await mesh.after(UNLOAD_RETRY_SECONDS / 2) == []
        assert await mesh.after(UNLOAD_RETRY_SECONDS / 2) == ["unload m1 on r1"], "it is still loaded"
        await mesh.beat(instance("m1", InstanceState.PHASE_HIBERNATING))
        assert await mesh.after(2 * UNLOAD_RETRY_SECONDS) == []
        assert mesh.events().count("r1 unowned") == 1


async def test_leased_but_unpublished_model_is_unloaded_without_a_report(tmp_path: Path) -> None:
    async with mesh_of(tmp_path) as mesh:
        mesh.leased.append(UnownedModel("r1", "m9"))
        await mesh.after(0.0)
        assert await mesh.after(UNLOAD_GRACE_SECONDS) == ["unload m9 on r1"]


async def test_unload_of_an_attached_unpublished_engine_is_attempted_once(tmp_path: Path) -> None:
    async with mesh_of(tmp_path) as mesh:
        mesh.calls.failures["m9"] = [WeftError(Reason.UNSUPPORTED_OPERATION, "it is attached")]
        await mesh.beat(instance("m9"))
        await mesh.after(0.0)
        assert await mesh.after(UNLOAD_GRACE_SECONDS) == ["unload m9 on r1"]
        assert await mesh.after(10 * UNLOAD_RETRY_SECONDS) == []


async def test_unload_finds_a_loaded_but_unpublished_model(tmp_path: Path) -> None:
    async with mesh_of(tmp_path, instance("m1", InstanceState.PHASE_HIBERNATING)) as mesh:
        await mesh.delete(ResourceKind.MODEL, "m1")
        await mesh.beat(instance("m1"))
        async with asyncio.timeout(LIMIT_SECONDS):
            await mesh.desk.unloader.unload("m1", "test")
        assert mesh.calls.heard == ["unload m1 on r1"]
