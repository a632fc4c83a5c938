"""Kept responses: the port to the response store and its values.

A response and its input are JSON that the store never parses. Every method takes the tenant: another tenant's response
is NOT_FOUND.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol

from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason

MAX_CHAIN = 256
"""Answers that one conversation may hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredResponse:
    """One answer as it is kept."""

    id: str
    """`resp_...`"""
    tenant: str
    previous_id: str
    """The answer it continues; empty: none."""
    created_at: datetime
    body: bytes
    """The response object, JSON."""
    items: bytes
    """Its own input, a JSON list of items; not that of the answers before it."""


class ResponseStore(Protocol):
    """The response store. Every method raises SERVICE_UNAVAILABLE when it cannot be reached."""

    async def save(self, response: StoredResponse) -> None:
        """Keep it; return once it is durable. One of the same id and tenant is replaced.

        Raises REQUEST_TOO_LARGE for one that is larger than may be kept, TOO_MANY_RESOURCES where the tenant keeps as
        many as it may, ALREADY_EXISTS where the id is another tenant's.
        """
        ...

    async def get(self, tenant: str, response_id: str) -> StoredResponse:
        """One answer. Raises NOT_FOUND."""
        ...

    async def chain(self, tenant: str, response_id: str) -> Sequence[StoredResponse]:
        """The response and all those it continues, oldest first.

        Raises NOT_FOUND where one of them is gone, INVALID_ARGUMENT for more than MAX_CHAIN.
        """
        ...

    async def delete(self, tenant: str, response_id: str) -> None:
        """Forget it. Raises NOT_FOUND."""
        ...


def response_not_found(response_id: str) -> WeftError:
    """NOT_FOUND for a response that is unknown or another tenant's."""
    return WeftError(Reason.NOT_FOUND, f"no response {response_id} exists")
