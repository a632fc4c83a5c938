"""Images without pixels: a size, bands, and whatever they were made with."""

import io
import json
from types import TracebackType
from typing import Any, Self

MAX_IMAGE_PIXELS: int | None = None
BANDS = {"RGB": ("R", "G", "B"), "RGBA": ("R", "G", "B", "A"), "L": ("L",)}


class Image:
    def __init__(self, mode: str, size: tuple[int, int], made: dict[str, Any]) -> None:
        self.mode, self.size, self.made = mode, size, made
        self.info: dict[str, Any] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        pass

    def getbands(self) -> tuple[str, ...]:
        return BANDS[self.mode]

    def convert(self, mode: str) -> "Image":
        return Image(mode, self.size, self.made)

    def getchannel(self, band: str) -> "Image":
        return Image("L", self.size, self.made | {"channel": band})

    def getextrema(self) -> tuple[int, int]:
        return int(self.made.get("lowest_alpha", 0)), 255

    def point(self, change: Any) -> "Image":
        return Image(self.mode, self.size, self.made | {"transparent_becomes": change(0)})

    def alpha_composite(self, other: "Image") -> None:
        self.made = other.made | {"ground": "white"}

    def resize(self, size: tuple[int, int]) -> "Image":
        return Image(self.mode, size, self.made | {"resized": True})

    def verify(self) -> None:
        if self.made.get("broken"):
            raise SyntaxError("broken PNG file")

    def load(self) -> None:
        if self.made.get("truncated"):
            raise OSError("image file is truncated (12 bytes not processed)")

    def save(self, target: Any, format: str, quality: int | None = None) -> None:  # noqa: A002 - as Pillow has it
        content = {"mode": self.mode, "size": self.size, "quality": quality, **self.made}
        target.write(f"{format} {json.dumps(content)}".encode())


def open(file: io.BytesIO, formats: tuple[str, ...]) -> Image:  # noqa: A001 - as Pillow has it
    kind, _, content = file.read().partition(b" ")
    if kind.decode("latin-1") not in formats:
        raise ValueError(f"cannot identify image file {file}")
    made = json.loads(content)
    width, height = made.pop("size")
    return Image(made.pop("mode", "RGB"), (width, height), made)


def new(mode: str, size: tuple[int, int], color: Any) -> Image:
    return Image(mode, size, {"color": color})
