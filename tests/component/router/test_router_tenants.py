"""Tenants that operators declare: the router takes them from the registry's watch while requests wait and run."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from kit.scheduling import placement_request as asked
from kit.scheduling import scheduling_loop
from test_request_log_of_loop import mesh_view

from router_svc.client_registry import ClientsConfig
from router_svc.loop import RouterRecords, SchedulingLoop
from router_svc.placement import LocalPlacement
from router_svc.policy.pool_settings import ClientProfile, RateLimitConfig, Settings, TenantSettings
from router_svc.receipt_counts import MAX_COUNTED_TOKENS
from router_svc.request_servicer import RequestServicer
from weft.api.common.v1.receipt_pb2 import OUTCOME_COMPLETED, Receipt
from weft.api.registry.v1.tenant_pb2 import REMOTE_PERMISSION_ALWAYS, Tenant, TenantLimit, TenantManifest
from weft.api.runner.v1.ticket_pb2 import TicketClaims
from weft.dispatch.fleet import FleetView
from weft.durable.requests import RequestClient
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.requests.request_values import Priority
from weft.kernel.time.clock import SystemClock
from weft.kernel.values.units import Rate


class Router:
    def __init__(self, loop: SchedulingLoop, records: RouterRecords, view: FleetView) -> None:
        self.loop = loop
        self.view = view
        self.placement = LocalPlacement(loop)
        self.requests = RequestClient(RequestServicer(records.requests, records.clients, SystemClock(), loop))

    def declare(self, *manifests: TenantManifest, source: "Tenant.Source.ValueType" = Tenant.SOURCE_DECLARED) -> None:
        """What the next view has: these tenants, and no others."""
        tenants = {each.name: Tenant(manifest=each, source=source) for each in manifests}
        self.view = replace(self.view, revision=self.view.revision + 1, tenants=tenants)
        self.loop.update_view(self.view)


@asynccontextmanager
async def router(
    slots: int = 8,
    rates: RateLimitConfig | None = None,
    settings: Settings | None = None,
    clients: ClientsConfig | None = None,
) -> AsyncIterator[Router]:
    clock = SystemClock()
    records = RouterRecords.empty(clock, rate_limits=rates, clients=clients)
    view = mesh_view(slots)
    loop = scheduling_loop(view, clock=clock, settings=settings, records=records)
    try:
        yield Router(loop, records, view)
    finally:
        loop.close()


def minutely(requests: int) -> TenantLimit:
    return TenantLimit(window=TenantLimit.WINDOW_MINUTE, requests=requests)


async def test_limit_applies_only_while_declared() -> None:
    async with router() as mesh:
        for name in ("r-1", "r-2"):
            async with mesh.placement.place(asked(name)) as place:
                assert (await place.next_decision()).HasField("granted")
        mesh.declare(TenantManifest(name="a", limits=[minutely(1)]))
        async with mesh.placement.place(asked("r-3")) as place:
            await place.next_decision()
        async with mesh.placement.place(asked("r-4")) as place:
            with pytest.raises(WeftError) as caught:
                await place.next_decision()
        assert caught.value.reason is Reason.RATE_LIMIT_EXCEEDED
        mesh.declare(TenantManifest(name="a", limits=[minutely(2)]))
        async with mesh.placement.place(asked("r-5")) as place:
            assert (await place.next_decision()).HasField("granted"), "one more than before"
        mesh.declare()
        async with mesh.placement.place(asked("r-6")) as place:
            assert (await place.next_decision()).HasField("granted")


async def test_tenant_changes_do_not_disturb_waiting_and_running_requests() -> None:
    async with router(slots=1) as mesh:
        first, second = mesh.placement.place(asked("r-1")), mesh.placement.place(asked("r-2"))
        async with first, second:
            assert (await first.next_decision()).HasField("granted")
            assert (await second.next_decision()).HasField("queued")
            mesh.declare(TenantManifest(name="a", weight=5, limits=[minutely(1)]))
            mesh.declare(TenantManifest(name="a", weight=0.5, limits=[minutely(3)]))
            record = await mesh.requests.request("r-2")
            assert record.queued.position == 1
            await first.report_finished(Reason.UNSPECIFIED)
            while not (decision := await second.next_decision()).HasField("granted"):
                assert decision.HasField("queued")
            await second.report_finished(Reason.UNSPECIFIED)


async def test_raised_tenant_limit_grants_free_slots_immediately() -> None:
    settings = Settings(tenants={"a": TenantSettings(max_in_flight=1)})
    async with router(slots=2, settings=settings) as mesh:
        first, second = mesh.placement.place(asked("r-1")), mesh.placement.place(asked("r-2"))
        async with first, second:
            assert (await first.next_decision()).HasField("granted")
            assert (await second.next_decision()).HasField("queued")
            mesh.declare(TenantManifest(name="a", max_in_flight=2))
            async with asyncio.timeout(5):
                while not (await second.next_decision()).HasField("granted"):
                    pass


async def test_bug_absurd_token_counts_of_a_runner_were_charged_to_the_tenant() -> None:
    """Its account lost precision, and a negative count put the tenant before all others."""
    async with router() as mesh:
        for tenant, tokens in (("a", 2**62), ("b", -(2**62))):
            receipt = Receipt(outcome=OUTCOME_COMPLETED)
            receipt.usage.prompt_tokens = receipt.usage.completion_tokens = tokens
            async with mesh.placement.place(asked(tenant=tenant)) as place:
                await place.next_decision()
                await place.report_finished(Reason.UNSPECIFIED, receipt)
        scheduler = mesh.loop.scheduler
        assert (scheduler.fair_share("a"), scheduler.fair_share("b")) == (2 * MAX_COUNTED_TOKENS, 0)


async def test_remote_permission_comes_from_the_declared_tenant() -> None:
    async with router() as mesh:
        for manifest, expected in (
            (None, False),
            (TenantManifest(name="a", allow_remote=REMOTE_PERMISSION_ALWAYS), True),
        ):
            mesh.declare(*([manifest] if manifest else []))
            async with mesh.placement.place(asked("r")) as place:
                granted = (await place.next_decision()).granted
                assert TicketClaims.FromString(granted.ticket.claims).allow_remote is expected


@pytest.mark.parametrize(
    ("asked_for", "of_key", "of_tenant", "granted"),
    [
        (Priority.HIGH, Priority.HIGH, Priority.HIGH, Priority.HIGH),
        (Priority.HIGH, Priority.NORMAL, Priority.HIGH, Priority.NORMAL),
        (Priority.HIGH, Priority.HIGH, Priority.NORMAL, Priority.NORMAL),
        (Priority.HIGH, Priority.NORMAL, Priority.LOW, Priority.LOW),
        (Priority.LOW, Priority.NORMAL, Priority.NORMAL, Priority.LOW),
        (None, Priority.HIGH, Priority.LOW, Priority.LOW),
        (Priority.DURABLE, Priority.LOW, Priority.LOW, Priority.DURABLE),
    ],
)
async def test_request_has_at_most_the_priority_that_its_key_and_tenant_allow(
    asked_for: Priority | None, of_key: Priority, of_tenant: Priority, granted: Priority
) -> None:
    wanted: dict[str, Any] = {"names_priority": False} if asked_for is None else {"priority": asked_for}
    async with router() as mesh:
        mesh.declare(TenantManifest(name="a", max_priority=of_tenant.as_ceiling))  # type: ignore[arg-type]  # same numbers
        async with mesh.placement.place(asked("r", max_priority=of_key, **wanted)) as place:
            assert (await place.next_decision()).granted.priority == granted.wire
            assert (await mesh.requests.request("r")).priority == granted.wire


async def test_profile_of_a_client_does_not_exceed_the_priority_of_its_callers_key() -> None:
    profiles = {"ci": ClientProfile(priority=Priority.HIGH)}
    async with router(clients=ClientsConfig(profiles=profiles)) as mesh:
        wanted = asked("r", client_id="ci", names_priority=False, max_priority=Priority.NORMAL)
        async with mesh.placement.place(wanted) as place:
            assert (await place.next_decision()).granted.priority == Priority.NORMAL.wire


async def test_configured_registry_tenant_does_not_override_router_rate_limits() -> None:
    async with router(rates=RateLimitConfig(tenants={"a": (Rate(2, 60),)})) as mesh:
        mesh.declare(TenantManifest(name="a", limits=[minutely(1)]), source=Tenant.SOURCE_CONFIGURED)
        for name in ("r-1", "r-2"):
            async with mesh.placement.place(asked(name)) as place:
                assert (await place.next_decision()).HasField("granted")


async def test_first_decision_has_the_remaining_limits_and_usage_agrees() -> None:
    async with router(slots=1) as mesh:
        mesh.declare(TenantManifest(name="a", limits=[minutely(5)]))
        first, second = mesh.placement.place(asked("r-1")), mesh.placement.place(asked("r-2"))
        async with first, second:
            granted, waiting = await first.next_decision(), await second.next_decision()
            assert (granted.rate_limits.requests.remaining, waiting.rate_limits.requests.remaining) == (4, 3)
            await first.report_finished(Reason.UNSPECIFIED)
            while not (later := await second.next_decision()).HasField("granted"):
                pass
            assert not later.HasField("rate_limits"), "it was told before"
        assert [(use.used, use.limit) for use in (await mesh.requests.limit_uses("a")).uses] == [(2, 5)]
        assert not (await mesh.requests.limit_uses("b")).uses


async def test_request_of_an_unlimited_tenant_has_no_rate_limits() -> None:
    async with router() as mesh, mesh.placement.place(asked("r-1")) as place:
        assert not (await place.next_decision()).HasField("rate_limits")
