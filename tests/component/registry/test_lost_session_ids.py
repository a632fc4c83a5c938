"""A runner that comes back without its session id, while its earlier process still counts as live."""

from collections.abc import AsyncIterator

import pytest
from kit.messages import changed
from test_roster_disk import OPENING

from registry_svc.mesh.core import RegistryCore
from registry_svc.mesh.sessions import SessionManager
from registry_svc.mesh.store import SqlStore
from registry_svc.registry_config import RegistryConfig
from weft.api.registry.v1.runner_pb2 import Runner
from weft.api.registry.v1.runner_session_service_pb2 import OpenSessionRequest
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft_testing.fake_clock import FakeClock

LOST = changed(OPENING, request_id="open-2", runner=changed(OPENING.runner, incarnation="life-2"))
"""The same runner in its next process, which does not know its session."""


class Addresses:
    """Which incarnation answers where, and what was asked."""

    def __init__(self) -> None:
        self.incarnations: dict[str, str] = {}
        self.asked: list[str] = []

    async def incarnation_at(self, address: str) -> str:
        self.asked.append(address)
        return self.incarnations.get(address, "")


@pytest.fixture
async def core() -> AsyncIterator[RegistryCore]:
    core = RegistryCore(SqlStore("sqlite://"), FakeClock(), RegistryConfig(database_url="sqlite://"))
    await core.start()
    yield core
    await core.stop(1.0)


@pytest.fixture
def addresses() -> Addresses:
    return Addresses()


@pytest.fixture
async def roster(core: RegistryCore, addresses: Addresses) -> SessionManager:
    """One that the first life has opened its session with."""
    roster = SessionManager(core, addresses.incarnation_at)
    await roster.open_session(OPENING)
    return roster


async def _refused(roster: SessionManager, opening: OpenSessionRequest) -> Reason:
    with pytest.raises(WeftError) as refused:
        await roster.open_session(opening)
    return refused.value.reason


async def test_runner_that_lost_its_session_id_reregisters_immediately_at_its_old_address(
    core: RegistryCore, roster: SessionManager, addresses: Addresses
) -> None:
    """It waited until its own earlier process counted as silent: 90 seconds without a runner."""
    addresses.incarnations["a"] = "life-2"
    session = await roster.open_session(LOST)
    member = core.mesh.of_runner("r1")
    assert member is not None
    assert member.session == session
    assert (member.pulse.active, list(member.publications)) == (True, ["m1"])
    assert [stored.session.id for stored in (await core.store.load()).sessions] == [session.id]


async def test_watchers_learn_that_the_earlier_process_is_gone_even_if_its_successor_is_refused(
    core: RegistryCore, roster: SessionManager, addresses: Addresses, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Routers placed requests on the process that was gone for as long as the disk was full, at most for hours."""

    async def fail(*_: object, **__: object) -> None:
        raise WeftError(Reason.SERVICE_UNAVAILABLE, "the disk is full")

    addresses.incarnations["a"] = "life-2"
    monkeypatch.setattr(core.store, "save_session", fail)
    _, watcher = core.watch()
    before = core.revision
    assert await _refused(roster, LOST) is Reason.SERVICE_UNAVAILABLE
    assert core.revision > before
    with watcher:
        told = (await anext(watcher)).change.runner.runner
    assert (told.name, told.incarnation, told.status) == ("r1", "life-1", Runner.STATUS_INACTIVE)
    monkeypatch.undo()
    await roster.open_session(LOST)


@pytest.mark.parametrize("answering", ["", "life-1", "life-3"])
async def test_live_runner_keeps_its_name_if_the_claimant_does_not_answer_at_its_address(
    roster: SessionManager, addresses: Addresses, answering: str
) -> None:
    addresses.incarnations["a"] = answering
    assert await _refused(roster, LOST) is Reason.ALREADY_EXISTS


async def test_claimant_at_another_address_is_rejected_without_a_callback(
    roster: SessionManager, addresses: Addresses
) -> None:
    addresses.incarnations["b"] = "life-2"
    elsewhere = changed(LOST, runner=changed(LOST.runner, address="b"))
    assert await _refused(roster, elsewhere) is Reason.ALREADY_EXISTS
    assert addresses.asked == []


async def test_claimant_behind_a_relay_is_rejected(roster: SessionManager, addresses: Addresses) -> None:
    addresses.incarnations["a"] = "life-2"
    behind = changed(LOST, runner=changed(LOST.runner, dial_out=True))
    assert await _refused(roster, behind) is Reason.ALREADY_EXISTS


async def test_runner_with_its_session_id_is_not_called_back(
    core: RegistryCore, roster: SessionManager, addresses: Addresses
) -> None:
    known = core.mesh.of_runner("r1")
    assert known is not None
    await roster.open_session(changed(LOST, session_id=known.session.id))
    assert addresses.asked == []
