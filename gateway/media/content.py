"""What a file must be before an engine sees it: of a known type by its own first bytes, and no larger than it may be.

Nothing is decoded here: a decoder is what a hostile file is made for. SVG, playlists and whatever else names further
files begin with none of the known bytes.
"""

from gateway.config import MediaConfig
from gateway.media.audio_headers import mp3_seconds, wav_seconds
from gateway.media.image_headers import media_type_of, size_of
from gateway.media.port import MediaFile
from weft.kernel.errors import invalid_field

IMAGE_TYPES = frozenset({"image/png", "image/jpeg", "image/webp", "image/gif", "image/bmp"})
AUDIO_TYPES = {"wav": "audio/wav", "mp3": "audio/mpeg"}
# Other names under which the types above are sent.
_SPELLINGS = {"image/jpg": "image/jpeg", "image/pjpeg": "image/jpeg", "image/x-ms-bmp": "image/bmp"}
# What servers say of files whose type they do not know; the bytes decide.
_UNKNOWN_TYPES = frozenset({"", "application/octet-stream", "binary/octet-stream"})


def checked_image(data: bytes, said: str, field: str, config: MediaConfig) -> MediaFile:
    """An image that is what it is said to be. Raises INVALID_ARGUMENT naming `field`."""
    media_type = _SPELLINGS.get(said.lower(), said.lower())
    if media_type not in IMAGE_TYPES:
        raise invalid_field(field, f"must be one of {', '.join(sorted(IMAGE_TYPES))}")
    found = media_type_of(data)
    if found != media_type:
        is_what = "an image of no known type" if found is None else found
        raise invalid_field(field, f"is said to be {media_type}, and its content is {is_what}")
    _require_size(data, media_type, field, config)
    return MediaFile(data=data, media_type=media_type)


def fetched_image(data: bytes, content_type: str, field: str, config: MediaConfig) -> MediaFile:
    """An image with the Content-Type that came with it. Raises INVALID_ARGUMENT naming `field`."""
    said = content_type.partition(";")[0].strip().lower()
    if said in _UNKNOWN_TYPES:
        said = media_type_of(data) or "of no known type"
    return checked_image(data, said, field, config)


def checked_audio(data: bytes, audio_format: str, field: str, config: MediaConfig) -> MediaFile:
    """A recording that is what it is said to be: `wav` or `mp3`. Raises INVALID_ARGUMENT naming `field`."""
    seconds = wav_seconds(data) if audio_format == "wav" else mp3_seconds(data)
    if seconds is None:
        raise invalid_field(field, f"is not a complete {audio_format} file")
    if seconds > config.max_audio_seconds:
        raise invalid_field(
            field, f"is longer than {config.max_audio_seconds:g} seconds (gateway.media.max_audio_seconds)"
        )
    return MediaFile(data=data, media_type=AUDIO_TYPES[audio_format])


def _require_size(data: bytes, media_type: str, field: str, config: MediaConfig) -> None:
    size = size_of(data, media_type, config.max_frames)
    if size is None or size.width < 1 or size.height < 1:
        raise invalid_field(field, f"is not a complete {media_type} file")
    if size.frames > config.max_frames:
        raise invalid_field(field, f"has more than {config.max_frames} frames (gateway.media.max_frames)")
    if size.width * size.height * size.frames > config.max_pixels:
        raise invalid_field(
            field,
            f"has {size.width} x {size.height} pixels in {size.frames} frame(s), more than {config.max_pixels} "
            "(gateway.media.max_pixels)",
        )
