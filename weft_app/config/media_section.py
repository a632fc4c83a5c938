"""The section of the configuration file about media in requests."""

from typing import Annotated

from pydantic import AfterValidator, Field

from weft.kernel.address import is_host_pattern
from weft_app.config.config_section import Seconds, Section

MAX_FETCHED_BYTES = 48 * 1024 * 1024
"""What fits into a message between services, which is 64 MiB, beside a request body."""


def _host_pattern(text: str) -> str:
    if not is_host_pattern(text):
        raise ValueError("must be a host name such as images.example.org or *.example.org, with or without :port")
    return text.lower()


HostPattern = Annotated[str, AfterValidator(_host_pattern)]


class MediaSection(Section):
    """Images and recordings in requests."""

    allowed_hosts: tuple[HostPattern, ...] = Field(default=(), max_length=1000, strict=False)
    """Hosts that images may be fetched from, such as `images.example.org` or `*.example.org`, which is every name below
    it; with `:port` for another than 443. Default: addresses are refused. To name a host is to agree that its addresses
    leave the premises."""
    allow_plain_http: bool = False
    """Whether `http://` addresses of those hosts are fetched, too."""
    max_bytes: Annotated[int, Field(ge=1024, le=MAX_FETCHED_BYTES)] = 10 * 1024 * 1024
    """Of one file, fetched or sent along."""
    max_total_bytes: Annotated[int, Field(ge=1024, le=MAX_FETCHED_BYTES)] = 20 * 1024 * 1024
    """Of all files that are fetched for one request."""
    max_files: Annotated[int, Field(ge=1, le=256)] = 16
    """Files that are fetched for one request."""
    max_concurrent_fetches: Annotated[int, Field(ge=1, le=1024)] = 16
    """Files that are fetched at once; others wait, at most half of `total_timeout_seconds`."""
    connect_timeout_seconds: Seconds = 5.0
    """For the look-up of a name, the connection and TLS."""
    total_timeout_seconds: Seconds = 20.0
    """For all files of one request."""
    min_bytes_per_second: Annotated[int, Field(ge=0, le=1_000_000_000)] = 1024
    """What a file must come at on the average ..."""
    slow_start_seconds: Seconds = 5.0
    """... from here on."""
    max_pixels: Annotated[int, Field(ge=1, le=2**31)] = 64 * 1024 * 1024
    """Width times height times frames of an image."""
    max_frames: Annotated[int, Field(ge=1, le=100_000)] = 300
    """Of an animation."""
    max_audio_seconds: Seconds = 3600.0
    """Length of a recording."""
