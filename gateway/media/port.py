"""What the edge needs from whoever fetches media."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from weft.kernel.errors import invalid_field


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaAddress:
    """An image that a request names by its address; the address has passed `gateway.media.addresses`."""

    url: str
    field: str
    """Where in the request it is first named, such as `messages[3].content[1].image_url.url`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaFile:
    """A file whose content was checked."""

    data: bytes
    media_type: str
    """Such as `image/png`, as its own first bytes say."""


class MediaSource(Protocol):
    """Fetches what requests name; see `gateway.media.fetcher.MediaFetcher`."""

    async def fetch(self, addresses: Sequence[MediaAddress]) -> Mapping[str, MediaFile]:
        """The file of every address, by its URL.

        Raises INVALID_ARGUMENT or REQUEST_TOO_LARGE naming the field of one that cannot be had, TOO_MANY_RESOURCES
        when too many others are being fetched.
        """
        ...


class NoMediaSource:
    """For an edge that fetches nothing."""

    async def fetch(self, addresses: Sequence[MediaAddress]) -> Mapping[str, MediaFile]:
        """See MediaSource.fetch. Raises INVALID_ARGUMENT for any address."""
        for address in addresses:
            raise invalid_field(address.field, "must be a data: URL: addresses are not fetched here")
        return {}
