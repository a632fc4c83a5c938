"""A process with a ledger on a real database and a real clock: it leases and releases until it is killed.

Its argument is the database's URL. It says on stdout what it was told.
"""

import asyncio
import os
import random
import sys
from contextlib import aclosing

import structlog
from lease_stage import GIB, MARGIN, ScriptedCalls, SimulatedHost, granted_lease, program, renewal, wanted

from registry_svc.ledger.lease_store import LeaseStore
from registry_svc.ledger.ledger import Ledger
from registry_svc.ledger.policy.leases import Lease
from registry_svc.mesh.store import SqlStore
from registry_svc.registry_config import LedgerConfig
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.time.clock import SystemClock


async def lease(ledger: Ledger, host: SimulatedHost, size: int, number: int) -> Lease | None:
    request_id = f"request-{os.getpid()}-{number}"
    request = wanted(program(), size, host.look(), request_id=request_id, purpose="work", max_wait_seconds=0.0)
    try:
        async with aclosing(ledger.acquire(request)) as words:
            return next(iter([granted_lease(ledger, word) async for word in words if word.HasField("granted")]), None)
    except WeftError as error:
        if error.reason is not Reason.INSUFFICIENT_MEMORY:
            raise
        return None


async def work(ledger: Ledger, host: SimulatedHost) -> None:
    held: list[Lease] = []
    for number in range(1_000_000):
        found = await lease(ledger, host, random.randint(1, 12) * GIB, number)
        if found is not None:
            held.append(found)
            sys.stdout.write(f"granted {found.grant.id} {found.grant.fencing_number}\n")
        if held and (found is None or random.random() < 0.4):
            given_up = held.pop(random.randrange(len(held)))
            sys.stdout.write(f"releasing {given_up.grant.id} 0\n")
            sys.stdout.flush()
            await ledger.release(given_up.grant.holder, "", given_up.grant.id, given_up.grant.fencing_number)
        sys.stdout.flush()
        await ledger.renew(renewal(program(), (), host.look()))
        await asyncio.sleep(0.002)


async def main(database_url: str) -> None:
    store = SqlStore(database_url)
    await store.open()
    config = LedgerConfig(device_margin_mb=MARGIN // 1024**2, renew_interval_seconds=0.01)
    ledger = Ledger(LeaseStore(store), SystemClock(), config, ScriptedCalls(), lambda _: None)
    await ledger.start()
    await work(ledger, SimulatedHost(totals=(24 * GIB, 24 * GIB)))


if __name__ == "__main__":
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    asyncio.run(main(sys.argv[1]))
