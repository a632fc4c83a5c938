"""The permit of a request stands in every ticket that is signed for it, on every attempt."""

import asyncio

import pytest

from router_svc.loop import LoopDeps, Mailbox, RouterRecords, SchedulingLoop, TicketIssuer, WakeFinished
from router_svc.policy.decisions import Wakes
from router_svc.policy.limits import SchedulerLimits
from router_svc.policy.settings import RemotePermission, Settings, TenantSettings
from weft.api.registry.v1.runner_pb2 import InstanceState
from weft.api.router.v1.placement_service_pb2 import Granted
from weft.api.runner.v1 import ticket_pb2
from weft.dispatch.fleet import FleetView, ModelView, RunnerView
from weft.kernel.errors import WeftError
from weft.kernel.placement_request import PlacementRequest
from weft.kernel.reasons import Reason
from weft.kernel.request import Operation
from weft_testing.fake_clock import FakeClock

LOCAL, REMOTE = ("near-1", "near-2"), ("far", "alone")
POOLS = {"alone": "alone"}
"""Of those that are not in the one pool of the others."""
TENANTS = {permission.value: TenantSettings(allow_remote=permission) for permission in RemotePermission}


class _NobodySleeps:
    def begin(self, wakes: Wakes, finished: WakeFinished) -> None:
        raise AssertionError(f"{wakes.model} does not sleep")

    def give_up(self, model: str) -> None:
        raise AssertionError(f"{model} waits for no memory")


def _view() -> FleetView:
    names = (*LOCAL, *REMOTE)
    return FleetView(1, {name: _runner(name) for name in names}, {name: _model(name) for name in names})


def _runner(name: str) -> RunnerView:
    instance = InstanceState(
        model=name, phase=InstanceState.PHASE_READY, slots_total=1, slots_used=0, load_progress=None, detail=""
    )
    return RunnerView(
        name=name,
        incarnation="1",
        address=f"unix:/nowhere/{name}",
        host=name,
        runtime="fake",
        active=True,
        draining=False,
        ticket_key=b"k" * 32,
        instances={name: instance},
    )


def _model(name: str) -> ModelView:
    return ModelView(
        name=name,
        pool=POOLS.get(name, "pool"),
        runner=name,
        operations=frozenset({Operation.CHAT}),
        remote=name in REMOTE,
        active=True,
        context_tokens=0,
        created_at_seconds=0,
    )


def _loop() -> SchedulingLoop:
    clock = FakeClock()
    parts = LoopDeps(waker=_NobodySleeps(), tickets=TicketIssuer(clock), records=RouterRecords.empty(clock))
    loop = SchedulingLoop(SchedulerLimits(), Settings(tenants=TENANTS), clock, parts)
    loop.update_view(_view())
    return loop


def _submit(loop: SchedulingLoop, *, tenant: str, asks_remote: bool, target: str = "pool") -> tuple[int, Mailbox]:
    request = PlacementRequest(
        request_id="req-1", tenant=tenant, model=target, operation=Operation.CHAT, allow_remote=asks_remote
    )
    return loop.submit(request)


async def _grants(loop: SchedulingLoop, key: int, mailbox: Mailbox) -> list[Granted]:
    """Every grant until the request is refused or left waiting, each attempt failing in turn."""
    grants: list[Granted] = []
    try:
        async with asyncio.timeout(0.2):
            while True:
                decision = await mailbox.get()
                if decision.HasField("granted"):
                    grants.append(decision.granted)
                    loop.report_failed(key, decision.granted.attempt, Reason.WORKER_LOST)
    except (TimeoutError, WeftError):
        loop.close()
        return grants


def _claims(grant: Granted) -> ticket_pb2.TicketClaims:
    return ticket_pb2.TicketClaims.FromString(grant.ticket.claims)


@pytest.mark.parametrize("asks_remote", [False, True])
@pytest.mark.parametrize("tenant", sorted(TENANTS))
async def test_every_ticket_of_a_request_has_its_remote_permit(tenant: str, asks_remote: bool) -> None:
    permit = tenant == "always" or (tenant == "on_request" and asks_remote)
    loop = _loop()
    key, mailbox = _submit(loop, tenant=tenant, asks_remote=asks_remote)
    grants = await _grants(loop, key, mailbox)
    assert [grant.attempt for grant in grants] == list(range(1, len(grants) + 1))
    assert len(grants) >= len(LOCAL), "it was tried again"
    assert {_claims(grant).allow_remote for grant in grants} == {permit}
    assert (REMOTE[0] in {grant.model for grant in grants}) == permit


@pytest.mark.parametrize("tenant", ["never", "on_request"])
async def test_request_for_a_remote_model_without_a_permit_is_rejected_with_that_reason(tenant: str) -> None:
    loop = _loop()
    asks_remote = tenant == "never"  # what such a tenant's requests say does not matter
    _, mailbox = _submit(loop, tenant=tenant, asks_remote=asks_remote, target="alone")
    with pytest.raises(WeftError) as refused:
        await mailbox.get()
    loop.close()
    assert refused.value.reason is Reason.PERMISSION_DENIED


async def test_remote_pool_member_is_skipped_for_local_ones_without_a_permit() -> None:
    loop = _loop()
    _, mailbox = _submit(loop, tenant="on_request", asks_remote=False, target="far")
    decision = await mailbox.get()
    loop.close()
    assert decision.granted.model in LOCAL
