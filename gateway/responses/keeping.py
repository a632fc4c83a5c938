"""Keeping a response: before its caller reads that it is kept, or with a word that it is not."""

from dataclasses import dataclass
from datetime import datetime
from typing import Protocol

import structlog

from weft.api.common.v1 import receipt_pb2
from weft.durable.responses import ResponseStore, StoredResponse
from weft.kernel.errors import WeftError

log = structlog.get_logger("weft.gateway")


class GrowingResponse(Protocol):
    """A response on its way; see `gateway.responses.stream` and `responses_answer`."""

    def snapshot(self, status: str = ...) -> bytes:
        """The response as it is now, as JSON; once it is concluded, as it has become."""
        ...

    def conclude(self, receipt: receipt_pb2.Receipt) -> bytes:
        """Its end is next: the whole response as JSON. Raises BACKEND_PROTOCOL_ERROR where it cannot be its end."""
        ...

    def not_kept(self, why: WeftError) -> None:
        """It was to be kept and is not."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Keeping:
    """Where a response is to be kept, and what is known of it before there is an answer."""

    store: ResponseStore
    id: str
    tenant: str
    previous_id: str
    """The response it continues; empty: none."""
    created_at: datetime
    items: bytes
    """Its own input, a JSON list of items."""

    async def keep(self, growing: GrowingResponse, body: bytes) -> bool:
        """Whether it is kept now; where it is not, `growing` says so."""
        response = StoredResponse(
            id=self.id,
            tenant=self.tenant,
            previous_id=self.previous_id,
            created_at=self.created_at,
            body=body,
            items=self.items,
        )
        try:
            await self.store.save(response)
        except WeftError as error:
            log.warning("response not kept", response_id=self.id, reason=error.reason.name.lower())
            growing.not_kept(error)
            return False
        return True
