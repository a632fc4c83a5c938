"""The port to the requests that a router's database remembers; see `router_svc.durable.request_records`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from router_svc.request_entry import EndedRequest
from weft.dispatch.remote_router import Selection


class RequestHistory(Protocol):
    """Port: the requests that a router's database remembers. Raises SERVICE_UNAVAILABLE."""

    async def find(self, request_id: str, tenant: str) -> "StoredRequest | None":
        """Return the newest request with this id of a tenant; of any if empty."""
        ...

    async def older(
        self, limit: int, tenant: str, selection: Selection, before_number: int
    ) -> tuple[Sequence[EndedRequest], int]:
        """Return ended requests before a number, the last first, and how many there are."""
        ...


@dataclass(frozen=True, slots=True)
class StoredRequest:
    """A request as the database has it."""

    is_under_way: bool
    """Whether its end is not recorded."""
    ended: EndedRequest
    """Without an end where it is under way."""
