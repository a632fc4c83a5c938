"""Images and recordings that a message of `weft chat` and `weft run` shows to the model."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from weft.client import Message
from weft.kernel.errors import invalid_field
from weft.kernel.media_types import audio_type_of, image_type_of

MAX_FILE_BYTES = 20 * 1024 * 1024
"""Size of one file."""
MAX_TOTAL_BYTES = 40 * 1024 * 1024
"""Size of all files of a message, which travel in one request."""
_IMAGES, _AUDIO = "--image", "--audio"

ImageOption = Annotated[
    list[Path] | None,
    typer.Option(
        _IMAGES, metavar="FILE", help="An image that the message is about: PNG, JPEG, WebP, GIF or BMP; repeatable."
    ),
]
AudioOption = Annotated[
    list[Path] | None,
    typer.Option(_AUDIO, metavar="FILE", help="A recording that the message is about: WAV or MP3; repeatable."),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageMedia:
    """The files of one message."""

    images: tuple[bytes, ...] = ()
    audio: tuple[bytes, ...] = ()

    def message(self, text: str) -> Message:
        """Returns a message of the user about these files."""
        message: Message = {"role": "user", "content": text}
        if self.images:
            message["images"] = self.images
        if self.audio:
            message["audio"] = self.audio
        return message


def read_media(images: Iterable[Path] | None, audio: Iterable[Path] | None) -> MessageMedia:
    """Reads the files of a message. Raises INVALID_ARGUMENT naming the option."""
    found = MessageMedia(
        images=tuple(_read(path, _IMAGES) for path in images or ()),
        audio=tuple(_read(path, _AUDIO) for path in audio or ()),
    )
    if sum(map(len, (*found.images, *found.audio))) > MAX_TOTAL_BYTES:
        option = _IMAGES if found.images else _AUDIO
        raise invalid_field(option, f"the files are larger than {MAX_TOTAL_BYTES // 1024**2} MiB together")
    return found


def _read(path: Path, option: str) -> bytes:
    try:
        with path.expanduser().open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise invalid_field(option, f"{path} cannot be read: {error.strerror}") from error
    if len(data) > MAX_FILE_BYTES:
        raise invalid_field(option, f"{path} is larger than {MAX_FILE_BYTES // 1024**2} MiB")
    if option == _IMAGES and image_type_of(data) is None:
        raise invalid_field(option, f"{path} is no PNG, JPEG, WebP, GIF or BMP")
    if option == _AUDIO and audio_type_of(data) is None:
        raise invalid_field(option, f"{path} is no WAV or MP3")
    return data
