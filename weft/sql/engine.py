"""SQLAlchemy's asynchronous engine without its ORM, which no table of weft uses.

`sqlalchemy.ext.asyncio` imports its sessions beside the engine, and with them the ORM: 6 MB of every registry and
router. Its module `engine` needs neither.
"""

# ruff: noqa: E402, TID251
from weft.kernel.bare_package import place_bare

place_bare("sqlalchemy.ext.asyncio")

from sqlalchemy.ext.asyncio.engine import AsyncConnection, AsyncEngine, create_async_engine

__all__ = ["AsyncConnection", "AsyncEngine", "create_async_engine"]
