"""The VRAM ledger beside the registry's own core: one database, and the sessions that runners opened."""

from contextlib import aclosing

from kit.refusals import refused
from lease_stage import GIB, ScriptedCalls, SimulatedHost, granted_lease, wanted

from registry_svc.config import LedgerConfig, RegistryConfig
from registry_svc.ledger.lease_store import LeaseStore
from registry_svc.ledger.ledger import Ledger
from registry_svc.ledger.policy.leases import Holder, HolderKind
from registry_svc.mesh.core import RegistryCore
from registry_svc.mesh.sessions import SessionManager
from registry_svc.mesh.store import SqlStore
from weft.api.registry.v1.lease_service_pb2 import AcquireLeaseRequest
from weft.api.registry.v1.runner_pb2 import Runner
from weft.api.registry.v1.runner_session_service_pb2 import OpenSessionRequest
from weft.kernel.clock import SystemClock
from weft.kernel.reasons import Reason


def opening(life: str, session_id: str = "") -> OpenSessionRequest:
    return OpenSessionRequest(
        request_id=f"open-{life}",
        session_id=session_id,
        runner=Runner(name="r1", incarnation=life, address="unix:/run/r1", host="host-a", runtime="fake"),
    )


def request(life: str, session_id: str) -> AcquireLeaseRequest:
    holder = Holder(kind=HolderKind.RUNNER, name="r1", incarnation=life)
    asked = {"request_id": f"load-{life}", "session_id": session_id, "purpose": "m1"}
    return wanted(holder, GIB, SimulatedHost().look(), **asked)


async def test_runner_leases_memory_with_its_open_session() -> None:
    store, clock = SqlStore("sqlite://"), SystemClock()
    core = RegistryCore(store, clock, RegistryConfig(database_url="sqlite://"))
    config = LedgerConfig(device_margin_mb=512)
    ledger = Ledger(LeaseStore(store), clock, config, ScriptedCalls(), core.of_runner)
    await core.start()
    await ledger.start()
    try:
        roster = SessionManager(core)
        session = await roster.open_session(opening("life-1"))
        async with aclosing(ledger.acquire(request("life-1", session.id))) as words:
            (granted,) = [word async for word in words]
        assert (await LeaseStore(store).load()).grants == (granted_lease(ledger, granted).grant,)

        again = await roster.open_session(opening("life-2", session.id))
        with refused(Reason.PERMISSION_DENIED):
            await anext(ledger.acquire(request("life-1", again.id)))
        present = Holder(kind=HolderKind.RUNNER, name="r1", incarnation="life-2")
        assert await ledger.release_earlier_lives(present, again.id) == 1
    finally:
        await ledger.stop(1.0)
        await core.stop(1.0)
