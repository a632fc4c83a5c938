"""A router whose requests are only recorded, and RequestService over a socket."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kit.request_endings import ending
from kit.scheduling import NothingRuns, placement_request
from kit.serving import served

from router_svc.client_registry import ClientRegistry, ClientsConfig
from router_svc.figures import FigureLimits, FiguresRecorder
from router_svc.policy.change_buffer import WatchLimits
from router_svc.policy.decisions import Waits
from router_svc.policy.pool_settings import RateLimitConfig
from router_svc.policy.router_request import Request
from router_svc.request_log import RequestLog
from router_svc.request_servicer import RequestServicer
from weft.api.router.v1 import request_service_pb2_grpc
from weft.durable.requests import RequestClient
from weft.kernel.errors.reasons import Reason
from weft.kernel.time.clock import Clock


class RecordingRouter:
    """A log, clients and figures, and what reads them in the process."""

    def __init__(self, clock: Clock, watches: WatchLimits | None = None) -> None:
        self.clock = clock
        self.log = RequestLog()
        self.figures = FiguresRecorder(clock, FigureLimits(step_seconds=1.0, max_steps=3))
        self.clients = ClientRegistry(ClientsConfig(), RateLimitConfig(), clock)
        loop: Any = NothingRuns()
        self.servicer = RequestServicer(
            self.log, self.clients, clock, loop, figures=self.figures, watches=watches or WatchLimits()
        )
        self.local = RequestClient(self.servicer)

    def arrive(self, key: int, tenant: str = "a") -> None:
        request = placement_request(f"r-{key}", tenant=tenant, client_id="app")
        self.log.note_arrival(Request.of(key, request, self.clock.monotonic()), datetime(2026, 11, 20, tzinfo=UTC))
        self.clients.admit(key, request)

    def wait(self, key: int, position: int) -> None:
        waits = Waits(key=key, position=position, reason="all slots are busy", eta_seconds=2.5)
        self.log.note_decisions([waits], self.clock.monotonic())

    def end(self, key: int, reason: Reason = Reason.UNSPECIFIED) -> None:
        self.log.note_end(ending(key, self.clock.monotonic(), reason))


@asynccontextmanager
async def remote(servicer: RequestServicer, folder: Path) -> AsyncIterator[RequestClient]:
    add = request_service_pb2_grpc.add_RequestServiceServicer_to_server
    async with served(folder / "router.sock", (add, servicer)) as channel:
        yield RequestClient(channel)
