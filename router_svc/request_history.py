"""The port to the requests that a router's database remembers; see `router_svc.durable.request_records`."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from router_svc.request_entry import EndedRequest
from weft.dispatch.remote_router import Selection


class RequestHistory(Protocol):
    """Port: the requests that routers remember in their database. Raises SERVICE_UNAVAILABLE."""

    @property
    def is_shared(self) -> bool:
        """Whether other routers write to the same database."""
        ...

    async def find(self, request_id: str, tenant: str) -> "StoredRequest | None":
        """Return the newest request with this id of a tenant; of any if empty."""
        ...

    async def older(
        self, limit: int, tenant: str, selection: Selection, before_number: int
    ) -> tuple[Sequence[EndedRequest], int]:
        """Return ended requests of this router before a number, the last first, and how many there are."""
        ...

    async def of_others(
        self, limit: int, tenant: str, selection: Selection, except_of: Iterable[str]
    ) -> tuple[Sequence[EndedRequest], int]:
        """Return ended requests of all routers except those of these names, the last first, and how many there are."""
        ...


@dataclass(frozen=True, slots=True)
class StoredRequest:
    """A request as the database has it."""

    router: str
    """The name of the router that placed it."""
    is_own: bool
    """Whether that is this very process."""
    is_under_way: bool
    """Whether its end is not recorded, and its router not known to be lost."""
    ended: EndedRequest
    """Without an end where it is under way."""
