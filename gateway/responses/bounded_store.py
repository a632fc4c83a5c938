"""Whoever keeps responses, asked within a time: a request must not wait for ever because nobody answers."""

import asyncio
from collections.abc import Awaitable, Sequence
from typing import TypeVar

from weft.durable.responses import ResponseStore, StoredResponse
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason

Answer = TypeVar("Answer")


class BoundedStore:
    """A ResponseStore whose every method raises SERVICE_UNAVAILABLE where the answer takes too long."""

    def __init__(self, store: ResponseStore, *, timeout_seconds: float) -> None:
        self._store = store
        self._timeout_seconds = timeout_seconds

    async def save(self, response: StoredResponse) -> None:
        """See ResponseStore.save."""
        await self._in_time(self._store.save(response))

    async def get(self, tenant: str, response_id: str) -> StoredResponse:
        """See ResponseStore.get."""
        return await self._in_time(self._store.get(tenant, response_id))

    async def chain(self, tenant: str, response_id: str) -> Sequence[StoredResponse]:
        """See ResponseStore.chain."""
        return await self._in_time(self._store.chain(tenant, response_id))

    async def delete(self, tenant: str, response_id: str) -> None:
        """See ResponseStore.delete."""
        await self._in_time(self._store.delete(tenant, response_id))

    async def _in_time(self, answer: Awaitable[Answer]) -> Answer:
        try:
            async with asyncio.timeout(self._timeout_seconds):
                return await answer
        except TimeoutError:
            raise WeftError(Reason.SERVICE_UNAVAILABLE, "response store timed out") from None
