"""The VRAM ledger on every kind of database."""

from dataclasses import replace
from datetime import UTC, datetime

import pytest
from kit.refusals import refused

from registry_svc.ledger.lease_store import LeaseStore, StoredLedger
from registry_svc.ledger.policy.leases import Grant, Holder, HolderKind
from registry_svc.mesh.store import SqlStore
from weft.gpu.snapshot import ProcessId
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason
from weft.kernel.request import Priority

pytest_plugins = ("database_fixtures",)

MANY = 40_000
"""More than the parameters of one statement."""

# As large as the contract lets them be.
LARGEST = 2**50


def grant(number: int, *, lease_id: str = "") -> Grant:
    return Grant(
        id=lease_id or f"lease-{number}",
        fencing_number=number,
        request_id=f"request-{number}",
        host="hôst",
        holder=Holder(kind=HolderKind.PROGRAM, name="train the model, ünd more", incarnation="life/1"),
        purpose="überlong " * 28,
        shares=((0, LARGEST), (63, 1)),
        pinned=True,
        priority=Priority.LOW,
        created_at=datetime(2026, 1, 1, 12, 0, 0, 123456, tzinfo=UTC),
        processes=(ProcessId(7, 2**62), ProcessId(8, 0)),
        releasing=False,
    )


@pytest.fixture
def leases(store: SqlStore) -> LeaseStore:
    """On an open, empty database."""
    return LeaseStore(store)


async def test_grants_round_trip_in_order(leases: LeaseStore) -> None:
    runners = Holder(kind=HolderKind.RUNNER, name="r1", incarnation="life-1")
    last = replace(grant(2**40), holder=runners, pinned=False, processes=(), priority=Priority.HIGH)
    await leases.grant(grant(9))
    await leases.grant(grant(10, lease_id="a-lease"))
    await leases.grant(last)
    stored = StoredLedger(grants=(grant(9), grant(10, lease_id="a-lease"), last), last_fencing_number=2**40)
    assert await leases.load() == stored


async def test_fencing_tokens_outlive_their_leases(leases: LeaseStore) -> None:
    await leases.grant(grant(1))
    await leases.grant(grant(2))
    await leases.remove(["lease-1", "lease-2", "lease-unknown"])
    assert await leases.load() == StoredLedger(last_fencing_number=2)


async def test_fencing_token_is_stored_once(leases: LeaseStore) -> None:
    await leases.grant(grant(1))
    with refused(Reason.SERVICE_UNAVAILABLE):
        await leases.grant(grant(1, lease_id="another"))
    assert (await leases.load()).grants == (grant(1),)


async def test_failed_grant_leaves_the_fencing_token_unchanged(leases: LeaseStore) -> None:
    await leases.grant(grant(1))
    with pytest.raises(WeftError):
        await leases.grant(grant(2, lease_id="lease-1"))
    assert await leases.load() == StoredLedger(grants=(grant(1),), last_fencing_number=1)


async def test_only_released_leases_are_marked_releasing(leases: LeaseStore) -> None:
    for number in (1, 2, 3):
        await leases.grant(grant(number))
    await leases.save_releasing(["lease-1", "lease-3", "lease-unknown"])
    assert [each.releasing for each in (await leases.load()).grants] == [True, False, True]


async def test_saving_processes_replaces_them(leases: LeaseStore) -> None:
    await leases.grant(grant(1))
    await leases.grant(grant(2))
    await leases.save_processes("lease-1", [ProcessId(5, 50)])
    await leases.save_processes("lease-unknown", [ProcessId(5, 50)])
    assert (await leases.load()).grants == (replace(grant(1), processes=(ProcessId(5, 50),)), grant(2))


async def test_more_leases_than_one_statement_allows_are_saved_together(leases: LeaseStore) -> None:
    await leases.grant(grant(1))
    many = [f"lease-{number}" for number in range(2, MANY + 2)] + ["lease-1"]
    await leases.save_releasing(many)
    assert (await leases.load()).grants[0].releasing
    await leases.remove(many)
    assert (await leases.load()).grants == ()
