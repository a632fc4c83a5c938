"""The router reads the registry's VRAM ledger again and again, over a real gRPC connection."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
from kit.serving import served

from router_svc.memory_watch import (
    HURRIED_POLL_SECONDS,
    HURRY_SECONDS,
    MAX_HOSTS,
    MAX_HOSTS_PER_SECOND,
    POLL_SECONDS,
    START_HURRY_SECONDS,
    MemoryWatch,
    host_memory_of,
)
from router_svc.policy.endpoints.candidates import HostMemory, MemoryHolder
from weft.api.registry.v1 import lease_pb2, lease_service_pb2, lease_service_pb2_grpc
from weft_testing.fake_clock import FakeClock

GIB = 1024**3
MIB = 1024**2
RUNNER, PROGRAM = lease_pb2.LeaseHolder.KIND_RUNNER, lease_pb2.LeaseHolder.KIND_PROGRAM


def lease(
    kind: lease_pb2.LeaseHolder.Kind.ValueType, name: str, purpose: str, gib: int, **other: object
) -> lease_pb2.Lease:
    return lease_pb2.Lease(
        holder=lease_pb2.LeaseHolder(kind=kind, name=name),
        purpose=purpose,
        shares=[lease_pb2.DeviceBytes(device_index=0, bytes=gib * GIB)],
        **{"state": lease_pb2.Lease.STATE_HELD, **other},  # type: ignore[arg-type]
    )


def host_of(name: str, *leases: lease_pb2.Lease, free_gib: int = 8) -> lease_service_pb2.HostMemory:
    device = lease_service_pb2.DeviceMemory(
        device=lease_pb2.Device(index=0, total_bytes=16 * GIB + 512 * MIB),
        free_bytes=free_gib * GIB,
        margin_bytes=512 * MIB,
    )
    return lease_service_pb2.HostMemory(host=name, devices=[device, device], leases=leases)


class Book(lease_service_pb2_grpc.LeaseServiceServicer):
    def __init__(self) -> None:
        self.hosts = [host_of("host-a")]
        self.looks = 0
        self.is_away = False
        self.looked = asyncio.Event()

    async def ListHostMemory(  # noqa: N802 - the name in the proto
        self, request: lease_service_pb2.ListHostMemoryRequest, context: Any
    ) -> lease_service_pb2.ListHostMemoryResponse:
        assert not request.host
        self.looks += 1
        self.looked.set()
        if self.is_away:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "away")
        return lease_service_pb2.ListHostMemoryResponse(hosts=self.hosts)


@dataclass
class Stage:
    book: Book
    clock: FakeClock
    watch: MemoryWatch
    heard: list[Mapping[str, HostMemory]] = field(default_factory=list)

    async def pass_time(self, seconds: float) -> None:
        """Each look ends before time goes on."""
        await self.clock.advance(seconds, sleepers=1)


@asynccontextmanager
async def watching(folder: Path, listener: Callable[[Mapping[str, HostMemory]], None]) -> AsyncIterator[Stage]:
    book, clock = Book(), FakeClock()  # type: ignore[abstract]  # nobody calls the others
    add = lease_service_pb2_grpc.add_LeaseServiceServicer_to_server
    async with served(folder / "registry.sock", (add, book)) as channel:
        watch = MemoryWatch(channel, clock, listener)
        await watch.start()
        await clock.wait_for_sleepers(1)
        yield Stage(book, clock, watch)
        await watch.stop()


@pytest.fixture
async def stage(tmp_path: Path) -> AsyncIterator[Stage]:
    heard: list[Mapping[str, HostMemory]] = []
    async with watching(tmp_path, heard.append) as stage:
        stage.heard = heard
        await stage.pass_time(START_HURRY_SECONDS)
        assert stage.book.looks == START_HURRY_SECONDS / HURRIED_POLL_SECONDS
        stage.book.looks = 0
        # From here on the looks are POLL_SECONDS apart.
        await stage.pass_time(POLL_SECONDS - HURRIED_POLL_SECONDS)
        assert stage.book.looks == 1
        yield stage


async def test_only_changes_are_reported(stage: Stage) -> None:
    assert [set(hosts) for hosts in stage.heard] == [{"host-a"}]
    await stage.pass_time(2 * POLL_SECONDS)
    assert (stage.book.looks, len(stage.heard)) == (3, 1)
    stage.book.hosts = [host_of("host-a", free_gib=1)]
    await stage.pass_time(POLL_SECONDS)
    assert stage.heard[1]["host-a"].free_bytes == 2 * GIB
    assert stage.watch.hosts == stage.heard[1]


async def test_ledger_is_polled_frequently_while_a_request_waits_for_a_load(stage: Stage) -> None:
    await stage.pass_time(1.0)
    before = stage.book.looks
    stage.watch.hurry()
    stage.book.looked.clear()
    await stage.book.looked.wait()
    await stage.clock.wait_for_sleepers(1)
    assert stage.book.looks == before + 1, "at once, as the last look was a while ago"
    await stage.pass_time(HURRY_SECONDS)
    assert stage.book.looks == before + HURRY_SECONDS / HURRIED_POLL_SECONDS
    calm = stage.book.looks
    await stage.pass_time(POLL_SECONDS - 2 * HURRIED_POLL_SECONDS)
    assert stage.book.looks == calm, "nobody hurries any more"


async def test_repeated_hurry_calls_do_not_poll_more_often(stage: Stage) -> None:
    before = stage.book.looks
    for _ in range(40):
        stage.watch.hurry()
        await stage.pass_time(HURRIED_POLL_SECONDS / 10)
    assert stage.book.looks - before <= 5


async def test_large_ledger_is_polled_less_often_regardless_of_hurry(stage: Stage) -> None:
    count = 2 * MAX_HOSTS_PER_SECOND
    stage.book.hosts = [lease_service_pb2.HostMemory(host=f"host-{number}") for number in range(count)]
    await stage.pass_time(POLL_SECONDS)
    before = stage.book.looks
    for _ in range(16):
        stage.watch.hurry()
        await stage.pass_time(HURRIED_POLL_SECONDS)
    assert stage.book.looks - before == 16 * HURRIED_POLL_SECONDS / 2


async def test_last_view_remains_during_a_registry_outage_and_has_an_age(stage: Stage) -> None:
    stage.book.is_away = True
    await stage.pass_time(3 * POLL_SECONDS)
    assert set(stage.watch.hosts) == {"host-a"}
    assert stage.watch.age_seconds == 3 * POLL_SECONDS
    stage.book.is_away, stage.book.hosts = False, []
    await stage.pass_time(POLL_SECONDS)
    assert (stage.watch.hosts, stage.watch.age_seconds) == ({}, 0.0)


@pytest.mark.slow("floods a service")
async def test_hosts_over_the_limit_are_omitted(stage: Stage) -> None:
    stage.book.hosts = [lease_service_pb2.HostMemory(host=f"host-{number}") for number in range(MAX_HOSTS + 5)]
    await stage.pass_time(POLL_SECONDS)
    assert len(stage.watch.hosts) == MAX_HOSTS


async def test_failing_listener_does_not_end_the_watch(tmp_path: Path) -> None:
    def fails(_: Mapping[str, HostMemory]) -> None:
        raise ValueError("a bug elsewhere")

    async with watching(tmp_path, fails) as stage:
        await stage.pass_time(POLL_SECONDS)
        assert stage.book.looks > 2


def test_models_are_named_by_lease_purpose_and_programs_by_their_own_name() -> None:
    memory = host_memory_of(
        host_of(
            "host-a",
            lease(RUNNER, "box", "qwen", 4, pinned=True),
            lease(RUNNER, "box", "llama", 2, state=lease_pb2.Lease.STATE_RELEASING, seen_bytes=3 * GIB),
            lease(RUNNER, "box", "phi", 1, state=lease_pb2.Lease.STATE_ORPHANED, seen_bytes=0),
            lease(PROGRAM, "train.py", "nightly training", 8),
        )
    )
    assert memory.holders == (
        MemoryHolder(name="qwen", is_model=True, held_bytes=4 * GIB, pinned=True),
        MemoryHolder(name="llama", is_model=True, held_bytes=3 * GIB, is_leaving=True),
        MemoryHolder(name="phi", is_model=True, held_bytes=GIB, is_lost=True),
        MemoryHolder(name="train.py", is_model=False, held_bytes=8 * GIB),
    )
