"""What may be continued: responses that are kept, and those in the background whose end nobody has seen yet."""

from collections.abc import Sequence

from gateway.responses.background import BackgroundResponses
from weft.durable.responses import ResponseStore, StoredResponse, response_not_found
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason

_FIELD = "previous_response_id"


class ContinuedResponses:
    """A ResponseStore that keeps a response in the background when it is asked for, if it is at its end."""

    def __init__(self, store: ResponseStore, background: BackgroundResponses) -> None:
        self._store = store
        self._background = background

    async def save(self, response: StoredResponse) -> None:
        """See ResponseStore.save."""
        await self._store.save(response)

    async def get(self, tenant: str, response_id: str) -> StoredResponse:
        """See ResponseStore.get. One that cannot be continued is NOT_FOUND."""
        try:
            return await self._store.get(tenant, response_id)
        except WeftError as missing:
            if missing.reason is not Reason.NOT_FOUND:
                raise
        try:
            return await self._background.kept(tenant, response_id, _FIELD)
        except WeftError as error:
            if error.reason is Reason.INVALID_ARGUMENT:
                raise response_not_found(response_id) from None
            raise

    async def chain(self, tenant: str, response_id: str) -> Sequence[StoredResponse]:
        """See ResponseStore.chain. Raises INVALID_ARGUMENT for one in the background that cannot be continued."""
        try:
            return await self._store.chain(tenant, response_id)
        except WeftError as error:
            if error.reason is not Reason.NOT_FOUND:
                raise
        # Those before it were kept when it was asked for: only the last can be missing.
        await self._background.kept(tenant, response_id, _FIELD)
        return await self._store.chain(tenant, response_id)

    async def delete(self, tenant: str, response_id: str) -> None:
        """See ResponseStore.delete."""
        await self._store.delete(tenant, response_id)
