"""Stored responses: the port to the response store.

A response and its input are JSON that the store never parses. Every method takes the tenant: another tenant's response
is NOT_FOUND. A `StoredResponse` is never changed: build a new one.
"""

from collections.abc import Sequence
from typing import Protocol

from weft.api.router.v1.stored_response_service_pb2 import StoredResponse
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason

MAX_CHAIN = 256
"""Maximum number of responses of one conversation."""


class ResponseStore(Protocol):
    """The response store. Every method raises SERVICE_UNAVAILABLE when it cannot be reached."""

    async def save(self, response: StoredResponse) -> None:
        """Stores a response; returns once it is durable. One of the same id and tenant is replaced.

        Raises REQUEST_TOO_LARGE beyond the size limit, TOO_MANY_RESOURCES at the tenant's limit, ALREADY_EXISTS where
        the id is another tenant's.
        """
        ...

    async def get(self, tenant: str, response_id: str) -> StoredResponse:
        """Returns one response. Raises NOT_FOUND."""
        ...

    async def chain(self, tenant: str, response_id: str) -> Sequence[StoredResponse]:
        """The response and all those it continues, oldest first.

        Raises NOT_FOUND where one of them is gone, INVALID_ARGUMENT for more than MAX_CHAIN.
        """
        ...

    async def delete(self, tenant: str, response_id: str) -> None:
        """Deletes a response. Raises NOT_FOUND."""
        ...


def response_not_found(response_id: str) -> WeftError:
    """NOT_FOUND for a response that is unknown or another tenant's."""
    return WeftError(Reason.NOT_FOUND, f"no response {response_id} exists")
