"""Images and recordings with foreign addresses, or with contents of another type."""

import base64
import struct
import zlib
from typing import Any

from bad_inputs_stage import Case, Send, later, of_kind, with_fields

_CHAT = of_kind("chat")
_SEES = of_kind("chat", "messages")
_REFUSED = frozenset({400, 403, 413, 501})
_ADDRESSES = (
    "file:///etc/passwd",
    "ftp://example.com/a.png",
    "gopher://example.com/",
    "javascript:alert(1)",
    "//example.com/a.png",
    "/etc/passwd",
    "",
    "http://127.1/a.png",
    "http://127.0.0.1:1/a.png",
    "http://[::]/a.png",
    "http://[::1]/a.png",
    "http://[::ffff:127.0.0.1]/a.png",
    "http://169.254.169.254/latest/meta-data/",
    "http://100.64.0.1/a.png",
    "http://0x7f000001/a.png",
    "http://2130706433/a.png",
    "http://0/a.png",
    "http://localhost/a.png",
    "http://example.com\\@127.0.0.1/a.png",
    "http://user:secret@example.com/a.png",
    "http://exa mple.com/",
    "http://example.com:99999/",
    "https://example.com/\r\nX-Injected: 1",
    "https://" + "a" * 5000,
    "data:text/html;base64,PGI+",
    "data:,x",
    "data:image/svg+xml;base64,PHN2Zz4=",
    "data:image/png;base64,",
    "data:image/png;base64,@@@@",
    "data:image/png;base64,iVBORw0KGgo",
    "data:image/png,raw",
)


def _image(url: str) -> Send:
    def send(endpoint: Any) -> bytes:
        part: dict[str, Any] = {"type": "image_url", "image_url": {"url": url}}
        if endpoint.kind == "messages":
            part = {"type": "image", "source": {"type": "url", "url": url}}
        return with_fields({"messages": [{"role": "user", "content": [part]}]})(endpoint)

    return send


def _audio(data: str, kind: str = "wav") -> Send:
    part = {"type": "input_audio", "input_audio": {"data": data, "format": kind}}
    return with_fields({"messages": [{"role": "user", "content": [part]}]})


def _png(width: int, height: int) -> str:
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunk = struct.pack(">I", len(header)) + b"IHDR" + header + struct.pack(">I", zlib.crc32(b"IHDR" + header))
    return "data:image/png;base64," + base64.b64encode(b"\x89PNG\r\n\x1a\n" + chunk).decode()


CASES = (
    *(Case(f"M1 {place} {url[:30]!r}", _image(url), _REFUSED, _SEES) for place, url in enumerate(_ADDRESSES)),
    Case("M18 PNG of 60,000 x 60,000", _image(_png(60_000, 60_000)), _REFUSED, _CHAT),
    Case("M19 recording of zero length", _audio(""), _REFUSED, _CHAT),
    Case("M19 playlist", _audio(base64.b64encode(b"#EXTM3U\nfile:///etc/passwd\n").decode()), _REFUSED, _CHAT),
    Case("M19 unknown format", _audio("UklGRg==", "flac"), _REFUSED, _CHAT),
    Case("M20 space in base64", _audio("Uk lG Rg=="), _REFUSED, _CHAT),
    Case("M20 wrong padding", _audio("UklGRg="), _REFUSED, _CHAT),
    Case("M20 base64 of 11 MB", later(lambda: _audio("A" * 11_000_000)), frozenset({413}), _CHAT),
)
