"""Who gets a name, and who keeps it."""

from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, cast

import pytest
from kit.refusals import refused
from registry_harness import ACTIVE, INACTIVE, RunningRegistry, SomeRunner, manifest, ready, running_registry

from weft.api.registry.v1 import runner_pb2
from weft.api.registry.v1 import runner_session_service_pb2 as pb
from weft.api.registry.v1.join_token_service_pb2 import CreateJoinTokenRequest
from weft.api.registry.v1.lease_service_pb2 import ListHostMemoryRequest
from weft.api.registry.v1.lease_service_pb2_grpc import LeaseServiceStub
from weft.kernel.errors.reasons import Reason

if TYPE_CHECKING:
    from weft.api.registry.v1.lease_service_pb2_grpc import LeaseServiceAsyncStub

pytest_plugins = ("database_fixtures",)


@pytest.fixture
def registry_url(database_url: str) -> str:
    """Every database."""
    return database_url


async def test_restarted_runner_adopts_its_rows_by_session_id_with_a_fresh_key(mesh: RunningRegistry) -> None:
    first = await SomeRunner(mesh).open()
    created = (await mesh.model("m1")).create_time
    await mesh.advance(10.0)
    second = await SomeRunner(mesh, incarnation="life-2", session_id=first.session_id).open()
    assert second.session_id == first.session_id
    assert second.ticket_key != first.ticket_key
    assert (await mesh.runner("r1")).incarnation == "life-2"
    assert (await mesh.model("m1")).create_time == created
    with refused(Reason.STALE_HEARTBEAT):
        await first.beat()


async def test_runner_with_changed_models_keeps_its_session_and_ticket_key(mesh: RunningRegistry) -> None:
    runner = await SomeRunner(mesh).open()
    before = runner.session_id, runner.ticket_key
    runner.models = ("m1", "m2")
    await runner.open()
    assert (runner.session_id, runner.ticket_key) == before
    assert (await mesh.model("m2")).runner == "r1"


async def test_guessed_session_id_owns_nothing_and_is_replaced(mesh: RunningRegistry) -> None:
    runner = await SomeRunner(mesh, session_id="ses-i-made-this-up").open()
    assert runner.session_id != "ses-i-made-this-up"


async def test_same_request_id_returns_the_same_session_and_changes_nothing(mesh: RunningRegistry) -> None:
    runner = await SomeRunner(mesh).open()
    await runner.beat()
    watch = await mesh.watch()
    request = SomeRunner(mesh, opens=1).opening()
    again = await mesh.sessions.OpenSession(request)
    assert (again.session_id, again.ticket_key) == (runner.session_id, runner.ticket_key)
    await runner.close()
    assert await watch.read_changes(1) == ["runner r1 inactive"]


async def test_repeated_opening_through_another_relay_moves_the_session_there(mesh: RunningRegistry) -> None:
    """Regression: it kept the address of the relay that had died with the first answer, so no request reached it."""
    first = SomeRunner(mesh, opens=1).opening()
    first.runner.address, first.runner.dial_out = "router-a:7444#runner=r1", True
    opened = await mesh.sessions.OpenSession(first)
    first.runner.address = "router-b:7444#runner=r1"
    again = await mesh.sessions.OpenSession(first)
    assert (again.session_id, again.ticket_key) == (opened.session_id, opened.ticket_key)
    assert (await mesh.runner("r1")).address == "router-b:7444#runner=r1"


async def test_runner_limit_applies_to_new_runners_and_known_ones_can_return(tmp_path: Path) -> None:
    async with running_registry(tmp_path, max_runners=1) as small:
        runner = await SomeRunner(small).open()
        with refused(Reason.TOO_MANY_RESOURCES) as errors:
            await SomeRunner(small, name="r2", models=()).open()
        assert errors[0].metadata == {"resource": "runners", "limit": "1"}
        await SomeRunner(small, incarnation="life-2", session_id=runner.session_id).open()


@pytest.mark.slow("steps hours of a registry's life")
async def test_session_publishes_at_most_1024_models(mesh: RunningRegistry) -> None:
    request = SomeRunner(mesh).opening()
    del request.models[:]
    request.models.extend(manifest(f"m{number}") for number in range(1025))
    opened = await mesh.sessions.OpenSession(request)
    assert [(item.kind, item.name) for item in opened.left_out] == [("model", "m1024")]
    await mesh.advance(90.0)
    assert (await mesh.model("m1023")).runner == "r1"
    assert (await mesh.runner("r1")).status == INACTIVE


async def test_responses_contain_monotonic_mesh_time_and_the_registry_clock(mesh: RunningRegistry) -> None:
    runner = SomeRunner(mesh)
    opened = await mesh.sessions.OpenSession(runner.opening())
    assert opened.mesh_time == opened.registry_time
    assert opened.max_clock_offset.ToSeconds() == 300
    mesh.clock._utc += timedelta(hours=1)
    beat = pb.HeartbeatRequest(session_id=opened.session_id, incarnation="life-1", sequence=1)
    heard = await mesh.sessions.Heartbeat(beat)
    assert heard.mesh_time == opened.mesh_time, "a clock that is set voids no ticket"
    assert heard.registry_time.ToDatetime() - heard.mesh_time.ToDatetime() == timedelta(hours=1)
    leases = cast("LeaseServiceAsyncStub", LeaseServiceStub(mesh.channel))
    hosts = await leases.ListHostMemory(ListHostMemoryRequest())
    assert hosts.mesh_time == heard.mesh_time, "routers and runners go by the same"


async def test_runner_behind_a_link_has_no_clock_offset_limit(mesh: RunningRegistry) -> None:
    opening = SomeRunner(mesh).opening()
    opening.runner.dial_out = True
    assert not (await mesh.sessions.OpenSession(opening)).HasField("max_clock_offset")


async def test_joined_machine_that_states_a_host_of_others_gets_a_host_of_its_own(mesh: RunningRegistry) -> None:
    async def token() -> str:
        return (await mesh.tokens.CreateJoinToken(CreateJoinTokenRequest(reusable=True))).join_token.id

    async def opened(name: str, joined_by: str = "", host: str = "box") -> str:
        opening = SomeRunner(mesh, name=name, models=(f"of-{name}",)).opening()
        opening.runner.host, opening.runner.dial_out, opening.runner.joined_by = host, bool(joined_by), joined_by
        told = (await mesh.sessions.OpenSession(opening)).host
        shown = await mesh.runner(name)
        assert (shown.host, shown.joined_by) == (told, joined_by)
        return told

    assert await opened("local") == "box"
    assert await opened("local-2") == "box"
    ann = await token()
    assert await opened("ann", ann) == "box (ann)"
    assert await opened("ann-2", ann, "laptop") == "laptop"
    assert await opened("ann-3", ann, "laptop") == "laptop", "runners of one machine share its host"
    assert await opened("eve", await token(), "laptop") == "laptop (eve)"
    assert await opened("late", "", "laptop") == "laptop"
    assert await opened("other", await token(), "box (ann)") == "box (ann) (other)"


async def test_clock_offset_of_a_runner_is_stored_and_bounded(mesh: RunningRegistry) -> None:
    runner = await SomeRunner(mesh).open()
    watch = await mesh.watch()
    report = runner_pb2.Capability(clock_refused=True)
    for seconds, kept in ((-600, -600), (2**60, 3_155_760_000)):
        report.clock_offset.seconds = seconds
        await runner.beat(report)
        told = (await watch.read()).change.runner.runner.capability
        assert (told.clock_offset.seconds, told.clock_refused) == (kept, True)
    await runner.beat(runner_pb2.Capability())
    assert not (await watch.read()).change.runner.runner.capability.HasField("clock_offset")


FOUR_HOURS = 4 * 3600.0


async def test_closing_twice_or_with_an_old_incarnation_changes_nothing(mesh: RunningRegistry) -> None:
    runner = await SomeRunner(mesh).open()
    earlier = SomeRunner(mesh, incarnation="life-0", session_id=runner.session_id)
    await earlier.close()
    assert (await mesh.runner("r1")).status == ACTIVE
    await runner.close()
    await runner.close()
    await SomeRunner(mesh, session_id="ses-nobody-has").close()


async def test_repeated_heartbeat_counts_as_activity(mesh: RunningRegistry) -> None:
    runner = await SomeRunner(mesh).open()
    await runner.beat(ready(slots_used=1))
    await mesh.advance(60.0)
    runner.sequence -= 1
    await runner.beat(ready(slots_used=1))
    await mesh.advance(60.0)
    assert (await mesh.runner("r1")).status == ACTIVE
