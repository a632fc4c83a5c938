"""The accelerator memory of a model: its lease, its use, and the forecast of loads."""

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

from typing_extensions import override

from runner_svc.backend.port import Backend, LoadOrder
from runner_svc.memory.machine_memory import engine_memory_bytes
from runner_svc.memory.port import (
    MemoryForecast,
    MemoryLedger,
    MemoryUser,
    OnWaiting,
    leased_bytes,
)
from runner_svc.policy.host_memory import host_memory_limit
from runner_svc.policy.load_options import LoadPlan
from runner_svc.policy.memory_estimate import MemoryEstimate
from runner_svc.request_records import RequestRecords
from weft.api.registry.v1.lease_pb2 import Lease
from weft.api.registry.v1.lease_service_pb2 import AcquireLeaseRequest, LeaseUse
from weft.gpu.snapshot import ProcessId
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.machine.machine_limits import usable_processors
from weft.kernel.requests.request_values import Priority
from weft.kernel.telemetry.log import get_logger
from weft.kernel.values.units import size_words

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import datetime


log = get_logger("weft.memory")

ALL_LAYERS = -1
"""Value of the load parameter `gpu_layers` that counts the whole model."""


class ModelMemory(MemoryUser):
    """The memory of a model, as a `port.MemoryUser`. Its lease survives a crash of the backend, but no regular end."""

    def __init__(
        self, model: str, backend: Backend, records: RequestRecords, ledger: MemoryLedger, forecast: MemoryForecast
    ) -> None:
        self._model = model
        self._backend = backend
        self._records = records
        self._ledger = ledger
        self._forecast = forecast
        self._plan = LoadPlan()
        self._filled = False
        self._is_learned = False
        self.expected: MemoryEstimate | None = None
        """Forecast of the current or next load; None: unknown, or not requested yet."""
        self.grant: Lease | None = None
        self.lost = asyncio.Event()
        """Set when the lease was lost: its processes must be ended, and none may be started."""
        self.on_lost: Callable[[], None] = lambda: None
        self.on_measured: Callable[[], None] = lambda: None
        """Called with the first observation after a load."""
        self.seen_bytes: int | None = None
        """Last observed memory of its processes; None: unknown."""
        self.priority = Priority.NORMAL
        self.pinned = False
        self.may_come_later = False
        """Whether the memory that the last load did not get may become available; False: it never fits."""
        self.last_used_at: datetime | None = None

    @property
    def holds_devices(self) -> bool:
        """Whether it holds a lease."""
        return self.grant is not None

    @property
    def held_bytes(self) -> int:
        """Memory that it holds: as observed, else as leased; 0: none."""
        if self.grant is None:
            return 0
        return leased_bytes(self.grant) if self.seen_bytes is None else self.seen_bytes

    def adopt(self, backend: Backend, forecast: MemoryForecast) -> None:
        """Uses another backend and forecast, those of the model with its pulled files."""
        self._backend, self._forecast, self.expected = backend, forecast, None

    async def foresee(self, plan: LoadPlan) -> MemoryEstimate | None:
        """Forecasts a load and stores the result in `expected`; None: unknown."""
        self.expected = await self._forecast.expect(plan)
        return self.expected

    async def require_budget(self, plan: LoadPlan, budget_bytes: int) -> None:
        """Raises INSUFFICIENT_MEMORY if a load would exceed a budget; the message states the context that fits."""
        expected = await self.foresee(plan)
        if expected is None or expected.bytes <= budget_bytes:
            return
        fits = await self._forecast.context_within(plan, budget_bytes)
        advice = f"; a context of {fits} tokens fits" if fits else ""
        raise WeftError(
            Reason.INSUFFICIENT_MEMORY,
            f"{self._model} needs {size_words(expected.bytes)} and may use {size_words(budget_bytes)}{advice}",
            metadata={"model": self._model, "field": "options.memory_budget_bytes"},
        )

    async def take(self, plan: LoadPlan, on_waiting: OnWaiting) -> LoadOrder:
        """Returns the order for a load, with its lease; keeps an existing lease. Raises as MemoryLedger.acquire."""
        if self.lost.is_set():
            self.give_up()  # its processes have ended by now
        if self.grant is None:
            expected = await self.foresee(plan)
            if expected is not None and expected.bytes > 0:
                wanted = AcquireLeaseRequest(
                    purpose=self._model,
                    bytes=expected.bytes,
                    priority=self.priority.wire,  # type: ignore[arg-type]  # same numbers
                    pinned=self.pinned,
                )
                self.grant = await self._acquire(wanted, on_waiting)
        self._plan, self._filled, self._is_learned = plan, False, False
        limit_bytes = await self._host_limit(plan)
        if self.grant is None:
            # An engine that needs no device memory gets no devices.
            shares = () if self.expected is not None and self.expected.bytes == 0 else None
            return LoadOrder(shares=shares, parameters=plan.parameters, host_limit_bytes=limit_bytes)
        return LoadOrder(
            shares=tuple(self.grant.shares),
            hides_devices=self._ledger.hides_devices,
            parameters=plan.parameters,
            host_limit_bytes=limit_bytes,
        )

    async def _host_limit(self, plan: LoadPlan) -> int | None:
        """Returns an engine's host memory limit, from the estimate with every layer counted."""
        whole = replace(plan, parameters={**plan.parameters, "gpu_layers": ALL_LAYERS})
        expected = await self._forecast.expect(whole)
        return host_memory_limit(expected, engine_memory_bytes(), usable_processors())

    async def _acquire(self, wanted: AcquireLeaseRequest, on_waiting: OnWaiting) -> Lease | None:
        try:
            return await self._ledger.acquire(wanted, self, on_waiting)
        except WeftError as error:
            self.may_come_later = error.retry_after_seconds is not None
            raise

    def require_good(self) -> None:
        """Raises LEASE_LOST if the lease may have expired, so that nothing starts under it."""
        if self.grant is not None and (self.lost.is_set() or not self._ledger.is_good(self.grant)):
            self.note_lease_lost("it was not renewed in time")
            raise self.lost_error()

    def lost_error(self) -> WeftError:
        """Returns the error that ends the users of a lost lease."""
        return WeftError(Reason.LEASE_LOST, "the lease on its accelerator memory was lost")

    def note_filled(self) -> None:
        """Records that loading has finished."""
        self._filled = True
        if self.grant is not None:
            self._ledger.note_change()

    def pin(self, pinned: bool) -> None:
        """Sets whether it is protected from eviction, and reports that to the ledger immediately."""
        self.pinned = pinned
        if self.grant is not None:
            self._ledger.note_change()

    def note_used(self, at: "datetime") -> None:
        """Records the end of a request."""
        self.last_used_at = at

    def give_up(self) -> None:
        """Releases the lease after the backend has ended. Idempotent."""
        grant, self.grant, self.seen_bytes = self.grant, None, None
        self._filled = False
        self.lost.clear()
        if grant is not None:
            self._ledger.release(grant)

    @override
    def processes(self) -> tuple[ProcessId, ...]:
        return self._backend.processes()

    @override
    def memory_use(self) -> LeaseUse:
        use = LeaseUse(
            filled=self._filled,
            active_requests=len(self._records.running),
            priority=self.priority.wire,  # type: ignore[arg-type]  # same numbers
            pinned=self.pinned,
        )
        if self.last_used_at is not None:
            use.last_used_time.FromDatetime(self.last_used_at)
        return use

    @override
    def note_lease_lost(self, why: str) -> None:
        if self.grant is not None and not self.lost.is_set():
            log.error("lease was lost; its engine is stopped", model=self._model, why=why)
            self.lost.set()
            self.on_lost()

    @override
    def note_memory_seen(self, seen_bytes: int | None) -> None:
        self.seen_bytes = seen_bytes
        if seen_bytes and self._filled and not self._is_learned:
            self._is_learned = True
            self._forecast.note_taken(self._plan, seen_bytes)
            self.on_measured()
