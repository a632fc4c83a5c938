"""The permit of a request stands in every ticket that is signed for it, on every attempt."""

import asyncio

import pytest
from kit.fleet import model_view, ready, runner_view
from kit.scheduling import scheduling_loop

from router_svc.loop import Mailbox, SchedulingLoop
from router_svc.policy.settings import RemotePermission, Settings, TenantSettings
from weft.api.router.v1.placement_service_pb2 import Granted
from weft.api.runner.v1 import ticket_pb2
from weft.dispatch.fleet import FleetView
from weft.kernel.errors import WeftError
from weft.kernel.placement_request import PlacementRequest
from weft.kernel.reasons import Reason
from weft.kernel.request import Operation
from weft_testing.fake_clock import FakeClock

LOCAL, REMOTE = ("near-1", "near-2"), "far"
TENANTS = {permission.value: TenantSettings(allow_remote=permission) for permission in RemotePermission}


def _view() -> FleetView:
    names = (*LOCAL, REMOTE)
    return FleetView(
        1,
        {name: runner_view(name, host=name, instances={name: ready(name)}) for name in names},
        {name: model_view(name, name, pool="pool", remote=name == REMOTE) for name in names},
    )


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
    loop = scheduling_loop(_view(), clock=FakeClock(), settings=Settings(tenants=TENANTS))
    request = PlacementRequest(
        request_id="req-1", tenant=tenant, model="pool", operation=Operation.CHAT, allow_remote=asks_remote
    )
    grants = await _grants(loop, *loop.submit(request))
    assert [grant.attempt for grant in grants] == list(range(1, len(grants) + 1))
    assert len(grants) >= len(LOCAL), "it was tried again"
    assert {_claims(grant).allow_remote for grant in grants} == {permit}
    assert (REMOTE in {grant.model for grant in grants}) == permit
