"""The health check of a database: a write to it that changes nothing."""

from collections.abc import Awaitable, Callable

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from weft.kernel.clock import Clock
from weft.kernel.health import WELL, HealthCheck, Observation, down
from weft.kernel.health_monitor import paced


async def write_nothing(connection: AsyncConnection) -> None:
    """Writes within the transaction of a connection, so that its commit reaches the disk; no row is changed.

    SQLite writes its header again, PostgreSQL an id of the transaction.
    """
    if connection.dialect.name == "sqlite":
        version = (await connection.execute(text("PRAGMA user_version"))).scalar_one()
        await connection.execute(text(f"PRAGMA user_version = {int(version)}"))
    else:
        await connection.execute(text("SELECT txid_current()"))


def write_check(
    name: str, failure: Callable[[], Awaitable[str]], clock: Clock, *, services: tuple[str, ...], seconds: float
) -> HealthCheck:
    """Returns the check of a database on which gRPC `services` depend.

    `failure` writes and returns the database's code of a failure; empty: it succeeded. While it succeeds it is called
    every `seconds`.
    """

    async def look() -> Observation:
        code = await failure()
        return WELL if not code else down("store_not_writable", f"the database cannot be written ({code})")

    return HealthCheck(name=name, look=paced(look, clock, seconds), services=services)
