"""Three routers as processes with one PostgreSQL: no tenant gets more than its limit, whatever is killed or stopped."""

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest
import yaml
from apart_mesh import Apart, running_apart
from mesh_process import POOL, eventually, fake_runner, write_config

from weft.dispatch.placement import PlacementRequest
from weft.dispatch.remote_router import RemotePlacement, RemoteRequests
from weft.kernel.errors import WeftError
from weft.kernel.names import new_id
from weft.kernel.reasons import Reason
from weft.kernel.request import Operation
from weft.kernel.rpc import open_channel
from weft_testing.postgres_server import PostgresServer, running_postgres

pytestmark = pytest.mark.nightly("active-active routers, removed in the redesign")

ROUTERS = ("r1", "r2", "r3")
WAIT_SECONDS = 60.0
PROMPT_TOKENS = 50
LIMITS = {"small": "7req/min", "middle": "40req/min", "large": "600req/min", "tokens": "3000tok/min"}
"""What the loaded tenants may ask for in a minute."""
LATE_LIMIT = 10
"""Of the tenant that is heard of while the database is away for the first time."""


@dataclass(frozen=True, slots=True)
class Admitted:
    """One that came in: not before it was sent, and not after its answer."""

    tenant: str
    sent_at: float
    heard_at: float


@dataclass
class Mesh:
    """The routers, each with a home of its own, and their database."""

    postgres: PostgresServer
    homes: dict[str, Apart]
    admitted: list[Admitted] = field(default_factory=list)
    refused: dict[str, int] = field(default_factory=dict)

    def address(self, name: str) -> str:
        return f"unix:{self.homes[name].home}/run/router.sock"

    async def ask(self, placement: RemotePlacement, name: str, tenant: str) -> bool:
        """Whether a router admits a request, which is ended at once."""
        request = PlacementRequest(
            request_id=new_id("req"),
            tenant=tenant,
            model=POOL,
            operation=Operation.CHAT,
            prompt_tokens=PROMPT_TOKENS,
            seconds_left=5.0,
            # The one that is asked is the owner then.
            unreachable_routers=frozenset(set(ROUTERS) - {name}),
        )
        sent_at = time.monotonic()
        try:
            async with placement.place(request) as place:
                await place.next_decision()
                self.admitted.append(Admitted(tenant, sent_at, time.monotonic()))
                await place.report_finished(Reason.UNSPECIFIED)
        except WeftError as error:
            if error.reason is not Reason.RATE_LIMIT_EXCEEDED:
                return False
            self.refused[tenant] = self.refused.get(tenant, 0) + 1
            return False
        return True

    async def load(self, name: str, tenants: Sequence[str]) -> None:
        """Asks one router for each tenant in turn, until it is cancelled."""
        async with open_channel(self.address(name)) as channel:
            placement = RemotePlacement(channel)
            while True:
                for tenant in tenants:
                    await self.ask(placement, name, tenant)
                await asyncio.sleep(0.02)

    async def knows_the_mesh(self, name: str) -> bool:
        async with open_channel(self.address(name)) as channel:
            return await self.ask(RemotePlacement(channel), name, "unlimited")

    async def uses(self, name: str, tenant: str) -> Mapping[str, tuple[int, bool]]:
        """What a router says of each that holds something of a tenant's limit: the share, if it is cut off."""
        async with open_channel(self.address(name)) as channel:
            uses = await RemoteRequests(channel).limit_uses(tenant)
            return {part.router: (part.share, part.is_cut_off) for use in uses for part in use.slices}

    def kill(self, name: str) -> None:
        self.homes[name].end("router", signal.SIGKILL)

    def amount(self, tenant: str) -> int:
        return PROMPT_TOKENS if LIMITS.get(tenant, "").endswith("tok/min") else 1

    def most_within_a_minute(self, tenant: str) -> int:
        """What was certainly admitted within one minute: sent and answered in it."""
        found = sorted((each for each in self.admitted if each.tenant == tenant), key=lambda each: each.sent_at)
        return max(
            (
                sum(other.heard_at < each.sent_at + 60 for other in found[place:]) * self.amount(tenant)
                for place, each in enumerate(found)
            ),
            default=0,
        )


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[Mesh]:
    with running_postgres() as postgres, postgres.fresh_database() as database:
        config = write_config(tmp_path, fake_runner("a", slots=64, answer_tokens=0))
        with running_apart(tmp_path, config, ("registry", "runner")) as apart, _routers(tmp_path) as homes:
            url = postgres.url(database)
            rates = {tenant: [rate] for tenant, rate in LIMITS.items()} | {"late": [f"{LATE_LIMIT}req/min"]}
            for name, home in homes.items():
                settings = {
                    "addresses": {"registry": f"unix:{apart.home}/run/registry.sock"},
                    "router": {"name": name, "database_url": url, "rate_limits": {"tenants": rates}},
                }
                (tmp_path / name / "weft.yaml").write_text(yaml.safe_dump(settings))
                home.start("router")
            yield Mesh(postgres, homes)


@contextmanager
def _routers(folder: Path) -> Iterator[dict[str, Apart]]:
    homes = {}
    for name in ROUTERS:
        (folder / name).mkdir()
        homes[name] = Apart(folder / name / "home", folder / name / "weft.yaml")
    try:
        yield homes
    finally:
        for home in homes.values():
            home.end_all()


@pytest.fixture
async def loaded(mesh: Mesh) -> AsyncIterator[Mesh]:
    """The same, while every router is asked for every tenant all the time."""
    for name in ROUTERS:
        await eventually(partial(mesh.knows_the_mesh, name), WAIT_SECONDS, f"{name} places nothing")
    tasks = [asyncio.create_task(mesh.load(name, list(LIMITS))) for name in ROUTERS]
    yield mesh
    for task in tasks:
        task.cancel()
    for task in tasks:
        with suppress(asyncio.CancelledError):
            await task


@pytest.mark.nightly("repeats kills, cuts or swaps of a whole mesh")
async def test_limits_hold_while_routers_are_killed_and_the_database_is_stopped(loaded: Mesh) -> None:
    mesh = loaded
    began = time.monotonic()
    # Before anything is lost: what a killed router admitted and did not answer is used, and not heard of.
    await eventually(lambda: _all_is_used(mesh), WAIT_SECONDS, "the limit is not used up")
    for name in ("r2", "r1"):
        await asyncio.sleep(2.0)
        mesh.kill(name)
        await asyncio.sleep(0.5)
        mesh.homes[name].start("router")
    await asyncio.sleep(2.0)
    mesh.postgres.stop()
    await _late_tenant(mesh)
    mesh.postgres.start()
    mesh.postgres.await_ready()
    await eventually(lambda: _is_back(mesh), WAIT_SECONDS, "no lease after the database came back")
    mesh.kill("r3")
    mesh.homes["r3"].start("router")
    await asyncio.sleep(max(2.0, began + 66.0 - time.monotonic()))

    found = {tenant: mesh.most_within_a_minute(tenant) for tenant in LIMITS}
    limits = {tenant: int(rate.partition("req")[0].partition("tok")[0]) for tenant, rate in LIMITS.items()}
    assert all(found[tenant] <= limits[tenant] for tenant in LIMITS), found
    assert found["middle"] >= 0.8 * limits["middle"], "most of it was used"
    assert all(mesh.refused[tenant] for tenant in LIMITS)


async def _late_tenant(mesh: Mesh) -> None:
    """While the database is away each router admits its share, says so, and all of them no more than the limit."""

    async def is_cut_off(name: str) -> bool:
        return await mesh.uses(name, "late") == {each: (4 if each == "r1" else 3, True) for each in ROUTERS}

    for name in ROUTERS:
        async with open_channel(mesh.address(name)) as channel:
            placement = RemotePlacement(channel)
            await eventually(
                partial(mesh.ask, placement, name, "late"), WAIT_SECONDS, f"{name} admits nothing by its share"
            )
    await eventually(lambda: is_cut_off("r1"), WAIT_SECONDS, "the routers do not say that they are cut off")
    for name in ROUTERS:
        async with open_channel(mesh.address(name)) as channel:
            for _ in range(LATE_LIMIT):
                await mesh.ask(RemotePlacement(channel), name, "late")
    assert sum(each.tenant == "late" for each in mesh.admitted) == LATE_LIMIT


async def _all_is_used(mesh: Mesh) -> bool:
    return mesh.most_within_a_minute("small") == 7


async def _is_back(mesh: Mesh) -> bool:
    found = [await mesh.uses(name, "late") for name in ROUTERS]
    return not any(cut_off for uses in found for _, cut_off in uses.values())
