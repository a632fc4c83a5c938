"""What a store of some tables needs from whoever owns the database."""

from contextlib import AbstractAsyncContextManager
from typing import Protocol

from sqlalchemy.ext.asyncio import AsyncConnection


class Transactions(Protocol):
    """See SqlStore. Transactions run one after the other, and each is on disk when its block has been left."""

    def transaction(self) -> AbstractAsyncContextManager[AsyncConnection]:
        """One transaction. Raises SERVICE_UNAVAILABLE when the database fails; then nothing of it has happened."""
        ...
