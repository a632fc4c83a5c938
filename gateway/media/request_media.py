"""The media of one request: inline bytes are validated immediately, URLs are collected and fetched before dispatch.

Translation is synchronous: `RequestMedia.image` returns a placeholder for a URL, which `supply` replaces by the bytes
when the answer is produced (`gateway.answers.generation.Work`). So a disconnect cancels the fetch, and a stream sends
its status line and keepalives meanwhile.
"""

import base64
import binascii
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol
from urllib.parse import unquote

from typing_extensions import override

from gateway.gateway_config import MediaConfig
from gateway.media.addresses import require_allowed
from gateway.media.content import checked_audio, checked_image
from weft.api.common.v1 import chat_pb2, image_pb2, warning_pb2
from weft.dispatch.history import converted, left_out_note
from weft.kernel.errors.error_tree import FieldError, invalid_field
from weft.kernel.errors.reasons import Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaAddress:
    """An image that a request references by URL; the URL has passed `gateway.media.addresses`."""

    url: str
    field: str
    """Path of the first occurrence in the request, such as `messages[3].content[1].image_url.url`."""
    optional: bool = False
    """Whether only earlier turns use it: the request then continues if it cannot be fetched."""


class MediaSource(Protocol):
    """Fetches media by address; see `gateway.media.fetcher.MediaFetcher`."""

    async def fetch(self, addresses: Sequence[MediaAddress]) -> Mapping[str, chat_pb2.MediaPart]:
        """Returns the files by URL, without optional ones that cannot be fetched.

        Raises INVALID_ARGUMENT or REQUEST_TOO_LARGE naming the field of a required file that cannot be fetched, and
        TOO_MANY_RESOURCES if too many files are being fetched.
        """
        ...


class NoMediaSource(MediaSource):
    """Rejects URLs unless they are optional, for a gateway that fetches none."""

    @override
    async def fetch(self, addresses: Sequence[MediaAddress]) -> Mapping[str, chat_pb2.MediaPart]:
        for address in (each for each in addresses if not each.optional):
            raise invalid_field(address.field, "must be a data: URL: addresses are not fetched")
        return {}


_DATA_URL = re.compile(r"\s*data:[^,]{0,200}?;\s*base64\s*,", re.IGNORECASE)
_SPACE = re.compile(r"\s+")
_URL_SAFE = str.maketrans("-_", "+/")
# Media type of a placeholder, which contains the URL. No engine knows this type.
_ADDRESS_TYPE = "x-weft/address"


class RequestMedia:
    """Collects the media URLs of one request."""

    def __init__(self, config: MediaConfig, *, allow_remote: bool | None = None) -> None:
        """`allow_remote`: the request's option; False rejects URLs, since a fetch contacts another host."""
        self.config = config
        self._allow_remote = allow_remote
        self._addresses: dict[str, MediaAddress] = {}

    @property
    def addresses(self) -> tuple[MediaAddress, ...]:
        """The URLs to fetch, without duplicates."""
        return tuple(self._addresses.values())

    def image(self, url: str, field: str, *, detail: str = "", optional: bool = False) -> chat_pb2.MediaPart:
        """Returns the image of a data: URL, or a placeholder for `supply`. Raises INVALID_ARGUMENT naming `field`.

        The detail `original`, which engines do not support, becomes `high`.
        """
        detail = "high" if detail == "original" else detail
        # Some clients send base64 alone, which has no colon.
        if _DATA_URL.match(url) or (len(url) > _MIN_BASE64_CHARS and ":" not in url):
            part = self.encoded_image(url, field)
            part.detail = detail
            return part
        if url[:5].lower() == "data:":
            raise invalid_field(field, "must be a data: URL such as data:image/png;base64,...")
        self._note(url, field, optional=optional)
        return chat_pb2.MediaPart(data=url.encode(), media_type=_ADDRESS_TYPE, detail=detail)

    def encoded_image(self, data: str, field: str) -> chat_pb2.MediaPart:
        """Returns an image in base64 or as a data: URL. Raises INVALID_ARGUMENT, REQUEST_TOO_LARGE naming `field`."""
        return checked_image(self._decoded(data, field), field, self.config)

    def encoded_audio(self, data: str, field: str) -> chat_pb2.MediaPart:
        """Returns a recording in base64 or as a data: URL. Raises as `encoded_image`."""
        if data[:8].lower().startswith(("http://", "https://")):
            raise invalid_field(field, "must be base64 or a data: URL: recordings are not fetched")
        return checked_audio(self._decoded(data, field), field, self.config)

    def _note(self, url: str, field: str, *, optional: bool) -> None:
        require_allowed(url, field, self.config)
        if self._allow_remote is False:
            raise invalid_field(field, "is a remote address, which 'allow_remote': false forbids")
        if (known := self._addresses.get(url)) is not None:
            if known.optional and not optional:
                self._addresses[url] = MediaAddress(url=url, field=field)
            return
        if len(self._addresses) == self.config.max_files:
            raise invalid_field(field, f"is one URL too many: at most {self.config.max_files} in one request")
        self._addresses[url] = MediaAddress(url=url, field=field, optional=optional)

    def _decoded(self, text: str, field: str) -> bytes:
        limit = self.config.max_bytes
        # Lines of base64 have up to 2 characters of white space in 64.
        if len(text) > (limit // 3 * 4 + 4) * 33 // 32 + _MAX_PREFIX_CHARS:
            raise too_large(field, limit)
        data = decoded(text, field)
        if not data:
            raise invalid_field(field, "must not be empty")
        if len(data) > limit:
            raise too_large(field, limit)
        return data


_MIN_BASE64_CHARS = 64
_MAX_PREFIX_CHARS = 256


def decoded(text: str, field: str) -> bytes:
    """Decodes base64 as other servers do: with a data: URL's prefix, white space, URL-safe or without padding.

    Raises INVALID_ARGUMENT naming `field`.
    """
    if (prefix := _DATA_URL.match(text)) is not None:
        text = text[prefix.end() :]
    with suppress(binascii.Error, ValueError):
        return base64.b64decode(text, validate=True)
    plain = _SPACE.sub("", unquote(text) if "%" in text else text).translate(_URL_SAFE).rstrip("=")
    try:
        return base64.b64decode(plain + "=" * (-len(plain) % 4), validate=True)
    except (binascii.Error, ValueError):
        raise invalid_field(field, "must be base64") from None


def too_large(field: str, max_bytes: int) -> FieldError:
    """Returns the error of a file above `max_bytes`."""
    return FieldError(field, f"is larger than {max_bytes} bytes (gateway.media.max_bytes)", Reason.REQUEST_TOO_LARGE)


async def supply(
    payload: chat_pb2.ChatPayload | image_pb2.ImagePayload, media: RequestMedia, source: MediaSource
) -> list[warning_pb2.Warning]:
    """Fetches every URL in `media` and replaces its placeholders in `payload`; returns warnings.

    Raises as `MediaSource.fetch`; `payload` is then unchanged. An optional file that is missing becomes a note.
    """
    if not media.addresses:
        return []
    files = await source.fetch(media.addresses)
    for image in _images_of(payload):
        if image.media_type == _ADDRESS_TYPE and (file := files.get(image.data.decode())) is not None:
            image.data = file.data
            image.media_type = file.media_type
    if isinstance(payload, chat_pb2.ChatPayload):
        for part in (part for message in payload.messages for part in message.content):
            if part.image.media_type == _ADDRESS_TYPE:
                part.text = left_out_note("image", "it could not be fetched")
    missing = (address for address in media.addresses if address.url not in files)
    return [converted(address.field, "could not be fetched") for address in missing]


def _images_of(payload: chat_pb2.ChatPayload | image_pb2.ImagePayload) -> Iterator[chat_pb2.MediaPart]:
    if isinstance(payload, image_pb2.ImagePayload):
        yield from payload.images
        if payload.HasField("mask"):
            yield payload.mask
        return
    for message in payload.messages:
        yield from (part.image for part in message.content if part.WhichOneof("kind") == "image")
