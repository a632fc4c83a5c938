"""Images to edit that are hostile, incomplete or of another type, as files of a form and as data: URLs in JSON."""

import base64
import json
import struct
import zlib
from typing import Any

from bad_inputs_stage import Case, Endpoint, Send, later, request, with_fields

from weft_testing.media_files import bmp, gif, jpeg, png, wav, webp

_REFUSED, _TOO_LARGE = frozenset({400}), frozenset({413})
_HEAD = b'Content-Disposition: form-data; name="%b"; filename="%b"\r\nContent-Type: %b\r\n\r\n'


def _is_edit(endpoint: Endpoint) -> bool:
    return endpoint.path == "/v1/images/edits"


def _is_made(endpoint: Endpoint) -> bool:
    return endpoint.kind == "images"


def _part(name: str, data: bytes, *, filename: str = "a.png", kind: str = "image/png") -> bytes:
    return b"--edge\r\n" + _HEAD % (name.encode(), filename.encode(), kind.encode()) + data + b"\r\n"


def _field(name: str, value: str) -> bytes:
    return f'--edge\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'.encode()


_ASKED = _field("model", "tiny") + _field("prompt", "a hat")
_GOOD = _part("image", png(2, 2))


def _form(*parts: bytes) -> Send:
    body = b"".join([*parts, b"--edge--\r\n"])
    return lambda endpoint: request(endpoint, body, {"Content-Type": "multipart/form-data; boundary=edge"})


def _file(data: bytes, kind: str = "image/png") -> Send:
    return _form(_ASKED, _part("image", data, kind=kind))


def _as_json(**fields: Any) -> Send:
    body = json.dumps({"model": "tiny", "prompt": "a hat", **fields}).encode()
    return lambda endpoint: request(endpoint, body)


def _url(data: bytes, kind: str = "image/png") -> dict[str, str]:
    return {"image_url": f"data:{kind};base64,{base64.b64encode(data).decode()}"}


def _bomb() -> bytes:
    """A PNG of 100 MB of zeros in 100 KB, whose header says so."""
    header = struct.pack(">IIBBBBB", 10_000, 10_000, 8, 0, 0, 0, 0)
    rows = zlib.compress(bytes(100_000_000), 9)
    chunks = (b"IHDR", header), (b"IDAT", rows), (b"IEND", b"")
    packed = (
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(packed)


_WRONG_FILES = {
    "empty": (b"", "image/png"),
    "text": (b"no image at all", "image/png"),
    "SVG as PNG": (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "image/png"),
    "SVG": (b"<svg/>", "image/svg+xml"),
    "GIF": (gif(2, 2), "image/gif"),
    "GIF as PNG": (gif(2, 2), "image/png"),
    "BMP": (bmp(2, 2), "image/bmp"),
    "PNG as JPEG": (png(2, 2), "image/jpeg"),
    "recording as WebP": (wav(seconds=0.01), "image/webp"),
    "PNG cut in its header": (png(2, 2)[:20], "image/png"),
    "PNG of no width": (png(0, 2), "image/png"),
    "PNG of 60,000 x 60,000": (png(60_000, 60_000, pixels=False), "image/png"),
    "JPEG of 65,500 x 65,500": (jpeg(65_500, 65_500), "image/jpeg"),
    "JPEG cut": (jpeg(2, 2)[:12], "image/jpeg"),
    "WebP of 16,000 x 16,000": (webp(16_000, 16_000), "image/webp"),
    "APNG of 100,000 frames": (png(2, 2, frames=100_000), "image/png"),
    "WebP of 2,000 frames": (webp(2, 2, frames=2_000), "image/webp"),
}

CASES = (
    *(Case(f"G1 file: {name}", _file(*wrong), _REFUSED, _is_edit) for name, wrong in _WRONG_FILES.items()),
    *(
        Case(f"G2 data: URL: {name}", _as_json(images=[_url(*wrong)]), _REFUSED, _is_edit)
        for name, wrong in _WRONG_FILES.items()
        if name not in {"GIF", "BMP"}
    ),
    Case("G3 bomb of 100 MB", later(lambda: _file(_bomb())), _REFUSED, _is_edit),
    Case(
        "G4 mask of 60,000 x 60,000",
        _form(_ASKED, _GOOD, _part("mask", png(60_000, 60_000, pixels=False))),
        _REFUSED,
        _is_edit,
    ),
    Case("G4 two masks", _form(_ASKED, _GOOD, _part("mask", png(2, 2)) * 2), _REFUSED, _is_edit),
    Case("G4 mask without an image", _form(_ASKED, _part("mask", png(2, 2))), _REFUSED, _is_edit),
    Case("G4 image is a value", _form(_ASKED, _field("image", "cat.png")), _REFUSED, _is_edit),
    Case("G5 17 images", _form(_ASKED, _part("image[]", png(2, 2)) * 17), _REFUSED, _is_edit),
    Case("G5 17 data: URLs", _as_json(images=[_url(png(2, 2))] * 17), _REFUSED, _is_edit),
    Case("G5 10,000 images", _form(_ASKED, _part("image[]", png(2, 2)) * 10_000), _TOO_LARGE, _is_edit),
    Case(
        "G6 filename of 20,000", _form(_ASKED, _part("image", png(2, 2), filename="x" * 20_000)), _TOO_LARGE, _is_edit
    ),
    Case("G6 filename of NULs", _form(_ASKED, _part("image", png(2, 2), filename="a\x00b")), _REFUSED, _is_edit),
    Case(
        "G7 prompt of 33,000", _form(_field("model", "tiny"), _field("prompt", "x" * 33_000), _GOOD), _REFUSED, _is_edit
    ),
    Case("G7 steps that are a word", _form(_ASKED, _field("steps", "many"), _GOOD), _REFUSED, _is_edit),
    Case("G7 stream that is a word", _form(_ASKED, _field("stream", "perhaps"), _GOOD), _REFUSED, _is_edit),
    Case("G8 image of 70 MB", later(lambda: _file(bytes(70_000_000))), _TOO_LARGE, _is_edit),
    *(
        Case(f"G9 {name}={value!r}", with_fields({name: value}), _REFUSED, _is_made)
        for name, value in (
            ("size", "1024"),
            ("size", "1e9x1e9"),
            ("size", "99999x99999"),
            ("size", "٣x٣"),
            ("steps", 10**9),
            ("steps", 1.5),
            ("steps", "20"),
            ("seed", 2**64),
            ("seed", -1),
            ("guidance", 1e300),
            ("strength", 1.01),
            ("partial_images", 1),
            ("n", 0),
            ("negative_prompt", "x" * 33_000),
        )
    ),
)
