"""Orphans: engines whose runner is dead, and leases without an engine.

Both are only orphans if they stay: a runner and the registry may take some seconds to notice a death.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, cast

import psutil
from grpc.aio import AioRpcError

from weft.api.registry.v1 import lease_pb2, lease_service_pb2, lease_service_pb2_grpc
from weft.kernel.channels.rpc import open_channel
from weft.kernel.channels.tls_channel import ChannelSecurity

if TYPE_CHECKING:
    from weft.api.registry.v1.lease_service_pb2_grpc import LeaseServiceAsyncStub

CALL_SECONDS = 5.0
POLL_SECONDS = 0.2
SETTLE_SECONDS = 60.0
"""Maximum time from the last kill until every engine has one lease again: a runner restarts, and loads its model."""
DEATH_SECONDS = 5.0
"""Maximum time from the kill of a runner until its engines have ended."""
_FAKE = "weft_testing.fake_backend"


def engines(log: Path) -> list[psutil.Process]:
    """Returns the processes of all fake backends that write this request log, whatever started them."""
    return [process for process in psutil.process_iter() if _writes(process, str(log))]


def _writes(process: psutil.Process, log: str) -> bool:
    with suppress(psutil.Error):
        line = process.cmdline()
        return _FAKE in line and log in line and process.status() != psutil.STATUS_ZOMBIE
    return False


def ownerless(processes: Iterable[psutil.Process], owners: Iterable[int]) -> list[str]:
    """Returns the engines that descend from none of these processes, as text."""
    pids = set(owners)
    return [f"engine {process.pid} has no runner" for process in processes if not pids & _ancestors(process)]


def _ancestors(process: psutil.Process) -> set[int]:
    with suppress(psutil.Error):
        return {parent.pid for parent in process.parents()}
    return set()


def wrong_leases(leases: Sequence[lease_pb2.Lease], models: Mapping[str, str]) -> list[str]:
    """Returns what is wrong with the leases of a mesh at rest, as text: each model has one lease, held by its runner.

    `models`: the runner of each model.
    """
    wrong = [
        f"a lease for {lease.purpose} of {lease.holder.name} is {lease_pb2.Lease.State.Name(lease.state)}"
        for lease in leases
        if lease.state != lease_pb2.Lease.STATE_HELD
    ]
    counts = Counter((lease.purpose, lease.holder.name) for lease in leases)
    wanted = Counter(models.items())
    wrong += [f"{model} of {runner} has {counts[model, runner]} leases" for model, runner in (wanted - counts)]
    wrong += [f"{model} of {runner} has {counts[model, runner]} leases" for model, runner in (counts - wanted)]
    return wrong


async def read_leases(address: str, security: ChannelSecurity | None) -> Sequence[lease_pb2.Lease]:
    """Returns all leases of a mesh. Raises AioRpcError."""
    async with open_channel(address, security) as channel:
        stub = cast("LeaseServiceAsyncStub", lease_service_pb2_grpc.LeaseServiceStub(channel))
        answer = await stub.ListHostMemory(lease_service_pb2.ListHostMemoryRequest(), timeout=CALL_SECONDS)
    return [lease for host in answer.hosts for lease in host.leases]


async def lasting(find: Callable[[], Awaitable[list[str]]], seconds: float) -> list[str]:
    """Returns what is still found after `seconds`; empty as soon as nothing is found."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            found = await find()
        except AioRpcError as error:
            found = [f"leases cannot be read: {error.code().name} {error.details()}"]
        if not found or time.monotonic() > deadline:
            return found
        await asyncio.sleep(POLL_SECONDS)
