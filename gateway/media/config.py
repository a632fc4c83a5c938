"""What media a request may hold, and how addresses in it are fetched. Units in the names."""

from dataclasses import dataclass

MEBIBYTE = 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaConfig:
    """Limits of `gateway.media`. Bytes that come inside a request pass the same checks as those that are fetched."""

    allowed_hosts: tuple[str, ...] = ()
    """Hosts that media may be fetched from: `images.example.org`, `*.example.org` (every name below it, not itself),
    with `:port` for another port than 443. Empty: no address is ever fetched."""
    allow_plain_http: bool = False
    """Whether http:// addresses of those hosts are fetched as well as https:// ones."""
    max_bytes: int = 10 * MEBIBYTE
    """Of one file, fetched or sent along."""
    max_total_bytes: int = 20 * MEBIBYTE
    """Of all files that are fetched for one request; a message between services holds 64 MiB."""
    max_files: int = 16
    """Addresses of one request."""
    max_concurrent_fetches: int = 16
    """Files that are fetched at once for all requests; others wait."""
    connect_timeout_seconds: float = 5.0
    """For the look-up of the name, the connection and TLS."""
    total_timeout_seconds: float = 20.0
    """For all files of one request, waiting included."""
    min_bytes_per_second: int = 1024
    """What a file must come at on the average ..."""
    slow_start_seconds: float = 5.0
    """... after this long."""
    max_pixels: int = 64 * 1024 * 1024
    """Width times height times frames of one image, as its header has them: 8192 x 8192."""
    max_frames: int = 300
    """Of one animation."""
    max_audio_seconds: float = 3600.0
    """Length of one recording, as its header has it."""
