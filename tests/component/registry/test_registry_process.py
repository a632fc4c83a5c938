"""The registry as `weft serve registry` starts it, on each database."""

import signal
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, cast

import pytest
import yaml
from kit.resources import declared
from kit.warm_python import warm
from registry_harness import an_agent, declare

from weft.api.registry.v1 import (
    declaration_service_pb2,
    declaration_service_pb2_grpc,
    registry_service_pb2,
    registry_service_pb2_grpc,
)
from weft.documents.kinds import record_in
from weft.kernel.rpc import open_channel

if TYPE_CHECKING:
    from weft.api.registry.v1.declaration_service_pb2_grpc import DeclarationServiceAsyncStub
    from weft.api.registry.v1.registry_service_pb2_grpc import RegistryServiceAsyncStub

pytest_plugins = ("database_fixtures",)

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
