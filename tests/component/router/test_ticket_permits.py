"""The permit of a request stands in every ticket that is signed for it, on every attempt."""

import asyncio

import pytest
from kit.fleet import model_view, ready, runner_view
from kit.scheduling import placement_request, scheduling_loop

from router_svc.loop import Mailbox, SchedulingLoop
from router_svc.policy.endpoints.prefix_affinity import PrefixReport, StoredPrompt
from router_svc.policy.pool_settings import RemotePermission, Settings, TenantSettings
from weft.api.router.v1.placement_service_pb2 import Granted
from weft.api.runner.v1 import ticket_pb2
from weft.dispatch.fleet import FleetView
from weft.dispatch.tickets import TicketGate
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
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


def _claims(ticket: ticket_pb2.Ticket) -> ticket_pb2.TicketClaims:
    return ticket_pb2.TicketClaims.FromString(ticket.claims)


@pytest.mark.parametrize("asks_remote", [False, True])
@pytest.mark.parametrize("tenant", sorted(TENANTS))
async def test_every_ticket_of_a_request_has_its_remote_permit(tenant: str, asks_remote: bool) -> None:
    permit = tenant == "always" or (tenant == "on_request" and asks_remote)
    loop = scheduling_loop(_view(), clock=FakeClock(), settings=Settings(tenants=TENANTS))
    request = placement_request("req-1", tenant=tenant, model="pool", allow_remote=asks_remote)
    grants = await _grants(loop, *loop.submit(request))
    assert [grant.attempt for grant in grants] == list(range(1, len(grants) + 1))
    assert len(grants) >= len(LOCAL), "it was tried again"
    assert {_claims(grant.ticket).allow_remote for grant in grants} == {permit}
    assert (REMOTE in {grant.model for grant in grants}) == permit


HOLDER, OTHER = LOCAL

DIGESTS = tuple(range(1, 17))


def _loop(clock: FakeClock, kind: str = "k", byte_count: int = 1_000) -> SchedulingLoop:
    """Two runners, of which the first one has a prompt on disk."""
    view = _view()
    for runner in LOCAL:
        view.runners[runner].instances[runner].state_kind = kind
    loop = scheduling_loop(view, clock=clock)
    stored = StoredPrompt(DIGESTS, 0.01, byte_count, "k")
    loop.note_prefixes(PrefixReport(key=(HOLDER, HOLDER, "1"), stored=(stored,)))
    return loop


async def _occupy_holder(loop: SchedulingLoop) -> None:
    request = placement_request("req-0", model=HOLDER)
    assert (await _grant_in(loop.submit(request)[1])).runner == HOLDER


async def _granted(loop: SchedulingLoop) -> Granted:
    request = placement_request("req-1", model="pool", prompt_tokens=4_200, prefix_digests=DIGESTS)
    _, mailbox = loop.submit(request)
    return await _grant_in(mailbox)


async def _grant_in(mailbox: Mailbox) -> Granted:
    async with asyncio.timeout(5):
        while True:
            decision = await mailbox.get()
            if decision.HasField("granted"):
                return decision.granted


async def test_prompt_goes_to_the_runner_that_has_it_on_disk() -> None:
    loop = _loop(FakeClock())
    granted = await _granted(loop)
    loop.close()
    assert granted.runner == HOLDER
    assert not _claims(granted.ticket).HasField("prompt_source")


async def test_other_runner_is_told_where_to_fetch_the_prompt() -> None:
    clock = FakeClock()
    loop = _loop(clock)
    await _occupy_holder(loop)
    granted = await _granted(loop)
    loop.close()
    assert granted.runner == OTHER
    source = _claims(granted.ticket).prompt_source
    assert source.address == f"unix:/nowhere/{HOLDER}"
    assert 0.5 < source.max_time.ToNanoseconds() / 1e9 < 1.1, "what processing 4,096 tokens is assumed to take"
    gate = TicketGate(runner=HOLDER, incarnation="1")
    gate.use_key(b"k" * 32)
    claims = gate.admit(source.ticket, now=clock.utc_now().timestamp())
    assert (claims.tenant, claims.model, claims.moved_prefix) == ("a", HOLDER, DIGESTS[-1])


async def test_transfer_that_takes_longer_than_processing_is_not_proposed() -> None:
    for loop in (_loop(FakeClock(), byte_count=10**12), _loop(FakeClock(), kind="other"), _loop(FakeClock(), kind="")):
        await _occupy_holder(loop)
        granted = await _granted(loop)
        loop.close()
        assert granted.runner == OTHER
        assert not _claims(granted.ticket).HasField("prompt_source")
