"""A VRAM ledger whose grants, refusals and revocations the test controls."""

import asyncio
from typing import TYPE_CHECKING

from runner_svc.memory.port import (
    MemoryForecast,
    MemoryLedger,
    MemoryUser,
    OnWaiting,
)
from runner_svc.policy.load_options import LoadPlan
from runner_svc.policy.memory_estimate import EstimateSource, MemoryEstimate
from weft.api.registry.v1.lease_pb2 import DeviceBytes, Lease
from weft.api.registry.v1.lease_service_pb2 import AcquireLeaseRequest

if TYPE_CHECKING:
    from weft.kernel.errors.error_tree import WeftError

GIB = 1024**3
WORDS = "waiting for memory: needs 2.0 GiB on host-a, held by qwen"


class SteppedLedger(MemoryLedger):
    """Grants one device's memory at once unless `go` is cleared or `error` is set."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.go.set()
        self.error: WeftError | None = None
        self.wishes: list[AcquireLeaseRequest] = []
        self.held: dict[str, MemoryUser] = {}
        self.released: list[str] = []
        self.is_sure = True
        self.changes = 0

    async def acquire(self, wish: AcquireLeaseRequest, user: MemoryUser, on_waiting: OnWaiting) -> Lease | None:
        self.wishes.append(wish)
        if not self.go.is_set():
            on_waiting(WORDS)
            await self.go.wait()
        if self.error is not None:
            raise self.error
        number = len(self.wishes)
        grant = Lease(
            lease_id=f"lease-{number}",
            fencing_number=number,
            shares=[DeviceBytes(device_index=0, bytes=wish.bytes)],
        )
        self.held[grant.lease_id] = user
        return grant

    def is_good(self, grant: Lease) -> bool:
        return self.is_sure and grant.lease_id in self.held

    def note_change(self) -> None:
        self.changes += 1

    def release(self, grant: Lease) -> None:
        self.held.pop(grant.lease_id, None)
        self.released.append(grant.lease_id)

    def lose(self) -> None:
        held, self.held = self.held, {}
        for user in held.values():
            user.note_lease_lost("the test says so")


class StepForecast(MemoryForecast):
    """2 GiB for a context of 2048, in proportion for others."""

    def __init__(self) -> None:
        self.taken: list[tuple[LoadPlan, int]] = []

    async def expect(self, plan: LoadPlan) -> MemoryEstimate | None:
        context = int(plan.parameters.get("context_tokens", 2048))
        return MemoryEstimate(bytes=2 * GIB * context // 2048, source=EstimateSource.HEADER)

    async def context_within(self, plan: LoadPlan, budget_bytes: int) -> int | None:
        del plan
        return budget_bytes * 2048 // (2 * GIB)

    def note_taken(self, plan: LoadPlan, taken_bytes: int) -> None:
        self.taken.append((plan, taken_bytes))
