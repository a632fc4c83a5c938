"""What `/api/v1/keys` needs from the rest of the mesh; tests script it."""

from typing import Protocol

from gateway.admin.key_schemas import KeyList, NewKeyBody, NewKeyDocument


class KeysPort(Protocol):
    """Who keeps the keys; see `gateway.admin.keys_client.KeysClient`.

    Every method raises the WeftError that the registry answers, SERVICE_UNAVAILABLE when it cannot be reached, and
    DEADLINE_EXCEEDED when it does not answer in time.
    """

    async def list_all(self) -> KeyList:
        """All keys, newest first."""
        ...

    async def create(self, wanted: NewKeyBody) -> NewKeyDocument:
        """A new key, with its secret."""
        ...

    async def revoke(self, key_id: str) -> None:
        """Make a key useless. Raises NOT_FOUND."""
        ...

    async def rotate(self, key_id: str, grace_seconds: int | None) -> NewKeyDocument:
        """A new secret for a key. Raises NOT_FOUND, also for one that is good no more."""
        ...
