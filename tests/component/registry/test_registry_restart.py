"""What a registry that was away still knows, and who owns its file."""

import signal
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, cast

import pytest
import yaml
from kit.refusals import refused
from kit.resources import declared
from kit.warm_python import warm
from registry_harness import ACTIVE, INACTIVE, SomeRunner, an_agent, declare, ready, running_registry

from weft.api.registry.v1 import (
    declaration_service_pb2,
    declaration_service_pb2_grpc,
    registry_service_pb2,
    registry_service_pb2_grpc,
)
from weft.documents.kinds import record_in
from weft.kernel.reasons import Reason
from weft.kernel.rpc import open_channel
from weft_testing.fake_clock import FakeClock

if TYPE_CHECKING:
    from weft.api.registry.v1.declaration_service_pb2_grpc import DeclarationServiceAsyncStub
    from weft.api.registry.v1.registry_service_pb2_grpc import RegistryServiceAsyncStub

pytest_plugins = ("database_fixtures",)

FOUR_HOURS = 4 * 3600.0


@pytest.fixture
def registry_url(database_url: str) -> str:
    """Every database."""
    return database_url


async def test_restarted_registry_keeps_sessions_runners_models_and_keys(tmp_path: Path, registry_url: str) -> None:
    clock = FakeClock()
    async with running_registry(tmp_path, database_url=registry_url, clock=clock) as before:
        runner = await SomeRunner(before, models=("m1", "m2")).open()
        model = await before.model("m2")
    async with running_registry(tmp_path, database_url=registry_url, clock=clock) as after:
        assert await after.model("m2") == model
        watch = await after.watch(include_ticket_keys=True)
        assert watch.snapshot.snapshot.runners[0].ticket_key == runner.ticket_key
        runner.registry = after
        await runner.beat(ready())
        assert (await after.runner("r1")).status == ACTIVE


async def test_registry_downtime_expires_no_runner(tmp_path: Path, registry_url: str) -> None:
    clock = FakeClock()
    async with running_registry(tmp_path, database_url=registry_url, clock=clock) as before:
        runner = await SomeRunner(before).open()
        await (await SomeRunner(before, name="closed", models=()).open()).close()
    await clock.advance(FOUR_HOURS * 2)
    async with running_registry(tmp_path, database_url=registry_url, clock=clock) as after:
        await after.advance(85.0)
        assert (await after.runner("r1")).status == ACTIVE
        assert (await after.runner("closed")).status == INACTIVE
        runner.registry = after
        await runner.beat()
        await after.advance(85.0)
        assert (await after.runner("r1")).status == ACTIVE


@pytest.mark.slow("kills or restarts a service")
async def test_inactive_time_before_a_restart_counts(tmp_path: Path, registry_url: str) -> None:
    clock = FakeClock()
    async with running_registry(tmp_path, database_url=registry_url, clock=clock) as before:
        await SomeRunner(before).open()
        await before.advance(90.0 + FOUR_HOURS / 2)
    async with running_registry(tmp_path, database_url=registry_url, clock=clock) as after:
        await after.advance(FOUR_HOURS / 2 - 5.0)
        assert (await after.runner("r1")).status == INACTIVE
        await after.advance(5.0)
        with refused(Reason.NOT_FOUND):
            await after.runner("r1")


async def test_session_is_adopted_across_a_restart_of_both_sides(tmp_path: Path, registry_url: str) -> None:
    async with running_registry(tmp_path, database_url=registry_url) as before:
        first = await SomeRunner(before).open()
    async with running_registry(tmp_path, database_url=registry_url) as after:
        second = await SomeRunner(after, incarnation="life-2", session_id=first.session_id).open()
        assert second.session_id == first.session_id
        with refused(Reason.ALREADY_EXISTS):
            await SomeRunner(after, incarnation="life-x").open()


STOP_LIMIT_SECONDS = 30.0

CALL_LIMIT_SECONDS = 20.0


@contextmanager
def serving(home: Path, config: Path, *, is_killed: bool = False) -> Iterator[str]:
    """The address of a registry in its own process, which ends in order or is killed."""
    command = [*warm("weft_app.cli.main"), "serve", "registry"]
    process = subprocess.Popen(
        [*command, "--home", str(home), "--config", str(config)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        assert "serves at" in line, "the registry did not start"
        yield line.split()[-1]
        if not is_killed:
            process.send_signal(signal.SIGTERM)
            assert process.wait(STOP_LIMIT_SECONDS) == 0
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@asynccontextmanager
async def asking(address: str) -> AsyncIterator[tuple["RegistryServiceAsyncStub", "DeclarationServiceAsyncStub"]]:
    async with open_channel(address) as channel:
        yield (
            cast("RegistryServiceAsyncStub", registry_service_pb2_grpc.RegistryServiceStub(channel)),
            cast("DeclarationServiceAsyncStub", declaration_service_pb2_grpc.DeclarationServiceStub(channel)),
        )


@pytest.mark.slow("kills or restarts a service")
async def test_registry_process_stores_declarations_in_the_configured_database(
    tmp_path: Path, database_url: str
) -> None:
    config = tmp_path / "weft.yaml"
    config.write_text(yaml.safe_dump({"registry": {"database_url": database_url}}))
    request = declaration_service_pb2.ApplyRequest(declarations=[declare("m1"), declared(agent=an_agent("a1"))])
    with serving(tmp_path / "home", config) as address:
        async with asking(address) as (_, declarations):
            await declarations.Apply(request, timeout=CALL_LIMIT_SECONDS)
    with serving(tmp_path / "home", config) as address:
        async with asking(address) as (registry, _):
            found = await registry.GetResource(
                registry_service_pb2.GetResourceRequest(kind="agent", name="a1"), timeout=CALL_LIMIT_SECONDS
            )
    assert record_in(found.resource).manifest == an_agent("a1")
    assert not list((tmp_path / "home").rglob("registry.db")), "it used a file of its own"
